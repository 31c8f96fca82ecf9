"""Units of time in the names of columns and fields, and seconds from what stands below them."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from specsim.importers.profile_parts import positive, shown
from specsim.types import SpecsimError

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}
"""Names of units and how many of them are a second."""
_SPELLINGS = {
    "s": ("s", "sec", "secs", "second", "seconds"),
    "ms": ("ms", "msec", "millisecond", "milliseconds"),
    "us": ("us", "usec", "µs", "μs", "microsecond", "microseconds"),
}
_UNIT_OF = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings}
_OTHER_UNIT = re.compile("ns|nsec|nanoseconds?|mins?|minutes?|h|hrs?|hours?|cycles?|ticks")
_A_TIME = re.compile("times?|runtime|walltime|latency|duration|cost")
_BESIDE = re.compile(
    "wall|clock|elapsed|step|forward|pass|iter|iteration|verify|verification|draft|drafting|drafter|decode|target|model|"
    "engine|gpu|cuda|device|kernel|execution|exec|measured|median|mean|avg|average|max|min|p|th|percentile|e|total|per"
)
"""What a time's name may hold too: a name with any other word (throughput_ms, cost_usd_s) is not taken for one."""
SHORTEST, LONGEST = 1e-12, 1e9
"""Seconds: nothing that is priced lies beyond, and what does is out of reach of the arithmetic."""
LONG_STEP = 10.0
"""Seconds from which on a step is rather a rate, or a time in another unit, than a step of an engine."""
SHORT_STEP = 50e-6
"""Seconds below which a step is rather one in another unit: a forward of the smallest model launches for longer."""


class Name(NamedTuple):
    """What the name of a column says that it holds, and its unit: one of UNITS, but for another ``unknown`` one."""

    kind: Literal["time", "rate", "unknown", "other"]
    unit: str | None = None


def read_name(name: str) -> Name:
    """Tell a time (verify_ms, step time (s), latency) from a rate (steps/s, tokens_per_sec) and from anything else."""
    words = re.findall("[a-zµμ']+", name.lower())
    units = [_UNIT_OF[word] for word in words if word in _UNIT_OF]
    per = re.search(r"(?:/|(?<![a-z])per)[^a-zµμ]*([a-zµμ]+)", name.lower())
    if per and (per[1] in _UNIT_OF or _OTHER_UNIT.fullmatch(per[1])):
        return Name("rate")
    unknown = words[-1] if words and not units and _OTHER_UNIT.fullmatch(words[-1]) else None
    rest = [word for word in words if word not in _UNIT_OF]
    if len(units) > 1 or not all(
        _A_TIME.fullmatch(w) or _BESIDE.fullmatch(w) for w in (rest[:-1] if unknown else rest)
    ):
        return Name("other")
    if unknown:
        return Name("unknown", unknown)
    if units:
        return Name("time", units[0])
    return Name("time" if any(map(_A_TIME.fullmatch, words)) else "other")


def told_unit(unit: str) -> str:
    """The unit that --unit names; SpecsimError for one that is not known."""
    if unit.lower() not in _UNIT_OF:
        raise SpecsimError(f"--unit: expected one of {', '.join(UNITS)}, got {unit!r}")
    return _UNIT_OF[unit.lower()]


def in_seconds(where: str, value: Any, unit: str) -> float:
    """Seconds of a time above 0 in a ``unit``, from JSON or CSV text."""
    return believable(where, positive(where, value) / UNITS[unit], value)


def believable(where: str, seconds: float, value: Any) -> float:
    """The ``seconds`` that ``value`` says; SpecsimError where no step or kernel could last so long, or so short."""
    if not SHORTEST <= seconds <= LONGEST:
        raise SpecsimError(f"{where}: expected a time of {SHORTEST:g} to {LONGEST:g} s, got {shown(value)}")
    return seconds


def odd_steps(shortest: float, longest: float, else_is: str) -> list[str]:
    """Warnings where the ``shortest`` or the ``longest`` step, in seconds, must be something else than a step."""
    said = [f"The longest step lasts {longest:,.4g} s: {else_is}"] if longest >= LONG_STEP else []
    return [*said, f"The shortest step lasts {1e6 * shortest:.4g} µs: {else_is}"] if shortest < SHORT_STEP else said
