"""Acceptance that engines count while they serve: Prometheus counters, and the lines they log.

vLLM, llama.cpp and our reference engine export the same four counters under their own prefix,
``…:spec_decode_num_drafts_total``, ``_num_draft_tokens_total``, ``_num_accepted_tokens_total`` and
``_num_accepted_tokens_per_pos_total{position}`` (0-based, unconditional). vLLM also logs them for every interval.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from specsim.files import read_text
from specsim.importers.evidence import (
    PAST_END,
    ROUNDED,
    Ask,
    Evidence,
    check_mean,
    check_survival,
    choose,
    length_notes,
    problem,
)
from specsim.types import SpecsimError

COUNTER = re.compile(r"^(vllm|llamacpp|specsim):spec_decode_num_", re.MULTILINE)
LOG_LINE = "SpecDecoding metrics:"
_DRAFTS, _TOKENS, _ACCEPTED, _AT = (
    f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)


class Series(NamedTuple):
    """Who counted (engines of a data-parallel server differ in ``others``), and what."""

    model: str
    others: tuple[tuple[str, str], ...]
    name: str
    position: int | None


def read_metrics(path: str | Path, text: str, ask: Ask, earlier: str | None = None) -> Evidence:
    """Read one scrape of /metrics, or the difference from the earlier scrape ``ask.before`` (or its text, ``earlier``).

    Engines of the same model_name are added up; ``ask.select`` chooses among several model names.
    Raises SpecsimError naming file, line or counter: a malformed sample, a counter that is missing or fell,
    counts that contradict each other.
    """
    counts = _scrape(path, text)
    model = choose(str(path), "model names", sorted({series.model for series in counts}), ask.select)
    counts = {series: value for series, value in counts.items() if series.model == model}
    window = "since the engine started (warm-up included)"
    if ask.before is not None:
        counts = _difference(path, counts, ask.before, _scrape(ask.before, read_text(ask.before)))
        window = f"since the scrape {Path(ask.before).name}"
    elif earlier is not None:
        before = f"{path} before"
        counts = _difference(path, counts, before, _scrape(before, earlier))
        window = "between two scrapes"
    total: dict[tuple[str, int | None], float] = {}
    for series, value in counts.items():
        key = series.name, series.position
        total[key] = total.get(key, 0.0) + value
    drafts, survival = _survival(str(path), total)
    per_draft = total[_TOKENS, None] / drafts if (_TOKENS, None) in total else None
    notes = (
        f"{drafts:,.0f} drafts {window}.",
        *length_notes(str(path), ask.fixed_length, len(survival), per_draft),
        PAST_END,
    )
    return Evidence({"*": survival}, "speculative-decoding counters of an engine (Prometheus)", notes, target=model)


def _scrape(path: str | Path, text: str) -> dict[Series, float]:
    """The speculative counters of a scrape; other metrics are not looked at."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[Series, float] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not COUNTER.match(line):
            continue
        where = f"{path}: line {number}"
        try:  # line by line, because the parser does not tell where it failed
            samples = [s for family in text_string_to_metric_families(line + "\n") for s in family.samples]
        except (ValueError, KeyError, IndexError) as error:
            tail = line if len(line) < 60 else f"…{line[-60:]}"  # the number stands at the end
            raise problem(where, "sample", 'name{label="value"} number', tail) from error
        for sample in samples:
            name = sample.name.partition(":")[2].removesuffix("_total")
            if name not in (_DRAFTS, _TOKENS, _ACCEPTED, _AT):
                continue  # such as the times of creation
            series = _series(where, name, dict(sample.labels))
            if not 0 <= sample.value < 2**53:
                raise problem(where, name, "a count, 0 or more and below 2^53", sample.value)
            if series in found:
                raise SpecsimError(f"{where}: {name}: stands twice, expected one scrape (for two, see --before)")
            found[series] = sample.value
    if not found:
        raise SpecsimError(
            f"{path}: expected counters such as vllm:{_DRAFTS}_total (an engine without speculation has none, "
            "SGLang's sglang:spec_accept_length is one mean without positions)"
        )
    return found


def _series(where: str, name: str, labels: dict[str, str]) -> Series:
    position = labels.pop("position", None)
    if (name == _AT) != (position is not None) or (position is not None and not position.isdecimal()):
        expected = "a whole number, from 0" if name == _AT else "no such label"
        raise problem(where, f"{name}, label position", expected, position)
    model = labels.pop("model_name", "")
    return Series(model, tuple(sorted(labels.items())), name, None if position is None else int(position))


def _difference(
    path: str | Path, after: Mapping[Series, float], first: str | Path, before: Mapping[Series, float]
) -> dict[Series, float]:
    """What was counted between two scrapes of the same engines."""
    model = next(iter(after)).model
    earlier = {series: value for series, value in before.items() if series.model == model}
    if not earlier:
        raise SpecsimError(f"{first}: expected counters of model {model!r}, as in {path}")
    for series, value in earlier.items():
        now = after.get(series)
        if now is None or now < value:
            at = "" if series.position is None else f", position {series.position}"
            raise SpecsimError(
                f"{path}: {series.name}{at}: expected at least {value:g}, as in the earlier scrape {first} of the "
                f"same run, got {'none' if now is None else f'{now:g}'}"
            )
    return {series: value - earlier.get(series, 0.0) for series, value in after.items()}


def _survival(where: str, total: Mapping[tuple[str, int | None], float]) -> tuple[float, tuple[float, ...]]:
    """Drafts, and the survival by position."""
    drafts = total.get((_DRAFTS, None), 0.0)
    if drafts <= 0:
        raise problem(where, f"{_DRAFTS}_total", "at least one draft", total.get((_DRAFTS, None)))
    positions = sorted(p for name, p in total if name == _AT and p is not None)
    if positions != list(range(len(positions))) or not positions:
        got = ", ".join(map(str, positions))
        raise problem(where, f"{_AT}_total", "positions 0, 1, … without a gap", got or None)
    accepted = [total[_AT, p] for p in positions]
    stated = total.get((_ACCEPTED, None))
    if stated is not None and abs(sum(accepted) - stated) > ROUNDED * max(stated, sum(accepted)):
        raise problem(where, f"{_ACCEPTED}_total", f"{sum(accepted):g}, the sum over positions", f"{stated:g}")
    return drafts, check_survival(where, f"{_AT}_total over drafts", [count / drafts for count in accepted])


class Interval(NamedTuple):
    """One line of a log: how many drafts, and the survival [γ] over them."""

    drafts: float
    drafted: int
    survival: tuple[float, ...]


def read_log(path: str | Path, text: str, ask: Ask) -> Evidence:
    """Read vLLM's "SpecDecoding metrics:" lines, weighted by the drafts of each; other lines are skipped.

    Lines of several block lengths come from several runs: ``ask.gamma`` chooses. Raises SpecsimError
    naming file, line and field.
    """
    lines = [(n, line.partition(LOG_LINE)[2]) for n, line in enumerate(text.split("\n"), 1) if LOG_LINE in line]
    intervals = [i for number, line in lines if (i := _interval(f"{path}: line {number}", line)) is not None]
    if not intervals:
        raise SpecsimError(f"{path}: expected lines with {LOG_LINE!r} and drafted tokens, got none")
    lengths = Counter(len(i.survival) for i in intervals)
    # Where all lines agree, a gamma is checked as for the other formats.
    gamma = None if ask.gamma is None or len(lengths) == 1 else str(ask.gamma)
    wanted = choose(str(path), "block lengths", [str(k) for k in sorted(lengths)], gamma, "gamma")
    chosen = [i for i in intervals if len(i.survival) == int(wanted)]
    drafts = sum(i.drafts for i in chosen)
    survival = [sum(i.drafts * i.survival[k] for i in chosen) / drafts for k in range(int(wanted))]
    per_draft = sum(i.drafted for i in chosen) / drafts
    if abs(per_draft - int(wanted)) < 1e-3 * int(wanted):
        per_draft = int(wanted)  # drafts were recovered from rounded rates
    notes = (
        f"{len(chosen)} lines of {drafts:,.0f} drafts, weighted by drafts; rates are printed to three digits.",
        *length_notes(str(path), ask.fixed_length, int(wanted), per_draft),
        PAST_END,
    )
    return Evidence({"*": survival}, "log lines of vLLM", notes)


def _interval(where: str, line: str) -> Interval | None:
    """What one line says; None where nothing was drafted."""
    mean, accepted, drafted = (
        _field(where, line, name, unit)
        for name, unit in (("Mean acceptance length", ""), ("Accepted", " tokens"), ("Drafted", " tokens"))
    )
    if accepted > drafted:
        raise problem(where, "Accepted", f"at most the {drafted:.0f} tokens drafted", f"{accepted:.0f}")
    if drafted == 0:
        return None
    name = "Per-position acceptance rate"
    # A word before a colon is the next field; any other (nan) is a rate, and a wrong one.
    found = re.search(rf"{name}: \[?([\w.+-]+(?:, ?(?![\w -]*:)[\w.+-]+)*)", line)
    try:
        rates = [float(cell) for cell in found[1].split(",")] if found else []
    except ValueError:
        rates = []
    if not rates:
        raise problem(where, name, "numbers with commas between", line.partition(name)[2][:40] or None)
    survival = check_survival(where, name, rates)
    check_mean(where, "Mean acceptance length", survival, mean)
    # The number of drafts is not printed. It is drafted / γ where that fits the rates; where drafts were
    # shorter than γ (n-gram), accepted / Σ rates, less exact because the rates are rounded.
    drafts = drafted / len(rates)
    least, most, rounding = drafts * sum(rates), drafted * min(sum(rates), 1), drafted * 0.0006 + 0.5
    if not least - rounding <= accepted <= most + len(rates) * rounding:
        expected = f"about {least:.0f}..{most:.0f}, by the rates and the {drafted:.0f} tokens drafted"
        raise problem(where, "Accepted", expected, f"{accepted:.0f}")
    if accepted - least > rounding and sum(rates) > 0:
        drafts = accepted / sum(rates)
    return Interval(drafts, int(drafted), survival)


def _field(where: str, line: str, name: str, unit: str) -> float:
    expected, digits = ("a whole number of" + unit, r"\d+") if unit else ("a number", r"\d+(?:\.\d+)?")
    found = re.search(rf"{name}: ({digits}){unit}", line)
    if found is None:
        got = re.search(rf"{name}: ([^,]*)", line)
        raise problem(where, name, expected, got[1] if got else None)
    if float(found[1]) >= 2**53:
        raise problem(where, name, f"{expected} below 2^53", found[1])
    return float(found[1])
