"""What a file of others says of a drafter's acceptance, and the synthetic trace that says the same.

Engines publish *unconditional* survival: the share of all cycles in which draft token k was accepted.
Ours is conditional, c_k = a_k / a_{k-1}. Both give the same law of accepted tokens a cycle, for
P(accepted ≥ k) = a_k whatever ties the positions; what they leave open (the spread between blocks, what
the drafter knew, correlation in time) is said in the notes of the trace and never made up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from specsim.blocktrace import TOTAL
from specsim.files import KeyTwiceError, parse_json
from specsim.hardware import Provenance
from specsim.synthesis import Domain, Synthetic
from specsim.types import SpecsimError

LONGEST = 64
"""The longest block that our traces hold, tokens."""
ROUNDED = 0.02
"""Share by which two published figures may differ through rounding; more means another convention."""

ASSUMED = (
    "The file has no confidences: a scheduler is shown the mean of each position, which tells nothing of the "
    "block, and blocks are independent in time."
)
ONE_MEAN = (
    "The file has one mean only: conditional acceptance is assumed the same at every position, so tau is the "
    "file's and its spread over positions is not known."
)
LOWER_BOUND = (
    "Verified lengths are not known to be fixed: tokens that were not proposed or not verified (adaptive "
    "verification, batch-size schedules, n-gram drafts) count as rejected, so acceptance is a lower bound."
)
PAST_END = "Accepted tokens past an end of sequence are counted: tau is that of cycles before a length clips them."


@dataclass(frozen=True)
class Ask:
    """What a user says of a file: see ``specsim.importers.acceptance.load_acceptance``."""

    select: str | None = None
    gamma: int | None = None
    before: str | Path | None = None
    fixed_length: bool = False
    drafter: str | None = None
    target: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class Evidence:
    """What a file says of one drafter.

    ``survival``: for each domain the unconditional survival of positions 1..γ, within 0..1 and
    non-increasing (``check_survival``). ``source`` says who counted, ``notes`` what is assumed.
    """

    survival: Mapping[str, Sequence[float]]
    source: str
    notes: tuple[str, ...] = ()
    drafter: str | None = None
    target: str | None = None
    temperature: float | None = None


def to_synthetic(path: str | Path, found: Evidence, ask: Ask) -> Synthetic:
    """The synthetic trace that has the survivals ``found`` in ``path``."""
    if TOTAL in found.survival:
        raise SpecsimError(f"{path}: domain: {TOTAL!r} is the name of the total, expected another")
    gammas = {len(survival) for survival in found.survival.values()}
    if len(gammas) > 1:
        raise SpecsimError(f"{path}: expected one block length, got {', '.join(map(str, sorted(gammas)))}")
    gamma = gammas.pop()
    if not 1 <= gamma <= LONGEST:
        raise SpecsimError(f"{path}: expected 1..{LONGEST} draft positions, got {gamma}")
    if ask.gamma is not None and ask.gamma != gamma:
        raise SpecsimError(f"{path}: --gamma: expected {gamma}, the positions that the file tells of, got {ask.gamma}")
    notes = [*found.notes, ASSUMED]
    unreached = min(next((k for k, a in enumerate(s, 1) if a == 0), gamma) for s in found.survival.values())
    if unreached < gamma:
        notes.append(f"Positions after {unreached} were never reached: their conditional acceptance is set to 0.")
    return Synthetic(
        drafter=ask.drafter or found.drafter or "unknown",
        target=ask.target or found.target or "unknown",
        gamma=gamma,
        temperature=found.temperature,
        confidence_source="position_mean",
        domains={name: Domain(conditional_acceptance=conditional(s)) for name, s in found.survival.items()},
        provenance=Provenance(
            source=f"imported: {found.source}, {Path(path).name}", command=ask.command, notes=" ".join(notes)
        ),
    )


def conditional(survival: Sequence[float]) -> tuple[float, ...]:
    """Conditional acceptance c_k = a_k / a_{k-1} of a survival a_1..a_γ; 0 where a_{k-1} is 0."""
    before = (1.0, *survival[:-1])
    # A sum of rounded rates may exceed its predecessor in the last bit.
    return tuple(min(1.0, a / b) if b > 0 else 0.0 for a, b in zip(survival, before, strict=True))


def constant_survival(mean: float, gamma: int) -> tuple[float, ...]:
    """The survival α, α², …, α^γ that sums to ``mean`` accepted draft tokens a cycle, 0..γ."""
    from scipy.optimize import brentq

    powers = np.arange(1, gamma + 1)
    alpha = float(brentq(lambda a: float((a**powers).sum()) - mean, 0.0, 1.0, xtol=1e-14)) if mean < gamma else 1.0
    return tuple((alpha**powers).tolist())


def check_survival(where: str, field: str, survival: Sequence[Any]) -> tuple[float, ...]:
    """The survivals as floats; SpecsimError unless they lie within 0..1 and do not increase."""
    last = 1.0
    for k, value in enumerate(survival, start=1):
        if not is_number(value) or not 0 <= value <= 1:
            raise problem(where, f"{field}, position {k}", "a share 0..1", value)
        if value > last:
            expected = f"at most {last:g}, that of position {k - 1} (survival is unconditional and cannot increase)"
            raise problem(where, f"{field}, position {k}", expected, value)
        last = value
    return tuple(map(float, survival))


def check_mean(where: str, field: str, survival: Sequence[float], mean: float, tolerance: float = ROUNDED) -> None:
    """SpecsimError unless ``mean`` tokens a cycle is 1 (the bonus) + the sum of the survivals, but for rounding."""
    tau = 1 + sum(survival)
    if not abs(tau - mean) <= tolerance * tau:
        expected = f"about {tau:.4g}, the bonus token plus the sum of the positions' unconditional survival"
        raise problem(where, field, expected, mean)


def length_notes(where: str, fixed_length: bool, gamma: int, per_draft: float | None) -> tuple[str, ...]:
    """What must be said about lengths; ``per_draft`` draft tokens were counted a cycle (None: not told).

    vLLM's adaptive verification leaves that count at γ [vllm#47808], so it cannot prove a fixed length:
    only the user can. It can disprove one.
    """
    if per_draft is not None and per_draft > gamma * (1 + 1e-9):
        raise problem(where, "draft tokens", f"at most gamma = {gamma} a draft", f"{per_draft:.4g}")
    short = per_draft is not None and per_draft < gamma * (1 - 1e-9)
    if fixed_length and short:
        raise problem(where, "draft tokens", f"gamma = {gamma} a draft, for a fixed length", f"{per_draft:.4g}")
    if fixed_length:
        return ()
    return (LOWER_BOUND, f"Drafts held {per_draft:.4g} tokens of {gamma}.") if short else (LOWER_BOUND,)


def choose(where: str, what: str, names: Sequence[str], select: str | None, option: str = "select") -> str:
    """``select``, or the only one of ``names``; SpecsimError listing them otherwise, for the user's ``option``."""
    listed = ", ".join(names)
    if select is None and len(names) == 1:
        return names[0]
    if select is None:
        raise SpecsimError(f"{where}: holds {len(names)} {what}, expected --{option} with one of {listed}")
    if select not in names:
        raise SpecsimError(f"{where}: --{option}: expected one of {listed}, got {select!r}")
    return select


def whole(where: str, row: Mapping[str, Any], field: str, low: int = 0, high: int = 2**53) -> int:
    """The whole number ``row[field]``, within ``low``..``high``."""
    value = row.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        bounds = f"{low}..{high}" if high < 2**53 else f"{low} or more"
        raise problem(where, field, f"a whole number, {bounds}", value)
    return value


def positive(where: str, row: Mapping[str, Any], field: str) -> float:
    """The number ``row[field]``, above 0 and finite."""
    value = row.get(field)
    if not is_number(value) or not 0 < value < 2**53:
        raise problem(where, field, "a number above 0", value)
    return float(value)


def is_number(value: object) -> TypeGuard[float]:
    """Whether JSON said a number (true is none)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def name_of(row: Mapping[str, Any], *fields: str) -> str | None:
    """The first of ``fields`` that ``row`` has as text or a number; None without one."""
    found = (row.get(field) for field in fields)
    return next((_line(str(value)) for value in found if isinstance(value, str | int) and value != ""), None)


def problem(where: str, field: str, expected: str, got: object) -> SpecsimError:
    """A mistake in a file, as one line: where, which field, what was expected."""
    text = _line(got) if isinstance(got, str) else "none" if got is None else json.dumps(got, default=repr)
    return SpecsimError(f"{where}: {field}: expected {expected}, got {text if len(text) < 80 else text[:77] + '...'}")


def _line(text: str) -> str:
    """Text of others as one line that can be printed: JSON may hold half a surrogate pair."""
    return " ".join(text.encode("utf-8", "replace").decode().split())


def parse(path: str | Path, text: str) -> list[tuple[str, Any]]:
    """The JSON values in ``text`` (one document, or one on each line), each with where it stands."""
    try:
        return [(str(path), parse_json(text))]
    except KeyTwiceError as error:
        raise SpecsimError(f"{path}: {error}") from error
    except ValueError as error:
        lines = [(f"{path}: line {n}", line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
        if not _alone(lines[0][1] if lines else ""):
            line = getattr(error, "lineno", 1)
            raise SpecsimError(f"{path}: line {line}: expected JSON: {getattr(error, 'msg', error)}") from error
    rows = []
    for where, line in lines:
        try:
            rows.append((where, parse_json(line)))
        except KeyTwiceError as error:
            raise SpecsimError(f"{where}: {error}") from error
        except ValueError as error:
            raise problem(where, "JSON lines", "a JSON value", line) from error
    return rows


def _alone(line: str) -> bool:
    """Whether a line is a JSON object by itself, so that the file is JSON lines."""
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False
