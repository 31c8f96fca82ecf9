"""How far the analytic roofline is from step times that were measured, and a measured curve from a straight line.

    python experiments/roofline_check/check.py [--profiles hw_profiles/] [--bundles DIR] [--json OUT.json]

Profiles imported from kernel measurements (h100-, h200-, b200-qwen3-*) are compared with the roofline of the same
model and GPU at its default efficiencies: nothing is fitted here (of the defaults, the latency of an all-reduce over
NVLink comes from the same H200 data, the others are older; see specsim/hardware/devices.py). DIR holds folders of
LLMServingSim's kernel times (NAME/profile), of Llama-3.1-8B on an RTX 4090 and an RTX PRO 6000. Differences are in step
time, the roofline's over the measured one's, less 1. What is not there is left out.
"""

import argparse
from pathlib import Path

import numpy as np

from specsim.cli import show
from specsim.hardware import Profile, Shape, find_device, find_model, load_profile, roofline_profile, step_cost
from specsim.importers.profile_parts import Ask
from specsim.importers.profiles import load_profile_source

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (512, 4096)
DRAFTS = 7
BUNDLES = {"RTX4090-Llama-3.1-8B": "rtx4090", "RTXPRO6000-Llama-3.1-8B": "rtxpro6000"}


def seconds(profile: Profile, shape: Shape, drafts: int) -> float:
    """Seconds of a step, infinite outside what was measured."""
    tokens = shape.num_seqs + sum(shape.chunks) + drafts
    return float(step_cost(profile, tokens, max(1, shape.num_seqs), 0).curve(shape, drafts)[drafts])


def steps() -> dict[str, list[tuple[int, Shape, int]]]:
    """The steps compared: what kind, tokens in the forward, shape and draft tokens."""

    def decode(n: int, context: int) -> Shape:
        return Shape(n, n * context, shortest=context, longest=context)

    kinds = {f"decode, context {c:,}": [(b, decode(b, c), 0) for b in TOKENS] for c in CONTEXTS}
    kinds["decode + 7 drafts each, context 4,096"] = [
        (8 * n, decode(n, 4096), DRAFTS * n) for n in TOKENS if 8 * n <= TOKENS[-1]
    ]
    kinds["prefill chunk, no history"] = [(c, Shape(0, 0, [c], [0]), 0) for c in (128, 256, 512, 1024, 2048)]
    return kinds


def compare(measured: Profile, analytic: Profile) -> list[dict[str, object]]:
    """For each kind of step: mean and worst difference, over the steps that were measured."""
    rows = []
    for kind, cases in steps().items():
        found = {b: (seconds(measured, shape, k), seconds(analytic, shape, k)) for b, shape, k in cases}
        difference = {b: a / m - 1 for b, (m, a) in found.items() if np.isfinite(m)}
        if not difference:
            continue
        worst = max(difference, key=lambda b: abs(difference[b]))
        rows.append(
            {
                "profile": measured.name,
                "steps": kind,
                "tokens": f"{min(difference)}..{max(difference)}",
                "mean_size": float(np.mean(np.abs(list(difference.values())))),
                "mean": float(np.mean(list(difference.values()))),
                "worst": difference[worst],
                "at": worst,
            }
        )
    return rows


def straight_line(profile: Profile) -> dict[str, object]:
    """The best a + b·B (least squares of relative errors) through a table's CUDA-graph sizes, and how far off it is."""
    table = profile.verify
    at, price = np.array(table.tokens, dtype=float), np.array(table.seconds)
    graph = at <= (table.capture_limit or at[-1])
    x, y = at[graph], price[graph]
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / y, x / y], axis=1), np.ones(len(y)), rcond=None)
    error = (a + b * x) / y - 1
    worst = int(np.abs(error).argmax())
    beyond = {int(t): float((a + b * t) / s - 1) for t, s in zip(at[~graph], price[~graph], strict=True)}
    return {
        "profile": profile.name, "a_seconds": float(a), "b_seconds": float(b), "limit": int(x[-1]),
        "mean_size": float(np.abs(error).mean()), "worst": float(error[worst]), "at": int(x[worst]), "beyond": beyond,
    }  # fmt: skip


def pairs(profiles: Path, bundles: Path | None) -> list[tuple[Profile, Profile]]:
    """Measured profiles with the rooflines of the same model and GPUs."""
    found = []
    for path in sorted(profiles.glob("*-qwen3-*.json")):
        measured = load_profile(path)
        if measured.kind != "analytic":
            gpu, model = measured.name.split("-qwen3-")[0], "qwen3-" + measured.name.split("-qwen3-")[1].split("-")[0]
            found.append((measured, roofline_profile(find_model(model), find_device(gpu), tp=measured.tp)))
    for folder, gpu in BUNDLES.items():
        if bundles is not None and (bundles / folder / "profile").is_dir():
            measured, _ = load_profile_source(bundles / folder / "profile", ask=Ask(tp=1))
            found.append((measured, roofline_profile(find_model("llama-3.1-8b"), find_device(gpu))))
    return found


def percent(share: object) -> str:
    return f"{100 * float(share):+.1f} %"  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, default=Path("hw_profiles"))
    parser.add_argument("--bundles", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = show.console()
    rows = [row for pair in pairs(arguments.profiles, arguments.bundles) for row in compare(*pair)]
    if rows:
        cells = [
            [r["profile"], r["steps"], r["tokens"], f"{100 * float(r['mean_size']):.1f} %", percent(r["mean"]),
             f"{percent(r['worst'])} at {r['at']}"]
            for r in rows
        ]  # fmt: skip
        heads = ["measured", "steps", "tokens", "mean size", "mean", "worst"]
        console.print(show.table("Step time of the roofline against the measured one", heads, cells))
    line = straight_line(load_profile(arguments.profiles / "dsv4-flash-b300-tp4.json"))
    beyond = ", ".join(f"{percent(e)} at {t:,}" for t, e in line["beyond"].items())  # type: ignore[attr-defined]
    console.print(
        f"{line['profile']}: best line through the sizes up to the CUDA-graph limit of {line['limit']:,} tokens is "
        f"{1e3 * line['a_seconds']:.2f} ms + {1e6 * line['b_seconds']:.2f} µs · B; "  # type: ignore[operator]
        f"off by {100 * line['mean_size']:.1f} % on average, {percent(line['worst'])} at worst (B = {line['at']}); "  # type: ignore[operator]
        f"beyond the limit {beyond}",
        soft_wrap=True,
    )
    if arguments.json is not None:
        show.write_json_file(arguments.json, {"roofline": rows, "straight_line": line})


if __name__ == "__main__":
    main()
