"""profile show: what steps cost, how profiles of one GPU differ, and when one more draft token pays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from specsim.acceptance import load_drafter
from specsim.cli import show
from specsim.files import check_apart, check_output
from specsim.hardware import Prices, Profile, load_profile
from specsim.hardware.analytic import MAX_CONTEXT, MAX_GAMMA
from specsim.marginal import (
    Choice,
    choices,
    decode_seconds,
    draft_curve,
    expected_tokens,
    fits,
    held,
    look_ahead_threshold,
    next_threshold,
    reads_kv,
)
from specsim.types import SpecsimError

MOST_TOKENS = 16384
"""The largest step shown of a profile whose range has no end of its own."""
NO_END = 1 << 17
CASES = (1, 8, 32, 128)


def profile_show(
    files: Annotated[list[Path], typer.Argument(help="Hardware profiles (hw_profiles/*.json).", show_default=False)],
    context: Annotated[
        int, typer.Option("--context", help="KV tokens of each sequence.", min=0, max=MAX_CONTEXT)
    ] = 1024,
    num_seqs: Annotated[
        int | None,
        typer.Option(
            "--num-seqs",
            help="Sequences in the table of SPS(B), tokens beyond one each being drafts (default: B), and in that of "
            f"survivals (default: {','.join(map(str, CASES))}).",
            min=1,
        ),
    ] = None,
    gamma: Annotated[
        int | None,
        typer.Option(
            "--gamma", help="Most draft tokens a sequence (default: the trace's, or 7).", min=1, max=MAX_GAMMA
        ),
    ] = None,
    tau: Annotated[
        float | None,
        typer.Option("--tau", help="Tokens a sequence that a step yields at most, in the numerator (default: all)."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="A drafter's trace: its survivals in the numerator, and what schedulers do."),
    ] = None,
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="Continue the profiles beyond what they measured.")
    ] = False,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw it too (.png or .svg).")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write what is printed as JSON here.")] = None,
) -> None:
    """Print hardware profiles: where they come from, what steps cost, and when one more draft token pays.

    SPS(B) is steps a second at B tokens in the forward; profiles of the same model and GPUs as the first are
    compared with it in per cent. A dash stands where sequences of --context tokens do not fit in the KV cache, or a
    step lies beyond what was measured: such sizes count in no average, and schedulers are not asked there.

    Survival that pays: a step of R sequences with K draft tokens lasts T(K), drafting included, and is expected to
    yield E(K) tokens. One more token of survival a raises E/T, as Algorithm 1 asks, if a > E(K)·(T(K+1) − T(K))/T(K):
    "next". On a staircase the stairs are free and their edges dear; a scheduler that sees all K at once admits m
    tokens of survival a if a > E(K)·(T(K+m) − T(K))/(m·T(K)) for some m: "ahead". E(K) is R·min(1 + K/R, τ), or
    R plus the survivals of --trace.

    Example: specsim profile show hw_profiles/dsv4-flash-b300-tp4.json

    Example: specsim profile show hw_profiles/dsv4-flash-b300-tp4.json --trace traces/qwen3-4b-dspark.json
    --gamma 5 --picture out/b300.png

    Example: specsim profile show hw_profiles/dsv4-flash-b300-tp4.json hw_profiles/dsv4-flash-production.json
    --num-seqs 32 --context 4096
    """
    check_apart({"--json": json, "--picture": picture}, {"FILE": files, "--trace": trace})
    check_output("--json", json)
    check_output("--picture", picture)
    if tau is not None and not 1 <= tau <= 1 + MAX_GAMMA:
        raise SpecsimError(f"--tau: expected 1 to {1 + MAX_GAMMA} tokens (the bonus token counts), got {tau:g}")
    if tau is not None and trace is not None:
        raise SpecsimError("--tau: has no meaning with --trace, whose survivals make the numerator")
    if picture is not None and picture.suffix.lower() not in (".png", ".svg"):
        raise SpecsimError(f"--picture: expected a .png or .svg file, got {picture}")
    for i, file in enumerate(files):
        if file.resolve() in [other.resolve() for other in files[:i]]:
            raise SpecsimError(f"FILE: {file}: is given twice, expected different profiles")
    profiles = _named([load_profile(file) for file in files])
    survival, by_position, gamma = _survivals(trace, gamma)
    cases = [num_seqs] if num_seqs else list(CASES)
    tokens = _token_counts(list(profiles.values()), num_seqs)
    curves = {
        name: decode_seconds(profile, tokens, context, num_seqs, extrapolate=extrapolate)
        for name, profile in profiles.items()
    }
    if picture is not None and not any(np.isfinite(curve).any() for curve in curves.values()):
        raise SpecsimError(
            f"--picture: nothing to draw at --context {context}: no step fits in the KV cache and in what was measured"
        )
    console = show.console()
    data: dict[str, Any] = {"context": context, "num_seqs": num_seqs, "gamma": gamma, "profiles": []}

    facts = {name: _facts(profile) for name, profile in profiles.items()}
    if len(profiles) == 1:
        for key, fact in next(iter(facts.values())).items():
            console.print(f"{key:>9}  {fact}")
    else:
        short = [key for key in next(iter(facts.values())) if key not in ("name", "source", "command", "notes")]
        rows: list[list[Any]] = [[key, *(facts[name][key] for name in profiles)] for key in short]
        console.print(show.table("", ["", *profiles], rows))
        for name in profiles:
            console.print(f"{name}: {facts[name]['source']}", soft_wrap=True)

    differences = _differences(profiles, curves)
    _print_steps(profiles, tokens, curves, differences, context, num_seqs)

    thresholds: dict[str, dict[int, tuple[Prices, Prices]]] = {}
    for name, profile in profiles.items():
        thresholds[name] = {}
        for r in cases:
            seconds = draft_curve(profile, r, gamma, context, extrapolate=extrapolate)
            expected = expected_tokens(r, gamma, tau, by_position)
            thresholds[name][r] = next_threshold(seconds, expected), look_ahead_threshold(seconds, expected)
        _print_thresholds(name, profile, thresholds[name], gamma, context, _numerator(tau, trace))
        entry: dict[str, Any] = {**facts[name], "kind": profile.kind}
        entry["steps"] = [{"tokens": b, "seconds": s} for b, s in zip(tokens, curves[name].tolist(), strict=True)]
        entry["difference"] = differences[name].tolist() if name in differences else None
        entry["survival_that_pays"] = [
            {"num_seqs": r, "tokens": r + k, "draft_tokens": k, "next": a, "ahead": b}
            for r, (one, many) in thresholds[name].items()
            for k, (a, b) in enumerate(zip(one.tolist(), many.tolist(), strict=True))
        ]
        if survival is not None:
            chosen = [c for r in cases for c in choices(profile, survival, r, context, extrapolate=extrapolate)]
            _print_choices(name, profile, chosen, cases, gamma, context)
            entry["choices"] = [vars(choice) for choice in chosen]
        data["profiles"].append(entry)
    for profile in profiles.values():
        if profile.caveat:
            console.print(f"note: {profile.caveat}")
    if picture is not None:
        from specsim.plots import save_figure
        from specsim.plots_profile import plot_profiles

        figure = plot_profiles(profiles, thresholds, context, num_seqs, extrapolate=extrapolate)
        console.print(f"Wrote {save_figure(figure, picture)}")
    if json is not None:
        # One profile's facts stand at the top, as they did before there could be several.
        show.write_json_file(json, {**data["profiles"][0], **data} if len(profiles) == 1 else data)


def _named(profiles: list[Profile]) -> dict[str, Profile]:
    """The profiles by name, each on one line; those of one name are numbered."""
    texts = ("name", "model", "device", "engine")
    profiles = [p.model_copy(update={t: _one_line(getattr(p, t)) for t in texts}) for p in profiles]
    names = [profile.name for profile in profiles]
    labels = [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]
    return dict(zip(labels, profiles, strict=True))


def _one_line(text: str | None) -> str | None:
    """The text without line ends, tabs and the like."""
    return text and "".join(c if c.isprintable() else " " for c in text)


def _survivals(trace: Path | None, gamma: int | None) -> tuple[Any, list[float] | None, int]:
    """The confidences' survivals [n, γ] (None without), those observed by position [γ], and γ."""
    if trace is None:
        return None, None, gamma or 7
    drafter = load_drafter(trace, gamma)
    tape = drafter.tape(0)
    observed = (tape.accepted[:, None] > np.arange(tape.gamma)).mean(axis=0)
    return tape.survival, observed.tolist(), tape.gamma


def _facts(profile: Profile) -> dict[str, str]:
    low, high = profile.verify.range
    graphs = f", CUDA graphs up to {profile.verify.capture_limit}" if profile.verify.capture_limit else ""
    draft = profile.draft
    return {
        "name": profile.name,
        "kind": profile.kind,
        "model": profile.model,
        "device": f"{profile.gpus} × {profile.device}, TP {profile.tp}",
        "engine": profile.engine or "–",
        "KV cache": f"{profile.kv_tokens:,} tokens" if profile.kv_tokens else "not limited",
        "measured": ("nothing" if profile.kind == "analytic" else f"{low}..{high} tokens") + graphs,
        "drafting": f"{draft.type}, {draft.num_seqs[0]}..{draft.num_seqs[-1]} sequences" if draft else "no cost given",
        "source": profile.provenance.source,
        "command": profile.provenance.command or "–",
        "notes": profile.provenance.notes or "–",
    }


def _token_counts(profiles: list[Profile], num_seqs: int | None) -> list[int]:
    """Token counts that show the profiles' ranges: powers of two, and both sides of the CUDA-graph limits."""
    ends = [p.last_tokens if p.last_tokens <= NO_END else MOST_TOKENS for p in profiles]
    low, high = min(p.verify.range[0] for p in profiles), max(ends)
    counts = {low, high, *(1 << i for i in range(high.bit_length()) if low <= 1 << i <= high)}
    for profile in profiles:
        if limit := profile.verify.capture_limit:
            counts |= {limit, min(limit + 1, high)}
    if num_seqs is not None:
        if num_seqs > high:
            raise SpecsimError(f"--num-seqs: expected at most {high}, the most tokens of a step, got {num_seqs}")
        counts = {num_seqs, *(b for b in counts if b > num_seqs)}
    return sorted(counts)


def _differences(profiles: dict[str, Profile], curves: dict[str, Prices]) -> dict[str, Prices]:
    """SPS(B) of the profiles of the first one's hardware over the first one's, less 1; NaN where either has none."""
    (first, base), *rest = profiles.items()
    found = {}
    for name, profile in rest:
        if _same_hardware(base, profile):
            with np.errstate(invalid="ignore"):
                ratio = curves[first] / curves[name]
            found[name] = np.where(np.isfinite(curves[first]) & np.isfinite(curves[name]), ratio - 1, np.nan)
    return found


def _same_hardware(one: Profile, other: Profile) -> bool:
    """Whether both are of one model on as many GPUs of one kind, however that is written; not where it is not told."""

    def key(profile: Profile) -> tuple[Any, ...]:
        model = re.sub(r"[^a-z0-9]", "", profile.model.lower().rpartition("/")[2])
        return _gpu(profile)[0], model, profile.gpus, profile.tp

    sizes = {size for profile in (one, other) if (size := _gpu(profile)[1])}
    return _told(one) and _told(other) and key(one) == key(other) and len(sizes) <= 1


def _told(profile: Profile) -> bool:
    return not {profile.model.lower(), profile.device.lower()} & {"unknown", "not published"}


def _gpu(profile: Profile) -> tuple[str, str]:
    """The GPU's name without what some leave out, and its memory ("" where the name does not tell it).

    Its maker calls the one of a SXM board by the bare name and the others H100 PCIe, H200 NVL and the like.
    """
    words = " ".join(re.findall(r"[a-z0-9]+", profile.device.lower()))
    memory = re.search(r"\b(\d+) ?gi?b\b", words)
    words = re.sub(r"\b(nvidia|geforce|tesla|amd|instinct|sxm\d?|hbm\d?e?|\d+ ?gi?b)\b", "", words)
    return words.replace(" ", ""), memory[1] if memory else ""


def _print_steps(
    profiles: dict[str, Profile],
    tokens: list[int],
    curves: dict[str, Prices],
    differences: dict[str, Prices],
    context: int,
    num_seqs: int | None,
) -> None:
    console = show.console()
    who = f"{f'{num_seqs} sequences' if num_seqs else 'each its own sequence'}, {held(profiles.values(), context)}"
    if len(profiles) == 1:
        seconds = next(iter(curves.values())).tolist()
        rows: list[list[Any]] = [[b, _ms(s), _per(1, s), _per(b, s)] for b, s in zip(tokens, seconds, strict=True)]
        heads = ["tokens B", "ms", "SPS(B)", "tok/s"]
    else:
        heads, rows = ["tokens B"], [[b] for b in tokens]
        for name in profiles:
            heads.append(name)
            for row, s in zip(rows, curves[name].tolist(), strict=True):
                row.append(_per(1, s))
            if name in differences:
                heads.append("vs first")
                for row, d in zip(rows, differences[name].tolist(), strict=True):
                    row.append(_percent(d))
    title = "Step time by tokens in the forward" if len(profiles) == 1 else "SPS(B), steps a second"
    console.print(show.table(f"\n{title} ({who})", heads, rows))
    most = min(num_seqs or tokens[-1], tokens[-1])
    for name, profile in profiles.items():
        if not fits(profile, most, context):
            console.print(f"{name}: {_room(profile, context)}; – where more would be needed", soft_wrap=True)
        if not reads_kv(profile) and any(map(reads_kv, profiles.values())):
            console.print(f"{name}: a curve by tokens alone, whatever KV they hold", soft_wrap=True)
    first = next(iter(profiles))
    for name, difference in differences.items():
        known = np.flatnonzero(np.isfinite(difference))
        if len(known):
            size = np.abs(difference[known])
            worst = known[size.argmax()]
            console.print(
                f"{name} against {first}: SPS(B) {100 * size.mean():.1f} % apart on average, "
                f"{_percent(float(difference[worst]))} at worst (B = {tokens[worst]:,})"
            )
    for name in list(profiles)[1:]:
        if name not in differences:
            told = _told(profiles[first]) and _told(profiles[name])
            why = f"is of another model or other GPUs than {first}" if told else "the model or the GPU is not told"
            console.print(f"{name}{'' if told else ' and ' + first + ':'} {why}: not compared")


def _room(profile: Profile, context: int) -> str:
    """How many sequences of ``context`` tokens the KV cache of a profile that limits it holds."""
    room = profile.kv_tokens or 0
    many = room // max(1, context)
    return f"the KV cache of {room:,} tokens holds {many:,} sequence{'s' * (many != 1)} of {context:,}"


def _print_thresholds(
    name: str,
    profile: Profile,
    thresholds: dict[int, tuple[Prices, Prices]],
    gamma: int,
    context: int,
    numerator: str,
) -> None:
    heads = ["drafts each"]
    rows: list[list[Any]] = [[str(each)] for each in range(gamma)]
    for r, (one, many) in thresholds.items():
        heads += [f"R = {r}: next", "ahead"]
        for each, row in enumerate(rows):
            row += [_survival(one[r * each]), _survival(many[r * each])]
    title = f"\n{name}: survival above which one more draft token pays"
    console = show.console()
    console.print(show.table(title, heads, rows))
    sequences = f"R sequences of {context:,} KV tokens" if reads_kv(profile) else "R sequences, whatever KV they hold"
    outside = "" if all(fits(profile, r, context) for r in thresholds) else f", or {_room(profile, context)}"
    console.print(
        f"{sequences}, each with so many drafts already; {numerator}. next: that token alone (Algorithm 1); ahead: "
        "with further ones of its survival (an argmax over all K); never: above 1; –: outside the range" + outside,
        soft_wrap=True,
    )


def _print_choices(
    name: str, profile: Profile, chosen: list[Choice], cases: list[int], gamma: int, context: int
) -> None:
    heads, rows = ["scheduler"], []
    there = [r for r in cases if fits(profile, r, context)]
    for r in there:
        heads += [f"R = {r}: drafts each", "tok/s/GPU"]
    for scheduler in dict.fromkeys(c.scheduler for c in chosen):
        row: list[Any] = [scheduler]
        for r in there:
            choice = next(c for c in chosen if c.scheduler == scheduler and c.num_seqs == r)
            row += [choice.draft_tokens, choice.throughput / profile.gpus]
        rows.append(row)
    title = f"\n{name}: what schedulers do with blocks of γ = {gamma} drawn from the trace"
    console = show.console()
    if there:
        caption = "steps without prefills, a draft token counted at its survival"
        console.print(show.table(title, heads, rows, caption))
    if there != cases:
        missing = ", ".join(str(r) for r in cases if r not in there)
        console.print(
            f"{title * (not there)}\nR = {missing} left out: {_room(profile, context)}".strip(), soft_wrap=True
        )


def _numerator(tau: float | None, trace: Path | None) -> str:
    if trace is not None:
        return f"survivals of {trace.stem}"
    return "all drafts counted in full" if tau is None else f"at most τ = {tau:g} tokens a sequence"


def _survival(value: float) -> str:
    """A threshold for people: nothing to pay, a share, or more than any token has."""
    if not np.isfinite(value):
        return "–"
    if value <= 0:
        return "0"
    if value > 1:
        return "never"
    return f"{value:.3f}" if value >= 0.001 else "<0.001"


def _ms(seconds: float) -> str:
    return show.milliseconds(seconds) if np.isfinite(seconds) else "–"


def _per(count: int, seconds: float) -> Any:
    return count / seconds if np.isfinite(seconds) else "–"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %" if np.isfinite(share) else "–"
