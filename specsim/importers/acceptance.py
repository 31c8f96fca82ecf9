"""Others' evidence of acceptance as our traces: counters, log lines, published rates, recorded rounds.

Where a file says what happened in every round, in order, it becomes a sequential block trace; where it says
shares or means, a synthetic trace with the same law of accepted tokens a cycle and notes on what is assumed.
``FORMATS`` lists what is read; the modules beside this one tell each format's fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from specsim.blocktrace import Trace
from specsim.files import read_text
from specsim.importers.counters import COUNTER, LOG_LINE, read_log, read_metrics
from specsim.importers.evidence import LONGEST, Ask, Evidence, parse, to_synthetic
from specsim.importers.rates import BENCH, read_deepspec, read_llamacpp, read_per_position, rows_of
from specsim.importers.rounds import read_sglang, read_specbench
from specsim.synthesis import Synthetic
from specsim.types import SpecsimError

# What reads each format, and which of a user's answers mean something to it.
_READERS: dict[str, tuple[Callable[[str | Path, str, Ask], Evidence | Trace], tuple[str, ...]]] = {
    "metrics": (read_metrics, ("select", "gamma", "before", "fixed_length")),
    "log": (read_log, ("gamma", "fixed_length")),
    "per-position": (read_per_position, ("select", "gamma", "fixed_length")),
    "deepspec": (read_deepspec, ("gamma",)),
    "llamacpp": (read_llamacpp, ("gamma", "fixed_length")),
    "specbench": (read_specbench, ("gamma",)),
    "sglang": (read_sglang, ("gamma",)),
}
FORMATS = tuple(_READERS)
"""Prometheus text of vLLM or llama.cpp; vLLM's log; JSON by position (vLLM bench results too); DeepSpec's
metrics.json; timings of llama.cpp; Spec-Bench JSON lines; SGLang's /server_info."""


def load_acceptance(
    path: str | Path,
    format: str = "auto",
    *,
    select: str | None = None,
    gamma: int | None = None,
    before: str | Path | None = None,
    fixed_length: bool = False,
    drafter: str | None = None,
    target: str | None = None,
    command: str | None = None,
) -> Synthetic | Trace:
    """Read others' evidence of a drafter's acceptance from ``path`` as a trace of ours.

    ``format``: one of FORMATS, or "auto" to tell by content. ``select`` names one of several drafters (rates by
    position) or models (counters). ``gamma``: the draft block length, tokens, where the file does not say it or
    holds several. ``before``: an earlier scrape of the same counters; what lies between is imported.
    ``fixed_length``: every draft held and had verified gamma tokens, so counts over drafts are survivals, not
    lower bounds. ``drafter``, ``target`` and ``command`` name what made it, for the trace's metadata.

    Raises SpecsimError, in one line: file, line or field, what was expected; also for an answer that the
    format has no use for.
    """
    ask = Ask(select, gamma, before, fixed_length, drafter, target, command)
    if gamma is not None and not 1 <= gamma <= LONGEST:
        raise SpecsimError(f"--gamma: expected 1..{LONGEST}, got {gamma}")
    text = read_text(path)
    name = _format(path, text) if format == "auto" else format
    if name not in _READERS:
        raise SpecsimError(f"--format: expected auto or one of {', '.join(FORMATS)}, got {format!r}")
    read, uses = _READERS[name]
    for field in fields(Ask):
        given = getattr(ask, field.name) not in (None, False)
        if given and field.name not in (*uses, "drafter", "target", "command"):
            raise SpecsimError(f"{path}: --{field.name.replace('_', '-')}: has no meaning for the format {name}")
    found = read(path, text, ask)
    return found if isinstance(found, Trace) else to_synthetic(path, found, ask)


def _format(path: str | Path, text: str) -> str:
    """Tell a format by content."""
    start = text.lstrip()
    if start.startswith(("{", "[")) and (LOG_LINE not in text or _is_json(start)):
        name = _json_format(parse(path, text)[0][1])
    else:
        name = "log" if LOG_LINE in text else "metrics" if COUNTER.search(text) or "# TYPE" in text else None
    if name is None and '"specsim.workload/' in start[:4096]:
        raise SpecsimError(f"{path}: these are arrivals (--arrivals), expected a trace or counters of a drafter")
    if name is None:
        got = repr(start[:60]) if start else "an empty file"
        raise SpecsimError(f"{path}: expected one of the formats {', '.join(FORMATS)}, got {got}")
    return name


def _is_json(text: str) -> bool:
    """Whether text is JSON, rather than a log whose lines begin with a bracket."""
    try:
        json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json_format(data: Any) -> str | None:
    """Tell a JSON format by the fields of its first object."""
    rows = rows_of(data)
    first = rows[0][1] if rows else None
    if not isinstance(first, dict):
        return None
    if isinstance(data, dict) and any(key in data for key in ("internal_states", "dspark_info_record", "records")):
        return "sglang"
    spec = first.get("spec")
    if "accept_rates_by_position" in (spec if isinstance(spec, dict) else first):
        return "deepspec"
    if "per_position" in first or BENCH in first:
        return "per-position"
    if "timings" in first or "draft_n" in first:
        return "llamacpp"
    return "specbench" if "accept_lengths" in first or "choices" in first else None
