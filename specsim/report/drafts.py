"""The page's section on drafters: how far their blocks survive, and whether their confidences foretell it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specsim.acceptance import Drafter
from specsim.blocktrace import TOTAL, Trace
from specsim.calibration import reliability_table
from specsim.report import charts, html
from specsim.report.sources import ANY
from specsim.synthesis import Synthetic
from specsim.trace_stats import acceptance_table, calibration_table, sample


def drafter_section(i: int, drafter: Drafter, calibrated: bool, specs: dict[str, charts.Spec]) -> str:
    made = isinstance(drafter.acceptance, Synthetic)
    trace = sample(drafter.acceptance) if isinstance(drafter.acceptance, Synthetic) else drafter.acceptance
    name = drafter.name or trace.meta.drafter
    table = acceptance_table(trace)
    table = table[table["position"] <= drafter.gamma]
    if table["domain"].nunique() == 2:  # one domain is all there is
        table = table[table["domain"] != TOTAL]
    table = table.assign(domain=table["domain"].replace({ANY: "any domain", TOTAL: "all domains"}))
    rows = [
        [r["domain"], r["position"], f"{r['reached']:,}", _interval(r, "conditional"), html.number(r["survival"])]
        for r in table.to_dict("records")
    ]
    numbers = html.table(
        f"{name}: acceptance of blocks by position, with 95 % intervals, of those that reached it and of all",
        ["Domain", "Position", "reached it", "accepted", "of all"],
        rows,
        names=2,
    )
    if drafter.gamma > 1:
        specs[f"acceptance-{i}"] = charts.acceptance_chart(table)
        figures = html.key(str(d) for d in table["domain"].unique()) + html.chart(f"acceptance-{i}")
        numbers = figures + html.details("Acceptance as a table", numbers)
    parts = [f"<div>{numbers}</div>"]  # one position makes no curve
    reliability = _reliability(i, name, trace, drafter.gamma, calibrated, specs)
    if reliability:
        parts.append(f"<div>{reliability}</div>")
    note = "Blocks drawn from the trace's parameters: the draw decides the last digits. " if made else ""
    if not reliability:
        note += "The trace has no confidences, so there is no reliability to show."
    heading = f"<h3>{html.text(name)}</h3>"
    layout = "grid" if drafter.gamma > 1 else "stack"  # tables alone take the whole width
    return heading + (f"<p>{html.text(note)}</p>" if note else "") + f'<div class="{layout}">{"".join(parts)}</div>'


def _reliability(i: int, name: str, trace: Trace, gamma: int, calibrated: bool, specs: dict[str, charts.Spec]) -> str:
    """The reliability diagram and its errors by position, of the confidences that schedulers see; "" without any."""
    seen, raw = trace.confidences(calibrated), trace.confidences(calibrated=False)
    if seen is None or raw is None:
        return ""
    accepted = np.minimum(trace.accepted, gamma)
    both = calibrated and trace.meta.sts is not None
    pairs = [("calibrated, as schedulers see them" if both else "as schedulers see them", seen)]
    pairs += [("raw", raw)] if both else []
    tables = [(name, reliability_table(confidence[:, :gamma], accepted)) for name, confidence in pairs]
    if not len(tables[0][1]):
        return ""
    colours = ("var(--s6)", "var(--s5)")
    shapes = ("circle", "square")
    items = "".join(
        f'<li><svg class="swatch" viewBox="0 0 30 12" aria-hidden="true"><g fill="{colour}">{html.OUTLINES[shape]}'
        f"</g></svg><span>{html.text(name)}</span></li>"
        for (name, _), colour, shape in zip(tables, colours, shapes, strict=False)
    )
    report = calibration_table(trace, calibrated)
    if report["domain"].nunique() == 2:  # one domain is all there is
        report = report[report["domain"] != TOTAL]
    rows = [
        ["any domain" if r["domain"] == ANY else r["domain"], r["position"], f"{r['count']:,}",
         *(html.number(r[c], digits=3) for c in ("predicted", "observed", "ece", "auc"))]
        for r in report[report["position"] <= gamma].to_dict("records")
    ]  # fmt: skip
    numbers = html.table(
        f"{name}: survival by position, predicted and observed, calibration error and area under the ROC curve",
        ["Domain", "Position", "blocks", "predicted", "observed", "ECE", "AUC"],
        rows,
        names=2,
    )
    if gamma == 1:  # a diagram of one position is a dot or two
        return numbers
    specs[f"reliability-{i}"] = charts.reliability_chart(tables)
    for label, bins in tables:
        numbers += html.table(
            f"{name}: the diagram's markers, {label}",
            ["First tokens", "blocks", "predicted", "observed"],
            [
                [r["position"], f"{r['count']:,}", html.number(r["predicted"]), html.number(r["observed"])]
                for r in bins.to_dict("records")
            ],
        )
    caption = (
        "Observed (up) against predicted (across) survival of a block's first tokens: on the diagonal confidences are "
        "right. A marker's area is its share of the blocks."
    )
    return (
        f'<ul class="key">{items}</ul>'
        + html.chart(f"reliability-{i}", caption)
        + html.details("Reliability as a table", numbers)
    )


def _interval(row: Mapping[Any, Any], name: str) -> str:
    value, low = row[name], row[f"{name}_low"]
    return html.number(value, value - low if np.isfinite(low) else None)
