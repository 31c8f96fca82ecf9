"""What an engine's step costs, from the gaps between its chunks: a table by running requests, and prompts apart.

A line would not do: engines pad, and on a CPU eight sequences may step faster than six.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specsim.hardware import Profile
from specsim.hardware.profile import Provenance
from specsim.hardware.tables import DraftCost, Table1D
from specsim.live.engines import Engine
from specsim.live.load import Drive, latencies, observed
from specsim.types import Floats, SpecsimError

LEAST = 4
"""Steps that a number of running requests must have been seen for, to have a price of its own."""
PAUSE = 10.0
"""A gap of so many medians is a pause of the machine, not a step: it is left out and told of."""


@dataclass(frozen=True)
class StepTable:
    """Seconds of a step by running requests, ``seconds[n]`` (mean) and ``gaps[n]`` (what it was taken from).

    ``prompts``: seconds to the first token of an idle engine, by tokens of the prompt. ``pauses``: gaps left out.
    ``source``: what the steps were taken from.
    """

    seconds: Mapping[int, float]
    gaps: Mapping[int, Floats]
    prompts: Mapping[int, float]
    pauses: int
    source: str = "gaps between the chunks that a running engine streamed"

    @property
    def most(self) -> int:
        """The most running requests that have a price."""
        return max(self.seconds)


def step_table(loads: Iterable[Drive], alone: Iterable[Drive]) -> StepTable:
    """The table that ``loads`` show, and the prompts of the closed loops of one user, ``alone``.

    Raises SpecsimError where no step of a single request was seen, or no prompt of an idle engine.
    """
    gaps: dict[int, list[float]] = {}
    for drive in loads:
        for running, gap in step_gaps(drive):
            gaps.setdefault(running, []).append(gap)
    kept, pauses = {}, 0
    for running, found in sorted(gaps.items()):
        values = np.array(found)
        steps = values < PAUSE * np.median(values)
        pauses += int((~steps).sum())
        # Each of the running requests tells of the same step.
        if steps.sum() >= LEAST * running:
            kept[running] = values[steps]
    prompts = _prompts(alone)
    if 1 not in kept or not prompts:
        raise SpecsimError(
            "calibration: expected steps of one running request and prompts of an idle engine, got "
            f"{sum(map(len, gaps.values()))} gaps between chunks and {len(prompts)} prompt lengths: did it stream?"
        )
    return StepTable(
        seconds={running: float(values.mean()) for running, values in kept.items()},
        gaps=kept,
        prompts=prompts,
        pauses=pauses,
    )


def _prompts(alone: Iterable[Drive]) -> dict[int, float]:
    """Seconds to the first token of an idle engine (median), by tokens of the prompt."""
    found: dict[int, list[float]] = {}
    for drive in alone:
        ttft, (tokens, _) = latencies(drive)[0], observed(drive.measured)
        for count, seconds in zip(tokens.tolist(), ttft.tolist(), strict=True):
            found.setdefault(count, []).append(seconds)
    return {count: float(np.median(seconds)) for count, seconds in sorted(found.items())}


def quiet_table(bursts: Iterable[Drive], alone: Iterable[Drive]) -> StepTable:
    """The table that bursts show, whose answers were not streamed: no time of these steps went into sending tokens.

    A step is what one token more of all answers takes: a burst of long ones less one of short ones. Raises SpecsimError
    where no size had both, or no prompt of an idle engine was timed.
    """
    took: dict[int, dict[int, list[float]]] = {}
    for drive in bursts:
        done = [a for a in drive.answers if a.finish is not None]
        if drive.answers and len(done) == len(drive.answers):
            seconds = max(a.finish or 0.0 for a in done) - min(a.sent for a in done)
            took.setdefault(len(done), {}).setdefault(done[0].order.output_tokens, []).append(seconds)
    steps = {}
    for running, lengths in sorted(took.items()):
        short, long = min(lengths), max(lengths)
        if long > short:
            some = min(len(lengths[short]), len(lengths[long]))
            gaps = (np.sort(lengths[long])[:some] - np.sort(lengths[short])[:some]) / (long - short)
            if gaps.mean() > 0:
                steps[running] = gaps
    prompts = _prompts(alone)
    if 1 not in steps or not prompts:
        raise SpecsimError("calibration: expected bursts of one request and more, and prompts of an idle engine")
    means = {n: float(gaps.mean()) for n, gaps in steps.items()}
    return StepTable(means, steps, prompts, 0, "long less short answers of a running engine that came whole")


def sending(streamed: StepTable, quiet: StepTable) -> float:
    """Seconds that a step is longer for each token it sends: on a CPU, clients and sockets take from the engine."""
    more = [(seconds - quiet.seconds[n]) / n for n, seconds in streamed.seconds.items() if n in quiet.seconds]
    return max(0.0, float(np.mean(more))) if more else 0.0


def step_gaps(drive: Drive) -> list[tuple[int, float]]:
    """(running requests, seconds of a step) of every gap between chunks in which no request waited or came or went.

    Where a chunk holds several tokens without speculation (an engine that streams every few steps), the gap is
    divided by them.
    """
    talking = [a for a in drive.answers if len(a.chunks) > 1]
    if not talking:
        return []
    began, ended = (np.sort([a.chunks[i] for a in talking]) for i in (0, -1))
    last = max(a.chunks[-1] for a in talking)
    sent = np.sort([a.sent for a in drive.answers])
    seen = np.sort([a.chunks[0] if a.chunks else max(last, a.sent) for a in drive.answers])
    start = np.concatenate([a.chunks[:-1] for a in talking])
    end = np.concatenate([a.chunks[1:] for a in talking])
    each = [max(1.0, ((a.output_tokens or 0) - 1) / (len(a.chunks) - 1)) if a.done else 1.0 for a in talking]
    tokens = np.repeat(each, [len(a.chunks) - 1 for a in talking])
    undisturbed = np.searchsorted(sent, end, "left") <= np.searchsorted(seen, start, "right")
    # Chunks of one step reach the client one after the other: who runs is asked in the middle of the gap.
    middle = (start + end) / 2
    running = np.searchsorted(began, middle, "right") - np.searchsorted(ended, middle, "left")
    seconds = (end - start) / tokens
    return list(zip(running[undisturbed].tolist(), seconds[undisturbed].tolist(), strict=True))


def to_profile(table: StepTable, engine: Engine, device: str, command: str, date: str) -> Profile:
    """The table as a profile: steps by tokens, decodes up to the most that ran together, prompts beyond.

    Raises SpecsimError where no prompt was longer than the most running requests: the two would share sizes.
    """
    prompts = {tokens: seconds for tokens, seconds in table.prompts.items() if tokens > table.most}
    if not prompts:
        raise SpecsimError(
            f"--prompt-tokens: expected more than {table.most}, the most requests that ran together in the calibration"
        )
    points = {**table.seconds, **prompts}
    # A difference of two bursts may be below nothing on a machine that is disturbed, a price may not.
    low, high = dict(points), dict(points)
    for n, gaps in table.gaps.items():
        quarter, three_quarters = np.quantile(gaps, (0.25, 0.75)).tolist()
        low[n], high[n] = max(0.0, min(quarter, points[n])), max(three_quarters, points[n])
    return Profile(
        schema="specsim.profile/1",
        name=f"live-{engine.kind}",
        kind="measured",
        model=engine.model,
        device=device,
        gpus=1,
        engine=engine.name,
        kv_tokens=engine.kv_tokens,
        verify=Table1D(
            tokens=tuple(points),
            seconds=tuple(points.values()),
            below="linear",
            low=tuple(low.values()),
            high=tuple(high.values()),
        ),
        provenance=Provenance(
            source=f"{table.source}, and its time to the first token when idle",
            command=command,
            date=date,
            versions={engine.kind: engine.version} if engine.version else {},
            notes=f"Decodes up to {table.most} tokens by their mean (quartiles beside it), "
            "prompts beyond by median; HTTP included.",
        ),
    )


def read_by_both(profile: Profile, draft: Profile, most: int) -> Profile:
    """``profile`` with prompts, its sizes above ``most`` tokens, that the draft model reads too before it can draft."""
    verify: Any = profile.verify
    beside = draft.step_seconds(np.array(verify.tokens), extrapolate=True).tolist()

    def priced(name: str) -> tuple[float, ...]:
        prices = zip(verify.tokens, getattr(verify, name), beside, strict=True)
        return tuple(seconds + more if tokens > most else seconds for tokens, seconds, more in prices)

    notes = f"{profile.provenance.notes} Prompts are read by the draft model too."
    return profile.model_copy(
        update={
            "verify": verify.model_copy(update={name: priced(name) for name in ("seconds", "low", "high")}),
            "provenance": profile.provenance.model_copy(update={"notes": notes}),
        }
    )


def draft_cost(draft: Profile | None, milliseconds: float | None, users: Sequence[int]) -> DraftCost | None:
    """What drafting costs: ``milliseconds`` a step, or γ steps of the draft model, whose own ``draft`` profile tells
    them; None where neither is given."""
    if draft is not None:
        most = min(max(users), draft.last_tokens)
        sizes = range(1, most + 1)
        seconds = draft.step_seconds(np.array(sizes)).tolist()
        return DraftCost(type="autoregressive", num_seqs=tuple(sizes), seconds=tuple(seconds))
    if milliseconds is None:
        return None
    seconds = milliseconds * 1e-3
    return DraftCost(type="parallel", num_seqs=(1, max(2, *users)), seconds=(seconds, seconds))
