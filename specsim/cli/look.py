"""trace inspect: what is in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from specsim.acceptance import Drafter, load_trace
from specsim.blocktrace import Trace
from specsim.calibration import calibration_report
from specsim.cli import show
from specsim.files import check_apart, check_output, read_start
from specsim.importers.arrivals import open_workload
from specsim.request_table import inspect_requests
from specsim.synthesis import Synthetic
from specsim.types import SpecsimError

Json = Annotated[Path | None, typer.Option("--json", help="Also write what is printed as JSON here.")]


def inspect(file: Annotated[Path, typer.Argument(help="Arrivals, a workload, a block trace or a synthetic trace.")],
            json: Json = None) -> None:  # fmt: skip
    """Describe a trace: arrivals (rate, burstiness, lengths, domains) or acceptance (τ, positions, calibration).

    The kind is found by content: Azure 2023 CSV, BurstGPT CSV, Mooncake JSONL, vLLM request logs,
    our own parquet and workload files; block traces (parquet) and synthetic ones (JSON).

    Example: specsim trace inspect traces/qwen3-4b-dspark.json
    """
    check_apart({"--json": json}, {"FILE": file})
    check_output("--json", json)
    data = _acceptance(file) if _is_acceptance(file) else _arrivals(file)
    if json is not None:
        show.write_json_file(json, data)


def _is_acceptance(file: Path) -> bool:
    """Whether ``file`` is a drafter's trace rather than arrivals."""
    start = read_start(file)
    if start.startswith(b"PAR1"):
        import pyarrow.parquet as pq

        try:
            schema = pq.read_schema(file)
        except Exception as error:
            raise SpecsimError(f"{file}: expected a parquet file: {str(error).splitlines()[0]}") from error
        return "accepted" in schema.names or b"specsim" in (schema.metadata or {})
    return start.startswith(b"{") and b"specsim.synthetic/" in start


def _acceptance(file: Path) -> dict[str, Any]:
    trace = load_trace(file)
    meta = trace if isinstance(trace, Synthetic) else trace.meta
    drafter = Drafter(trace, trace.gamma, name=file.stem)
    tape = drafter.tape(0)
    console = show.console()
    rows_text = "generated from parameters, seed 0" if isinstance(trace, Synthetic) else f"{len(trace):,} rows"
    console.print(
        f"{meta.drafter} for {meta.target}: γ = {trace.gamma}, {meta.kind} ({rows_text}), "
        f"confidence: {meta.confidence_source}"
    )
    data: dict[str, Any] = {"drafter": meta.drafter, "target": meta.target, "gamma": trace.gamma, "kind": meta.kind}
    rows: list[list[Any]] = []
    # A token that was not proposed says nothing about the drafter's tokens.
    proposed = np.full(len(tape.accepted), trace.gamma) if tape.proposed is None else tape.proposed
    offered = np.arange(trace.gamma) < proposed[:, None]
    for d, name in enumerate(tape.parts):
        part = slice(int(tape.first[d]), int(tape.first[d] + tape.size[d]))
        accepted = tape.accepted[part]
        ks = np.arange(1, trace.gamma + 1)
        reached = ((accepted[:, None] >= ks - 1) & offered[part]).sum(0)
        kept = (accepted[:, None] >= ks).sum(0)
        conditional = np.divide(kept, reached, out=np.full(trace.gamma, np.nan), where=reached > 0)
        rows.append([name, int(tape.size[d]), float(accepted.mean() + 1), *conditional.tolist()])
        data[name] = {"rows": int(tape.size[d]), "tau": float(accepted.mean() + 1), "conditional": conditional.tolist()}
    heads = ["domain", "rows", "tau", *(str(k) for k in range(1, trace.gamma + 1))]
    console.print(show.table("\nConditional acceptance by position, over all anchors", heads, rows))
    if tape.confidence is not None:
        report = calibration_report(np.where(offered, tape.confidence, np.float32(np.nan)), tape.accepted)
        rows = [[int(r["position"]), r["predicted"], r["observed"], r["ece"], r["auc"]] for _, r in report.iterrows()]
        title = "Survival of the first k tokens: predicted and observed"
        console.print(show.table(title, ["k", "predicted", "observed", "ECE", "AUC"], rows))
        data["calibration"] = report.to_dict("records")
    if isinstance(trace, Trace) and trace.meta.notes:
        console.print(f"Notes: {trace.meta.notes}")
    if isinstance(trace, Synthetic):
        console.print(f"Source: {trace.provenance.source}\nNotes: {trace.provenance.notes or '–'}")
    return data


def _arrivals(file: Path) -> dict[str, Any]:
    workload = open_workload(file)
    requests = workload.requests(0)
    data = inspect_requests(requests)
    console = show.console()
    label = "" if hasattr(workload, "table") else " (a law; drawn with seed 0)"
    console.print(f"{data['requests']:,} requests over {show.number(data['duration_s'])} s{label}")
    rejected = data["rejected"]
    assert isinstance(rejected, dict)
    for reason, count in rejected.items():
        console.print(f"{count:,} rejected: {reason}")
    facts = [
        ["rate", f"{show.number(data['mean_rate'])} requests/s"],
        ["CV of the gaps", f"{show.number(data['gap_cv'])} (Poisson: 1)"],
        ["dispersion of counts in 1 s", f"{show.number(data['dispersion_1s'])} (Poisson: 1)"],
        ["gaps of zero", show.number(data["zero_gap_share"])],
        ["domains", ", ".join(f"{k or 'none given'} {v:,}" for k, v in _dict(data["domains"]).items())],
    ]
    if data["sessions"] is not None:
        facts.append(["sessions", show.number(data["sessions"])])
    if data["prefix_reuse_share"] is not None:
        facts.append(["prefix blocks seen before", show.number(data["prefix_reuse_share"])])
    console.print(show.table("", ["", ""], facts))
    prompt, output = _dict(data["prompt_tokens"]), _dict(data["output_tokens"])
    rows = [["prompt", *prompt.values()], ["output", *output.values()]]
    console.print(show.table("Tokens", ["", *prompt], rows))
    return data


def _dict(value: object) -> dict[str, Any]:
    assert isinstance(value, dict)
    return value
