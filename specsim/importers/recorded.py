"""A recorded engine run: what each request met, what the engine was told, and where its step prices are.

A run is a folder: requests.jsonl (a line a request), meta.json (the engine's settings), config.json (the model's),
profile/ (a bundle of kernel times) and, where it was kept, timeseries.csv (the engine's own counts).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, ValidationError

from specsim.files import first_error, parse_json, read_text
from specsim.importers.engine_meta import Count, Meta, Part, Settings, read_meta
from specsim.importers.profile_parts import finite, read_table, whole
from specsim.types import Floats, Ints, SpecsimError

Seconds = Annotated[float, Field(allow_inf_nan=False, gt=-(2**63), lt=2**63)]

TIMES = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
"""The engine's moments of a request, in the order in which they happen."""
SERIES = ("t", "running", "waiting")
MORE_SERIES = ("prompt_throughput", "gen_throughput", "kv_cache_pct")
UNITS = (1e3, 1e6, 1e9, 1e-3, 1e-6, 1e-9)
"""How much faster a clock goes whose unit is another than the other's."""
A_STEP = 1.0
"""Seconds between the queue times of requests that one stamp of the client's may stand for: a long step."""
LONG = 60.0
"""Seconds that a request may wait to be seen in any run, be it as short as it may."""
SLACK = 5.0
"""Seconds that the client's clock may leave the run's start and end."""
DAY = 86400.0
"""Seconds from the run's start, before the engine is loaded, to its first request, at most."""


@dataclass(frozen=True)
class Timings:
    """What each request met, [n] in order of arrival: seconds on one clock whose zero is the first arrival."""

    arrival_s: Floats
    queued_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def ttft(self) -> Floats:
        """Seconds [n] from the moment the engine sees a request, at a step's boundary, to its first token."""
        return self.first_token_s - self.queued_s

    @property
    def e2e(self) -> Floats:
        """Seconds [n] from the moment the engine sees a request to its last token."""
        return self.finish_s - self.queued_s

    @property
    def tpot(self) -> Floats:
        """Seconds an output token after the first, of the requests that have more than one: [n] or fewer."""
        many = self.output_tokens > 1
        return (self.finish_s - self.first_token_s)[many] / (self.output_tokens[many] - 1)


@dataclass(frozen=True)
class Load:
    """An engine's requests and KV at the times ``t`` (s, [m], on the clock of the run's Timings).

    ``kv_share`` is the used share of the KV cache, 0 to 1, or None where it was not recorded.
    """

    t: Floats
    running: Floats
    waiting: Floats
    kv_share: Floats | None


@dataclass(frozen=True)
class RecordedRun:
    """One run's folder, read. ``config`` and ``profile`` are paths inside it, None where there is none.

    ``lines`` [n]: where the requests stand in requests.jsonl.
    """

    path: Path
    settings: Settings
    requests: Timings
    lines: Ints
    load: Load | None
    config: Path | None
    profile: Path | None

    @property
    def name(self) -> str:
        return self.path.resolve().name


class _Row(Part):
    """A line of requests.jsonl: ``arrival_time`` is the client's clock, the others the engine's; seconds."""

    request_id: str | None = None
    input_toks: Count
    output_toks: Count
    arrival_time: Seconds
    queued_ts: Seconds
    scheduled_ts: Seconds
    first_token_ts: Seconds
    last_token_ts: Seconds


def read_run(path: str | Path) -> RecordedRun:
    """Read the folder of a recorded run.

    A client's clock is brought to the engine's by the request that waited least to be seen: its arrival is
    when it was queued. Raises SpecsimError, naming file, line and field, for anything that is missing, of the
    wrong type or at odds with the rest: clocks of different units, and times that leave those of meta.json.
    """
    path = Path(path)
    if not path.is_dir():
        raise SpecsimError(f"{path}: expected the folder of a recorded run, with requests.jsonl and meta.json")
    meta = read_meta(path / "meta.json")
    source = path / "requests.jsonl"
    lines, rows = _rows(source)
    if meta.num_requests is not None and meta.num_requests != len(rows):
        raise SpecsimError(f"{path / 'meta.json'}: num_requests: expected {len(rows)}, the lines of {source.name}, "
                           f"got {meta.num_requests}")  # fmt: skip
    _check_lengths(source, lines, rows, meta.settings.max_model_len)
    requests, order, first_arrival = _timings(source, lines, rows)
    _check_moments(path / "meta.json", meta, source, first_arrival, first_arrival + float(requests.finish_s.max()))
    series = path / "timeseries.csv"
    config, profile = path / "config.json", path / "profile"
    # The ticks count from the start of the client; 0 where that is not told.
    start = 0.0 if meta.started_at is None else meta.started_at - first_arrival
    return RecordedRun(
        path=path,
        settings=meta.settings,
        requests=requests,
        lines=np.array(lines)[order],
        load=_load(series, start, float(requests.finish_s.max())) if series.exists() else None,
        config=config if config.exists() else None,
        profile=profile if profile.exists() else None,
    )


def _rows(path: Path) -> tuple[list[int], list[_Row]]:
    """The requests with the numbers of their lines."""
    lines, rows = [], []
    for number, text in enumerate(read_text(path).split("\n"), 1):
        if text.strip():
            lines.append(number)
            rows.append(_row(f"{path}: line {number}", text))
    if not rows:
        raise SpecsimError(f"{path}: expected at least one request, got none")
    seen: dict[str, int] = {}
    for number, row in zip(lines, rows, strict=True):
        if row.request_id is not None and seen.setdefault(row.request_id, number) != number:
            raise SpecsimError(
                f"{path}: line {number}: request_id: {row.request_id!r} is also on line {seen[row.request_id]}"
            )
    return lines, rows


def _row(where: str, text: str) -> _Row:
    try:
        return _Row.model_validate_json(text)
    except ValidationError as error:
        try:
            data = parse_json(text)
        except ValueError as broken:
            raise SpecsimError(f"{where}: expected a JSON object: {broken}") from error
        raise SpecsimError(f"{where}: {first_error(error, data)}") from error


def _check_lengths(path: Path, lines: Sequence[int], rows: Sequence[_Row], most: int | None) -> None:
    """Refuse a request that is longer than its engine's max_model_len."""
    for line, row in zip(lines, rows, strict=True):
        if most is not None and row.input_toks + row.output_toks > most:
            raise SpecsimError(
                f"{path}: line {line}: input_toks, output_toks: expected at most {most} together, meta.json's "
                f"engine_kwargs.max_model_len, got {row.input_toks} + {row.output_toks}"
            )


def _timings(path: Path, lines: Sequence[int], rows: Sequence[_Row]) -> tuple[Timings, Ints, float]:
    """The requests on the engine's clock, from the first arrival on; the order of arrival; and the first arrival on
    the client's clock."""
    for line, row in zip(lines, rows, strict=True):
        for before, after in itertools.pairwise(TIMES):
            if getattr(row, after) < getattr(row, before):
                raise SpecsimError(
                    f"{path}: line {line}: {after}: expected {before}, {getattr(row, before)}, or later, "
                    f"got {getattr(row, after)}"
                )
        if row.last_token_ts == row.queued_ts:
            raise SpecsimError(f"{path}: line {line}: last_token_ts: expected later than queued_ts, got the same time")
    sent = np.array([row.arrival_time for row in rows])
    queued, scheduled, first, last = (np.array([getattr(row, name) for row in rows]) for name in TIMES)
    _check_clocks(path, lines, sent, queued, last)
    arrival = sent + (queued - sent).min()
    zero, order = float(arrival.min()), np.argsort(arrival, kind="stable")
    timings = Timings(
        arrival_s=arrival[order] - zero,
        queued_s=queued[order] - zero,
        scheduled_s=scheduled[order] - zero,
        first_token_s=first[order] - zero,
        finish_s=last[order] - zero,
        prompt_tokens=np.array([row.input_toks for row in rows])[order],
        output_tokens=np.array([row.output_toks for row in rows])[order],
    )
    return timings, order, float(sent.min())


# Clocks


def _check_clocks(path: Path, lines: Sequence[int], sent: Floats, queued: Floats, last: Floats) -> None:
    """Refuse arrivals and queue times [n] (s) that cannot have been told by two clocks that both count seconds."""
    for name, times in (("arrival_time", sent), ("last_token_ts", last)):
        largest = float(np.abs(times).max())
        if np.spacing(largest) > 1e-3:  # an epoch in µs or ns: such numbers would round to seconds and more
            raise SpecsimError(f"{path}: {name}: expected seconds that can tell milliseconds apart, got {largest:.4g}")
    spans = float(np.ptp(sent)), float(np.ptp(queued))
    if spans[0] == 0 and spans[1] > A_STEP:
        raise SpecsimError(
            f"{path}: arrival_time: expected each request's own, got {sent[0]:g} on all {len(sent)} lines, while their "
            f"queued_ts are {spans[1]:.4g} s apart"
        )
    for factor in UNITS:
        # One clock follows the other in all it does, but this many times as fast.
        if max(spans) > LONG and float(np.ptp(queued / factor - sent)) < 0.1 * spans[0]:
            raise SpecsimError(
                f"{path}: arrival_time, queued_ts: expected both in seconds, got clocks of which the second goes "
                f"{factor:g} times as fast"
            )
    apart = queued - sent
    wait = float(np.ptp(apart))
    # A request is seen after the step under way. One wrong time makes one of the spans wrong, and all others wait.
    if wait > min(float(last.max() - queued.min()), spans[0] + max(float(np.median(last - queued)), LONG)):
        odd = int(np.argmax(np.abs(apart - np.median(apart))))
        far = [abs(float(times[odd] - np.median(times))) for times in (sent, queued)]
        field, other = ("arrival_time", "queued_ts") if far[0] >= far[1] else ("queued_ts", "arrival_time")
        raise SpecsimError(
            f"{path}: line {lines[odd]}: {field}: expected seconds, as {other}: its clocks and those of the other "
            f"requests are {wait:.4g} s apart"
        )


def _check_moments(path: Path, meta: Meta, source: Path, first: float, last: float) -> None:
    """See that the first arrival and the last token (s, the client's clock) lie between the run's start and end."""
    if meta.started_at is not None and not -SLACK <= first - meta.started_at <= DAY:
        if not 0.9e9 < first < 1e10:  # no date of our days
            raise SpecsimError(
                f"{source}: arrival_time: expected seconds since 1970, from {_date(meta.started_at)} on, "
                f"{path.name}'s started_at, got {first!r}"
            )
        raise SpecsimError(
            f"{path}: started_at: expected less than a day before the first arrival_time of {source.name}, "
            f"{_date(first)}, got {_date(meta.started_at)}"
        )
    if meta.finished_at is not None and last > meta.finished_at + SLACK:
        raise SpecsimError(
            f"{path}: finished_at: expected a moment after the last token by {source.name}, {_date(last)}, got "
            f"{_date(meta.finished_at)}"
        )


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):  # beyond the calendar
        return f"{seconds:.0f} s after 1970"


def _load(path: Path, start: float, end: float) -> Load:
    """timeseries.csv, whose zero is ``start`` seconds after the first arrival; the last token comes at ``end``.

    ``kv_cache_pct`` that is zero throughout counts as not recorded.
    """
    rows = read_table(path, SERIES, MORE_SERIES)
    t = [finite(f"{path}: {where}: t", row["t"]) for where, row in rows]
    for (where, _), before, after in zip(rows[1:], t, t[1:], strict=False):
        if after <= before:
            raise SpecsimError(f"{path}: {where}: t: expected more than {before:g}, the row before, got {after:g}")
    if t[0] + start > end or t[-1] + start < 0:
        raise SpecsimError(
            f"{path}: t: expected seconds since meta.json's started_at that meet the run's, {-start:.4g} to "
            f"{end - start:.4g}, got {t[0]:g} to {t[-1]:g}"
        )
    running, waiting = ([whole(f"{path}: {where}: {name}", row[name], 0) for where, row in rows] for name in SERIES[1:])
    kv = [finite(f"{path}: {where}: kv_cache_pct", row.get("kv_cache_pct", "0")) for where, row in rows]
    for (where, _), share in zip(rows, kv, strict=True):
        if not 0 <= share <= 100:
            raise SpecsimError(f"{path}: {where}: kv_cache_pct: expected 0 to 100, got {share:g}")
    return Load(
        t=np.array(t) + start,
        running=np.array(running, dtype=np.float64),
        waiting=np.array(waiting, dtype=np.float64),
        kv_share=np.array(kv) / 100 if any(kv) else None,
    )
