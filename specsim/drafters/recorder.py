"""The recorder: at every position of the target's answers, what the drafter proposes and how much of it survives.

Drafting is coupled to the answer y: with q = p_d(y_k) and p = p_t(y_k) the drafted token is y_k with
probability min(1, q/p), else it comes from (p_d - p_t)+ and is the block's first rejection. This has
the law of rejection sampling, where p_d(v)/p_t(v) is the chance that an output v was the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from specsim.blocktrace import Trace, TraceMeta, make_trace
from specsim.drafters.batches import anchor_range, draft_ids, target_probabilities
from specsim.drafters.draft import Draft, Drafter, draft, pick
from specsim.drafters.responses import Recipe, Response, stream_seed
from specsim.drafters.target import Target
from specsim.types import SpecsimError

ConfidenceSource = Literal["head", "draft_prob", "position_mean", "none"]
CHUNK = 256
"""Anchors drafted in one forward."""


def record(
    drafter: Drafter,
    target: Target,
    recipe: Recipe,
    responses: Sequence[Response],
    meta: TraceMeta,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Record a dense block trace of ``drafter`` over ``responses``; ``meta`` says what it is.

    A row for every position whose block lies within what was recorded of the answer. Draws of a
    response come from a stream of its own (``meta.seed`` and its id), so they depend on no other.
    Raises SpecsimError if the responses lack a layer that the drafter reads, or none is long enough.
    """
    needed = (*drafter.target_layers, target.num_layers - 1)
    for layer in needed:
        if layer not in recipe.layers:
            raise SpecsimError(f"responses: layers: expected states after layer {layer}, got {list(recipe.layers)}")
    columns = [recipe.layers.index(i) for i in drafter.target_layers]
    final = recipe.layers.index(target.num_layers - 1)
    parts: list[dict[str, Any]] = []
    for done, response in enumerate(responses):
        first, end = anchor_range(response, drafter.gamma)
        if first < end:
            parts.append(_record_one(drafter, target, response, columns, final, recipe.temperature, meta))
        if progress:
            progress(done + 1, len(responses))
    if not parts:
        raise SpecsimError(f"responses: expected one of more than gamma = {drafter.gamma} tokens")
    columns_ = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return make_trace(meta, _confidence(columns_, meta))


def _record_one(
    drafter: Drafter,
    target: Target,
    response: Response,
    columns: list[int],
    final: int,
    temperature: float,
    meta: TraceMeta,
) -> dict[str, Any]:
    first, end = anchor_range(response, drafter.gamma)
    device = target.device
    tokens = response.tokens.to(device)
    size = len(tokens) - 1
    context = drafter.context(1, size)
    hidden = response.hidden[:size, columns].to(device, torch.float32)[None] if columns else None
    drafter.read(context, tokens[None], hidden, torch.arange(size, device=device)[None])
    spots = torch.arange(first, end + drafter.gamma - 1)
    said = Answer(drafter, target, response, spots, final, temperature)
    key = [ord(letter) for letter in response.id]
    generator = torch.Generator(device=device).manual_seed(stream_seed(meta.seed or 0, *key))
    drafts = []
    for start in range(first, end, CHUNK):
        positions = torch.arange(start, min(start + CHUNK, end), device=device)
        coupled = Coupled(said, positions - first, generator)
        greedy = 0.0 if meta.draft_sampling == "greedy" else temperature
        made = draft(drafter, context, tokens[positions][None], positions[None], greedy, coupled)
        drafts.append(_rows(made, coupled))
    n = end - first
    rows = {name: np.concatenate([d[name] for d in drafts]) for name in drafts[0]}
    return rows | {
        "request_id": np.full(n, response.id, dtype=object),
        "domain": np.full(n, response.domain, dtype=object),
        "position": np.arange(n, dtype=np.int64),
        "prompt_tokens": np.full(n, response.prompt_tokens, dtype=np.int64),
        "output_tokens": np.full(n, response.output_tokens, dtype=np.int64),
    }


class Answer:
    """What the target said after each of ``spots`` int[n] of a response, in the drafter's vocabulary.

    ``drafted`` int[n]: the token that followed (-1: the drafter cannot propose it); ``p`` [n, V']: the
    target's probabilities of what it can propose.
    """

    def __init__(
        self, drafter: Drafter, target: Target, response: Response, spots: Tensor, final: int, temperature: float
    ) -> None:
        ids = draft_ids(drafter.vocabulary, target.vocab_size)
        self.drafted = ids[response.tokens[spots + 1]].to(target.device)
        if temperature == 0:
            size = target.vocab_size if drafter.vocabulary is None else len(drafter.vocabulary)
            inside = (self.drafted >= 0).float()[:, None]
            self.p = torch.zeros(len(spots), size, device=target.device)
            self.p.scatter_(1, self.drafted.clamp(min=0)[:, None], inside)
        else:
            states, normalizer = response.hidden[spots, final], response.log_normalizer[spots]
            self.p = target_probabilities(target, states, normalizer, temperature, drafter.vocabulary)


class Coupled:
    """Chooses draft tokens coupled to an answer, for anchors at ``places`` int[A] among its spots."""

    def __init__(self, answer: Answer, places: Tensor, generator: torch.Generator) -> None:
        self.answer, self.places, self.generator = answer, places, generator
        self.alive = torch.ones_like(places, dtype=torch.bool)
        self.accepted = torch.zeros_like(places)
        self.rates: list[Tensor] = []

    def __call__(self, k: int, q: Tensor) -> Tensor:
        """The k-th draft tokens int[1, A] from the drafter's probabilities ``q`` [1, A, V']."""
        q = q[0]
        chosen = torch.empty_like(self.places)
        rate = q.new_full(q.shape[:1], torch.nan)
        free, alive = (~self.alive).nonzero()[:, 0], self.alive.nonzero()[:, 0]
        if len(free):
            chosen[free] = pick(q[free], self.generator)
        if len(alive):
            spot = self.places[alive] + k
            drafted, p, q = self.answer.drafted[spot], self.answer.p[spot], q[alive]
            rate[alive] = torch.minimum(p, q).sum(-1).clamp(max=1)
            index = drafted.clamp(min=0)[:, None]
            q_y, p_y = (x.gather(1, index)[:, 0] for x in (q, p))
            draws = torch.rand(len(alive), generator=self.generator, device=q.device)
            kept = draws * p_y < q_y * (drafted >= 0)
            # The first rejection comes from where the drafter exceeds the target; after it the draft is free.
            other = pick((q - p).clamp_(min=0), self.generator)
            chosen[alive] = torch.where(kept, drafted, other)
            self.alive[alive] = kept
            self.accepted[alive] += kept
        self.rates.append(rate)
        return chosen[None]


def _rows(made: Draft, coupled: Coupled) -> dict[str, Any]:
    rows = {
        "accepted": torch.minimum(coupled.accepted, made.proposed[0]).cpu().numpy(),
        "proposed": made.proposed[0].cpu().numpy(),
        "draft_prob": made.draft_prob[0].clamp(max=1).cpu().numpy(),
        "accept_rate": torch.stack(coupled.rates, -1).cpu().numpy(),
    }
    if made.confidence is not None:
        rows["confidence"] = made.confidence[0].cpu().numpy()
    return rows


def _confidence(columns: dict[str, Any], meta: TraceMeta) -> dict[str, Any]:
    """The confidence column that ``meta.confidence_source`` asks for."""
    if meta.confidence_source == "head":
        if "confidence" not in columns:
            raise SpecsimError(
                "confidence: this drafter has no confidence head: expected draft_prob, position_mean or none"
            )
        return columns
    confidence = None
    if meta.confidence_source == "draft_prob":
        confidence = columns["draft_prob"]
    elif meta.confidence_source == "position_mean":
        confidence = position_means(columns["accepted"], columns["proposed"], columns["domain"], meta.gamma)
    return columns | {"confidence": confidence}


def position_means(accepted: np.ndarray, proposed: np.ndarray, domain: np.ndarray, gamma: int) -> np.ndarray:
    """Float32 [n, γ]: of each row's domain, the share of reached and proposed positions that survived."""
    means = np.zeros((len(accepted), gamma), dtype=np.float32)
    for name in sorted(set(domain)):
        rows = domain == name
        for k in range(gamma):
            reached = rows & (accepted >= k) & (proposed > k)
            means[rows, k] = (accepted[reached] > k).mean() if reached.any() else 0.0
    return means
