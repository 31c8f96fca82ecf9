"""Loads on the command line: what can be asked for, what is told of a run too short to tell, what is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
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
