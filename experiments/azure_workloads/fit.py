"""Fit the two workloads in traces/ to the Azure LLM inference trace of November 2023.

    python experiments/azure_workloads/fit.py AzureLLMInferenceTrace_conv.csv \\
        AzureLLMInferenceTrace_code.csv --out traces

The CSV files are in github.com/Azure/AzurePublicDataset (CC-BY-4.0). Lengths become quantiles,
arrivals become gamma-distributed gaps with the measured rate and CV. What that leaves out is measured
here and written into each file's notes: the same inputs give the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.integrate import trapezoid

from specsim.files import write_json
from specsim.importers.arrivals import read_azure_2023
from specsim.types import Requests
from specsim.workload import Gamma
from specsim.workload_file import WorkloadFile, read_workload

# Steps of 2.5 %, closer at the ends: with steps of 5 to 25 % the straight lines between quantiles
# would make the mean output of the code trace 30 % too long, because its last percent reaches 1,899.
PROBABILITIES = [
    0,
    0.01,
    *np.arange(0.025, 1, 0.025).round(3).tolist(),
    0.99,
    0.995,
    0.9975,
    0.999,
    0.9995,
    1,
]
SEEDS = range(20)
SOURCE = "Azure/AzurePublicDataset, AzureLLMInferenceTrace 2023 ({file}), CC-BY-4.0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conv", type=Path, help="AzureLLMInferenceTrace_conv.csv")
    parser.add_argument("code", type=Path, help="AzureLLMInferenceTrace_code.csv")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two JSON files")
    # Fixed, so that a fit made again differs only where its inputs or this program do.
    parser.add_argument("--date", default="2026-11-29", help="date to record (default: %(default)s)")
    args = parser.parse_args()
    command = f"python experiments/azure_workloads/fit.py {args.conv.name} {args.code.name} --out traces"
    for source, domain in ((args.conv, "chat"), (args.code, "code")):
        path = args.out / f"azure-2023-{domain}.json"
        fit(source, domain, command, args.date, path)
        print(path)


def fit(source: Path, domain: str, command: str, date: str, path: Path) -> None:
    """Fit one trace and write it to ``path``."""
    real = read_azure_2023(source, domain)
    gaps = np.diff(real.arrival_s)
    rate, cv = round(float(1 / gaps.mean()), 4), round(float(gaps.std() / gaps.mean()), 3)
    prompt, output = quantiles(real.prompt_tokens), quantiles(real.output_tokens)
    arrivals = Gamma(rate, cv, num_requests=len(real)).requests
    file = WorkloadFile.model_validate(
        {
            "schema": "specsim.workload/1",
            "name": path.stem,
            "kind": "fitted",
            "domain": domain,
            "arrivals": {"type": "gamma", "rate": rate, "cv": cv},
            "prompt_tokens": prompt,
            "output_tokens": output,
            "provenance": {
                "source": SOURCE.format(file=source.name),
                "command": command,
                "date": date,
                "notes": " ".join(
                    (
                        about_arrivals(real.arrival_s, [arrivals(seed).arrival_s for seed in SEEDS]),
                        verdict(cv),
                        about_lengths(real, prompt, output),
                    )
                ),
            },
        }
    )
    write_json(path, file)
    read_workload(path)


def quantiles(tokens: NDArray[np.integer]) -> dict[str, Any]:
    """Return the law of lengths as the file has it, from token counts that occurred."""
    values = np.quantile(tokens, PROBABILITIES, method="inverted_cdf")
    return {"type": "quantiles", "probabilities": PROBABILITIES, "tokens": values.tolist()}


def about_arrivals(real: NDArray[np.floating], runs: list[NDArray[np.floating]]) -> str:
    """Compare the trace's arrivals with ``runs`` of the law of the same number."""
    spread = "; ".join(
        f"{window} s: {dispersion(real, window):.3g} measured, "
        f"{np.mean([dispersion(run, window) for run in runs]):.3g} from the gamma law"
        for window in (1, 10, 60)
    )
    gaps = np.sort(np.diff(real))
    body = gaps[: int(0.99 * len(gaps))]
    return (
        f"{len(real)} requests in {real[-1]:.0f} s. Rate and CV of gaps are the trace's; other properties of "
        f"the arrivals are not. Variance over mean of the arrivals counted in windows of {spread}. Share of "
        f"gaps under 1 ms: {(gaps < 1e-3).mean():.3f} measured, {(np.diff(runs) < 1e-3).mean():.3f} from the "
        f"gamma law. CV without the longest 1 % of gaps: {body.std() / body.mean():.2f}; longest gap "
        f"{gaps[-1]:.0f} s."
    )


def about_lengths(real: Requests, prompt: dict[str, Any], output: dict[str, Any]) -> str:
    """Compare the trace's lengths with the two laws."""
    means = "; ".join(
        f"{name} {tokens.mean():.1f} measured, {trapezoid(law['tokens'], law['probabilities']):.1f} from the quantiles"
        for name, tokens, law in (
            ("prompt", real.prompt_tokens, prompt),
            ("output", real.output_tokens, output),
        )
    )
    ranks = pd.DataFrame({"prompt": real.prompt_tokens, "output": real.output_tokens}).rank()
    return (
        f"Mean tokens: {means}. Prompt and output are drawn independently (rank correlation in the trace "
        f"{ranks['prompt'].corr(ranks['output']):+.2f})."
    )


def verdict(cv: float) -> str:
    if cv < 2:
        return (
            "Within a second the law is close; swings of the rate over ten seconds and more are not in it: "
            "loads averaged over a minute vary far less than in the trace."
        )
    return (
        "The CV comes from a few long pauses between busy spells. The gamma law has pauses and minutes about "
        "right, but packs the rest into bursts far sharper than the trace's: queues within a second are "
        "overstated. Replay the trace itself where that matters."
    )


def dispersion(arrival_s: NDArray[np.floating], window_s: float) -> float:
    """Return variance over mean of the arrivals counted in whole windows."""
    index = ((arrival_s - arrival_s[0]) // window_s).astype(np.int64)
    counts = np.bincount(index)[: index[-1]]
    return float(counts.var() / counts.mean())


if __name__ == "__main__":
    main()
