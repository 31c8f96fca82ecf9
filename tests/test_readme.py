"""The README and docs/ run as they stand, with every file and shown output, and every link leads somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, Section, headings, prose, section, sections, slug

import specsim as ss

WALKED = [s for page in PAGES for s in sections(page) if any(b.commands or b.kind == "python" for b in s.blocks)]
LINKING = [*PAGES, ROOT / "CHANGELOG.md", *sorted(ROOT.glob("experiments/*/README.md"))]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like the checkout, and takes what the commands write."""
    for name in ("hw_profiles", "traces", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "out").mkdir()
    return tmp_path


def run(arguments: list[str], folder: Path, code: int = 0) -> str:
    """Run Python with these arguments there, expecting that exit code; return what it printed."""
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{arguments}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def walk(section: Section, folder: Path) -> None:
    """Do what a section says from its first line to its last."""
    for name, text in section.files.items():
        write(folder / name, text)
    printed, shown = "", False
    for block in section.blocks:
        if block.name:
            write(folder / block.name, block.text)
        if block.kind == "python":
            run(["-W", "error", "-c", block.text], folder)
        if block.commands and shown:
            printed, shown = "", False
        for command, code in block.commands:
            told = run(["-m", *shlex.split(command, comments=True)], folder, code)
            assert told, command
            printed += told
        if block.kind == "output":
            missing, shown = not_in(printed, block.text), True
            assert missing is None, f"not in what the commands printed, or in another order:\n{missing}\n---\n{printed}"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def not_in(printed: str, shown: str) -> str | None:
    """The first of the pieces of ``shown`` that is not in ``printed`` behind the one before it, blanks aside."""
    rest = " ".join(printed.split())
    for piece in shown.split("…"):
        _, found, rest = rest.partition(" ".join(piece.split()))
        if not found and piece.strip():
            return piece
    return None


@pytest.mark.parametrize("section", WALKED, ids=str)
def test_section(section: Section, checkout: Path) -> None:
    walk(section, checkout)


def test_the_pages_have_commands_and_a_tour_for_each_reader() -> None:
    assert sum(len(block.commands) for s in WALKED for block in s.blocks) >= 25
    tours = [s for s in WALKED if s.page.name == "README.md" and s.title.startswith("You ")]
    assert len(tours) == 3
    for tour in tours:
        kinds = [block.kind for block in tour.blocks]
        assert {"bash", "output"} <= set(kinds), tour
    codes = [code for block in tours[2].blocks for _, code in block.commands]
    assert codes[-1] == 1  # the gate fails on the scheduler made worse
    assert 0 in codes


def test_what_is_shown_must_have_been_printed() -> None:
    printed = "  policy   ≥ 80\n  mine   1,234\n  theirs   5\n"
    assert not_in(printed, "policy ≥ 80\n…\ntheirs  5") is None
    assert not_in(printed, "mine   1,235") == "mine   1,235"
    assert not_in(printed, "theirs 5 … mine") == " mine"


def test_the_profile_of_the_pages_loads(tmp_path: Path) -> None:
    written = section(ROOT / "docs/profiles.md", "Write one")
    path = tmp_path / "mine.json"
    path.write_text(next(block.text for block in written.blocks if block.kind == "json"))
    assert ss.load_profile(path).name == "mine"


@pytest.mark.parametrize("page", LINKING, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^()\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        assert other.is_relative_to(ROOT), target
        if anchor:
            assert anchor in [slug(title) for title in headings(other)], target


@pytest.mark.parametrize("page", LINKING, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    names = r"\b(?:experiments|hw_profiles|traces|benchmarks|tests)/[\w./-]+\.(?:py|sh|toml|json|jsonl|parquet|csv)\b"
    for name in re.findall(names, page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name


def test_every_page_is_linked_from_the_readme() -> None:
    readme = prose(ROOT / "README.md")
    assert [page.name for page in PAGES[1:] if f"](docs/{page.name}" not in readme] == []
