"""A counterexample: where the law of the output departs from the target's, made plain and put into words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.audit.law import (
    Asked,
    Block,
    History,
    blocks,
    distance,
    distance_of,
    finished,
    joined,
    outcomes,
    told_apart,
)
from specsim.audit.models import PROMPT_TOKENS, TABLES, Array, Instance

LETTERS = "abc"
MOST_ROWS = 16
MOST_STATES = 500


@dataclass(frozen=True)
class Drafted:
    """What may be drafted at the step: tokens, confidences and tokens verified of each decoding request, its chance."""

    drafts: tuple[str, ...]
    chance: float
    confidence: tuple[tuple[float, ...], ...]
    verified: tuple[int, ...]


@dataclass(frozen=True)
class Counterexample:
    """An instance in which a scheduler bends the target's law, and where it does.

    ``tv``: between the joint laws of the first tokens of all requests. ``step`` (1, 2, ..): the first at which, after
    ``history`` (empty for a scheduler without memory) and ``output`` (a text a request), what comes next does not have
    the target's law; ``decoding`` are the requests in it, from 0. ``laws``: text, its chance under the target, and
    under the scheduler, for the next ``tokens`` tokens of ``requests``; ``tv_next`` is between these. ``drafted``: all
    blocks of that step.
    """

    instance: Instance
    tv: float
    step: int
    history: History
    output: tuple[str, ...]
    decoding: tuple[int, ...]
    requests: tuple[int, ...]
    tokens: int
    tv_next: float
    laws: tuple[tuple[tuple[str, ...], float, float], ...]
    drafted: tuple[Drafted, ...]

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        instance = self.instance
        return {
            "vocabulary": instance.decoders[0].vocabulary,
            "gamma": instance.decoders[0].gamma,
            "requests": len(instance.decoders),
            "steps": instance.steps,
            "length": instance.decoders[0].length,
            "tv": self.tv,
            "seconds": instance.seconds.tolist(),
            "seconds_per_prompt_token": float(instance.seconds[0]) / PROMPT_TOKENS,
            "present": [list(row) for row in instance.present],
            "prompts": [row._asdict() for row in instance.prompts],
            "request_ids": list(instance.ids[: len(instance.decoders)]),
            "decoders": [
                {name: [table.tolist() for table in getattr(decoder, name)] for name in TABLES}
                for decoder in instance.decoders
            ],
            "step": self.step,
            "output": list(self.output),
            "drafted": [
                {"drafts": list(d.drafts), "chance": d.chance, "confidence": [list(c) for c in d.confidence],
                 "verified": list(d.verified)} for d in self.drafted
            ],
            "next": {
                "requests": list(self.requests), "tokens": self.tokens, "tv": self.tv_next,
                "laws": [{"text": list(text), "target": p, "output": q} for text, p, q in self.laws],
            },
        }  # fmt: skip


# Where it happens


def explained(
    instance: Instance, asked: Asked, tolerance: float, most_states: int | None = MOST_STATES
) -> Counterexample:
    """The first step, and there the state, from which what comes out departs most from the target's law.

    Of very many states the likeliest ``most_states`` are looked at, and the others only if these show nothing.
    """
    tv = distance_of(instance, asked)
    for step, mass in enumerate(told_apart(instance, asked)[:-1]):
        worst: tuple[float, Block, tuple[int, int], Array, Array] | None = None
        for block in blocks(instance, asked, mass, step):
            one, other = (outcomes(instance, block, seat) for seat in (0, 1))
            for i, j in _likeliest(block.mass, most_states):
                out = finished(instance.decoders, joined(np.ones((1, 1)), one[i : i + 1], other[j : j + 1]))
                before = np.zeros(mass[block.history].shape)
                before[block.states[0][i], block.states[1][j]] = 1.0
                law = finished(instance.decoders, before)
                gap = distance(out, law)
                if worst is None or gap > worst[0] + 1e-9:
                    worst = gap, block, (int(i), int(j)), law, out
        if worst is not None and worst[0] > tolerance:
            _, block, at, law, out = worst
            return _counterexample(instance, tv, step, block, at, law, out)
    if most_states is not None:
        return explained(instance, asked, tolerance, None)
    raise AssertionError("an output law that is not the target's departs from it at some step")


def _likeliest(mass: Array, most: int | None) -> Iterator[NDArray[np.int64]]:
    """Where ``mass`` is, in the order of states, and of more than ``most`` the likeliest."""
    found = np.argwhere(mass > 0)
    by_mass = np.argsort(-mass[tuple(found.T)], kind="stable")
    return iter(found[np.sort(by_mass[:most])])


def _counterexample(
    instance: Instance, tv: float, step: int, block: Block, at: tuple[int, int], law: Array, out: Array
) -> Counterexample:
    seats = range(len(instance.decoders))
    states = [int(block.states[seat][at[seat]]) for seat in seats]
    texts = tuple(
        _text(state - d.first[int(d.lengths[state])], int(d.lengths[state]), d.vocabulary)
        for d, state in zip(instance.decoders, states, strict=True)
    )
    decoding = tuple(seat for seat in seats if block.live[seat])
    requests, tokens, target, output = _fewest(instance, [len(text) for text in texts], decoding, law, out)
    v = instance.decoders[0].vocabulary
    laws = tuple(
        (tuple(_text(int(code), tokens, v) for code in np.unravel_index(flat, target.shape)), float(p), float(q))
        for flat, (p, q) in enumerate(zip(target.ravel(), output.ravel(), strict=True))
    )
    drafted = []
    # Of each request that decodes: its blocks, in order, each with its chance, its confidences and its kind.
    each = []
    for seat in decoding:
        d, anchor = instance.decoders[seat], int(instance.decoders[seat].anchors[states[seat]])
        kinds = sorted((code, kind) for kind, codes in enumerate(d.kinds[anchor].values()) for code in codes)
        each.append(
            [
                (_text(c, d.gamma, v), float(d.chances[anchor, c]), tuple(d.shown[anchor, c].tolist()), u)
                for c, u in kinds
            ]
        )
    for drafts in itertools.product(*each):
        here = np.all([block.kinds[s] == u for s, (*_, u) in zip(decoding, drafts, strict=True)], axis=0).argmax()
        words, chance, confidences, _ = zip(*drafts, strict=True)
        drafted.append(Drafted(words, float(np.prod(chance)), confidences, block.said[int(here)]))
    return Counterexample(
        instance, tv, step + 1, block.history, texts, decoding, requests, tokens,
        distance(target, output), laws, tuple(drafted),
    )  # fmt: skip


def _fewest(
    instance: Instance, out: list[int], decoding: tuple[int, ...], law: Array, other: Array
) -> tuple[tuple[int, ...], int, Array, Array]:
    """The fewest requests and next tokens whose laws already show half of the distance, and those laws."""
    v, length = instance.decoders[0].vocabulary, instance.decoders[0].length
    whole = distance(law, other)
    groups = [(seat,) for seat in decoding] + [decoding] * (len(decoding) > 1)
    for tokens in range(1, length + 1):
        for group in groups:
            if all(out[seat] + tokens <= length for seat in group):
                p, q = (_next(x, out, group, tokens, v, length) for x in (law, other))
                if distance(p, q) > whole / 2:
                    return group, tokens, p, q
    # The requests' outputs end at different places: the law of all that is compared.
    return tuple(range(law.ndim)), length, law, other


def _next(law: Array, out: list[int], group: tuple[int, ...], tokens: int, vocabulary: int, length: int) -> Array:
    """The law of the next tokens of some requests, of one that is of all tokens of all: what is out is certain."""
    shape: list[int] = []
    for n in out:
        shape += [vocabulary**n, vocabulary**tokens, vocabulary ** (length - n - tokens)] if n + tokens <= length else [
            vocabulary**length, 1, 1]  # fmt: skip
    kept = {3 * seat + 1 for seat in group}
    return np.asarray(law.reshape(shape).sum(axis=tuple(a for a in range(len(shape)) if a not in kept)))


def _text(code: int, n: int, vocabulary: int) -> str:
    return "".join(LETTERS[code // vocabulary ** (n - k - 1) % vocabulary] for k in range(n))


# In words


def _lines(case: Counterexample) -> Iterator[str]:
    instance = case.instance
    decoder = instance.decoders[0]
    requests = len(instance.decoders)
    yield (
        f"vocabulary {decoder.vocabulary}, blocks of {decoder.gamma}, {requests} request{'s' * (requests > 1)}, "
        f"{instance.steps} step{'s' * (instance.steps > 1)}; "
        f"first {decoder.length} tokens: total variation {_n(case.tv)}"
    )
    for seat, one in enumerate(instance.decoders):
        of = f" of request {seat + 1}" if requests > 1 else ""
        most = min(decoder.gamma, decoder.length - 1)
        yield f"  target{of}: {_laws([table[None] for table in one.target[: most + 1]])}"
        yield f"  drafter{of}: {_laws(one.drafter)}"
    steps = " ".join(_n(1 / s) for s in instance.seconds[requests - 1 :])
    yield f"  steps/s with {requests}, {requests + 1}, .. tokens in the step: {steps}"
    if instance.ids != (0, 1):
        yield f"  request ids: {', '.join(map(str, instance.ids[:requests]))}"
    for step, (row, (prompt, ends, before)) in enumerate(zip(instance.present, instance.prompts, strict=True), 1):
        if not all(row):
            yield f"  step {step}: request {row.index(False) + 1} does not decode"
        if prompt:
            more = f"{_n(instance.price(1, prompt)[0] - instance.price(1, 0)[0])} s more"
            yield f"  step {step}: {prompt} prompt tokens ({more}), {ends} prompt{'s' * (ends != 1)} ended"
        if before:
            yield f"  step {step}: prompts were computed since the step before it (view.prefilled)"
    yield from _before(case)
    heads = [f"request {seat + 1}" for seat in case.decoding] if len(case.decoding) > 1 else ["draft"]
    several = len(heads) > 1
    yield ""
    yield from _table(
        [
            *heads,
            "chance",
            *(f"confidence {seat + 1}" if several else "confidences" for seat in case.decoding),
            "verified",
        ],
        [
            [*d.drafts, _n(d.chance), *(" ".join(map(_n, c)) for c in d.confidence), " ".join(map(str, d.verified))]
            for d in case.drafted
        ],
    )
    reason = _reason(case)
    if reason:
        yield ""
        yield reason
    yield ""
    whose = "" if requests == 1 else " of request " + " and ".join(str(seat + 1) for seat in case.requests)
    what = "token" if case.tokens == 1 else f"{case.tokens} tokens"
    yield from _table(
        [f"{'first' if not any(case.output) else 'next'} {what}{whose}", "target", "output"],
        [[" ".join(text), _n(p), _n(q)] for text, p, q in case.laws if p or q],
    )
    yield f"total variation {_n(case.tv_next)}"


def _before(case: Counterexample) -> Iterator[str]:
    if case.step > 1:
        out = ", ".join(text or "nothing" for text in case.output)
        yield f"It shows at step {case.step}, where {out} has been put out."
    for step, past in enumerate(case.history, 1):
        shown = "; ".join(" ".join(map(_n, np.frombuffer(row))) for row in past.seen.rows)
        came = "" if past.emitted is None else f", put out {' '.join(map(str, past.emitted))}"
        yield f"  step {step} before it: confidences {shown}, verified {' '.join(map(str, past.lens))}{came}"


def _reason(case: Counterexample) -> str | None:
    """Two drafts that agree before some position, of which one has it verified and the other does not.

    Of a request that the law shown is of, if there are such, at the first position.
    """
    found = list(_pairs(case))
    best = next((pair for pair in found if case.decoding[pair[1]] in case.requests), found[0] if found else None)
    if best is None:
        if len(case.requests) > 1:
            return (
                "Why: each request's drafts decide what is verified of the other's, which ties their outputs together."
            )
        return None
    k, at, one, other = best
    whose = (
        f"request {case.decoding[at] + 1}'s draft token {k}" if len(case.instance.decoders) > 1 else f"draft token {k}"
    )
    beside = f", beside {' '.join(d for i, d in enumerate(one.drafts) if i != at)}" if len(one.drafts) > 1 else ""
    begins = " alike before it" if k > 1 else ""
    return (
        f"Why: whether {whose} is verified depends on what it is, or on what follows it: it is verified in "
        f"{one.drafts[at]} and not in {other.drafts[at]}{begins and ', which are' + begins}{beside}."
    )


def _pairs(case: Counterexample) -> Iterator[tuple[int, int, Drafted, Drafted]]:
    """By position and decoding request, the first pair of drafts of which one has it verified and the other has not."""
    for k in range(1, case.instance.decoders[0].gamma + 1):
        for at in range(len(case.decoding)):
            # By what the two must share, the first draft of each kind.
            kept: dict[Any, int] = {}
            left: dict[Any, int] = {}
            for n, drafted in enumerate(case.drafted):
                key = drafted.drafts[at][: k - 1], drafted.drafts[:at], drafted.drafts[at + 1 :]
                if drafted.verified[at] >= k - 1:
                    (kept if drafted.verified[at] >= k else left).setdefault(key, n)
            pairs = [(kept[key], left[key]) for key in kept.keys() & left.keys()]
            if pairs:
                one, other = min(pairs)
                yield k, at, case.drafted[one], case.drafted[other]


def _laws(tables: Sequence[Array]) -> str:
    """Laws by position and text before, or one for all where they are the same."""
    flat = [row for table in tables for row in table.reshape(-1, table.shape[-1])]
    if all(np.allclose(row, flat[0], atol=1e-15) for row in flat):
        return _law(flat[0]) + (" always" if len(flat) > 1 else "")
    parts = []
    for k, table in enumerate(tables):
        anchors, _, v = table.shape
        for (a, code), row in zip(np.ndindex(table.shape[:2]), table.reshape(-1, v), strict=True):
            before = f"last {LETTERS[a]}: " if anchors > 1 else ""
            parts.append(before + (f"after {_text(code, k, v)} " if k else "first ") + _law(row))
    shown = parts[:MOST_ROWS]
    return "; ".join(shown) + (f"; and {len(parts) - len(shown)} more" if len(parts) > len(shown) else "")


def _law(row: Array) -> str:
    return ", ".join(f"{LETTERS[x]} {_n(p)}" for x, p in enumerate(row))


def _n(value: float) -> str:
    return f"{value:.4g}"


def _table(heads: list[str], rows: list[list[str]]) -> Iterator[str]:
    shown = rows[:MOST_ROWS]
    widths = [max(len(row[i]) for row in [heads, *shown]) for i in range(len(heads))]
    for row in [heads, *shown]:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if len(rows) > len(shown):
        yield f"  and {len(rows) - len(shown)} more"
