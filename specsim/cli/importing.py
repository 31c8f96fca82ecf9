"""trace import: others' evidence of acceptance as a trace of ours."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from specsim.blocktrace import TOTAL, Trace, write_trace
from specsim.cli import show
from specsim.files import check_apart, check_output, write_json
from specsim.importers.acceptance import FORMATS, load_acceptance
from specsim.synthesis import Synthetic
from specsim.trace_stats import acceptance_table


def import_trace(
    file: Annotated[Path, typer.Argument(help="Counters, log, published rates or recorded rounds.")],
    out: Annotated[Path, typer.Option("--out", help="Where the trace goes: JSON if synthetic, else parquet.")],
    format: Annotated[str, typer.Option("--format", help=f"auto (by content), {', '.join(FORMATS)}.")] = "auto",
    select: Annotated[
        str | None, typer.Option("--select", help="Which of several drafters (rates) or model names (counters).")
    ] = None,
    gamma: Annotated[
        int | None, typer.Option("--gamma", help="Draft block length, where the file does not say or has several.")
    ] = None,
    before: Annotated[
        Path | None, typer.Option("--before", help="Earlier scrape of the counters: import what came after it.")
    ] = None,
    fixed_length: Annotated[
        bool, typer.Option("--fixed-length", help="All drafts had gamma tokens, all verified: no lower bounds.")
    ] = False,
    drafter: Annotated[str | None, typer.Option("--drafter", help="Name of the drafter, for the trace.")] = None,
    target: Annotated[str | None, typer.Option("--target", help="Name of the target, for the trace.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write what is printed as JSON here.")] = None,
) -> None:
    """Import a drafter's acceptance as others measured it, for --trace.

    Reads the speculative-decoding counters of vLLM or llama.cpp (Prometheus text), vLLM's "SpecDecoding metrics"
    log lines and bench results, JSON of acceptance by position, DeepSpec's metrics.json and llama.cpp's timings
    (synthetic traces); Spec-Bench accept lengths and SGLang's step records (sequential ones). The trace's notes
    say what the file leaves open.

    Example: specsim trace import metrics.txt --before metrics-at-start.txt --fixed-length --out mine.json
    """
    outputs = {"--out": out, "--json": json}
    check_apart(outputs, {"FILE": file, "--before": before})
    for name, path in outputs.items():
        check_output(name, path)
    answers = {"select": select, "gamma": gamma, "before": before, "drafter": drafter, "target": target}
    flags = ["--fixed-length"] * fixed_length + ([] if format == "auto" else ["--format", format])
    flags += [word for name, value in answers.items() if value is not None for word in (f"--{name}", str(value))]
    command = shlex.join(["specsim", "trace", "import", str(file), *flags, "--out", str(out)])
    trace = load_acceptance(
        file, format, select=select, gamma=gamma, before=before, fixed_length=fixed_length,
        drafter=drafter, target=target, command=command,
    )  # fmt: skip
    if isinstance(trace, Synthetic):
        write_json(out, trace)
        notes = trace.provenance.notes
    else:
        write_trace(trace, out)
        notes = trace.meta.notes
    data = _summary(trace)
    rows = [[d["domain"], d["rows"], d["tau"], *d["conditional"]] for d in data["domains"]]
    heads = ["domain", "cycles", "tau", *map(str, range(1, trace.gamma + 1))]
    title = f"{data['drafter']} for {data['target']}: {data['kind']}, conditional acceptance by position"
    console = show.console()
    console.print(show.table(title, heads, rows))
    console.print(f"Notes: {notes}\nWrote {out}", soft_wrap=True)
    if json is not None:
        show.write_json_file(json, data | {"notes": notes})


def _summary(trace: Synthetic | Trace) -> dict[str, Any]:
    """What the imported trace says, by domain: cycles (None: not told), tau, conditional acceptance [γ]."""
    domains: list[dict[str, Any]] = []
    if isinstance(trace, Synthetic):
        for name, domain in trace.domains.items():
            reach = np.cumprod([1.0, *domain.conditional_acceptance])
            ratio = np.divide(reach[1:], reach[:-1], out=np.full(trace.gamma, np.nan), where=reach[:-1] > 0)
            domains.append({"domain": name, "rows": None, "tau": float(reach.sum()), "conditional": ratio.tolist()})
    else:
        table = acceptance_table(trace)
        parts = {name: trace.domain == d for d, name in enumerate(trace.domains)}
        if len(parts) > 1:
            parts[TOTAL] = np.ones(len(trace), dtype=bool)
        for name, rows in parts.items():
            tau, conditional = float(trace.accepted[rows].mean() + 1), table.loc[table["domain"] == name, "conditional"]
            domains.append({"domain": name, "rows": int(rows.sum()), "tau": tau, "conditional": conditional.tolist()})
    meta = trace if isinstance(trace, Synthetic) else trace.meta
    return {
        "drafter": meta.drafter, "target": meta.target, "kind": meta.kind, "gamma": trace.gamma, "domains": domains,
    }  # fmt: skip
