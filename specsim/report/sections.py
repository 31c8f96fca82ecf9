"""The page's sections on the sweep: what is read off, what happens under load, where all of it is from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from specsim.blocktrace import TOTAL
from specsim.crossovers import crossover_lines
from specsim.pareto import Front, number
from specsim.report import charts, html
from specsim.report.sources import Source

MOST = 10**9
"""The most users, or requests/s, that the page asks GPUs for."""


def read_off(
    front: Front,
    tables: Mapping[str, pd.DataFrame],
    floors: list[float],
    slider: Mapping[str, str],
    demand: float,
    base: str,
) -> str:
    chips = "".join(
        f'<button type="button" data-floor="{f:g}" aria-pressed="false" aria-label="{f:g} tokens per second and user">'
        f"{f:g}</button>"
        for f in floors
        if f <= float(slider["max"])
    )  # fmt: skip
    beyond = f'<p class="hint">{html.text(told)}</p>' if (told := too_fast(front, floors)) else ""
    closed = front.workload == "closed"
    controls = (
        '<div class="controls"><div><label for="floor">Interactivity floor<output id="floor-value" for="floor">'
        f"{slider['value']} tok/s per user</output></label>"
        f'<input type="range" id="floor" min="0" max="{slider["max"]}" step="{slider["step"]}" '
        f'value="{slider["value"]}" aria-describedby="floor-help">'
        f'<div class="chips"><span id="floor-help">The median user gets at least this.</span>{chips}</div>'
        f"{beyond}</div>"
        f'<div><label for="demand">{"Users" if closed else "Requests/s"} to serve</label>'
        f'<input type="number" id="demand" max="{MOST}" value="{demand:.12g}" '
        + ('min="1" step="1" inputmode="numeric" ' if closed else 'min="0" step="any" inputmode="decimal" ')
        + 'aria-describedby="demand-problem"><p class="problem" id="demand-problem" aria-live="polite"></p></div></div>'
        '<p class="verdict" id="verdict" role="status" aria-live="polite"></p>'
    )
    rows = "".join(
        f'<tr id="sold-{i}"><th scope="row"><button type="button" class="name" data-curve="{i}" aria-pressed="false">'
        f"{html.swatch(i)}<span>{html.name(policy)}</span></button>"
        '<span class="tag"></span></th>' + "<td>–</td>" * 5 + "</tr>\n"
        for i, policy in enumerate(front.policies)
    )
    served = "users per GPU" if closed else "requests/s per GPU"
    heads = ("Scheduler", "tok/s per GPU", f"% against {base}", served, "GPUs needed", "TTFT")
    top = "".join(f'<th scope="col">{html.name(head)}</th>' for head in heads)
    sold = (
        '<div class="scroll" tabindex="0" role="region" aria-label="Read off at the floor"><table class="sold"><thead>'
        f"<tr>{top}</tr></thead>\n"
        f"<tbody>{rows}</tbody></table></div>"
    )
    answered = "" if closed else " Requests/s are those answered."
    help_text = (
        "Read off along the lines, straight between neighbouring loads and nothing beyond: ≥ and ≤ mean that the "
        "highest load measured is still faster than the floor, – that none is as fast. GPUs are whole replicas. "
        "TTFT, the time to the first token, is the median and the 90th percentile (p90) at the load read off."
        + answered
    )
    points = front.points.to_dict("records")
    numbers = html.table(
        "The fronts' points, means and half-widths of 95 % intervals",
        ["Scheduler", _load_name(front), "tok/s per GPU", "tok/s per user, median", "of the slowest tenth",
         served, "τ"],
        [
            [p["policy"], f"{p['load']:g}", *(html.number(p.get(c), p.get(f"{c}_ci")) for c in
             (front.y, front.x, "interactivity_p10", "served", "tau"))]
            for p in points
        ],
        names=2,
    )  # fmt: skip
    figure = html.chart(
        "front", "Numbers on the lines are loads. The dashed line is the floor, rings are what is read off there."
    )
    body = (
        f'{controls}\n<div class="split"><div>{figure}{html.details("The points as a table", numbers)}</div>'
        f'<div>{sold}<p class="hint">{html.text(help_text)}</p></div></div>\n'
        f"<h3>At the floors asked for</h3>{_sla(tables, floors)}{_crossovers(front)}"
    )
    return html.section("read-off", "What each scheduler sells", body)


def _sla(tables: Mapping[str, pd.DataFrame], floors: list[float]) -> str:
    """The table that ``specsim pareto --sla`` prints, of all domains; those of each domain when asked for."""

    def one(domain: str, table: pd.DataFrame) -> str:
        rows = [[policy, *part["text"]] for policy, part in table.groupby("policy", sort=False)]
        what = "all domains" if domain == TOTAL else f"domain {domain}"
        caption = f"tok/s per GPU at a floor of tok/s per user, {what}"
        return html.table(caption, ["Scheduler", *(f"≥ {f:g}" for f in floors)], rows, kind="floors")

    whole = one(TOTAL, tables[TOTAL])
    parts = "".join(one(domain, table) for domain, table in tables.items() if domain != TOTAL)
    return whole + (html.details("By domain: its share of the mixed runs", parts) if parts else "")


def _crossovers(front: Front) -> str:
    lines = crossover_lines(front)
    if not lines:
        return ""
    return (
        '<h3>Where another scheduler takes the lead</h3><ul class="said">'
        + "".join(f"<li>{html.text(line)}</li>" for line in lines)
        + "</ul>"
    )


def load_section(front: Front, specs: dict[str, charts.Spec]) -> str:
    metrics = [m for m in ("throughput", "verified_tokens") if front.points[m].notna().any()]
    for metric in metrics:
        specs[metric] = charts.load_chart(front, metric)
    columns = {
        "throughput": "tok/s per GPU", "verified_tokens": "verified tokens a cycle", "tau": "τ",
        "acceptance_rate": "accepted of verified drafts", "waste": "rejected",
    }  # fmt: skip
    rows = [
        [p["policy"], f"{p['load']:g}", *(html.number(p[c], p[f"{c}_ci"]) for c in columns)]
        for p in front.points.to_dict("records")
    ]
    numbers = html.table("By load", ["Scheduler", _load_name(front), *columns.values()], rows, names=2)
    figures = "".join(html.chart(metric) for metric in metrics)
    intro = (
        "τ is tokens produced per request and cycle; verified tokens count the bonus token and the drafts that the "
        "target checked, accepted or not."
    )
    body = f'<p>{intro}</p>{html.key(front.policies)}<div class="grid">{figures}</div>'
    return html.section("load", "Against load", body + html.details("The numbers as a table", numbers))


def latency_section(front: Front, specs: dict[str, charts.Spec]) -> str:
    radios = "".join(
        f'<label><input type="radio" name="quantile" value="{q}"{" checked" if q == "p50" else ""}>{name}</label>'
        for q, name in zip(charts.QUANTILES, ("median", "90th percentile", "99th percentile"), strict=True)
    )
    heads, columns = [], []
    for name, (title, factor, unit) in charts.LATENCIES.items():
        specs[name] = charts.latency_chart(front, name)
        for q in charts.QUANTILES:
            heads.append(f"{title if q == 'p50' else ''} {q}, {unit}".strip())
            columns.append((f"{name}_{q}", factor))
    rows = [
        [p["policy"], f"{p['load']:g}", *(html.number(p.get(c, math.nan), None, factor) for c, factor in columns)]
        for p in front.points.to_dict("records")
    ]
    numbers = html.table(
        "Latency percentiles by load, means over seeds", ["Scheduler", _load_name(front), *heads], rows, names=2
    )
    figures = "".join(html.chart(name) for name in charts.LATENCIES)
    body = (
        f'<fieldset class="radios"><legend>Percentile of the requests</legend>{radios}</fieldset>'
        f'{html.key(front.policies)}<div class="grid three">{figures}</div>'
    )
    return html.section("latency", "Latency", body + html.details("All percentiles as a table", numbers))


def sources_section(found: Sequence[Source]) -> str:
    parts = []
    for source in found:
        rows = "".join(f"<dt>{html.text(term)}</dt><dd>{html.text(said)}</dd>" for term, said in source.rows)
        kind = "analytic" if source.kind == "analytic" else ""
        badge = f'<span class="kind {kind}">{html.text(source.kind)}</span>'
        parts.append(html.fold(html.text(source.heading) + badge, f"<dl>{rows}</dl>"))
    return html.section("sources", "Assumptions, and where every input is from", "\n".join(parts))


def made_section(frame: pd.DataFrame, command: str, read: str, versions: Mapping[str, str]) -> str:
    seeds = ", ".join(str(seed) for seed in sorted(frame["seed"].unique()))
    rows = [
        *([("Numbers", read)] if read else []),
        ("Seeds", f"{seeds}: runs of one seed share arrivals, lengths and blocks, so differences are paired"),
        ("Intervals", "95 %, Student's t over the seeds' means"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    listed = "".join(f"<dt>{html.text(term)}</dt><dd>{html.text(said)}</dd>" for term, said in rows)
    typed = f"<pre><code>{html.text(command)}</code></pre>" if command else ""
    return html.section("made", "How this was made", f"{typed}<dl>{listed}</dl>")


def too_fast(front: Front, floors: Iterable[float]) -> str:
    """Say which of ``floors`` (tok/s/user) no scheduler is fast enough for; nothing where there is none."""
    best = front.points.loc[[front.points[front.x].idxmax()]].to_dict("records")[0]
    above = [f"{floor:,g}" for floor in floors if floor > best[front.x]]
    if not above:
        return ""
    load = amount(best["load"], front.workload == "closed")
    return (
        f"No scheduler is as fast as {' or '.join(above)} tok/s per user: "
        f"the most is {number(best[front.x])}, {best['policy']}'s at {load}."
    )


def amount(load: float, closed: bool) -> str:
    """A load with its unit."""
    return f"{load:g} user{'' if load == 1 else 's'}" if closed else f"{load:g} requests/s"


def _load_name(front: Front) -> str:
    return "Users" if front.workload == "closed" else "Requests/s"
