"""What compare says of two baselines: a table, Markdown, JUnit XML, JSON."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import typer

from specsim.cli import show
from specsim.compare import GAIN, GONE, LOSS, MOVED, SAME, UNDECIDED, UNREAD, Change, Comparison
from specsim.files import read_text, write_text

MARKS = {LOSS: "▼ ", GAIN: "▲ ", MOVED: "◆ ", UNDECIDED: "? "}
WORDS = {SAME: "=", UNREAD: "–", GONE: "gone"}
KEY = {
    "▼ regression": LOSS, "▲ gain": GAIN, "◆ moved beyond noise": MOVED, "= the same": SAME, "– not read": UNREAD,
    "? beyond its tolerance, but so much noise that it could not fail": UNDECIDED, "gone: NEW lacks it": GONE,
}  # fmt: skip
ENOUGH = 8
"""Seeds that are recommended where there are too few."""
SHORT = {"hypervolume": "area", "verified tokens": "verified"}


def print_comparison(found: Comparison, caveats: Sequence[str]) -> None:
    """What differs and the table on stdout, what failed on stderr."""
    columns, rows = grid(found)
    console = show.console()
    for line in (*warnings(found), *(f"note: {line}" for line in found.inputs)):
        console.print(line)
    if rows:
        console.print(show.table("NEW against BASE, %", columns, rows))
        console.print(key(found, columns))  # not the table's caption, which would be as narrow as the table
    for line in (*unread(found), *found.notes, *caveats):
        console.print(f"note: {line}")
    console.print(verdict(found))
    for line in failures(found):
        typer.echo(line, err=True)


def warnings(found: Comparison) -> list[str]:
    """A line where the two sides are not like with like, and one where a pass would hide much."""
    lines = []
    if found.unlike:
        *first, last = found.unlike
        both = f"{', '.join(first)} and {last}" if first else last
        lines.append(f"warning: not like with like: {both} differ{'s' * (not first)} between BASE and NEW")
    if found.hidden and not found.undecided:  # the verdict tells that already
        many = _count(len(found.hidden), "number")
        most = _most(found.hidden)
        lines.append(f"warning: in {many} losses of up to {most} would not be seen: {_more(found)}")
    return lines


def verdict(found: Comparison) -> str:
    """How it ended, in a sentence."""
    return _ended(found) + " Not like with like: see the warning." * bool(found.unlike)


def _ended(found: Comparison) -> str:
    how = f"{_seeds(found)}, {'paired' if found.paired else 'independent'}"
    return f"{head(found)}. {found.tests} numbers at a family-wise level of {100 * found.level:g} %, {how}."


def head(found: Comparison) -> str:
    """How it ended, in few words."""
    unsure = len(found.undecided)
    if found.failed:
        gone = len(found.gone) + len(found.lost)
        parts = [_count(len(found.regressions), "regression")] * bool(found.regressions) + [f"{gone} gone"] * bool(gone)
        return f"Failed: {', '.join([*parts, *[f'{unsure} undecided'] * bool(unsure)])}"
    if unsure:
        most = _most(found.undecided)
        its = "its" if unsure == 1 else "their"
        hide = f"{_seeds(found)} hide losses of up to {most}"
        return f"Undecided: {_count(unsure, 'number')} fell beyond {its} tolerance, but {hide}: {_more(found)}"
    if found.identical:
        return "Passed: what both have is the same" if found.added else "Passed: the same"
    gains = sum(c.verdict == GAIN for c in found.changes)
    return "Passed: no regression" + f", {_count(gains, 'gain')}" * bool(gains)


def _seeds(found: Comparison) -> str:
    base, new = found.seeds
    return f"{base} seeds" if base == new else f"{base} and {new} seeds"


def _most(hidden: Sequence[Change]) -> str:
    """The greatest loss that the noise of ``hidden`` numbers hides: at most all there is."""
    return _share(min(max(c.noise for c in hidden), 1.0))


def _more(found: Comparison) -> str:
    return f"run more seeds ({max(ENOUGH, 2 * min(found.seeds))}, say)"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def failures(found: Comparison) -> list[str]:
    """A line for each thing for which the comparison does not pass."""
    gone = [*found.gone, *(told(c) for c in found.lost)]
    lines = [f"gone: {line}" for line in gone] + [f"regression: {told(c)}" for c in found.regressions]
    return lines + [f"undecided: {told(c)}" for c in found.undecided]


def told(change: Change) -> str:
    """One change in words: before, after, and from where on it would fail."""
    text = f"{change.policy}: {change.label}"
    if change.verdict == UNREAD:
        return f"{text}: not read: {change.reason}"
    if change.verdict == GONE:
        return f"{text}: {change.reason}" + f", {show.number(change.base)} in BASE" * (change.base == change.base)
    moved = f"{text}: {show.number(change.base)} → {show.number(change.new)}, {percent(change)}"
    if change.tolerance is None:
        return moved
    # Beyond the tolerance and beyond the noise, whichever is more.
    both = "±" if change.metric == "verified_tokens" else "−"
    tolerance, noise = _share(change.tolerance), _share(change.noise)
    bound = tolerance if change.tolerance >= change.noise else noise
    if change.noise >= 1:  # nobody can lose more than everything
        return f"{moved}; no loss would fail (noise {noise})"
    return f"{moved}; fails beyond {both}{bound} (tolerance {tolerance}, noise {noise})"


def percent(change: Change) -> str:
    """The change with its interval, such as "−3.0 ± 0.2 %"."""
    if change.verdict == SAME:
        return "="
    text = f"{100 * change.change:+.{_places(change)}f}".replace("-", "−")
    return f"{text} ± {100 * change.half:.{_places(change)}f} %"


def grid(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """A row a policy and a column a number; columns that no policy has a number in are left out."""
    rows: dict[str, list[Change]] = {}
    for change in found.changes:
        rows.setdefault(change.policy, []).append(change)
    heads = [short(c.label) for c in next(iter(rows.values()), [])]
    kept = [i for i in range(len(heads)) if any(row[i].verdict != UNREAD for row in rows.values())]
    cells = [[policy, *(cell(row[i]) for i in kept)] for policy, row in rows.items()]
    return ["policy", *(heads[i] for i in kept)], cells


def key(found: Comparison, columns: Sequence[str]) -> str:
    """What the marks and the heads of the columns mean, those of this comparison alone."""
    there = {c.verdict for c in found.changes}
    marks = ", ".join(text for text, verdict in KEY.items() if verdict in there)
    parts = [f"{marks}{'; ' * bool(marks)}± half of the 95 % interval"]
    if floor := next((c for c in columns if c.startswith("tok/s ")), None):
        parts.append(f"{floor}: throughput at {floor.rpartition(' ')[2]} tok/s/user or more")
    if share := next((c for c in columns if c.startswith("speed at ")), None):
        parts.append(f"{share}: tok/s/user at {share.removeprefix('speed at ')} of BASE's greatest throughput")
    if "area" in columns:
        parts.append("area: hypervolume")
    return "; ".join(parts)


def unread(found: Comparison) -> list[str]:
    """A line for each number that no policy has: the grid leaves it out."""
    reasons: dict[str, list[str]] = {}
    for change in found.changes:
        reasons.setdefault(change.label, []).append(change.reason if change.verdict == UNREAD else "")
    return [f"{label}: not read for any policy: {why[0]}" for label, why in reasons.items() if all(why)]


def cell(change: Change) -> str:
    """A cell of the grid: mark, change and interval."""
    if change.verdict in WORDS:
        return WORDS[change.verdict]
    return MARKS.get(change.verdict, "") + percent(change).removesuffix(" %")


def short(label: str) -> str:
    """A number's label as the head of a column."""
    label = label.partition(": no longer")[0]
    label = re.sub(r"throughput at (≥ \S+) tok/s/user", r"tok/s \1", label)
    label = re.sub(r"interactivity at (\S+ %) of BASE's greatest throughput", r"speed at \1", label)
    return SHORT.get(label, label)


def write_markdown(path: Path, found: Comparison, caveats: Sequence[str], command: str) -> None:
    """Write the summary; other steps' text in the file that $GITHUB_STEP_SUMMARY names is kept."""
    text = summary(found, caveats, command)
    named = os.environ.get("GITHUB_STEP_SUMMARY")
    if named and path.exists() and Path(named).exists() and os.path.samefile(path, named):
        text = read_text(path).rstrip("\n") + "\n\n" + text if read_text(path).strip() else text
    write_text(path, text)


def summary(found: Comparison, caveats: Sequence[str], command: str) -> str:
    """The comparison as Markdown."""
    columns, rows = grid(found)
    sign = "✅" if found.passed else "❌" if found.failed else "❓"
    lines = [f"### {sign} specsim compare", "", verdict(found), ""]
    lines += [f"**{_escaped(line)}**\n" for line in warnings(found)]
    if found.inputs:
        lines += [*(f"- {_escaped(line)}" for line in found.inputs), ""]
    if rows:
        lines += [f"| {' | '.join(columns)} |", f"|---{'|--:' * (len(columns) - 1)}|"]
        lines += [f"| {_code(row[0])} | {' | '.join(row[1:])} |" for row in rows]
        lines += ["", f"% of BASE. {key(found, columns)}.", ""]
    lines += [f"- {_escaped(line)}" for line in failures(found)]
    lines += [f"- note: {_escaped(line)}" for line in (*found.notes, *caveats)]
    if found.changes:
        lines += ["", "<details><summary>Every number</summary>", ""]
        lines += [f"- {_escaped(told(c))}" for c in found.changes]
        lines += ["", "</details>"]
    if command:
        lines += ["", f"BASE was written by {_code(command)}"]
    return "\n".join(lines) + "\n"


def junit(found: Comparison) -> str:
    """The comparison as JUnit XML: a case a number, failed, skipped (not read) or passed."""
    failed, skipped = len(failures(found)), sum(c.verdict == UNREAD for c in found.changes)
    counts = {
        "name": "specsim compare",
        "tests": str(len(found.changes) + len(found.gone)),
        "failures": str(failed),
        "errors": "0",
        "skipped": str(skipped),
    }
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(suites, "testsuite", counts)
    for line in found.gone:
        case = ElementTree.SubElement(suite, "testcase", {"classname": "specsim", "name": "gone", "time": "0"})
        ElementTree.SubElement(case, "failure", {"message": _for_xml(line), "type": "gone"}).text = _for_xml(line)
    for change in found.changes:
        names = {"classname": _for_xml(change.policy), "name": change.label.partition(": no longer")[0], "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", names)
        text = _for_xml(told(change))
        if change.verdict in (LOSS, GONE, UNDECIDED):
            ElementTree.SubElement(case, "failure", {"message": text, "type": change.verdict}).text = text
        elif change.verdict == UNREAD:
            ElementTree.SubElement(case, "skipped", {"message": _for_xml(change.reason)})
        else:
            ElementTree.SubElement(case, "system-out").text = text
    if told_first := [*warnings(found), *found.inputs]:
        ElementTree.SubElement(suite, "system-err").text = _for_xml("\n".join(told_first))
    ElementTree.indent(suites, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def plain(found: Comparison, caveats: Sequence[str]) -> dict[str, Any]:
    """The comparison as plain data; shares are of BASE (-0.03: 3 % less)."""
    return {
        "verdict": verdict(found),
        "passed": found.passed,
        "failed": found.failed,
        "undecided": len(found.undecided),
        "identical": found.identical,
        "level": found.level,
        "tests": found.tests,
        "paired": found.paired,
        "seeds": list(found.seeds),
        "floors": found.floors,
        "gone": found.gone,
        "warnings": warnings(found),
        "unlike": found.unlike,
        "inputs": found.inputs,
        "notes": found.notes,
        "caveats": list(caveats),
        "changes": [asdict(change) for change in found.changes],
    }


def _share(share: float) -> str:
    """A share as a per cent of two figures, whole from 10 on."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:,.0f} %"


def _places(change: Change) -> int:
    """Decimals of a per cent that show two figures of the interval, one to three."""
    half = 100 * change.half
    return 1 if half == 0 else min(max(1 - math.floor(math.log10(half)), 1), 3)


def _code(text: str) -> str:
    """Text as code in Markdown, also within a table."""
    return "`" + " ".join(text.split()).replace("`", "'").replace("|", "\\|") + "`"


def _escaped(text: str) -> str:
    """One line of Markdown in which what users chose starts no formatting."""
    return re.sub(r"([\\`*_<>\[\]#|])", r"\\\1", " ".join(text.split()))


def _for_xml(text: str) -> str:
    """Text without the control characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "�", text)
