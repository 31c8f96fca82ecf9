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
from specsim.compare import GAIN, LOSS, MOVED, SAME, UNREAD, Change, Comparison
from specsim.files import read_text, write_text

MARKS = {LOSS: "▼ ", GAIN: "▲ ", MOVED: "◆ "}
KEY = (
    "▼ regression, ▲ gain, ◆ moved beyond noise, = the same, – not read; ± half of the 95 % interval. tok/s ≥ 80: "
    "throughput at 80 tok/s/user or more; speed at 50 %: tok/s/user at half of BASE's greatest throughput; area: "
    "hypervolume"
)
SHORT = {"hypervolume": "area", "verified tokens": "verified"}


def print_comparison(found: Comparison, caveats: Sequence[str]) -> None:
    """What differs and the table on stdout, what failed on stderr."""
    columns, rows = grid(found)
    console = show.console()
    for line in (*warnings(found), *(f"note: {line}" for line in found.inputs)):
        console.print(line)
    if rows:
        console.print(show.table("NEW against BASE, %", columns, rows, KEY))
    for line in (*unread(found), *found.notes, *caveats):
        console.print(f"note: {line}")
    console.print(verdict(found))
    for line in failures(found):
        typer.echo(line, err=True)


def warnings(found: Comparison) -> list[str]:
    """One line where the two sides are not like with like, none where they are."""
    if not found.unlike:
        return []
    *first, last = found.unlike
    both = f"{', '.join(first)} and {last}" if first else last
    return [f"warning: not like with like: {both} differ{'s' * (not first)} between BASE and NEW"]


def verdict(found: Comparison) -> str:
    """How it ended, in a sentence."""
    return _ended(found) + " Not like with like: see the warning." * bool(found.unlike)


def _ended(found: Comparison) -> str:
    how = f"{found.seeds} seeds, {'paired' if found.paired else 'independent'}"
    family = f"{found.tests} numbers at a family-wise level of {100 * found.level:g} %, {how}"
    if found.failed:
        worse, gone = len(found.regressions), len(found.gone)
        parts = [f"{worse} regression{'s' * (worse != 1)}"] * bool(worse) + [f"{gone} gone"] * bool(gone)
        return f"Failed: {', '.join(parts)}. {family}."
    if found.identical:
        return f"Passed: the same. {family}."
    gains = sum(c.verdict == GAIN for c in found.changes)
    also = f", {gains} gain{'s' * (gains != 1)}" if gains else ""
    return f"Passed: no regression{also}. {family}."


def failures(found: Comparison) -> list[str]:
    """A line for each thing that fails the comparison."""
    return [f"gone: {line}" for line in found.gone] + [f"regression: {told(c)}" for c in found.regressions]


def told(change: Change) -> str:
    """One change in words: before, after, and from where on it would fail."""
    text = f"{change.policy}: {change.label}"
    if change.verdict == UNREAD:
        return f"{text}: not read: {change.reason}"
    moved = f"{text}: {show.number(change.base)} → {show.number(change.new)}, {percent(change)}"
    if change.tolerance is None:
        return moved
    # Beyond the tolerance and beyond the noise, whichever is more.
    both = "±" if change.metric == "verified_tokens" else "−"
    tolerance, noise = (f"{100 * share:.2g} %" for share in (change.tolerance, change.noise))
    bound = tolerance if change.tolerance >= change.noise else noise
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


def unread(found: Comparison) -> list[str]:
    """A line for each number that no policy has: the grid leaves it out."""
    reasons: dict[str, list[str]] = {}
    for change in found.changes:
        reasons.setdefault(change.label, []).append(change.reason if change.verdict == UNREAD else "")
    return [f"{label}: not read for any policy: {why[0]}" for label, why in reasons.items() if all(why)]


def cell(change: Change) -> str:
    """A cell of the grid: mark, change and interval."""
    if change.verdict in (SAME, UNREAD):
        return "=" if change.verdict == SAME else "–"
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
    lines = [f"### {'❌' if found.failed else '✅'} specsim compare", "", verdict(found), ""]
    if found.inputs:
        lines += [
            *(f"**{_escaped(line)}**\n" for line in warnings(found)),
            *(f"- {_escaped(line)}" for line in found.inputs),
            "",
        ]
    if rows:
        lines += [f"| {' | '.join(columns)} |", f"|---{'|--:' * (len(columns) - 1)}|"]
        lines += [f"| {_code(row[0])} | {' | '.join(row[1:])} |" for row in rows]
        lines += ["", f"% of BASE. {KEY}.", ""]
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
        case = ElementTree.SubElement(suite, "testcase", {"classname": "specsim", "name": "policy", "time": "0"})
        ElementTree.SubElement(case, "failure", {"message": _for_xml(line), "type": "gone"}).text = _for_xml(line)
    for change in found.changes:
        names = {"classname": _for_xml(change.policy), "name": change.label.partition(": no longer")[0], "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", names)
        text = _for_xml(told(change))
        if change.verdict == LOSS:
            ElementTree.SubElement(case, "failure", {"message": text, "type": LOSS}).text = text
        elif change.verdict == UNREAD:
            ElementTree.SubElement(case, "skipped", {"message": _for_xml(change.reason)})
        else:
            ElementTree.SubElement(case, "system-out").text = text
    if found.inputs:
        text = _for_xml("\n".join([*warnings(found), *found.inputs]))
        ElementTree.SubElement(suite, "system-err").text = text
    ElementTree.indent(suites, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def plain(found: Comparison, caveats: Sequence[str]) -> dict[str, Any]:
    """The comparison as plain data; shares are of BASE (-0.03: 3 % less)."""
    return {
        "verdict": verdict(found),
        "failed": found.failed,
        "identical": found.identical,
        "level": found.level,
        "tests": found.tests,
        "paired": found.paired,
        "seeds": found.seeds,
        "floors": found.floors,
        "gone": found.gone,
        "unlike": found.unlike,
        "inputs": found.inputs,
        "notes": found.notes,
        "caveats": list(caveats),
        "changes": [asdict(change) for change in found.changes],
    }


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
