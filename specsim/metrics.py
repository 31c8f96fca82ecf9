"""What a run was worth: latency, throughput and speculation, overall and by domain."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from specsim.types import SLO, Result

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def request_metrics(result: Result) -> pd.DataFrame:
    """The measured requests, with their latencies in seconds beside their counts.

    ttft = first token − arrival; tpot = (finish − first token)/(output_tokens − 1), NaN for a single
    output token; itl = mean gap between emissions (one a cycle, so bursty under speculation);
    e2e = finish − arrival; queue = scheduled − arrival; interactivity = 1/tpot, tok/s/user.
    """
    table = result.requests
    table = table[(table["request_id"] >= result.window.first) & (table["request_id"] < result.window.last)].copy()
    decode = table["finish"] - table["first_token"]
    rest = table["output_tokens"] - 1
    table["ttft"] = table["first_token"] - table["arrival"]
    table["queue"] = table["scheduled"] - table["arrival"]
    table["e2e"] = table["finish"] - table["arrival"]
    table["tpot"] = (decode / rest).where(rest > 0)
    table["itl"] = (decode / table["cycles"]).where(table["cycles"] > 0)
    table["interactivity"] = (1.0 / table["tpot"]).where(table["tpot"] > 0)
    return table


def summarize(result: Result, slo: SLO | None = None) -> pd.DataFrame:
    """One row of metrics for the whole run (domain "all") and one for each domain.

    throughput: output tok/s per GPU inside the window, for a domain its share of the mixed run;
    tau, acceptance_rate and token_acceptance_rate as in the design's terms; verified_tokens: 1 + draft
    tokens verified, per request and cycle; waste: rejected share of verified draft tokens; goodput:
    requests/s that meet every bound of ``slo`` (NaN without one). Latencies are seconds.

    window_s: seconds of the measurement window. In an open loop it is from the first measured arrival to the last
    arrival, as long as they happen to lie apart. Where it is shorter than a measured request is in service on average
    (finish − scheduled), or nothing was emitted in it, throughput, request_rate and goodput are NaN: such a window
    sees a start, no rate. Where it is shorter than the mean e2e they say little: see :func:`window_warning`.
    """
    table = request_metrics(result)
    window = result.window
    served = float((table["finish"] - table["scheduled"]).mean())
    seconds = window.end - window.start
    per_second = 1 / seconds if seconds > 0 and window.tokens.sum() > 0 and not seconds < served else np.nan
    rows = [_row("all", table, result, int(window.tokens.sum()), slo, per_second)]
    for code, domain in enumerate(result.domains):
        part = table[table["domain"] == domain]
        rows.append(_row(domain, part, result, int(window.tokens[code]), slo, per_second))
    return pd.DataFrame(rows if len(result.domains) > 1 else rows[:1])


def window_warning(frame: pd.DataFrame) -> str:
    """A line where runs' measurement windows are too short for rates; "" where none is, or the table does not tell.

    ``frame`` has summarize's columns, a row a run and domain: too short is a window below the mean e2e of its run.
    """
    if "window_s" not in frame.columns or "e2e_mean" not in frame.columns:
        return ""
    runs = frame[frame["domain"] == "all"]
    short = runs[(runs["window_s"] < runs["e2e_mean"]) | runs["throughput"].isna()]
    if short.empty:
        return ""
    worst = short.iloc[int((short["window_s"] / short["e2e_mean"]).to_numpy().argmin())]
    window, life = f"{worst['window_s']:.3g} s", f"{worst['e2e_mean']:.3g} s"
    named = "the measurement window, first measured arrival to last arrival,"
    told = f"{named} lasts {window}, and a request {life} end to end"
    if len(runs) > 1:
        told = f"in {len(short)} of {len(runs)} runs {named} is too short (one lasts {window}, and a request {life})"
    return (
        f"{told}: rates and throughputs say little there, or nothing (–); "
        "more requests (--num-requests) make the window longer"
    )


def meets(table: pd.DataFrame, slo: SLO) -> pd.Series:
    """Which of the requests (with request_metrics' columns) meet every bound; one token has no tpot to miss."""
    good = pd.Series(True, index=table.index)
    if slo.interactivity is not None:
        good &= table["interactivity"].fillna(np.inf) >= slo.interactivity
    if slo.ttft is not None:
        good &= table["ttft"] <= slo.ttft
    if slo.e2e is not None:
        good &= table["e2e"] <= slo.e2e
    return good


def _row(
    domain: str, table: pd.DataFrame, result: Result, tokens: int, slo: SLO | None, per_second: float
) -> dict[str, str | float | int]:
    cycles, verified, accepted = (int(table[c].sum()) for c in ("cycles", "verified", "accepted"))
    good = float(meets(table, slo).sum()) if slo is not None else np.nan
    return {
        "domain": domain,
        "requests": len(table),
        "throughput": tokens * per_second / result.gpus,
        "request_rate": len(table) * per_second,
        "goodput": good * per_second,
        **dict(_spread(table, "interactivity", ("p10", "p50"))),
        **dict(_spread(table, "ttft", ("p50", "p90", "p95", "p99"))),
        **dict(_spread(table, "tpot", ("p50", "p90", "p95", "p99"))),
        **dict(_spread(table, "e2e", ("p50", "p90", "p95", "p99"))),
        "itl_mean": table["itl"].mean(),
        "queue_mean": table["queue"].mean(),
        "tau": (accepted + cycles) / cycles if cycles else np.nan,
        "verified_tokens": (verified + cycles) / cycles if cycles else np.nan,
        "acceptance_rate": accepted / verified if verified else np.nan,
        "token_acceptance_rate": (accepted + cycles) / (verified + cycles) if cycles else np.nan,
        "waste": 1 - accepted / verified if verified else np.nan,
        "preemptions": int(table["preemptions"].sum()),
        "single_token_requests": int((table["output_tokens"] == 1).sum()),
        "steps": result.num_steps,
        "extrapolated_steps": result.extrapolated_steps,
        "gpus": result.gpus,
        "window_s": result.window.end - result.window.start,
    }


def _spread(table: pd.DataFrame, name: str, quantiles: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    values = table[name].dropna().to_numpy()
    yield f"{name}_mean", float(values.mean()) if len(values) else np.nan
    shares = [QUANTILES[q] for q in quantiles]
    levels = np.quantile(values, shares).tolist() if len(values) else [np.nan] * len(shares)
    yield from zip((f"{name}_{q}" for q in quantiles), levels, strict=True)
