"""profile import: what others measured of a step's cost as a profile of ours."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from specsim.cli import show
from specsim.cli.inputs import one_of
from specsim.files import check_apart, check_output
from specsim.hardware import Layered, Profile, Roofline, Shape, save_profile, step_cost
from specsim.importers.profile_parts import Ask
from specsim.importers.profiles import FORMATS, load_profile_source

NO_LIMIT = "KV capacity is not told: not limited (--kv-tokens)"


def import_profile(
    file: Annotated[
        Path, typer.Argument(metavar="FILE_OR_DIR", help="Cost table, columns, a bundle's folder, or a model.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Where the profile goes (JSON).")],
    format: Annotated[str, typer.Option("--format", help=f"auto (by content), {', '.join(FORMATS)}.")] = "auto",
    name: Annotated[str | None, typer.Option("--name", help="Name of the profile.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="The model; a bundle of another is refused.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="The GPU.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs of one replica (default: --tp).")] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="Tensor parallelism; chooses a bundle's tpN folder.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="The engine that was measured.")] = None,
    kv_tokens: Annotated[int | None, typer.Option("--kv-tokens", help="Tokens that the KV cache holds.")] = None,
    max_num_tokens: Annotated[
        int | None, typer.Option("--max-num-tokens", help="The most tokens the engine puts in a step.")
    ] = None,
    host_seconds: Annotated[
        float | None, typer.Option("--host-seconds", help="Host time a step on top of what was measured.")
    ] = None,
    date: Annotated[
        str | None, typer.Option("--date", help="Day it was measured, as 2026-08-14 (default: what the source says).")
    ] = None,
    as_engine: Annotated[
        bool, typer.Option("--as-engine", help="SGLang: probe below and last price beyond, as the engine reads it.")
    ] = False,
    capture_limit: Annotated[
        int | None, typer.Option("--capture-limit", help="Tokens of the largest CUDA graph; below it sizes pad up.")
    ] = None,
    monotone: Annotated[bool, typer.Option("--monotone", help="Running maximum over sizes, as vLLM loads it.")] = False,
    unit: Annotated[str | None, typer.Option("--unit", help="ms, us or s, where no column's name says.")] = None,
    draft: Annotated[Path | None, typer.Option("--draft", help="A file: columns of num_seqs and draft time.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Bundle: the model's config.json (default: in it or one up).")
    ] = None,
    no_skew: Annotated[bool, typer.Option("--no-skew", help="Bundle: leave skew_fit.csv out.")] = False,
    kv_reads: Annotated[
        str | None, typer.Option("--kv-reads", help="Kernels: draft tokens read KV once (default) or per_query.")
    ] = None,
    expert_parallel: Annotated[
        int | None, typer.Option("--expert-parallel", help="Bundle: ranks that share the experts.")
    ] = None,
    link_bandwidth: Annotated[
        float | None, typer.Option("--link-bandwidth", help="Bundle, tp > 1: bytes/s of an all-reduce's links.")
    ] = None,
    link_latency: Annotated[
        float | None, typer.Option("--link-latency", help="Bundle, tp > 1: seconds before an all-reduce moves.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="aiconfigurator: the GPUs, as it names them (h200_sxm).")
    ] = None,
    backend: Annotated[
        str | None, typer.Option("--backend", help="aiconfigurator: vllm (default), sglang or trtllm.")
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option("--engine-version", help="aiconfigurator: version measured (default: current).")
    ] = None,
    utilisation: Annotated[
        float | None, typer.Option("--utilisation", help="aiconfigurator: share of the memory used (default: 0.9).")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option("--max-context", help="aiconfigurator: longest sequence (default: the model's).")
    ] = None,
    draft_layers: Annotated[
        int | None, typer.Option("--draft-layers", help="aiconfigurator: price a parallel drafter of so many layers.")
    ] = None,
    draft_gamma: Annotated[
        int | None, typer.Option("--draft-gamma", help="aiconfigurator: tokens which that drafter drafts.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write what is printed as JSON here.")] = None,
) -> None:
    r"""Import what others measured of a step's cost, for --profile.

    Reads SGLang's step tables (steps per second, and the additive form), vLLM's adaptive-verification cost tables,
    CSV of tokens and time (unit in the column's name), the steps that serve-reference logs, and LLMServingSim's
    bundles of per-layer kernel times. What was measured is kept: a step outside it is an error, curves that fall stay
    as they are, and the notes say so.
    With --format aiconfigurator the source is a model's name, and a profile is composed from AIConfigurator's
    measured operations (needs pip install 'specsim\[silicon]').

    Example: specsim profile import tables.json --capture-limit 512 --model Qwen3-8B --device H100 --out h100.json
    """
    outputs = {"--out": out, "--json": json}
    check_apart(outputs, {"FILE_OR_DIR": file, "--draft": draft, "--config": config})
    for option, path in outputs.items():
        check_output(option, path)
    one_of("--kv-reads", kv_reads, ("once", "per_query"))
    answers: dict[str, Any] = {
        "name": name, "model": model, "device": device, "gpus": gpus, "tp": tp, "engine": engine,
        "kv_tokens": kv_tokens, "max_num_tokens": max_num_tokens, "host_seconds": host_seconds, "date": date,
        "as_engine": as_engine, "capture_limit": capture_limit, "monotone": monotone, "unit": unit, "draft": draft,
        "config": config, "no_skew": no_skew, "kv_reads": kv_reads, "expert_parallel": expert_parallel,
        "link_bandwidth": link_bandwidth, "link_latency": link_latency, "system": system, "backend": backend,
        "engine_version": engine_version, "utilisation": utilisation, "max_context": max_context,
        "draft_layers": draft_layers, "draft_gamma": draft_gamma,
    }  # fmt: skip
    words = ["specsim", "profile", "import", str(file), *([] if format == "auto" else ["--format", format])]
    for key, value in answers.items():
        if not (value is None or value is False):
            words += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    command = shlex.join([*words, "--out", str(out)])
    profile, warnings = load_profile_source(file, format, Ask(**answers, command=command))
    save_profile(profile, out)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    _print_imported(profile, out, json)


def _print_imported(profile: Profile, out: Path, json: Path | None) -> None:
    """Print some steps of an imported profile, and its notes."""
    rows: list[list[Any]] = []
    steps: list[dict[str, Any]] = []
    examples = _examples(profile)
    cost = step_cost(profile, max(shape.num_tokens + drafts for shape, drafts, _ in examples), 256, 0)
    for shape, draft_tokens, what in examples:
        tokens, seconds = shape.num_tokens + draft_tokens, float(cost.curve(shape, draft_tokens)[draft_tokens])
        if np.isfinite(seconds):  # inside what was measured
            rows.append([what, tokens, show.milliseconds(seconds), tokens / seconds])
            steps.append({"step": what, "tokens": tokens, "seconds": seconds})
    title = f"{profile.name}: {profile.model} on {profile.gpus} × {profile.device}, {profile.verify.type}"
    console = show.console()
    console.print(show.table(title, ["step", "tokens B", "ms", "tok/s"], rows))
    drafting = list(zip(profile.draft.num_seqs, profile.draft.seconds, strict=True)) if profile.draft else []
    if any(seconds for _, seconds in drafting):  # zero where the steps hold it: the notes say so
        ends = [f"{show.milliseconds(seconds)} ms for {n:,} sequence{'s' * (n != 1)}" for n, seconds in drafting]
        console.print(f"Drafting: {' to '.join(dict.fromkeys((ends[0], ends[-1])))}", soft_wrap=True)
    if profile.kv_tokens is None:
        console.print(NO_LIMIT, soft_wrap=True)
    notes = profile.provenance.notes
    console.print(f"Notes: {notes or '–'}\nWrote {out}", soft_wrap=True)
    if json is not None:
        drafts = [{"num_seqs": n, "seconds": seconds} for n, seconds in drafting]
        data = {"name": profile.name, "model": profile.model, "device": profile.device, "type": profile.verify.type}
        show.write_json_file(json, data | {"steps": steps, "drafting": drafts, "notes": notes})


def _examples(profile: Profile) -> list[tuple[Shape, int, str]]:
    """Steps to show, with their draft tokens: round token counts, and for kernels what a forward may hold."""
    verify = profile.verify
    if not isinstance(verify, Layered | Roofline):
        sizes = np.unique(np.geomspace(verify.range[0], verify.tokens[-1], 8).round()).astype(int).tolist()
        return [(Shape(1), size - 1, "one sequence and its drafts") for size in sizes]
    decodes = [(Shape(n, n * 1024.0), 0, f"{n} × 1,024 KV tokens") for n in (1, 8, 64, 256)]
    drafts = [(Shape(n, n * 1024.0), 3 * n, f"{n} × 1,024 KV tokens, 3 drafts each") for n in (8, 64)]
    prefills = [(Shape(0, 0, [c], [0]), 0, f"prefill of {c:,}") for c in (512, 2048)]
    beside = [(Shape(64, 64 * 1024.0, [512], [0]), 0, "64 × 1,024 KV tokens, prefill of 512")]
    return decodes + drafts + prefills + beside
