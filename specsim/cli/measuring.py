"""measure: the step times of a model shape on this machine, as a hardware profile.

Torch is imported by the verb, not by this module: the command line works without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli import show
from specsim.cli.inputs import one_of, typed_command
from specsim.files import check_apart, check_output
from specsim.hardware import Profile, save_profile
from specsim.hardware.model_shape import DENSE_PRESETS
from specsim.hardware.tables import UNBOUNDED
from specsim.measure import check_installed
from specsim.types import SpecsimError

if TYPE_CHECKING:
    from specsim.measure.fit import Sum
    from specsim.measure.grid import Grid
    from specsim.measure.records import Run

WHAT, SIZES, HOW, OUT = "Model and drafter", "Sizes", "How", "Output"
GRAPHS = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""The sizes engines capture CUDA graphs at."""
BETWEEN, TAIL = (3, 12, 100, 300), (768, 1024, 1536, 2048, 4096, 8192)
"""Sizes that are padded to a graph, to see that they cost as much; sizes above the graphs."""
ON_CPU = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def _option(*names: str, help: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def measure(
    context: typer.Context,
    out: Annotated[Path, _option("--out", help="Where the profile (JSON) goes.", panel=OUT)],
    model: Annotated[
        str | None,
        _option("--model", help=f"{', '.join(DENSE_PRESETS)}, or a config.json.", panel=WHAT),
    ] = None,
    hidden: Annotated[
        int | None, _option("--hidden", help="Width; like those below, instead of the model's.", panel=WHAT)
    ] = None,
    layers: Annotated[int | None, _option("--layers", help="Decoder layers.", panel=WHAT)] = None,
    heads: Annotated[int | None, _option("--heads", help="Query heads.", panel=WHAT)] = None,
    kv_heads: Annotated[int | None, _option("--kv-heads", help="Key and value heads.", panel=WHAT)] = None,
    head_dim: Annotated[int | None, _option("--head-dim", help="Width of a head.", panel=WHAT)] = None,
    intermediate: Annotated[
        int | None, _option("--intermediate", help="Width of the feed-forward.", panel=WHAT)
    ] = None,
    vocab: Annotated[int | None, _option("--vocab", help="Tokens of the vocabulary.", panel=WHAT)] = None,
    max_position: Annotated[
        int | None, _option("--max-position", help="Longest sequence in tokens.", panel=WHAT)
    ] = None,
    tied: Annotated[
        bool | None, _option("--tied/--untied", help="Embedding and head are one matrix.", panel=WHAT)
    ] = None,
    qk_norm: Annotated[
        bool | None, _option("--qk-norm/--no-qk-norm", help="Query and key heads are normed.", panel=WHAT)
    ] = None,
    drafter: Annotated[
        str, _option("--drafter", help="parallel (DSpark, DFlash), autoregressive (Eagle, MTP) or none.", panel=WHAT)
    ] = "parallel",
    gamma: Annotated[int, _option("--gamma", help="Most draft tokens a sequence.", panel=WHAT)] = 7,
    draft_layers: Annotated[
        int | None,
        _option(
            "--draft-layers",
            help="Of the drafter (default: parallel 5, or 2 below a width of 2048; else 1; no more than the model's).",
            min=1,
            panel=WHAT,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        _option("--rank", help="Of the Markov head (default: 256, or 32 below a width of 2048).", min=1, panel=WHAT),
    ] = None,
    tokens: Annotated[
        str | None, _option("--tokens", help="Tokens in the forward: 1,2,4,8 (default: by device).", panel=SIZES)
    ] = None,
    contexts: Annotated[
        str | None,
        _option(
            "--contexts",
            help="KV tokens of a sequence, the reference first (default: 512,4096; CPU 256,1024).",
            panel=SIZES,
        ),
    ] = None,
    capture: Annotated[
        str | None, _option("--capture", help="CUDA graph sizes, or none (default: as engines, to 512).", panel=SIZES)
    ] = None,
    max_seqs: Annotated[
        int | None, _option("--max-seqs", help="Most sequences in a batch (default: 256; CPU 64).", panel=SIZES)
    ] = None,
    device: Annotated[str, _option("--device", help="auto, cpu or cuda.", panel=HOW)] = "auto",
    dtype: Annotated[
        str, _option("--dtype", help="auto (bfloat16; CPU float32), float32, bfloat16, float16.", panel=HOW)
    ] = "auto",
    threads: Annotated[
        int | None, _option("--threads", help="CPU threads (default: torch's).", min=1, max=1024, panel=HOW)
    ] = None,
    compiled: Annotated[
        bool | None,
        _option("--compile/--no-compile", help="Compile element-wise parts (default: on CUDA, if it can).", panel=HOW),
    ] = None,
    attention: Annotated[
        str | None, _option("--attention", help="paged or padded (default: paged where it works).", panel=HOW)
    ] = None,
    rounds: Annotated[int, _option("--rounds", help="Samples of each size, at most.", panel=HOW)] = 20,
    minutes: Annotated[
        float | None, _option("--minutes", help="Rounds end by then, three at least (default: 7; CPU 3).", panel=HOW)
    ] = None,
    input_sets: Annotated[int, _option("--input-sets", help="Sets of tokens and lengths, in turn.", panel=HOW)] = 3,
    seed: Annotated[int, _option("--seed", help="Of weights, inputs and order.", min=0, panel=HOW)] = 0,
    name: Annotated[
        str | None, _option("--name", help="Of the profile (default: the model and device).", panel=OUT)
    ] = None,
    kv_tokens: Annotated[
        int | None,
        _option("--kv-tokens", help="KV cache size to write into the profile.", min=1, max=UNBOUNDED, panel=OUT),
    ] = None,
    device_memory: Annotated[
        float | None, _option("--device-memory", help="GB of the device, to work out the KV cache from.", panel=OUT)
    ] = None,
    log: Annotated[Path | None, _option("--log", help="Every point (default: OUT.log.jsonl).", panel=OUT)] = None,
    picture: Annotated[Path | None, _option("--picture", help="PNG or SVG (default: OUT.png).", panel=OUT)] = None,
) -> None:
    """Measure how long steps of a model last on this machine: a profile for --profile, a log and a picture.

    A decoder of the model's shape, with random weights, verifies batches of sequences with different draft
    lengths and contexts; its drafter runs too. On CUDA with graphs, elsewhere without. Sizes are timed in random
    order over several rounds; the profile holds medians and quartiles, the log every sample.

    A run takes --rounds samples of every size at every context, or stops at --minutes (after three rounds at least):
    --rounds 3 or --minutes 0.5 is enough for a first look. Fewer --tokens (in any order), one of --contexts and a lower
    --max-seqs make each round shorter.

    Example: specsim measure --model smollm2-135m --device cpu --out hw_profiles/smollm2-cpu.json
    """
    log = log or out.with_suffix(".log.jsonl")
    picture = picture or out.with_suffix(".png")
    files = {"--out": out, "--log": log, "--picture": picture}
    check_apart(files, {"--model": Path(model) if model and Path(model).is_file() else None})
    if picture.suffix.lower() not in (".png", ".svg"):
        raise SpecsimError(f"--picture: {picture}: suffix {picture.suffix!r}, expected .png or .svg")
    for option, path in files.items():
        check_output(option, path)
    one_of("--drafter", drafter, ("parallel", "autoregressive", "none"))
    one_of("--attention", attention, ("paged", "padded"))
    for option, given in (("--draft-layers", draft_layers), ("--rank", rank)):
        if given is not None and (drafter == "none" or (option == "--rank" and drafter != "parallel")):
            raise SpecsimError(f"{option}: has no meaning with --drafter {drafter}")
    if not (rounds >= 3 and input_sets >= 1):
        raise SpecsimError(f"--rounds, --input-sets: expected at least 3 and 1, got {rounds} and {input_sets}")
    for option, value in (("--minutes", minutes), ("--device-memory", device_memory)):
        if value is not None and not 0 < value <= 1e6:
            raise SpecsimError(f"{option}: expected a number above 0, up to a million, got {value}")
    if name is not None and not name.strip():
        raise SpecsimError("--name: expected a text, got an empty one")
    if kv_tokens is not None and device_memory is not None:
        raise SpecsimError("--kv-tokens, --device-memory: expected one of them")
    check_installed()
    from specsim.measure import machine
    from specsim.measure.fit import decompose
    from specsim.measure.picture import plot_measured
    from specsim.measure.records import Run, kv_room, make_profile, write_log
    from specsim.measure.session import Settings, measure
    from specsim.measure.shape import find_shape
    from specsim.plots import save_figure

    on = machine.find_device(device)
    numbers = machine.find_dtype(dtype, on)
    shape = find_shape(
        model, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=vocab,
        intermediate=intermediate, max_position=max_position, tied=tied, qk_norm=qk_norm,
    )  # fmt: skip
    if draft_layers is not None and draft_layers > shape.layers:
        raise SpecsimError(
            f"--draft-layers: expected at most the {shape.layers} layers of {shape.name}, got {draft_layers}"
        )
    cuda = on.type == "cuda"
    if not cuda and capture not in (None, "none"):
        raise SpecsimError("--capture: CUDA graphs need --device cuda")
    if not cuda and attention == "paged":
        raise SpecsimError("--attention: paged needs --device cuda")
    grid = _grid(cuda, tokens, contexts, capture, gamma, max_seqs)
    wide = shape.hidden >= 2048
    settings = Settings(
        drafter=drafter,
        draft_layers=draft_layers or min(shape.layers, 1 if drafter == "autoregressive" else 5 if wide else 2),
        rank=rank or (256 if wide else 32),
        rounds=rounds,
        minutes=minutes or (7.0 if cuda else 3.0),
        input_sets=input_sets,
        seed=seed,
        compile=compiled,
        attention=attention,
    )
    width = numbers.itemsize
    room = kv_tokens if device_memory is None else kv_room(shape, width, device_memory * 1e9)
    with _threads(threads), show.progress("samples taken") as report:
        session = measure(shape, grid, settings, on, numbers, report)
        run = Run(
            shape, grid, settings, session, machine.device_name(on), str(numbers).removeprefix("torch."), width,
            graphs=bool(grid.capture),
        )  # fmt: skip
    sum_ = decompose(run.of("verify", "chunk"), grid)
    command = typed_command(context)
    profile = make_profile(run, sum_, name or f"{shape.name}-{on.type}", command=command, kv_tokens=room)
    save_profile(profile, out)
    write_log(run, sum_, log, command)
    save_figure(plot_measured(run, profile), picture)
    _print(run, sum_, profile)
    for path in files.values():
        show.console().print(f"Wrote {path}", soft_wrap=True)


def _grid(
    cuda: bool, tokens: str | None, contexts: str | None, capture: str | None, gamma: int, max_seqs: int | None
) -> Grid:
    """The sizes asked for; every captured size is measured, or the staircase would lack its step."""
    from specsim.measure.grid import Grid

    asked = _sizes("--tokens", tokens)
    if not cuda or capture == "none":
        graphs: tuple[int, ...] = ()
    elif capture is not None:
        graphs = _sizes("--capture", capture) or ()
    else:
        graphs = GRAPHS if asked is None else tuple(n for n in asked if n <= GRAPHS[-1])
    sizes = asked or ((*GRAPHS, *BETWEEN, *TAIL) if cuda else ON_CPU)
    return Grid(
        tokens=tuple(sorted({*sizes, *graphs})),
        contexts=_sizes("--contexts", contexts, in_order=False) or ((512, 4096) if cuda else (256, 1024)),
        capture=graphs,
        gamma=gamma,
        max_seqs=max_seqs if max_seqs is not None else 256 if cuda else 64,
    )


def _sizes(option: str, text: str | None, in_order: bool = True) -> tuple[int, ...] | None:
    """Different sizes above 0, separated by commas; sorted, unless their order means something."""
    from specsim.measure.grid import MOST

    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    wrong = next((p for p in parts if not (p.isdecimal() and len(p) < 20 and 0 < int(p) <= MOST)), None)
    if wrong is None and len(set(map(int, parts))) < len(parts):
        wrong = text
    if wrong is not None:
        raise SpecsimError(f"{option}: expected different sizes of 1 to {MOST:,}, separated by commas, got {wrong!r}")
    sizes = [int(part) for part in parts]
    return tuple(sorted(sizes) if in_order else sizes)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """So many CPU threads for as long as it takes."""
    import torch

    held = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(held)


def _print(run: Run, sum_: Sum, profile: Profile) -> None:
    from specsim.measure.curves import FREE, curves
    from specsim.measure.records import residual_lines

    console = show.console()
    predicted = dict(zip([m.point for m in run.of("verify", "chunk")], sum_.predicted.tolist(), strict=True))
    context = run.grid.contexts[0]
    rows: list[list[Any]] = []
    for m in run.of("verify"):
        point, (q1, median, q3) = m.point, m.quartiles
        if point.context == context:
            low, high, priced = (show.milliseconds(s) for s in (q1, q3, predicted[point]))
            rows.append([point.tokens, point.num_seqs, show.milliseconds(median), low, high, priced, 1 / median])
    heads = ["tokens B", "sequences", "ms", "q1", "q3", "priced", "steps/s"]
    console.print(f"{profile.model} on {run.device}: {'; '.join(run.session.method.values())}\n", soft_wrap=True)
    console.print(show.table(f"Verification at context {context}, {run.rounds} rounds", heads, rows))
    if drafts := run.of("draft"):
        cells = [[m.point.num_seqs, *(show.milliseconds(m.quartiles[i]) for i in (1, 0, 2))] for m in drafts]
        title = f"Drafting {run.grid.gamma} tokens, {run.settings.drafter}"
        console.print(show.table(title, ["sequences", "ms", "q1", "q3"], cells))
    for line in residual_lines(run, sum_):
        console.print(line[0].upper() + line[1:] + ".", soft_wrap=True)
    until = curves(profile, run.grid.gamma, context).free_until
    said = "at every size" if until is None else f"up to {until:,}"
    console.print(f"Verified tokens are free (the step within {FREE:.0%} of a single token's) {said}.", soft_wrap=True)
    if run.rounds < run.settings.rounds:
        console.print(f"Time was up after {run.rounds} of {run.settings.rounds} rounds (--minutes).", soft_wrap=True)
