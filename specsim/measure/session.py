"""One measurement: a model and a drafter set up on a device, every point made ready, all of them timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from specsim.hardware import ModelShape
from specsim.measure import machine
from specsim.measure.attention import Lengths, cache_tokens, make_cache
from specsim.measure.drafting import FOLDED, DraftBatch, draft_block, draft_chain, make_draft_weights
from specsim.measure.grid import Grid, Point, check_contexts, context_lengths, longest, query_lengths
from specsim.measure.model import Batch, Decoder, Fused, Weights, add_norm, make_fused, make_weights
from specsim.measure.timing import Measured, Runner, take
from specsim.types import SpecsimError

Some = TypeVar("Some", Batch, DraftBatch)

KV_SHARE, KV_MOST = 0.5, {"cpu": 1 << 30, "cuda": 24 << 30}
"""Of the memory left, and in all, what the cache may take; more would only be read once too."""
SAMPLE_SECONDS = {"cpu": 0.004, "cuda": 0.02}


@dataclass(frozen=True)
class Settings:
    """How to measure. ``drafter``: parallel, autoregressive or none, of ``draft_layers`` layers and ``rank``.

    ``minutes`` bounds the whole run (at least three rounds are taken), ``input_sets`` are used in turn.
    """

    drafter: str = "parallel"
    draft_layers: int = 5
    rank: int = 256
    rounds: int = 20
    minutes: float = 7.0
    input_sets: int = 3
    seed: int = 0
    compile: bool | None = None
    attention: str | None = None


class Session(NamedTuple):
    """What came out: the samples of every point, how they were taken, and the machine before and after."""

    measured: list[Measured]
    method: dict[str, str]
    before: dict[str, Any]
    after: dict[str, Any]
    seconds: float


def measure(
    shape: ModelShape,
    grid: Grid,
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Session:
    """Time every point of ``grid`` for ``shape``.

    Raises SpecsimError for contexts beyond the model's, and where memory does not suffice.
    """
    begun = time.monotonic()
    points = [p for p in grid.points() if settings.drafter != "none" or p.kind not in ("draft", "sync")]
    if device.type == "cpu":
        points = [p for p in points if p.kind != "sync"]  # there is no other side to bring anything to
    check_contexts(points, grid.gamma, shape.max_position, shape.name)
    with _no_memory_is_said(shape, device), torch.inference_mode():
        before = machine.condition(device)
        bench = _Bench.set_up(shape, grid, settings, device, dtype, points)
        # Large graphs first: the memory pool that graphs share then fits the small ones too.
        order = sorted(points, key=lambda p: (-p.tokens, -p.num_seqs, p.context, p.kind))
        runners = [bench.runner(point) for point in order]
        measured = take(
            runners,
            device,
            rounds=settings.rounds,
            until=begun + 60 * settings.minutes,
            sets=settings.input_sets,
            sample_seconds=SAMPLE_SECONDS[device.type],
            rng=np.random.default_rng(np.random.SeedSequence(settings.seed, spawn_key=(0,))),
            report=report,
        )
        after = machine.condition(device)
    method = {
        "attention": bench.decoder.cache.method,
        "between": "element-wise parts compiled" if bench.decoder.fused.compiled else "element-wise parts as they are",
        "graphs": f"CUDA graphs of {len(grid.capture)} sizes up to {grid.capture[-1]}" if grid.capture else "no graphs",
    }
    ordered = sorted(measured, key=lambda m: (m.point.kind != "verify", m.point))
    return Session(ordered, method, before, after, time.monotonic() - begun)


@dataclass(frozen=True)
class _Bench:
    """Everything that the points share."""

    grid: Grid
    settings: Settings
    decoder: Decoder
    target: Weights
    drafter: Any
    states: Tensor
    graph_pool: Any

    @classmethod
    def set_up(
        cls, shape: ModelShape, grid: Grid, s: Settings, device: torch.device, dtype: torch.dtype, points: list[Point]
    ) -> _Bench:
        like = torch.empty(0, device=device, dtype=dtype)
        drafts = s.drafter != "none"
        wide = FOLDED * (grid.gamma + 1) if s.drafter == "parallel" else 1
        states = grid.max_seqs * wide * shape.hidden if drafts else 0
        extra = (shape.cut(s.draft_layers).layer_parameters + 2 * shape.vocab * s.rank if drafts else 0) + states
        weights = (shape.parameters + extra) * like.element_size()
        kv = _cache_size(shape, points, grid.gamma, like, weights, device)
        generator = torch.Generator(device).manual_seed(
            int(np.random.SeedSequence(s.seed, spawn_key=(1,)).generate_state(1)[0])
        )
        cache = make_cache(shape, kv, like, generator, s.attention)
        decoder = Decoder(shape, cache, _fused(s.compile, like, shape))
        most = max(longest(point, grid.gamma) for point in points)
        target = make_weights(shape, like, most, generator)
        drafter = make_draft_weights(decoder, s.drafter, s.draft_layers, s.rank, like, generator) if drafts else None
        random = torch.empty(states, device=device, dtype=dtype).normal_(generator=generator)
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" and grid.capture else None
        return cls(grid, s, decoder, target, drafter, random, pool)

    def runner(self, point: Point) -> Runner:
        """The point with its input sets on the device, its graph captured if it has one."""
        if point.kind == "draft":
            blocks = [self._draft_batch(point, rng) for rng in self._streams(point)]
            draft = draft_block if self.settings.drafter == "parallel" else draft_chain
            return self._ready(
                point, blocks, lambda b: draft(self.decoder, self.target, self.drafter, b, self.grid.gamma),
                self.graph_pool is not None,
            )  # fmt: skip
        if point.kind == "sync":
            sure = torch.rand(self.grid.gamma, point.num_seqs, device=self.target.embed.device)
            return Runner(point, lambda _: None, lambda: sure.to("cpu"), on_host=True)
        captured = self.graph_pool is not None and point.tokens <= self.grid.capture[-1]
        padded = self.grid.padded(point.tokens) if captured else point.tokens
        batches = [self._batch(point, padded, rng) for rng in self._streams(point)]
        # What a verification does with logits: the target's choice at every position.
        return self._ready(point, batches, lambda b: self.decoder.logits(self.target, b).argmax(-1), captured)

    def _streams(self, point: Point) -> Iterator[np.random.Generator]:
        for i in range(self.settings.input_sets):
            key = (2, i, point.tokens, point.num_seqs, point.context)
            yield np.random.default_rng(np.random.SeedSequence(self.settings.seed, spawn_key=key))

    def _batch(self, point: Point, padded: int, rng: np.random.Generator) -> Batch:
        chunk = point.kind == "chunk"
        queries = [point.tokens] if chunk else query_lengths(point.tokens, point.num_seqs, self.grid.gamma, rng)
        contexts = [0] if chunk else context_lengths(point.num_seqs, point.context, rng)
        most = point.tokens if chunk else min(1 + self.grid.gamma, point.tokens - point.num_seqs + 1)
        positions = np.zeros(padded, dtype=np.int64)
        positions[: point.tokens] = np.concatenate([c + np.arange(q) for c, q in zip(contexts, queries, strict=True)])
        # A prefill needs the logits of its last token alone.
        rows = np.array([point.tokens - 1]) if chunk else np.arange(point.tokens)
        lengths = Lengths(queries, contexts, longest(point, self.grid.gamma), most)
        shape = self.decoder.shape
        return Batch(
            tokens=self._put(rng.integers(0, shape.vocab, padded)),
            positions=self._put(positions),
            rows=self._put(rows),
            plan=self.decoder.cache.plan(shape.layers, lengths, padded),
        )

    def _draft_batch(self, point: Point, rng: np.random.Generator) -> DraftBatch:
        gamma, count, shape = self.grid.gamma, point.num_seqs, self.decoder.shape
        contexts = np.array(context_lengths(count, point.context, rng))
        parallel = self.settings.drafter == "parallel"
        steps = gamma if parallel else 1
        lengths = Lengths([steps] * count, contexts.tolist(), longest(point, gamma), steps, causal=not parallel)
        wide, states = (FOLDED, count * (gamma + 1)) if parallel else (1, count)
        return DraftBatch(
            anchors=self._put(rng.integers(0, shape.vocab, count)),
            states=self.states[: states * wide * shape.hidden].view(states, -1),
            positions=self._put((contexts[:, None] + np.arange(steps)).ravel()),
            slots=self._put((contexts[:, None] + np.arange(gamma + 1)).ravel()),
            plan=self.decoder.cache.plan(self.settings.draft_layers, lengths, count * steps),
        )

    def _put(self, values: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.target.embed.device)

    def _ready(self, point: Point, batches: Sequence[Some], step: Callable[[Some], object], captured: bool) -> Runner:
        if not captured:
            chosen = [batches[0]]

            def choose(i: int) -> None:
                chosen[0] = batches[i]

            return Runner(point, choose, lambda: step(chosen[0]))
        held = _copy(batches[0])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is done the first time must not be captured
            step(held)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graph_pool):
            step(held)
        return Runner(point, lambda i: _load(held, batches[i]), graph.replay)


def _copy(batch: Any) -> Any:
    """The batch with tensors of its own: the places that a graph reads."""
    return type(batch)(*(
        part.clone() if isinstance(part, Tensor) else _copy(part) if hasattr(part, "_fields") else part
        for part in batch
    ))  # fmt: skip


def _load(held: Any, batch: Any) -> None:
    for to, part in zip(held, batch, strict=True):
        if isinstance(part, Tensor):
            to.copy_(part)
        elif hasattr(part, "_fields"):
            _load(to, part)


def _cache_size(
    shape: ModelShape, points: list[Point], gamma: int, like: Tensor, weights: int, device: torch.device
) -> int:
    """Tokens of one layer that the cache holds: what the largest batch takes in all layers, as far as there is room."""
    each: int = 2 * shape.kv_heads * shape.head_dim * like.element_size()
    asked = [p for p in points if p.kind != "sync"]
    want = max(cache_tokens(shape.layers, p.num_seqs, longest(p, gamma)) for p in asked)
    largest = max(asked, key=lambda p: cache_tokens(1, p.num_seqs, longest(p, gamma)))
    need = cache_tokens(1, largest.num_seqs, longest(largest, gamma))
    free = machine.free_bytes(device)
    if free is None:
        return max(need, min(want, KV_MOST[device.type] // each))
    left = free - weights
    if left <= 0:
        raise SpecsimError(
            f"model {shape.name}: its weights and the drafter's take {weights / 1e9:,.1f} GB, "
            f"{device.type} has {free / 1e9:,.1f} GB free: expected a smaller model, a shorter --dtype or more memory"
        )
    room = int(KV_SHARE * left)
    if need * each > room:
        raise SpecsimError(
            f"model {shape.name}: {largest.num_seqs} sequences with contexts around {largest.context} take "
            f"{need * each / 1e9:,.1f} GB of KV cache a layer, {device.type} has {room / 1e9:,.1f} GB for it: "
            "expected a lower --max-seqs or shorter --contexts"
        )
    return max(need, min(want, min(room, KV_MOST[device.type]) // each))


def _fused(compiled: bool | None, like: Tensor, shape: ModelShape) -> Fused:
    """The element-wise parts; unless told otherwise compiled on CUDA, where launches would cost more than they do."""
    if compiled is False or (compiled is None and like.device.type != "cuda"):
        return make_fused(False)
    fused = make_fused(True)
    x, weight = like.new_ones(3, shape.hidden), like.new_ones(shape.hidden)
    try:
        agree = torch.allclose(fused.add_norm(x, x, weight)[0], add_norm(x, x, weight)[0], atol=0.02)
    except Exception as error:  # whatever a compiler may raise
        if compiled:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise SpecsimError(f"--compile: torch.compile fails here: {first}; expected --no-compile") from error
        return make_fused(False)
    if not agree:
        raise SpecsimError("--compile: compiled parts give other numbers here; expected --no-compile")
    return fused


@contextmanager
def _no_memory_is_said(shape: ModelShape, device: torch.device) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        out = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not out:
            raise
        raise SpecsimError(
            f"model {shape.name}: out of memory on {device.type}: expected a smaller model, fewer --tokens, "
            "a lower --max-seqs or shorter --contexts"
        ) from error
