"""profile roofline: an analytic profile of a GPU that nobody measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from specsim.cli import show
from specsim.cli.inputs import check_filled, is_typed, one_of, typed_command
from specsim.files import check_apart, check_output
from specsim.hardware import DEVICES, find_device, find_model, roofline_profile, save_profile
from specsim.hardware.analytic import MAX_CONTEXT, MAX_GAMMA, MAX_HOST_SECONDS
from specsim.hardware.devices import BANDWIDTH_EFFICIENCY, FLOPS_EFFICIENCY, KERNEL_SECONDS, RESERVE_BYTES
from specsim.hardware.model_shape import BYTES, PRESETS, Dtype
from specsim.hardware.roofline import LEAST_SHARE
from specsim.types import SpecsimError

TOKENS = (1, 8, 32, 128, 512, 2048)


def roofline(
    call: typer.Context,
    model: Annotated[str, typer.Option("--model", help=f"config.json, or {', '.join(PRESETS)}.")],
    device: Annotated[str, typer.Option("--device", help=f"{', '.join(DEVICES)}, or a JSON file of a GPU's ratings.")],
    out: Annotated[Path, typer.Option("--out", help="Where the profile goes (JSON).")],
    tp: Annotated[int, typer.Option("--tp", help="GPUs that split each layer.", min=1, max=1024)] = 1,
    dtype: Annotated[str, typer.Option("--dtype", help="Format of the weights: bf16 or fp8.")] = "bf16",
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="Format of the KV cache: bf16 or fp8.")] = "bf16",
    efficiency: Annotated[
        str, typer.Option("--efficiency", help="Shares of rated FLOP/s and of bandwidth that kernels reach.")
    ] = f"{FLOPS_EFFICIENCY:g},{BANDWIDTH_EFFICIENCY:g}",
    kernel_us: Annotated[
        float,
        typer.Option("--kernel-us", help="µs a kernel costs besides (with CUDA graphs; more without).", min=0, max=1e4),
    ] = KERNEL_SECONDS * 1e6,
    host_ms: Annotated[
        float,
        typer.Option("--host-ms", help="The engine's own ms between forwards.", min=0, max=MAX_HOST_SECONDS * 1e3),
    ] = 0.0,
    utilisation: Annotated[
        float, typer.Option("--utilisation", help="Share of the memory that the engine may use.", min=0.01, max=1)
    ] = 0.9,
    reserve_gib: Annotated[
        float, typer.Option("--reserve-gib", help="GiB a GPU that are neither weights nor KV.", min=0, max=1024)
    ] = RESERVE_BYTES / 2**30,
    draft_layers: Annotated[
        int, typer.Option("--draft-layers", help="Price a drafter of so many of the model's layers (0: none).", min=0)
    ] = 0,
    gamma: Annotated[
        int, typer.Option("--gamma", help="Block length of a parallel drafter.", min=1, max=MAX_GAMMA)
    ] = 7,
    draft_type: Annotated[
        str, typer.Option("--draft-type", help="parallel (a block in one forward) or autoregressive (γ forwards).")
    ] = "parallel",
    context: Annotated[
        int,
        typer.Option(
            "--context", help="KV tokens a sequence: while drafting, and in the table printed.", min=0, max=MAX_CONTEXT
        ),
    ] = 1024,
    name: Annotated[str | None, typer.Option("--name", help="Name of the profile (default: from the rest).")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write what is printed as JSON here.")] = None,
) -> None:
    """Work out a hardware profile from a model's shape and a GPU's ratings, for GPUs nobody measured.

    Each kernel takes the longer of its FLOPs and its bytes at what kernels reach of the ratings, and a constant
    besides; experts are read as often as the batch activates them. The profile is of kind analytic, its notes
    state every assumption, and what is simulated on it says so.

    Example: specsim profile roofline --model qwen3-8b --device h200 --draft-layers 5 --gamma 7
    --out out/h200-qwen3-8b.json

    A GPU of your own is a JSON file: name, bf16_flops, fp8_flops (optional), bandwidth, memory_bytes,
    link_bandwidth, link_seconds (optional), source; in FLOP/s, bytes and seconds.
    """
    from specsim import __version__

    check_filled(name=name)
    inputs = {"--model": _path(model), "--device": _path(device)}
    check_apart({"--out": out, "--json": json}, inputs)
    check_output("--out", out)
    check_output("--json", json)
    shares = _shares(efficiency)
    one_of("--dtype", dtype, tuple(BYTES))
    one_of("--kv-dtype", kv_dtype, tuple(BYTES))
    one_of("--draft-type", draft_type, ("parallel", "autoregressive"))
    for option in ("gamma", "draft_type"):
        if not draft_layers and is_typed(call, option):
            raise SpecsimError(f"--{option.replace('_', '-')}: has no meaning without --draft-layers")
    if draft_type == "autoregressive" and is_typed(call, "gamma"):
        raise SpecsimError("--gamma: has no meaning with --draft-type autoregressive, whose cost is by forward")
    profile = roofline_profile(
        find_model(model, cast(Dtype, dtype)),
        find_device(device),
        tp=tp,
        weights=cast(Dtype, dtype),
        kv=cast(Dtype, kv_dtype),
        utilisation=utilisation,
        reserve_bytes=reserve_gib * 2**30,
        draft_layers=draft_layers,
        gamma=gamma,
        draft_type=cast(Literal["parallel", "autoregressive"], draft_type),
        context=context,
        host_seconds=host_ms * 1e-3,
        name=name,
        command=typed_command(call),
        version=__version__,
        flops_efficiency=shares[0],
        bandwidth_efficiency=shares[1],
        kernel_seconds=kernel_us * 1e-6,
    )
    save_profile(profile, out)
    room = profile.kv_tokens or 0
    steps: list[dict[str, Any]] = []
    for b in TOKENS:
        # What does not fit in the KV cache has no price.
        s = float(profile.step_seconds(b, kv_tokens=b * context)) if b * context <= room else math.nan
        steps.append({"tokens": b, "seconds": s, "sps": 1 / s, "tokens_per_s": b / s})
    rows: list[list[Any]] = [[s["tokens"], show.milliseconds(s["seconds"]), s["sps"], s["tokens_per_s"]] for s in steps]
    title = f"{profile.name}: decoding at {context:,} KV tokens a sequence"
    console = show.console()
    console.print(show.table(title, ["tokens B", "ms", "SPS(B)", "tok/s"], rows, profile.caveat))
    many = room // max(1, context)
    more = f", {many:,} sequence{'s' * (many != 1)} of {context:,}; – where more would be needed"
    console.print(f"KV cache: {room:,} tokens{more * (TOKENS[-1] * context > room)}")
    console.print(f"Notes: {profile.provenance.notes}\nWrote {out}", soft_wrap=True)
    if json is not None:
        facts = {"name": profile.name, "kind": profile.kind, "kv_tokens": profile.kv_tokens}
        show.write_json_file(json, {**facts, "context": context, "steps": steps, "notes": profile.provenance.notes})


def _path(text: str) -> Path | None:
    """The file that an option of a preset or a file names."""
    path = Path(text)
    return path if path.is_file() else path / "config.json" if path.is_dir() else None


def _shares(text: str) -> list[float]:
    """The two shares of ``--efficiency``; one number stands for both."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) not in (1, 2) or not all(LEAST_SHARE <= share <= 1 for share in shares):
        raise SpecsimError(f"--efficiency: expected one or two shares, {LEAST_SHARE:g} to 1, as 0.8,0.8, got {text!r}")
    return shares if len(shares) == 2 else shares * 2
