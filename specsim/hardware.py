"""Hardware profiles: how long a step takes.

    step = verify(tokens, KV tokens) + draft(num_seqs, gamma) + host

A profile is one JSON file with units in its field names and its provenance beside the numbers
(`kind` is measured, imported, fitted or analytic). Token counts are whole numbers, so a verify
table is spread out once into one price per token count; a step, or a scheduler's array of candidate
token counts, is then a plain look-up.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from specsim.files import read_json, write_json
from specsim.types import SpecsimError

SCHEMA = "specsim.profile/1"
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]
Prices = NDArray[np.float64]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Staircase(_Part):
    """The rules by which a verify price depends on the tokens in the forward."""

    tokens: tuple[Count, ...] = Field(min_length=1)
    capture_limit: Count | None = None
    below: Literal["next_size", "linear", "floor"] = "next_size"
    above: Literal["linear"] = "linear"
    monotone: bool = False

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest token count that has a price."""
        return (1 if self.below == "next_size" else self.tokens[0]), self.tokens[-1]

    def spread(self, column: tuple[float, ...], size: int, extrapolate: bool) -> Prices:
        """Seconds [size + 1] for 0..size tokens from one column of seconds by ``tokens``.

        Outside the range infinite, or with ``extrapolate`` the last slope (below it, the first price).
        """
        at, price = np.array(self.tokens), np.array(column)
        if self.monotone:
            price = np.maximum.accumulate(price)
        count = np.arange(size + 1)
        graph = at <= (self.capture_limit or at[-1])
        out = np.empty(size + 1)
        if graph.any():
            if self.below == "linear":
                out = np.interp(count, at[graph], price[graph])
            elif self.below == "next_size":
                out = price[np.minimum(np.searchsorted(at, count), graph.sum() - 1)]
            else:
                out = price[np.clip(np.searchsorted(at, count, side="right") - 1, 0, graph.sum() - 1)]
        eager = ~graph
        if eager.any():
            beyond = count > at[graph].max(initial=0)
            out[beyond] = np.interp(count[beyond], at[eager], price[eager])
        first, last = self.range
        out[count > last] = np.inf
        out[count < first] = np.inf
        if extrapolate:
            out[count < first] = price[0]
            out[count > last] = price[-1] + _last_slope(at, price) * (count[count > last] - last)
        return np.asarray(out, dtype=np.float64)


class Table1D(_Staircase):
    """Verify seconds by tokens in the forward.

    Up to ``capture_limit`` (the largest CUDA graph; null: the whole table) the rule is ``below``:
    ``next_size`` pads to the next captured size, a staircase; ``linear`` interpolates; ``floor``
    takes the size below. Above it (the eager tail) prices are linear between the sizes above the
    limit alone, and a count between the limit and the first of them costs that first one, so the
    cliff stays a cliff. ``monotone`` takes the running maximum over sizes, as vLLM does at load.
    """

    type: Literal["table1d"] = "table1d"
    seconds: tuple[Seconds, ...]

    @model_validator(mode="after")
    def _check(self) -> Table1D:
        _increasing("tokens", self.tokens)
        _same_length("seconds", self.seconds, "tokens", self.tokens)
        return self

    def columns(self) -> list[tuple[int, tuple[float, ...]]]:
        """The one column: prices do not depend on KV tokens."""
        return [(0, self.seconds)]


class Table2D(_Staircase):
    """Verify seconds by tokens and by KV tokens read: ``seconds[i][j]`` at tokens i, KV tokens j.

    Each KV column follows the rules of Table1D; between columns the price is linear. A KV total
    below the first column costs the first; beyond the last it is outside the measured range.
    """

    type: Literal["table2d"] = "table2d"
    kv_tokens: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=2)
    seconds: tuple[tuple[Seconds, ...], ...]

    @model_validator(mode="after")
    def _check(self) -> Table2D:
        _increasing("tokens", self.tokens)
        _increasing("kv_tokens", self.kv_tokens)
        _same_length("seconds", self.seconds, "tokens", self.tokens)
        for i, row in enumerate(self.seconds):
            _same_length(f"seconds[{i}]", row, "kv_tokens", self.kv_tokens)
        return self

    def columns(self) -> list[tuple[int, tuple[float, ...]]]:
        """The columns as (KV tokens, seconds by tokens)."""
        return list(zip(self.kv_tokens, zip(*self.seconds, strict=True), strict=True))


class DraftCost(_Part):
    """What drafting costs a step, by decoding sequences; linear between the sizes measured.

    ``parallel``: seconds of the whole block, whatever its length. ``autoregressive``: seconds of one
    of the γ forwards.
    """

    type: Literal["parallel", "autoregressive"]
    num_seqs: tuple[Count, ...] = Field(min_length=1)
    seconds: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...]

    @model_validator(mode="after")
    def _check(self) -> DraftCost:
        _increasing("num_seqs", self.num_seqs)
        _same_length("seconds", self.seconds, "num_seqs", self.num_seqs)
        return self

    def spread(self, size: int, gamma: int, extrapolate: bool) -> Prices:
        """Seconds [size + 1] of drafting γ tokens for 0..size sequences; none for 0."""
        at, price = np.array(self.num_seqs), np.array(self.seconds)
        count = np.arange(size + 1)
        out = np.interp(count, at, price)
        beyond = count > at[-1]
        out[beyond] = price[-1] + _last_slope(at, price) * (count[beyond] - at[-1]) if extrapolate else np.inf
        out[0] = 0.0
        return np.asarray(out * (gamma if self.type == "autoregressive" else 1), dtype=np.float64)


class Provenance(_Part):
    """Where the numbers come from."""

    source: str = Field(min_length=1)
    command: str | None = None
    date: str | None = None
    versions: dict[str, str] = {}
    notes: str | None = None


class Profile(_Part):
    """A hardware profile (``hw_profiles/*.json``). Times are seconds of one engine step.

    ``kv_tokens`` is what the KV cache holds (null: not limited), ``gpus`` the GPUs of one replica,
    ``host_seconds`` is added to every step and ``sync_seconds`` to those of a synchronous scheduler.
    """

    schema_: Literal["specsim.profile/1"] = Field(alias="schema")
    name: str = Field(min_length=1)
    kind: Literal["measured", "imported", "fitted", "analytic"]
    model: str
    device: str
    gpus: Count
    tp: Count = 1
    engine: str | None = None
    kv_tokens: Count | None = None
    kv_bytes_per_token: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_num_tokens: Count | None = None
    verify: Annotated[Table1D | Table2D, Field(discriminator="type")]
    draft: DraftCost | None = None
    host_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    sync_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    provenance: Provenance

    @property
    def last_tokens(self) -> int:
        """The largest step that has a price: measured, and no more than the engine takes."""
        return min(self.verify.range[1], self.max_num_tokens or self.verify.range[1])

    def step_seconds(
        self,
        num_tokens: Any,
        num_seqs: int = 0,
        gamma: int = 0,
        kv_tokens: float = 0,
        *,
        extrapolate: bool = False,
    ) -> Prices:
        """Seconds of steps of ``num_tokens`` (int or int array) tokens, host time included.

        ``gamma`` > 0 adds drafting for ``num_seqs`` sequences at the profile's ``draft`` cost.
        Raises SpecsimError, naming the range, where a step lies outside what was measured.
        """
        tokens = np.asarray(num_tokens)
        cost = step_cost(self, int(tokens.max(initial=0)), num_seqs, gamma, extrapolate=extrapolate)
        seconds = cost.column(kv_tokens)[tokens] + cost.draft[num_seqs]
        outside = ~np.isfinite(seconds)
        if outside.any():
            raise cost.outside(int(tokens[outside][0]), num_seqs, kv_tokens)
        return np.asarray(seconds, dtype=np.float64)


@dataclass(frozen=True)
class StepCost:
    """A profile spread out for one run, host time included.

    ``prices`` [KV columns, max tokens + 2] by token count, the last entry standing for any larger
    count (infinite); ``kv_tokens`` [KV columns]; ``draft`` [max num_seqs + 1], measured up to
    ``draft_limit`` sequences (None: no drafter runs).
    """

    profile: Profile
    prices: Prices
    kv_tokens: Prices
    draft: Prices
    draft_limit: int | None
    extrapolate: bool

    def column(self, kv_tokens: float) -> Prices:
        """The prices [max tokens + 2] of a step that reads ``kv_tokens`` tokens of KV cache."""
        at = self.kv_tokens
        if len(at) == 1 or kv_tokens <= at[0]:
            return cast(Prices, self.prices[0])
        if kv_tokens > at[-1] and not self.extrapolate:
            return np.full_like(self.prices[0], np.inf)
        j = min(int(at.searchsorted(kv_tokens)), len(at) - 1)
        share = (kv_tokens - at[j - 1]) / (at[j] - at[j - 1])
        if share == 1.0:
            return cast(Prices, self.prices[j])
        with np.errstate(invalid="ignore"):  # inf - inf where both columns are outside the range
            mixed = (1 - share) * self.prices[j - 1] + share * self.prices[j]
        return np.where(np.isnan(mixed), np.inf, mixed)

    def is_outside(self, num_tokens: int, num_seqs: int, kv_tokens: float) -> bool:
        """Whether such a step lies outside what was measured."""
        return any(not low <= value <= high for _, value, low, high in self._axes(num_tokens, num_seqs, kv_tokens))

    def outside(self, num_tokens: int, num_seqs: int, kv_tokens: float) -> SpecsimError:
        """The error for a step outside what was measured: it names the range."""
        axes = self._axes(num_tokens, num_seqs, kv_tokens)
        name, value, low, high = next(axis for axis in axes if not axis[2] <= axis[1] <= axis[3])
        bound = {"tokens": "a lower max_num_batched_tokens", "drafting sequences": "a lower max_num_seqs"}
        keep = f"{bound[name]} keeps steps inside, " if name in bound and value > high else ""
        return SpecsimError(
            f"profile {self.profile.name}: a step of {value} {name} is outside the measured range {low}..{high}; "
            f"{keep}extrapolate=True (--extrapolate) continues the last slope and marks the result"
        )

    def _axes(self, num_tokens: int, num_seqs: int, kv_tokens: float) -> list[tuple[str, int, int, int]]:
        first, _ = self.profile.verify.range
        axes = [("tokens", num_tokens, first, self.profile.last_tokens)]
        if len(self.kv_tokens) > 1:
            axes.append(("KV tokens", math.ceil(kv_tokens), 0, int(self.kv_tokens[-1])))
        if self.draft_limit:
            axes.append(("drafting sequences", num_seqs, 0, self.draft_limit))
        return axes


def step_cost(
    profile: Profile,
    max_tokens: int,
    max_seqs: int,
    gamma: int,
    draft: DraftCost | None = None,
    *,
    extrapolate: bool = False,
) -> StepCost:
    """Spread ``profile`` out for steps of up to ``max_tokens`` tokens and ``max_seqs`` sequences.

    ``gamma`` = 0 means that no drafter runs; ``draft=None`` takes the profile's own draft cost.
    Raises SpecsimError where a drafter runs and neither it nor the profile has a draft cost.
    """
    draft = draft or profile.draft
    if gamma and draft is None:
        raise SpecsimError(
            f"profile {profile.name}: draft: expected a draft cost, since a drafter of γ={gamma} runs on it"
        )
    columns = profile.verify.columns()
    prices = np.full((len(columns), max_tokens + 2), np.inf)
    for row, (_, seconds) in zip(prices, columns, strict=True):
        row[:-1] = profile.verify.spread(seconds, max_tokens, extrapolate) + profile.host_seconds
        if not extrapolate:
            row[profile.last_tokens + 1 :] = np.inf
    return StepCost(
        profile=profile,
        prices=prices,
        kv_tokens=np.array([kv for kv, _ in columns], dtype=np.float64),
        draft=draft.spread(max_seqs, gamma, extrapolate) if gamma and draft else np.zeros(max_seqs + 1),
        draft_limit=draft.num_seqs[-1] if gamma and draft else None,
        extrapolate=extrapolate,
    )


def load_profile(path: str | Path) -> Profile:
    """Read a hardware profile; SpecsimError names the file, the field and what was expected."""
    return read_json(path, Profile)


def save_profile(profile: Profile, path: str | Path) -> Path:
    """Write a hardware profile as JSON, whole or not at all."""
    return write_json(path, profile)


def sps(profile: Profile, num_tokens: Any, *, extrapolate: bool = False) -> Prices:
    """Engine steps per second at ``num_tokens`` tokens in the forward, drafting left out: SPS(B)."""
    return 1.0 / profile.step_seconds(num_tokens, extrapolate=extrapolate)


def _last_slope(at: NDArray[np.int64], price: Prices) -> float:
    """Seconds per unit between the last two points; 0 for a single one, or where the curve ends falling."""
    return max(0.0, float((price[-1] - price[-2]) / (at[-1] - at[-2]))) if len(at) > 1 else 0.0


def _increasing(name: str, values: tuple[int, ...]) -> None:
    for i, (a, b) in enumerate(itertools.pairwise(values)):
        if b <= a:
            raise ValueError(f"{name}[{i + 1}]: expected more than {a}, got {b}: sizes must increase")


def _same_length(name: str, values: tuple[Any, ...], other: str, others: tuple[Any, ...]) -> None:
    if len(values) != len(others):
        raise ValueError(f"{name}: expected {len(others)} entries, one for each of {other}, got {len(values)}")
