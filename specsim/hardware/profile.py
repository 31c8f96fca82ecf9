"""Hardware profiles: how long a step takes.

    step = verify(shape) + draft(num_seqs, gamma) + host

A profile is one JSON file with units in its field names and its provenance beside the numbers
(`kind` is measured, imported, fitted or analytic).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from specsim.files import read_json, write_json
from specsim.hardware.layered import Layered
from specsim.hardware.roofline import Roofline
from specsim.hardware.shape import Axis, Part, Prices, Shape, Surface
from specsim.hardware.tables import Additive, Count, DraftCost, Table1D, Table2D
from specsim.types import BeyondProfile, SpecsimError

SCHEMA = "specsim.profile/1"

Verify = Table1D | Table2D | Additive | Layered | Roofline


class Provenance(Part):
    """Where the numbers come from."""

    source: str = Field(min_length=1)
    command: str | None = None
    date: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    notes: str | None = None


class Profile(Part):
    """A hardware profile (``hw_profiles/*.json``). Times are seconds of one engine step.

    ``kv_tokens`` is what the KV cache holds (null: not limited), ``gpus`` the GPUs of one replica
    (a multiple of ``tp``),
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
    verify: Annotated[Verify, Field(discriminator="type")]
    draft: DraftCost | None = None
    host_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    sync_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    provenance: Provenance

    @model_validator(mode="after")
    def _is_whole_groups(self) -> Profile:
        if self.gpus % self.tp:
            raise ValueError(f"gpus: expected a multiple of tp = {self.tp}, got {self.gpus}")
        return self

    @property
    def caveat(self) -> str | None:
        """What must stand beside any result of an analytic profile; None for the other kinds."""
        return analytic_caveat(self.name) if self.kind == "analytic" else None

    @property
    def last_tokens(self) -> int:
        """The largest step that has a price: measured, and no more than the engine takes."""
        return min(self.verify.range[1], self.max_num_tokens or self.verify.range[1])

    def step_seconds(
        self,
        num_tokens: Any,
        num_seqs: int | None = None,
        gamma: int = 0,
        kv_tokens: float = 0,
        *,
        extrapolate: bool = False,
    ) -> Prices:
        """Seconds of decode steps of ``num_tokens`` (int or int array) tokens, host time included.

        ``num_seqs`` sequences hold ``kv_tokens`` tokens of KV in all, the tokens beyond one each are drafts;
        None: every token is a sequence of its own. ``gamma`` > 0 adds drafting for them at the profile's
        ``draft`` cost. Raises SpecsimError, naming the range, where a step lies outside what was measured.
        """
        tokens = np.asarray(num_tokens)
        most = int(tokens.max(initial=0))
        cost = step_cost(self, most, most if num_seqs is None else num_seqs, gamma, extrapolate=extrapolate)
        seconds = np.empty(tokens.shape)
        for i, count in enumerate(tokens.flat):
            shape = Shape(int(count) if num_seqs is None else min(num_seqs, int(count)), kv_tokens)
            seconds.flat[i] = cost.seconds(shape, int(count) - shape.num_seqs)
        return seconds


@dataclass(frozen=True)
class StepCost:
    """A profile spread out for one run, host time included.

    ``draft`` [max num_seqs + 1] is measured up to ``draft_limit`` sequences (None: no drafter runs);
    ``last_tokens``: the largest step that the engine takes, where that is less than what was measured.
    ``hides_host``: the ``host`` works while the GPU does, and only what it takes longer is added.
    """

    profile: Profile
    surface: Surface
    draft: Prices
    draft_limit: int | None
    extrapolate: bool
    host: float
    last_tokens: int | None
    hides_host: bool = False

    def curve(self, shape: Shape, most: int) -> Prices:
        """Seconds [most + 1] of a step with 0, 1, .. ``most`` draft tokens, drafting left out; infinite outside."""
        seconds = self.surface.curve(shape, most)
        if self.host:
            seconds = np.maximum(seconds, self.host) if self.hides_host else seconds + self.host
        if self.last_tokens is not None:
            seconds = np.array(seconds)
            seconds[max(0, self.last_tokens + 1 - shape.num_tokens) :] = np.inf
        return seconds

    def seconds(self, shape: Shape, draft_tokens: int = 0) -> float:
        """Seconds of one step, drafting included; SpecsimError, naming the range, outside what was measured."""
        seconds = float(self.curve(shape, draft_tokens)[draft_tokens]) + float(self.draft[shape.num_seqs])
        if seconds == np.inf:
            raise self.outside(shape, draft_tokens)
        return seconds

    def is_outside(self, shape: Shape, draft_tokens: int) -> bool:
        """Whether such a step lies outside what was measured."""
        return any(not low <= value <= high for _, value, low, high in self._axes(shape, draft_tokens))

    def outside(self, shape: Shape, draft_tokens: int) -> SpecsimError:
        """The error for a step outside what was measured: it names the range."""
        axes = self._axes(shape, draft_tokens)
        name, value, low, high = next((axis for axis in axes if not axis[2] <= axis[1] <= axis[3]), axes[0])
        keep = ""
        if value > high and name == "tokens":
            keep = "a lower max_num_batched_tokens keeps steps inside, "
        elif value > high and "sequences" in name:
            keep = "a lower max_num_seqs keeps steps inside, "
        kind = BeyondProfile if value > high else SpecsimError
        return kind(
            f"profile {self.profile.name}: a step of {value} {name} is outside the measured range {low}..{high}; "
            f"{keep}extrapolate=True (--extrapolate) continues the last slope and marks the result"
        )

    def _axes(self, shape: Shape, draft_tokens: int) -> list[Axis]:
        tokens = shape.num_tokens + draft_tokens
        axes = self.surface.axes(shape, tokens)
        if self.profile.max_num_tokens:
            axes.insert(0, ("tokens", tokens, self.profile.verify.range[0], self.profile.last_tokens))
        if self.draft_limit:
            axes.append(("drafting sequences", shape.num_seqs, 0, self.draft_limit))
        return axes


def step_cost(
    profile: Profile,
    max_tokens: int,
    max_seqs: int,
    gamma: int,
    draft: DraftCost | None = None,
    *,
    extrapolate: bool = False,
    hides_host: bool = False,
) -> StepCost:
    """Spread ``profile`` out for steps of up to ``max_tokens`` tokens and ``max_seqs`` sequences.

    ``gamma`` = 0 means that no drafter runs; ``draft=None`` takes the profile's own draft cost. With
    ``hides_host`` the engine's host works while the forward runs (asynchronous scheduling).
    Raises SpecsimError where a drafter runs and neither it nor the profile has a draft cost.
    """
    draft = draft or profile.draft
    if gamma and draft is None:
        raise SpecsimError(
            f"profile {profile.name}: draft: expected a draft cost, since a drafter of γ={gamma} runs on it; "
            "specsim profile roofline --draft-layers and specsim profile import --draft make one, or write the section "
            "draft into the profile's JSON"
        )
    return StepCost(
        profile=profile,
        surface=profile.verify.surface(max_tokens, max_seqs, extrapolate),
        draft=draft.spread(max_seqs, gamma, extrapolate) if gamma and draft else np.zeros(max_seqs + 1),
        draft_limit=draft.num_seqs[-1] if gamma and draft else None,
        extrapolate=extrapolate,
        host=profile.host_seconds,
        last_tokens=None if extrapolate or profile.last_tokens >= profile.verify.range[1] else profile.last_tokens,
        hides_host=hides_host,
    )


def load_profile(path: str | Path) -> Profile:
    """Read a hardware profile; SpecsimError names the file, the field and what was expected."""
    return read_json(path, Profile)


def save_profile(profile: Profile, path: str | Path) -> Path:
    """Write a hardware profile as JSON, whole or not at all."""
    return write_json(path, profile)


def analytic_caveat(name: str) -> str:
    """The caption of results that rest on the analytic profile ``name``."""
    return f"profile {name} is analytic: no measurement behind these step times"


def sps(profile: Profile, num_tokens: Any, *, extrapolate: bool = False) -> Prices:
    """Engine steps per second at ``num_tokens`` tokens in the forward, drafting left out: SPS(B)."""
    return 1.0 / profile.step_seconds(num_tokens, extrapolate=extrapolate)
