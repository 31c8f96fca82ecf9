"""Many runs: policies × workloads × seeds, in parallel, into one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import joblib
import pandas as pd

from specsim.asking import several, told_twice
from specsim.engine import Policy, Scenario, simulate
from specsim.metrics import summarize
from specsim.parallel import side_by_side
from specsim.steady import check_steady
from specsim.types import SLO, SpecsimError


def sweep(
    base: Scenario,
    policy: Sequence[Any] | None = None,
    workload: Sequence[Any] | None = None,
    seeds: Iterable[int] = range(3),
    *,
    slo: SLO | None = None,
    jobs: int = -1,
    progress: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """Run ``base`` under every policy, workload and seed; one row a (policy, workload, seed, domain).

    ``policy`` holds schedulers or Policy pairs, ``workload`` workloads; None keeps the base's own.
    Runs of one seed share their arrivals, lengths and blocks (common random numbers). The table is
    the same whatever ``jobs`` (processes; -1: one a core). ``progress(done, total)`` is called as
    runs end. Columns: policy, workload, load, seed, profile and profile_kind (so that results of analytic profiles
    say so wherever they go), and those of :func:`summarize`.

    Each scheduler that is not specsim's own first answers a few hundred steps of the least load again and again.
    Raises SpecsimError for one that does not answer alike (the table could not be made again), for none or
    twice the same policy, and where a scenario cannot run.
    """
    policies = several("policy", policy) if policy is not None else [base.scheduler]
    workloads = several("workload", workload) if workload is not None else [base.workload]
    seeds = several("seeds", seeds)
    if not policies or not workloads or not seeds:
        raise SpecsimError("expected at least one policy, one workload and one seed")
    if jobs == 0 or jobs < -1:
        raise SpecsimError(f"jobs: expected -1 (one a core), or 1 or more, got {jobs}")
    # A policy on the base's drafter goes by its scheduler alone; another drafter is named too.
    pairs = [p if isinstance(p, Policy) else Policy(p) for p in policies]
    labels = [repr(p) for p in pairs]
    if len(set(labels)) < len(labels):
        twice = next(x for x in labels if labels.count(x) > 1)
        raise SpecsimError(told_twice(twice, [p.scheduler for p in pairs if repr(p) == twice]))
    scenarios = [base.with_policy(p) for p in policies]
    least = min(workloads, key=lambda w: float(w.load))
    cases = [
        (replace(scenario, workload=w), label, seed, slo, w is least and seed == seeds[0])
        for w in workloads
        for scenario, label in zip(scenarios, labels, strict=True)
        for seed in seeds
    ]
    # Few sequences make many steps: the longest runs come first, so that no core is left waiting.
    order = sorted(range(len(cases)), key=lambda i: cases[i][0].workload.load)
    workers = min(joblib.cpu_count() if jobs < 0 else jobs, len(cases))
    tables: list[pd.DataFrame | None] = [None] * len(cases)
    found = side_by_side(_run, (cases[i] for i in order), workers)
    for done, (i, table) in enumerate(zip(order, found, strict=True), start=1):
        tables[i] = table
        if progress is not None:
            progress(done, len(cases))
    frame = pd.concat([t for t in tables if t is not None], ignore_index=True)
    rank = {label: i for i, label in enumerate(labels)}
    frame["_rank"] = frame["policy"].map(rank)
    return frame.sort_values(["_rank", "load", "seed"], kind="stable", ignore_index=True).drop(columns="_rank")


def _run(scenario: Scenario, label: str, seed: int, slo: SLO | None, is_first: bool) -> pd.DataFrame:
    if is_first:  # of its policy
        check_steady(scenario, seed)
    table, workload, profile = summarize(simulate(scenario, seed), slo), scenario.workload, scenario.profile
    head = pd.DataFrame(
        {"policy": label, "workload": workload.label, "load": workload.load, "seed": seed, "profile": profile.name,
         "profile_kind": profile.kind}, index=table.index,
    )  # fmt: skip
    users = workload.load if workload.closed else float("nan")
    head["tps_per_request"] = table["throughput"] * table["gpus"] / users
    return pd.concat([head, table], axis=1)
