"""A whole profile from a model's shape and a GPU's ratings: verify, drafting, memory, and every assumption in words."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import ValidationError

from specsim.files import first_error
from specsim.hardware.devices import RESERVE_BYTES, Device
from specsim.hardware.model_shape import Dtype, ModelShape, kv_bytes_on_gpu
from specsim.hardware.profile import SCHEMA, Profile, Provenance
from specsim.hardware.roofline import SAMPLER_KERNELS, Roofline
from specsim.hardware.shape import Shape
from specsim.hardware.tables import UNBOUNDED, DraftCost
from specsim.types import SpecsimError

DRAFT_SEQS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MAX_GAMMA = 64
"""The longest block, as in traces."""
MAX_CONTEXT = 10_000_000
MAX_HOST_SECONDS = 10.0
"""Beyond what any model reads, and what any engine takes for a step: they only catch slips."""


def make_roofline(model: ModelShape, device: Device, **fields: object) -> Roofline:
    """A Roofline; SpecsimError says which field does not fit."""
    try:
        return Roofline.model_validate({"model": model, "device": device} | fields)
    except ValidationError as error:
        raise SpecsimError(f"roofline: {first_error(error)}") from error


def parallel_draft(target: Roofline, layers: int, gamma: int, context: int) -> DraftCost:
    """What a block of ``gamma`` tokens from a parallel backbone of the target's width costs, by sequences.

    ``layers`` layers and the target's head see γ tokens a sequence at once, each sequence with ``context``
    tokens of KV. Left out: the projection of the target's hidden states, and a Markov or confidence head.
    Raises SpecsimError for a ``gamma`` that no trace has.
    """
    if not 1 <= gamma <= MAX_GAMMA:
        raise SpecsimError(f"gamma: expected 1 to {MAX_GAMMA} draft tokens in a block, got {gamma}")
    model = target.model.cut(layers)
    surface = target.model_copy(update={"model": model}).surface(DRAFT_SEQS[-1] * gamma, DRAFT_SEQS[-1], False)
    seconds = [float(surface.curve(Shape(n, n * context), n * (gamma - 1))[-1]) for n in DRAFT_SEQS]
    return DraftCost(type="parallel", num_seqs=DRAFT_SEQS, seconds=tuple(seconds))


def autoregressive_draft(target: Roofline, layers: int, context: int) -> DraftCost:
    """What one of the γ forwards of a drafter of ``layers`` layers and the target's head costs, by sequences."""
    model = target.model.cut(layers)
    surface = target.model_copy(update={"model": model}).surface(DRAFT_SEQS[-1], DRAFT_SEQS[-1], False)
    seconds = [float(surface.curve(Shape(n, n * context), 0)[0]) for n in DRAFT_SEQS]
    return DraftCost(type="autoregressive", num_seqs=DRAFT_SEQS, seconds=tuple(seconds))


def kv_capacity(
    model: ModelShape, device: Device, tp: int, weights: Dtype, kv: Dtype, utilisation: float, reserve_bytes: float
) -> int:
    """KV tokens that fit: memory × ``utilisation``, less weights and ``reserve_bytes`` on each GPU.

    At most as many as a profile can tell. Raises SpecsimError where the weights leave no room.
    """
    room = device.memory_bytes * utilisation - reserve_bytes - model.weight_bytes(weights) / tp
    tokens = room / kv_bytes_on_gpu(model, kv, tp)
    if not tokens >= 1:
        needed = (model.weight_bytes(weights) / tp + reserve_bytes) / 2**30
        raise SpecsimError(
            f"memory: {needed:.1f} GiB a GPU for {weights} weights of {model.name} at tp {tp} and the reserve leave "
            f"no room for KV in {utilisation:g} of {device.memory_bytes / 2**30:.1f} GiB ({device.name}); "
            "expected a larger tp, a larger GPU or fp8"
        )
    return int(min(tokens, UNBOUNDED))


def roofline_profile(
    model: ModelShape,
    device: Device,
    *,
    tp: int = 1,
    weights: Dtype = "bf16",
    kv: Dtype = "bf16",
    utilisation: float = 0.9,
    reserve_bytes: float = RESERVE_BYTES,
    draft_layers: int = 0,
    gamma: int = 7,
    draft_type: Literal["parallel", "autoregressive"] = "parallel",
    context: int = 1024,
    host_seconds: float = 0.0,
    name: str | None = None,
    command: str | None = None,
    version: str | None = None,
    **efficiency: float,
) -> Profile:
    """An analytic profile of ``model`` on ``tp`` GPUs of kind ``device``.

    ``efficiency``: flops_efficiency, bandwidth_efficiency and kernel_seconds of Roofline. With ``draft_layers``
    a drafter of so many of the model's layers is priced too, at ``context`` KV tokens a sequence. The notes
    hold every assumption. Raises SpecsimError where model, device and tp do not fit together, or a number is
    out of its range.
    """
    if not 0 <= draft_layers <= model.layers:
        raise SpecsimError(f"draft_layers: expected 0 to the {model.layers} layers of {model.name}, got {draft_layers}")
    if not 0 <= context <= MAX_CONTEXT:
        raise SpecsimError(f"context: expected 0 to {MAX_CONTEXT:,} KV tokens a sequence, got {context}")
    if not 0 <= host_seconds <= MAX_HOST_SECONDS:
        raise SpecsimError(f"host_seconds: expected 0 to {MAX_HOST_SECONDS:g} s, got {host_seconds}")
    verify = make_roofline(model, device, tp=tp, weights=weights, kv=kv, **efficiency)
    room = kv_capacity(model, device, tp, weights, kv, utilisation, reserve_bytes)
    if draft_layers and context > room:
        raise SpecsimError(f"context: expected at most the {room:,} tokens that the KV cache holds, got {context:,}")
    per_token = kv_bytes_on_gpu(model, kv, tp) * tp
    notes = [
        "No measurement is behind these step times.",
        f"Model: {model.describe()}; weights {weights}, KV {kv}, activations, embedding"
        f"{', router' if model.moe_layers else ''} and head bf16.",
        f"Device: {device.bf16_flops / 1e12:g} TFLOP/s bf16"
        + (f", {device.fp8_flops / 1e12:g} fp8" if device.fp8_flops else "")
        + f", {device.bandwidth / 1e9:g} GB/s, {device.memory_bytes / 2**30:.1f} GiB ({device.source}).",
        f"Kernels reach {verify.flops_efficiency:g} of the FLOP/s and {verify.bandwidth_efficiency:g} of the bandwidth "
        f"and cost {verify.kernel_seconds * 1e6:g} µs besides; none overlap.",
        _kernels(verify),
        "Weights are read once a step; the KV of a sequence once for its token and its drafts together, that of a "
        "prefill once for its chunk, which attends causally. Attention computes in bf16. Logits are of decodes and "
        "drafts, and of the last token of a prefill; they are turned to 32 bits and read again.",
    ]
    if model.moe_layers:
        notes.append("Tokens choose experts evenly and independently; each GPU holds a slice of every expert.")
    if tp > 1:
        notes.append(
            f"Two all-reduces a layer: {device.link_seconds * 1e6:g} µs and their bytes at "
            f"{verify.bandwidth_efficiency:g} of {device.link_bandwidth / 1e9:g} GB/s; the "
            "logits are gathered at the same prices."
        )
    notes.append(
        f"KV cache: {utilisation:g} of the memory, less weights and {reserve_bytes / 2**30:.2g} GiB a GPU for all else."
    )
    draft = None
    if draft_layers:
        if draft_type == "parallel":
            draft = parallel_draft(verify, draft_layers, gamma, context)
            notes.append(
                f"Drafting: one forward of γ = {gamma} tokens a sequence through {draft_layers} of the model's layers "
                f"and its head at {context:,} KV tokens a sequence; the projection of the target's states and a Markov "
                "or confidence head are left out."
            )
        else:
            draft = autoregressive_draft(verify, draft_layers, context)
            notes.append(
                f"Drafting: γ forwards of one token a sequence through {draft_layers} of the model's layers and its "
                f"head at {context:,} KV tokens a sequence."
            )
        notes.append("The drafter's memory is not taken off the KV cache: give it with the drafter.")
    if host_seconds:
        notes.append(f"The engine's own time: {host_seconds * 1e3:g} ms a step, as given.")
    else:
        notes.append("The engine's own time between forwards is not in it.")
    return Profile.model_validate(
        {
            "schema": SCHEMA,
            "name": name or f"{_short(device.name)}-{model.name.lower()}-tp{tp}-roofline",
            "kind": "analytic",
            "model": model.name,
            "device": device.name,
            "gpus": tp,
            "tp": tp,
            "kv_tokens": room,
            "kv_bytes_per_token": per_token,
            "verify": verify,
            "draft": draft,
            "host_seconds": host_seconds,
            "provenance": Provenance(
                source="roofline: the model's shape and the GPU's ratings",
                command=command,
                versions={"specsim": version} if version else {},
                notes=" ".join(notes),
            ),
        }
    )


def _kernels(verify: Roofline) -> str:
    """How many kernels a step launches, and which they are."""
    model = verify.model
    one, free = np.ones(1), verify.model_copy(update={"kernel_seconds": 0.0})
    unit = verify.model_copy(update={"kernel_seconds": 1.0})
    parts = [[float(v[0]) for v in (*r.by_tokens(one).values(), *r.by_rows(one).values())] for r in (unit, free)]
    count = round(sum(parts[0]) - sum(parts[1]))
    dense = "2 norms, 2 of attention, and one each for qkv, rotary, cache write, attention's output"
    text = f"A step launches {count} kernels, {count * verify.kernel_seconds * 1e3:.3g} ms: a layer has {dense}"
    if model.moe_layers < model.layers:
        text += ", gate and up, activation and down"
    if model.moe_layers:
        text += ", or, with experts, " if model.moe_layers < model.layers else ", "
        text += "router, 2 of routing, gate and up, activation, down and sum"
        text += ", and 3 of shared experts" if model.shared_intermediate else ""
    return f"{text}; besides them the embedding, the final norm, the head and {SAMPLER_KERNELS} of the sampler."


def _short(device: str) -> str:
    """A GPU's name as part of a file's."""
    words = [w for w in device.replace("NVIDIA ", "").replace("GeForce ", "").split() if w not in ("SXM", "Server")]
    return "-".join(words).lower().removesuffix("-blackwell-edition")
