"""The tables that simulate and pareto print: what a newcomer reads, by plain names, and what it is worth."""

import json
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console
from test_cli import BASE, MTP, SMALL, Run
from test_pareto import sweep

from specsim.cli.tables import GROUPS, gain_tables, sold_tables
from specsim.pareto import pareto, sla_table


def test_simulate_prints_the_main_metrics_by_plain_names_and_all_when_asked(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    code, text, _ = run("simulate", *BASE, *SMALL, "-s", "DSparkAsync", "--json", path)
    assert code == 0
    for label in ("Output token throughput (tok/s/GPU)", "Median TTFT", "P99 TPOT (ms)", "Mean ITL", "tau, τ"):
        assert label in text
    assert "_p50" not in text
    assert len(text.splitlines()) < 30
    assert not [word for word in ("Goodput", "Preemptions", "Mean E2EL") if word in text]
    row = json.loads(path.read_text())["metrics"][0]
    shown = {name for metrics in GROUPS.values() for name, *_ in metrics}
    assert shown == set(row) - {"domain", "steps", "gpus", "extrapolated_steps"}  # none is forgotten
    line = next(line for line in text.splitlines() if "Median E2EL" in line)
    assert line.split()[-4] == f"{1e3 * row['e2e_p50']:.3g}"  # all, math, code, chat
    line = next(line for line in text.splitlines() if "Accepted of" in line)
    assert line.split()[-4] == f"{100 * row['acceptance_rate']:.1f}"
    code, text, _ = run("simulate", *BASE, *SMALL, "-s", "NoSpec", "--all")
    assert code == 0
    assert all(label in text for metrics in GROUPS.values() for _, label, *_ in metrics)


def test_simulate_shows_what_is_there_to_tell(run: Run) -> None:
    text = run("simulate", *BASE, *SMALL, "-s", "NoSpec", "--slo-ttft", "5")[1]
    assert "Goodput" in text
    assert "Accepted of" not in text  # nothing was drafted
    assert "Preemptions" not in text
    short = run("simulate", *BASE, "--closed", "8", "--num-requests", "20", "--output-tokens", "64", "-s", "NoSpec",
                "--prompt-tokens", "32", "--kv-tokens", "256")[1]  # fmt: skip
    assert "Preemptions" in short


def test_pareto_prints_what_is_sold_and_the_paired_gains_of_all_domains_alone(run: Run, tmp_path: Path) -> None:
    code, text, _ = run(
        "pareto", *BASE, "-s", "NoSpec", "-s", "StaticGamma(2)", "-s", "DSparkAsync", "--closed", "2,32",
        "--seeds", "2", "--num-requests", "40", "--output-tokens", "16", "--sla", "100,180", "--jobs", "1",
        "--out", tmp_path,
    )  # fmt: skip
    assert code == 0
    assert text.count("tok/s/GPU at a floor") == 1
    assert "math" not in text
    assert "The same against NoSpec(), paired by seed" in text
    assert "sla.csv (the tables, of every domain)" in text
    table = pd.read_csv(tmp_path / "sla.csv")
    assert set(table["domain"]) == {"all", "math", "code", "chat"}
    told = table[(table["domain"] == "all") & (table["policy"] != "NoSpec()")].dropna(subset=["gain", "gain_ci"])
    assert len(told)
    for row in told.to_dict("records"):
        assert f"{100 * row['gain']:+.1f} ± {100 * row['gain_ci']:.1f} %".replace("-", "−") in text
    other = run("pareto", "--results", tmp_path / "results.parquet", "--base", "DSparkAsync()", "--out", tmp_path)[1]
    assert "The same against DSparkAsync(), paired by seed" in other


def test_the_base_is_named_as_tables_or_schedulers_are_and_seen_to_before_the_runs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = (
        "pareto", *BASE, "-s", "StaticGamma(2)", "-s", f"MTP1@{MTP}", "--closed", "2,32", "--num-requests", "32",
        "--output-tokens", "16", "--sla", "180", "--seeds", "1", "--jobs", "1", "--out", tmp_path,
    )  # fmt: skip
    for base in (f"MTP1@{MTP}", "MTP1()@mtp1"):
        assert "The same against MTP1()@mtp1" in run(*typed, "--base", base)[1]
    results = ("pareto", "--results", tmp_path / "results.parquet", "--sla", "180", "--out", tmp_path, "--base")
    fast = ("pareto", "--results", tmp_path / "results.parquet", "--sla", "9000", "--out", tmp_path)
    assert "note: no gains: what StaticGamma(2) sells at these floors is not known (≥: heavier " in run(*fast)[1]
    assert "The same against StaticGamma(2)" in run(*results, "StaticGamma(gamma=2)")[1]
    monkeypatch.setattr("specsim.cli.run.run_all", lambda *_: pytest.fail("it was simulated first"))
    words = "error: --base: expected one of StaticGamma(2), MTP1()@mtp1, got {!r}\n"
    for base in ("NoSpec", "Nope", "missing.py:Mine"):
        assert run(*typed, "--base", base) == (2, "", words.format(base))
        assert run(*results, base) == (2, "", words.format(base))


def test_pareto_draws_no_results_of_other_options(run: Run, tmp_path: Path) -> None:
    typed = (*BASE, "-s", "StaticGamma(2)", "--closed", "2,32", "--num-requests", "32", "--output-tokens", "16")
    table = tmp_path / "results.parquet"
    assert run("sweep", *typed, "--seeds", "1", "--jobs", "1", "--out", tmp_path)[0] == 0
    drawn = ("pareto", "--results", table, "--out", tmp_path / "drawn")
    assert run(*drawn, *typed)[::2] == (0, "")
    wrong = {
        (*typed, "--seeds", "2"): f"{table}: made with other options: --seeds 1, not 2",
        (*typed, "--gamma", "3"): f"{table}: made with other options: --gamma its default, not 3",
        (*typed, "--closed", "2"): f"{table}: column 'workload': expected ",
        ("--gamma", "3"): "--gamma: the runs of --results are made: expected none of their options, or all, to be ",
        ("--seeds", "1"): "--seeds: the runs of --results are made",
        ("--slo-ttft", "1"): "--slo-ttft: has no meaning with --results, whose goodput is counted already",
    }
    for more, words in wrong.items():
        code, printed, err = run(*drawn, *more)
        assert (code, printed, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"error: {words}")
    frame = pd.read_parquet(table)
    frame.attrs = {}
    frame.to_parquet(table)
    assert run(*drawn, *typed)[2] == f"note: {table} does not tell what it was made from: not all options are checked\n"


def test_a_gain_is_a_bound_where_the_throughput_is_one() -> None:
    curves = {"A": [(1, 100.0, 100.0), (4, 40.0, 200.0)], "B": [(1, 100.0, 110.0), (4, 60.0, 240.0)]}
    sold = sla_table(pareto(sweep(curves, factors=(1, 1.1))), [50, 80, 120])
    (table,) = gain_tables(sold, "A", 80)
    assert [next(iter(column.cells)) for column in table.columns] == ["B", "≥ +30.9 %", "+31.2 ± 0.0 %", "–"]
    of_b = sold[sold["policy"] == "B"].set_index("floor")  # as sla.csv has them
    assert of_b["gain_at_least"].dropna().to_dict() == pytest.approx({50: 0.309}, abs=1e-3)
    assert table.caption == "–: no number to compare there"
    assert gain_tables(sold[sold["policy"] == "A"], "A", 80) == []
    assert gain_tables(sold[sold["floor"] == 120], "A", 80) == []  # nobody sells there, A neither


def test_many_floors_wrap_into_several_tables() -> None:
    """Sixty floors once made columns without width, which showed nothing."""
    curves = {"A": [(1, 100.0, 100.0), (4, 40.0, 200.0)], "B": [(1, 100.0, 110.0), (4, 60.0, 240.0)]}
    front = pareto(sweep(curves, factors=(1, 1.1)))
    sold = sla_table(front, [30.0 + k for k in range(60)])
    for tables in (sold_tables(front, sold, 80), gain_tables(sold, "A", 80)):
        assert len(tables) > 5
        text = ""
        for table in tables:
            console = Console(width=80, markup=False, file=StringIO())
            console.print(table)
            text += console.file.getvalue()  # type: ignore[attr-defined]
        assert [f"≥ {30 + k}" in text for k in range(60)] == [True] * 60
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= 80
    assert len(sold_tables(front, sold, 10)) == 60  # one floor at least
