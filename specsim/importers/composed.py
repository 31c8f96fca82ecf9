"""A compiled engine of AIConfigurator, operation by operation, as a profile: how a verification step is composed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specsim.hardware import SCHEMA, Attention, Curve, DraftCost, Layered, Profile, Provenance, Shape, step_cost
from specsim.importers.tabulate import round_to, steps, thin, thin_rows
from specsim.types import SpecsimError

PACKAGE = "aiconfigurator-core"
KV_NOTE = "KV format by AIConfigurator's choice for such weights (bytes per number: {})."
"""Said where weights are not of 16 bits, or KV is not."""
CURVE_TOLERANCE = 0.003
GRID_TOLERANCE = 0.015
FIRST_CONTEXT = 16
"""Shorter contexts cost what this one does."""
AROUND_POWERS = [2**k + step for k in range(20) for step in (-1, 0, 1)]
"""The data's own sizes, and those beside them, where its prices may jump."""
MAX_SEQS = 1024
"""Decoding sequences up to which drafting is priced: the engines' usual bound."""
ALIKE = 0.02
"""How far apart the same work may be priced in a prefill and in a decode."""
DRAFT_CONTEXT = EXAMPLE_CONTEXT = 1024
EXAMPLE_SEQS, EXAMPLE_TOKENS = 64, 8


@dataclass(frozen=True)
class Deployment:
    """What is deployed where, and what of it is not a time.

    ``context`` is the longest sequence, ``kv_tokens`` and ``kv_bytes_per_token`` are those of all ``tp`` GPUs
    together, ``kv_number_bytes`` those of each number in it (None: not told), ``memory`` says how ``kv_tokens`` came
    about, ``database`` the version of the engine measured.
    """

    model: str
    system: str
    backend: str
    tp: int
    layers: int
    context: int
    dtype: str
    kv_tokens: int
    kv_bytes_per_token: float
    memory: str
    database: str
    package: str
    kv_number_bytes: float | None = None


def compose(
    handle: Any,
    deployment: Deployment,
    *,
    name: str | None = None,
    kv_reads: Literal["once", "per_query"] = "once",
    max_num_tokens: int = 8192,
    max_context: int | None = None,
    draft_layers: int | None = None,
    draft_gamma: int | None = None,
    command: str | None = None,
) -> Profile:
    """Tabulate a compiled engine (``EngineHandle``) into a profile; the arguments are those of load_silicon.

    ``handle`` offers ``evaluate_generation_ops(indices, batch_size=, s=)`` and ``evaluate_context_ops(indices,
    batch_size=, s=, prefix=)``, both returning one (name, ms, energy, source) for each index. Raises SpecsimError
    for a model whose steps do not come apart into token-wise work and attention.
    """
    for told, value, most, what in (
        ("--max-context", max_context, deployment.context, "tokens of the model's longest sequence"),
        ("--draft-layers", draft_layers, deployment.layers, "layers of the model"),
    ):
        if value is not None and value > most:
            raise SpecsimError(f"{told}: expected at most the {most} {what}, got {value}")
    ops = Operations(handle)
    ops.check_prefill(max_num_tokens)
    context = max_context or deployment.context
    tokens, rows = _curve(ops.tokenwise, max_num_tokens), _curve(ops.rows, max_num_tokens)
    decode, decode_error = _decodes(ops, max_num_tokens, context)
    prefill, prefill_error = _prefills(ops, max_num_tokens, context)
    columns = list(zip(*(decode + prefill), strict=True))
    draft = None
    if draft_layers is not None and draft_gamma is not None:
        draft = _draft(ops, draft_layers / deployment.layers, draft_gamma)
    verify = Layered(
        tokens=tokens,
        rows=rows,
        attention=Attention(
            prefill_chunk=columns[0], kv_prefill=columns[1], n_decode=columns[2], kv_decode=columns[3],
            seconds=columns[4],
        ),
        kv_reads=kv_reads,
    )  # fmt: skip
    profile = Profile(
        schema=SCHEMA,
        name=name or _name(deployment),
        kind="imported",
        model=deployment.model,
        device=deployment.system.replace("_", " ").upper(),
        gpus=deployment.tp,
        tp=deployment.tp,
        engine=f"{deployment.backend} {deployment.database}",
        kv_tokens=deployment.kv_tokens,
        kv_bytes_per_token=deployment.kv_bytes_per_token,
        max_num_tokens=max_num_tokens,
        verify=verify,
        draft=draft,
        provenance=Provenance(source="AIConfigurator's silicon data, composed from single operations", command=command),
    )
    notes = [
        _verification_note(ops, profile, kv_reads, context),
        f"Sources: {ops.sources(max_num_tokens, context)}. Interpolated to within {CURVE_TOLERANCE:.1%} of the data "
        f"(tokens, rows), {decode_error:.1%} (decode attention) and {prefill_error:.1%} (prefill attention) of a step.",
        deployment.memory,
        f"Weights as the model's config says ({deployment.dtype}). Kernel times alone: no host time, no padding to "
        "CUDA-graph sizes, no sampler, and prefill attention adds to decode attention; measured steps have been "
        "longer at large batches with long contexts (ai-dynamo/aiconfigurator issue 1148).",
    ]
    width = deployment.kv_number_bytes
    if width is not None and (width != 2 or deployment.dtype not in ("bfloat16", "float16")):
        notes.append(KV_NOTE.format(f"{width:g}"))
    if draft is not None:
        notes.append(
            f"The draft cost is composed, not measured: {draft_layers} layers of the model in one parallel pass over "
            f"{draft_gamma} tokens a sequence, their attention at a context of {DRAFT_CONTEXT} with KV read once, and "
            "the output head for every draft token; a sequential head over the block (DSpark) is not in it."
        )
    versions = {PACKAGE: deployment.package, deployment.backend: deployment.database}
    provenance = profile.provenance.model_copy(update={"notes": " ".join(notes), "versions": versions})
    return profile.model_copy(update={"provenance": provenance})


def _verification_note(ops: Operations, profile: Profile, kv_reads: str, context: int) -> str:
    """How verification is composed, and what the bounds are at an example that the profile has a price for."""
    seqs, context = min(EXAMPLE_SEQS, profile.last_tokens // EXAMPLE_TOKENS), min(EXAMPLE_CONTEXT, context)
    low, high = verification_bounds(profile, seqs, EXAMPLE_TOKENS, context)
    once, per_query = ops.decode(seqs, context), ops.decode(seqs * EXAMPLE_TOKENS, context)
    return (
        "Verification: operations that work token by token at the step's tokens, the output head at its rows of "
        f"logits, attention at its sequences. {seqs} sequences of {EXAMPLE_TOKENS} tokens at a context of {context} "
        f"take {low * 1e3:.4g} ms if the KV of a sequence is read once (kv_reads once, the lower bound) and "
        f"{high * 1e3:.4g} ms if each query reads it (per_query, the upper bound); {kv_reads} is priced "
        f"here, and that one word gives the other. For these queries the prefill kernels' attention is "
        f"{ops.prefill(EXAMPLE_TOKENS, context, seqs) * 1e3:.4g} ms, the decode kernels' {once * 1e3:.4g} ms with KV "
        f"read once and {per_query * 1e3:.4g} ms per query."
    )


def verification_bounds(
    profile: Profile, num_seqs: int = EXAMPLE_SEQS, tokens: int = EXAMPLE_TOKENS, context: int = EXAMPLE_CONTEXT
) -> tuple[float, float]:
    """Seconds of verifying ``tokens`` tokens of each of ``num_seqs`` sequences: KV read once, and for every query.

    Each sequence has ``context`` tokens of KV; drafting is left out. Raises SpecsimError for a profile whose
    verify cost is not layered, or a step outside it.
    """
    if not isinstance(profile.verify, Layered):
        raise SpecsimError(f"profile {profile.name}: verify.type: expected layered, got {profile.verify.type}")
    shape, drafts = Shape(num_seqs, num_seqs * context), num_seqs * (tokens - 1)
    seconds = []
    for reads in ("once", "per_query"):
        variant = profile.model_copy(update={"verify": profile.verify.model_copy(update={"kv_reads": reads})})
        seconds.append(step_cost(variant, num_seqs * tokens, num_seqs, 0).seconds(shape, drafts))
    return seconds[0], seconds[1]


class Operations:
    """A compiled engine's operations, told apart by what their price depends on; seconds of the whole model."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        names = _names(lambda i: handle.evaluate_generation_ops([i], batch_size=2, s=2))
        contexts = _names(lambda i: handle.evaluate_context_ops([i], batch_size=1, s=64, prefix=0))
        self.attention = [i for i in range(len(names)) if self._moves(handle.evaluate_generation_ops, i, "s", 2)]
        self.prefill_attention = [
            i for i in range(len(contexts)) if self._moves(handle.evaluate_context_ops, i, "prefix", 1)
        ]
        if not self.attention or not self.prefill_attention:
            raise SpecsimError("AIConfigurator's model has no attention whose cost grows with the context")
        self.logits = [i for i, name in enumerate(names) if "logits" in name]
        self.token_ops = [i for i in range(len(names)) if i not in self.attention and i not in self.logits]
        self.once = [i for i in self.token_ops if "embedding" in names[i] or "p2p" in names[i]]  # not of a layer
        self.layered = [i for i in self.token_ops if i not in self.once]
        heads = [i for i, name in enumerate(contexts) if "logits" in name]
        self.prefill_ops = [i for i in range(len(contexts)) if i not in self.prefill_attention and i not in heads]

    def tokenwise(self, tokens: int) -> float:
        """All that works token by token, at ``tokens`` tokens in the forward."""
        return self._generation(self.token_ops, tokens)

    def layers(self, tokens: int) -> float:
        """What of it belongs to the layers."""
        return self._generation(self.layered, tokens)

    def rest(self, tokens: int) -> float:
        """What of it does not: the embedding."""
        return self._generation(self.once, tokens)

    def rows(self, rows: int) -> float:
        """The output head at ``rows`` rows of logits."""
        return self._generation(self.logits, rows)

    def decode(self, num_seqs: int, context: int) -> float:
        """Attention of one query for each of ``num_seqs`` sequences with ``context`` tokens of KV before it."""
        return self._generation(self.attention, num_seqs, context + 1)

    def prefill(self, chunk: int, history: int, num_seqs: int = 1) -> float:
        """Attention of ``chunk`` tokens after ``history`` in the cache, of each of ``num_seqs`` sequences."""
        return _seconds(
            self.handle.evaluate_context_ops(self.prefill_attention, batch_size=num_seqs, s=chunk, prefix=history)
        )

    def sources(self, max_num_tokens: int, context: int) -> str:
        """Which operations come from where, by AIConfigurator's own account: "silicon: qkv_gemm, ...; ..."."""
        found: dict[str, set[str]] = {}
        every = [*self.token_ops, *self.logits, *self.attention]
        for batch, s in ((1, 2), (64, 1025), (512, min(context, 4096)), (max_num_tokens, 2)):
            for name, ms, _, source in self.handle.evaluate_generation_ops(every, batch_size=batch, s=s):
                if ms:
                    found.setdefault(name.removeprefix("generation_"), set()).add(source)
        for chunk, history in ((16, 0), (512, 1024), (min(max_num_tokens, 2048), context)):
            values = self.handle.evaluate_context_ops(self.prefill_attention, batch_size=1, s=chunk, prefix=history)
            for name, *_, source in values:
                found.setdefault(f"prefill {name.removeprefix('context_')}", set()).add(source)
        by_source: dict[str, list[str]] = {}
        for name, sources in found.items():
            by_source.setdefault(" or ".join(sorted(sources)), []).append(name)
        return "; ".join(f"{source}: {', '.join(names)}" for source, names in sorted(by_source.items()))

    def check_prefill(self, max_num_tokens: int) -> None:
        """See that a prefill is made of what a decode is made of, attention left out, so that one table prices both.

        Raises SpecsimError otherwise: where projections are part of attention (MLA) or layers keep a state.
        """
        for tokens in (16, 256, max_num_tokens):
            decode = self.tokenwise(tokens)
            prefill = _seconds(self.handle.evaluate_context_ops(self.prefill_ops, batch_size=1, s=tokens, prefix=0))
            if abs(prefill - decode) > ALIKE * decode:
                raise SpecsimError(
                    f"a step of this model cannot be composed: beside attention, AIConfigurator prices a prefill of "
                    f"{tokens} tokens at {prefill * 1e3:.4g} ms and a decode of as many at {decode * 1e3:.4g} ms"
                )

    def _generation(self, indices: list[int], batch: int, s: int = 2) -> float:
        return _seconds(self.handle.evaluate_generation_ops(indices, batch_size=batch, s=s)) if indices else 0.0

    @staticmethod
    def _moves(evaluate: Callable[..., Any], index: int, name: str, low: int) -> bool:
        """Whether an operation's price depends on the length ``name``."""
        rest = {"batch_size": 8} if name == "s" else {"batch_size": 1, "s": 512}
        short, long = (_seconds(evaluate([index], **rest, **{name: value})) for value in (low, 8192))
        return abs(long - short) > 1e-6 * short


def _names(evaluate: Callable[[int], Any]) -> list[str]:
    """The operations' names in order: the handle refuses the first index beyond them."""
    names: list[str] = []
    while True:
        try:
            names.append(evaluate(len(names))[0][0])
        except ValueError as error:
            if "out of range" not in str(error):
                raise
            return names


def _seconds(values: Sequence[tuple[str, float, float, str]]) -> float:
    return sum(value[1] for value in values) / 1e3


def _curve(price: Callable[[int], float], most: int) -> Curve:
    """Seconds at 1 to ``most``, every one asked for, the table thinned to what linear interpolation needs."""
    count = np.arange(1, most + 1)
    values = np.array([price(int(n)) for n in count])
    places = thin(count, values, CURVE_TOLERANCE * values)
    return Curve(at=tuple(p + 1 for p in places), seconds=tuple(round_to(values[p]) for p in places))


def _decodes(ops: Operations, max_num_tokens: int, context: int) -> tuple[list[tuple[Any, ...]], float]:
    """Points of attention without a prefill (chunk, history, sequences, context, seconds), and the worst error.

    The error is a share of a step. There are as many sequences as there may be tokens: where KV is read for each
    query, queries count as sequences.
    """
    seqs = steps(1, max_num_tokens, 6, AROUND_POWERS)
    contexts = steps(FIRST_CONTEXT, context, 6, AROUND_POWERS)
    values = np.array([[ops.decode(int(n), int(kv)) for kv in contexts] for n in seqs])
    step = values + np.array([ops.tokenwise(int(n)) + ops.rows(int(n)) for n in seqs])[:, None]
    pairs, worst = thin_rows(seqs, contexts, values, GRID_TOLERANCE * step)
    points = [(0, 0, int(seqs[i]), int(contexts[j]), round_to(values[i, j])) for i, j in pairs]
    return points, worst * GRID_TOLERANCE


def _prefills(ops: Operations, max_num_tokens: int, context: int) -> tuple[list[tuple[Any, ...]], float]:
    """Points of attention of a prefill alone, as _decodes."""
    chunks = steps(1, min(max_num_tokens, context), 6, AROUND_POWERS)
    histories = np.append(0, steps(1, context, 6, AROUND_POWERS))
    values = np.array([[ops.prefill(int(chunk), int(history)) for history in histories] for chunk in chunks])
    step = values + np.array([ops.tokenwise(int(chunk)) + ops.rows(1) for chunk in chunks])[:, None]
    pairs, worst = thin_rows(chunks, histories, values, GRID_TOLERANCE * step)
    points = [(int(chunks[i]), int(histories[j]), 0, 0, round_to(values[i, j])) for i, j in pairs]
    return points, worst * GRID_TOLERANCE


def _draft(ops: Operations, share: float, gamma: int) -> DraftCost:
    """A parallel drafter of a ``share`` of the layers: one pass over ``gamma`` tokens of each sequence."""

    def price(num_seqs: int) -> float:
        tokens = num_seqs * gamma
        layers = ops.layers(tokens) + ops.decode(num_seqs, DRAFT_CONTEXT)
        return share * layers + ops.rest(tokens) + ops.rows(tokens)

    curve = _curve(price, MAX_SEQS)
    return DraftCost(type="parallel", num_seqs=curve.at, seconds=curve.seconds)


def _name(deployment: Deployment) -> str:
    system = deployment.system.removesuffix("_sxm").replace("_", "-")
    return f"{system}-{Path(deployment.model).name.lower()}-tp{deployment.tp}-{deployment.backend}"
