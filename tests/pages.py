"""The README and the pages of docs/ as a reader walks them: sections, and in each its files, commands and outputs.

In a fenced block

- ``python``, ``toml``, ``yaml`` or ``text`` whose first line is a comment with a file's name is that file (and Python
  is run);
- ``bash``: lines that begin with "specsim " are commands; with ``# exits 1`` behind it, one has that exit code, not 0;
- ``output``: what the commands before it printed, those since the last such block; pieces of it parted by "…".
"""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its ``kind`` is the word behind the fence."""

    kind: str
    text: str

    @property
    def name(self) -> str | None:
        """The file that it is, if it is one."""
        match = re.match(r"# ([\w./-]+\.\w+)\n", self.text)
        return match[1] if match and self.kind in ("python", "toml", "yaml", "text") else None

    @property
    def commands(self) -> list[tuple[str, int]]:
        """Commands and the exit codes that they end with."""
        if self.kind != "bash":
            return []
        lines = [line for line in self.text.replace("\\\n", " ").splitlines() if line.startswith("specsim ")]
        codes = [re.search(r"# exits (\d+)$", line) for line in lines]
        return [(line, int(code[1]) if code else 0) for line, code in zip(lines, codes, strict=True)]


@dataclass(frozen=True)
class Section:
    """What stands under one heading of the second level; ``files``: those that the sections before it wrote."""

    page: Path
    title: str
    blocks: list[Block]
    files: dict[str, str] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}#{slug(self.title)}"


def slug(title: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def headings(page: Path) -> list[str]:
    """The headings of a page, in order."""
    return re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)


@cache
def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def sections(page: Path) -> list[Section]:
    """The sections of a page that hold fenced blocks."""
    # Headings inside of blocks are comments: blocks are cut out first, and put back by number.
    text = page.read_text(encoding="utf-8")
    blocks = [Block(*match.groups()) for match in FENCE.finditer(text)]
    numbers = iter(range(len(blocks)))
    marked = FENCE.sub(lambda _: f"\0{next(numbers)}\0", text)
    found: list[Section] = []
    files: dict[str, str] = {}
    for part in re.split(r"^## ", marked, flags=re.MULTILINE):
        own = [blocks[int(n)] for n in re.findall(r"\0(\d+)\0", part)]
        if own:
            found.append(Section(page, part.partition("\n")[0].lstrip("# "), own, dict(files)))
        files |= {block.name: block.text for block in own if block.name}
    return found


def section(page: Path, title: str) -> Section:
    """The section of that title."""
    return next(s for s in sections(page) if s.title == title)
