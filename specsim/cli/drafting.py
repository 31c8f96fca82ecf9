"""record and train-drafter: a drafter of one's own, from a target and prompts to a trace.

Torch is imported by the verbs, not by this module: the command line works without it.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import numpy as np
import typer
from rich.console import Console

from specsim.blocktrace import Trace, TraceMeta, write_trace
from specsim.cli import show
from specsim.cli.inputs import one_of, typed_command
from specsim.cli.traces import conditional_summary, tau_summary
from specsim.drafters import check_installed
from specsim.files import check_apart, check_folder, check_output, read_text
from specsim.trace_stats import acceptance_table, tau_table
from specsim.types import SpecsimError

if TYPE_CHECKING:
    from specsim.drafters.prompts import Prompt
    from specsim.drafters.responses import Recipe
    from specsim.drafters.target import Target

DEFAULT_BATCH = 128
DTYPES = ("auto", "float32", "bfloat16")
STORED = {"confidence": "float32", "draft_prob": "float16", "accept_rate": "float16"}
"""Confidences of a head can be as sure as float16 cannot tell; the others are for statistics."""

TargetPath = Annotated[str, typer.Option("--target", help="The LLM: a Hugging Face folder or a GGUF file.")]
Prompts = Annotated[
    Path, typer.Option("--prompts", help='JSONL: {"prompt": ..} or {"messages": [..]}, with "domain" and "id".')
]
Work = Annotated[Path | None, typer.Option("--work", help="Keep the target's answers there, to go on or use again.")]
Limit = Annotated[int | None, typer.Option("--limit", help="So many of the prompts, evenly spread.", min=1)]
Temperature = Annotated[float, typer.Option("--temperature", help="The target's; 0 is greedy.", min=0)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Most tokens of an answer.", min=1)]
Seed = Annotated[int, typer.Option("--seed", help="Seed of every draw.", min=0)]
BatchSize = Annotated[int, typer.Option("--batch", help="Prompts answered at once (in a new --work).", min=1)]
Dtype = Annotated[str, typer.Option("--dtype", help="auto (bfloat16 where that is fast), float32 or bfloat16.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]


def record(
    context: typer.Context,
    target: TargetPath,
    drafter: Annotated[
        str, typer.Option("--drafter", help="Checkpoint folder, 'ngram(longest=4, shortest=2)', or a small LM.")
    ],
    prompts: Prompts,
    out: Annotated[Path, typer.Option("--out", help="Where the block trace (parquet) goes.")],
    work: Work = None,
    limit: Limit = None,
    responses_per_prompt: Annotated[
        int, typer.Option("--responses-per-prompt", help="Answers of each prompt.", min=1)
    ] = 1,
    temperature: Temperature = 1.0,
    max_tokens: MaxTokens = 224,
    gamma: Annotated[
        int | None, typer.Option("--gamma", help="Block length (default: the drafter's, or 7).", min=1, max=64)
    ] = None,
    confidence: Annotated[
        str | None,
        typer.Option("--confidence", help="head, draft_prob, position_mean or none (default: head if there is one)."),
    ] = None,
    draft_sampling: Annotated[
        str | None, typer.Option("--draft-sampling", help="probabilistic (default), or greedy (always at T = 0).")
    ] = None,
    seed: Seed = 0,
    batch: BatchSize = DEFAULT_BATCH,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Annotated[Path | None, typer.Option("--json", help="Also write what is printed as JSON here.")] = None,
) -> None:
    """Record a drafter against a real target: a dense block trace, for --trace of the other verbs.

    The target answers the prompts once; at every position of its answers the drafter proposes a block, coupled
    to the answer so that acceptance has the law of rejection sampling. A DSpark or DFlash drafter takes a
    smaller --gamma (its block is cut), Eagle3 and the others any. With --work, what was interrupted goes on,
    and other drafters are recorded on the same answers.

    Example: specsim record --target models/ --drafter drafters/dspark --prompts test.jsonl --out dspark.parquet
    """
    above_zero("--temperature", temperature, or_zero=True)
    sampling = "greedy" if temperature == 0 else draft_sampling or "probabilistic"
    one_of("--draft-sampling", sampling, ("probabilistic", "greedy"))
    one_of("--confidence", confidence, get_args(TraceMeta.model_fields["confidence_source"].annotation))
    one_of("--dtype", dtype, DTYPES)
    if temperature == 0 and responses_per_prompt > 1:
        raise SpecsimError("--responses-per-prompt: expected 1 at --temperature 0, which has one answer a prompt")
    outputs = {"--out": out, "--json": json}
    read = {"--prompts": prompts, "--target": Path(target), "--drafter": Path(drafter)}
    check_apart({**outputs, "--work": work}, read if drafter.strip() != "ngram" else {**read, "--drafter": None})
    for name, path in outputs.items():
        check_output(name, path)
    if work is not None:
        check_folder(work, "--work")
    check_installed()
    from specsim.drafters.load import has_confidence, load_drafter_model, parse_spec
    from specsim.drafters.recorder import record as record_blocks
    from specsim.drafters.resume import answer
    from specsim.drafters.target import load_target

    spec = parse_spec(drafter)
    asked = _prompts(prompts, limit, responses_per_prompt)
    llm = load_target(target, dtype, device)
    model = load_drafter_model(spec, llm, gamma)
    source = confidence or ("head" if has_confidence(model) else "none")
    if source == "head" and not has_confidence(model):
        raise SpecsimError(f"--confidence: {spec.name} has no head: expected draft_prob, position_mean or none")
    meta = TraceMeta.model_validate(
        {"drafter": spec.name, "target": llm.name, "gamma": model.gamma, "kind": "dense", "temperature": temperature,
         "draft_sampling": sampling, "confidence_source": source, "dataset": _named(prompts), "seed": seed,
         "command": typed_command(context), "versions": _versions()}
    )  # fmt: skip
    recipe = _recipe(llm, model.target_layers, temperature, max_tokens, seed, batch, model.gamma)
    with _folder(work) as folder:
        with show.progress("steps of answering") as report:
            recipe, responses = answer(llm, asked, folder, recipe, report)
        with show.progress("answers recorded") as report:
            trace = record_blocks(model, llm, recipe, responses, meta, report)
    write_trace(trace, out, dtype=STORED)  # type: ignore[arg-type]
    _print_recorded(trace, len(asked), len(responses), recipe, out)
    if json is not None:
        tables = {"tau": tau_table(trace), "acceptance": acceptance_table(trace)}
        rows = {name: table.to_dict("records") for name, table in tables.items()}
        show.write_json_file(json, {"out": str(out), "meta": meta.model_dump(mode="json", by_alias=True), **rows})


def train_drafter(
    context: typer.Context,
    target: TargetPath,
    prompts: Prompts,
    work: Annotated[Path, typer.Option("--work", help="Keep the target's answers there, to go on or use again.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the drafter, and what resuming needs.")],
    kind: Annotated[
        str, typer.Option("--kind", help="dspark, dspark-gated, dspark-rnn, dflash, eagle3 or mtp.")
    ] = "dspark",
    blocks: Annotated[int, typer.Option("--blocks", help="Blocks to learn from, in all.", min=1)] = 300_000,
    gamma: Annotated[int, typer.Option("--gamma", help="Block length (mtp: 1).", min=1, max=64)] = 7,
    vocabulary: Annotated[
        int, typer.Option("--vocabulary", help="Propose only the answers' most frequent tokens; 0: all.", min=0)
    ] = 0,
    rank: Annotated[int, typer.Option("--rank", help="Of a DSpark's Markov head.", min=1)] = 32,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Target layers it reads, from 0 (default: five, spread).")
    ] = None,
    num_layers: Annotated[int, typer.Option("--num-layers", help="Layers of a DSpark or DFlash drafter.", min=1)] = 2,
    intermediate_size: Annotated[
        int | None, typer.Option("--intermediate-size", help="Of its feed-forward (default: the target's).", min=1)
    ] = None,
    rows: Annotated[int, typer.Option("--rows", help="Answers in a step.", min=1)] = 4,
    anchors: Annotated[int, typer.Option("--anchors", help="Blocks of an answer in a step.", min=1)] = 64,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="At its peak.")] = 1.5e-3,
    start: Annotated[
        Path | None, typer.Option("--start", help="Checkpoint to begin with, where names and shapes agree.")
    ] = None,
    limit: Limit = None,
    temperature: Temperature = 1.0,
    max_tokens: MaxTokens = 224,
    seed: Seed = 0,
    batch: BatchSize = DEFAULT_BATCH,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Train a drafter on what the target itself answers; the same command goes on with what was interrupted.

    Writes a checkpoint in DeepSpec's format to --out, without the embedding and the head, which are the target's.
    The losses, and τ on held-out answers, go to stderr and to log.jsonl in --out. An mtp drafter is an Eagle3 of
    one step that reads the last layer. DeepSpec itself reads an Eagle3 of five layers only.

    Example: specsim train-drafter --target models/ --prompts train.jsonl --work answers/ --out drafters/dspark
    """
    above_zero("--temperature", temperature, or_zero=True)
    above_zero("--learning-rate", learning_rate)
    one_of("--dtype", dtype, DTYPES)
    check_apart({"--work": work, "--out": out}, {"--prompts": prompts, "--target": Path(target), "--start": start})
    for option, folder in (("--work", work), ("--out", out)):
        check_folder(folder, option)
    check_installed()
    from specsim.drafters.checkpoint import load_checkpoint
    from specsim.drafters.resume import Run, answer, open_run
    from specsim.drafters.target import load_target
    from specsim.drafters.train import Kind, Training, check_shape, train

    one_of("--kind", kind, get_args(Kind))
    training = Training.model_validate(
        {"kind": kind, "gamma": gamma, "num_layers": num_layers, "intermediate_size": intermediate_size, "rank": rank,
         "vocabulary": vocabulary, "blocks": blocks, "rows": rows, "anchors": anchors, "learning_rate": learning_rate,
         "seed": seed}
    )  # fmt: skip
    asked = _prompts(prompts, limit)
    llm = load_target(target, dtype, device)
    check_shape(llm)
    if vocabulary > llm.vocab_size:
        raise SpecsimError(f"--vocabulary: expected at most {llm.vocab_size} as target {llm.name}, got {vocabulary}")
    read = _layers(layers, kind, llm.num_layers)
    first = None if start is None else load_checkpoint(start, llm)
    run = Run(
        training=training, target=llm.identity, layers=read, prompts=_named(prompts), limit=limit,
        temperature=temperature, max_tokens=max_tokens, start=None if start is None else str(start),
    )  # fmt: skip
    open_run(out, run)
    recipe = _recipe(llm, read, temperature, max_tokens, seed, batch, gamma)
    notes = {"target": llm.name, "prompts": _named(prompts), "command": typed_command(context), "versions": _versions()}
    with _resumable():
        with show.progress("steps of answering") as report:
            recipe, responses = answer(llm, asked, work, recipe, report)
        every = min(100, max(1, training.steps // 20))
        with _training_progress(kind, training.steps, rows * anchors) as log:
            train(training, llm, recipe, responses, read, out, log, first, every, notes)
    _print_trained(kind, llm.name, out)


def spread_layers(count: int) -> tuple[int, ...]:
    """Five of a target's ``count`` layers as DeepSpec spreads them: 1, 9, 17, 25, 33 of 36; fewer where few are."""
    last = max(1, count - 3)
    return tuple(sorted({min(count - 1, int(1 + (last - 1) * i / 4 + 0.5)) for i in range(5)}))


def _layers(text: str | None, kind: str, count: int) -> tuple[int, ...]:
    if kind == "mtp":
        if text is not None:
            raise SpecsimError("--layers: an mtp drafter reads the last layer: expected no --layers")
        return (count - 1,)
    if text is None:
        return spread_layers(count)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < count for part in parts) or len(set(parts)) < len(parts):
        raise SpecsimError(f"--layers: expected different numbers from 0 to {count - 1}, separated by commas: {text!r}")
    return tuple(int(part) for part in parts)


def _recipe(
    llm: Target, layers: tuple[int, ...], temperature: float, max_tokens: int, seed: int, batch: int, gamma: int
) -> Recipe:
    """How answers are made; their states are kept as exactly as the target computes them."""
    from specsim.drafters.responses import Recipe

    kept = tuple(sorted({*layers, llm.num_layers - 1}))
    exact = str(llm.embedding.dtype).removeprefix("torch.")
    return Recipe.model_validate(
        {"target": llm.identity, "temperature": temperature, "max_tokens": max_tokens, "layers": kept, "seed": seed,
         "extra": max(7, gamma), "batch": batch, "states": exact}
    )  # fmt: skip


def _prompts(path: Path, limit: int | None, times: int = 1) -> list[Prompt]:
    """``limit`` of the prompts, spread over the file so that every domain has its share; each ``times`` times."""
    from specsim.drafters.prompts import read_prompts

    prompts = read_prompts(path)
    if limit is not None and limit < len(prompts):
        prompts = [prompts[i] for i in np.linspace(0, len(prompts) - 1, limit).round().astype(int)]
    if times == 1:
        return prompts
    return [replace(prompt, id=f"{prompt.id}#{i}") for prompt in prompts for i in range(1, times + 1)]


@contextmanager
def _folder(work: Path | None) -> Iterator[Path]:
    """``work``, or without it a folder that is gone afterwards."""
    if work is not None:
        with _resumable():
            yield work
        return
    with tempfile.TemporaryDirectory(prefix="specsim-") as name:
        yield Path(name)


@contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command goes on from what is there", err=True)
        raise


@contextmanager
def _training_progress(kind: str, steps: int, blocks: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Say on stderr, past two seconds, what a training reports: loss, held-out τ, and the time left by its pace."""
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    start = time.monotonic()
    seen: list[tuple[float, int]] = []

    def log(row: dict[str, Any]) -> None:
        seen.append((time.monotonic(), row["step"]))
        (first, begun), (now, step) = seen[0], seen[-1]
        left = "" if step == begun else f", {(now - first) / (step - begun) * (steps - step) / 60:,.0f} min left"
        if now - start > show.PATIENCE:
            err.print(
                f"step {step:,} of {steps:,}, {row['blocks']:,} blocks: loss {_loss(row):.4g}, "
                f"held-out τ {row['tau']:.3f}{left}"
            )

    timer = threading.Timer(show.PATIENCE, err.print, [f"training {kind}: {steps:,} steps of {blocks:,} blocks"])
    timer.daemon = True
    timer.start()
    try:
        yield log
    finally:
        timer.cancel()


def _print_recorded(trace: Trace, asked: int, answered: int, recipe: Recipe, out: Path) -> None:
    meta, console = trace.meta, show.console()
    left = asked - answered
    more = f", {left:,} left out (over {recipe.max_prompt_tokens} tokens, or no answer)" if left else ""
    console.print(
        f"{meta.drafter} for {meta.target}, T = {meta.temperature:g}, drafts {meta.draft_sampling}, "
        f"confidence: {meta.confidence_source}; {asked:,} prompts{more}\n"
    )
    console.print(tau_summary({meta.drafter: trace}, {meta.drafter: tau_table(trace)}))
    console.print(conditional_summary({meta.drafter: acceptance_table(trace)}))
    console.print(f"Wrote {out}", soft_wrap=True)


def _print_trained(kind: str, target: str, out: Path) -> None:
    import json

    lines = read_text(out / "log.jsonl").splitlines()
    rows = [json.loads(line) for line in lines]
    chosen = sorted({round(i) for i in np.linspace(0, len(rows) - 1, min(len(rows), 6))})
    survival = [f"≥{k}" for k in range(1, len(rows[-1]["survival"]) + 1)]
    cells = [
        [row["step"], row["blocks"], _loss(row), row["tau"], *row["survival"]] for row in (rows[i] for i in chosen)
    ]
    title = f"{kind} for {target}: loss, and on held-out answers τ and the share of blocks with ≥ k tokens accepted"
    console = show.console()
    console.print(show.table(title, ["step", "blocks", "loss", "τ", *survival], cells))
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    console.print(f"Wrote {out}, {size / 1e6:,.1f} MB of weights", soft_wrap=True)


def _loss(row: dict[str, Any]) -> float:
    """The sum of the loss parts of a row of the training's log."""
    return float(sum(row.get(part, 0.0) for part in ("ce", "l1", "bce")))


def above_zero(option: str, value: float, or_zero: bool = False) -> None:
    """SpecsimError, in the option's name, unless ``value`` is a number above 0 (``or_zero``: or 0)."""
    if not (0 < value < math.inf or (or_zero and value == 0)):
        raise SpecsimError(f"{option}: expected a number {'of 0 or more' if or_zero else 'above 0'}, got {value}")


def _named(path: Path) -> str:
    """A file by its name and the start of its SHA-256."""
    return f"{path.name} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("specsim", "torch", "transformers")}
