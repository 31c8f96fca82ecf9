"""Loads on the command line: what can be asked for, what is told of a run too short to tell, what is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from test_cli import BASE, mistake

Run = Callable[..., tuple[int, str, str]]


def burst(path: Path) -> tuple[object, ...]:
    """Options of recorded arrivals: one request, and, after a hundred seconds of nothing, twenty within 19 ms."""
    arrivals = [0.0, *(100 + 0.001 * i for i in range(20))]
    table = {"arrival_s": arrivals, "prompt_tokens": 64, "output_tokens": 64, "domain": "chat"}
    pd.DataFrame(table).to_parquet(path)
    return (*BASE, "-s", "NoSpec", "--arrivals", path)


def test_a_window_too_short_for_rates_is_told(run: Run, tmp_path: Path) -> None:
    options = burst(tmp_path / "burst.parquet")
    code, text, err = run("simulate", *options, "--json", tmp_path / "r.json")
    assert code == 0
    (row,) = [line.split() for line in text.splitlines() if "Output token throughput" in line]
    assert row[-1] == "–"
    assert err.count("\n") == 1
    assert err.startswith("note: the measurement window")
    assert "lasts 0.019 s" in err
    assert "--num-requests" in err
    assert json.loads((tmp_path / "r.json").read_text())["metrics"][0]["request_rate"] is None
    code, _, err = run("sweep", *options, "--rate", "8,9", "--seeds", 1, "--jobs", 1)
    assert (code, "note: in 2 of 2 runs the measurement window" in err) == (0, True)
    for verb in ("pareto", "baseline", "report"):
        out, twice = tmp_path / f"{verb}.html", ("--seeds", 2, "--jobs", 1)
        assert "error: in 2 of 2 runs the measurement window" in mistake(run, verb, *options, *twice, "--out", out)
        # Of two loads one lasts long enough: told, and drawn.
        code, _, err = run(verb, *options, "--rate", "0.001,0.2", *twice, "--out", out)
        assert (code, "note: in 2 of 4 runs the measurement window" in err) == (0, True), err


@pytest.mark.parametrize("ramp", ["2,20,20", "5,5,3", "1:60:60", "0,8,5"])
def test_a_ramp_may_repeat_a_number_and_begin_at_none(run: Run, ramp: str, tmp_path: Path) -> None:
    arguments = ("--output-tokens", 4, "--prompt-tokens", 4, "--json", tmp_path / "r.json")
    code, _, err = run("simulate", *BASE, "--ramp", ramp, *arguments)
    assert code == 0, err
    assert json.loads((tmp_path / "r.json").read_text())["metrics"][0]["requests"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ramp", "5,1,1e12"), "--ramp: Ramp: expected at most 100,000,000 requests, got about 3e+12"),
        (("--ramp", "5,x,7"), "--ramp: expected START,END,SECONDS such as 1,50,600, got '5,x,7'"),
        (("--ramp", "5,-1,7"), "--ramp: Ramp.end_rate: expected a number of at least 0, got -1.0"),
        (("--ramp", "5,1,nan"), "--ramp: Ramp.duration_s: expected a number above 0"),
        (("--poisson", "1e-300"), "--poisson: expected at least 1e-06 requests/s, got 1e-300"),
        (("--poisson", "1e-12", "--cv", "2"), "--poisson: expected at least 1e-06 requests/s"),
        (("--poisson", "1e-6", "--num-requests", "100000"), "expected the last arrival within 1e+10 s, got 1e+11 s"),
        (
            ("--closed", "1", "--kv-tokens", "10"),
            "KV cache of 0 tokens (--kv-tokens, kv_tokens: 10,",
        ),
        (("--closed", "1", "--steps"), "--steps: has no meaning without --out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_loads_that_cannot_be(run: Run, arguments: tuple[str, ...], words: str) -> None:
    assert words in mistake(run, "simulate", *BASE, *arguments)


def test_a_scenario_file_names_no_other(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('scenario = "b.toml"\nclosed = [1]\n')
    assert f"{path}: scenario: a scenario file reads no other" in mistake(run, "simulate", "--scenario", path)
    path.write_text('out = ""\nclosed = [1]\n')
    assert f"{path}: out: expected a path, got ''" in mistake(run, "simulate", *BASE, "--scenario", path)
    path.write_text('trace = ""\nclosed = [1]\n')
    assert f"{path}: trace: expected a path, got ''" in mistake(run, "simulate", *BASE[:2], "--scenario", path)
    path.write_text('scheduler = ["MTP1@:1"]\nclosed = [1]\n')
    assert "scheduler 'MTP1@:1': expected a trace after @" in mistake(run, "simulate", *BASE, "--scenario", path)


@pytest.mark.parametrize("empty", [("--out", ""), ("--out=",)])
def test_an_empty_path_is_not_this_folder(
    run: Run, empty: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in ("simulate", "pareto", "report", "baseline"):
        assert mistake(run, verb, *BASE, "--closed", "1", *empty) == "error: --out: expected a path, got ''\n"
        assert mistake(run, verb, *BASE, "--profile", "") == "error: --profile: expected a path, got ''\n"
    assert not any(tmp_path.iterdir())


def test_a_run_that_is_stopped_leaves_no_empty_folder(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specsim.cli.run.run_sweep", stop)
    kept = tmp_path / "kept"
    kept.mkdir()
    for out in (kept, tmp_path / "deep" / "out"):
        code, _, _ = run("pareto", *BASE, "--closed", "1", "--out", out, "--json", tmp_path / "more" / "a.json")
        assert code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
