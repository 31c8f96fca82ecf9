"""Baselines: the same bytes every time, and one line for whatever is no baseline."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from specsim.baseline import (
    FLOORS,
    METRICS,
    MadeOf,
    fingerprint,
    make_baseline,
    note_floors,
    read_baseline,
    spans,
    write_baseline,
)
from specsim.types import SpecsimError

ROOT = Path(__file__).parents[1]


def table(policies=("NoSpec()", "DSparkAsync()"), loads=(8, 32), seeds=range(3), **changes):
    """A sweep's table in which every number has more digits than are kept."""
    rng = np.random.default_rng(0)
    rows = [
        {"policy": p, "workload": f"closed {load}", "load": load, "seed": seed, "domain": domain}
        | {metric: 100 / 3 + rng.random() for metric in METRICS}
        for p in policies
        for load in loads
        for seed in seeds
        for domain in ("all", "math")
    ]
    return pd.DataFrame(rows).assign(**changes)


def test_written_read_and_written_again_is_the_same(tmp_path):
    made = make_baseline(
        table(),
        floors=[30, 80.5],
        made_of=MadeOf(settings={"gamma": 5, "cv": 1.0}, inputs=[]),
        command="specsim baseline",
    )
    first = write_baseline(tmp_path / "a.json", made)
    second = write_baseline(tmp_path / "b.json", read_baseline(first))
    third = write_baseline(tmp_path / "c.json", read_baseline(second))
    assert first.read_bytes() == second.read_bytes() == third.read_bytes()
    assert read_baseline(first) == made
    assert first.stat().st_size < 4000


def test_numbers_keep_ten_digits_and_gaps_stay_gaps():
    made = make_baseline(table(tau=np.nan, throughput=1234.567890123456))
    assert made.runs[0].throughput == [1234.56789] * 3
    assert made.runs[0].tau == [None] * 3
    assert np.isnan(made.frame()["tau"]).all()
    assert made.frame()["throughput"].tolist() == [1234.56789] * 12


def test_rows_are_of_all_domains_and_in_the_order_of_policies_loads_and_seeds():
    frame = table(policies=("Z()", "A()"), loads=(32, 8))
    made = make_baseline(frame.sample(frac=1, random_state=1).sort_values("policy", ascending=False))
    assert made.policies == ["Z()", "A()"]
    assert [(r.policy, r.load) for r in made.runs] == [("Z()", 8), ("Z()", 32), ("A()", 8), ("A()", 32)]
    assert made.seeds == [0, 1, 2]
    one = frame[(frame["domain"] == "all") & (frame["policy"] == "A()") & (frame["load"] == 8)].sort_values("seed")
    assert made.runs[2].throughput == pytest.approx(one["throughput"].tolist(), rel=1e-9)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (table().drop(columns="tau"), "no column 'tau'"),
        (table(throughput="fast"), "column 'throughput' is"),
        (table(seed=0.5), "column 'seed' is"),
        (table().iloc[:-2], "DSparkAsync() at load 32: expected each of the seeds 0-2 once"),
        (table(workload=["closed 8"] * 12 + ["poisson 8"] * 12), "closed and poisson are mixed"),
        (table().iloc[:0], "no rows"),
    ],
    ids=["missing", "text", "half a seed", "a seed less", "kinds", "empty"],
)
def test_tables_that_are_no_whole_sweep(frame, words):
    with pytest.raises(SpecsimError) as error:
        make_baseline(frame)
    assert words in str(error.value)


def test_results_of_a_sweep_are_read_as_a_baseline(tmp_path):
    frame = table()
    frame.to_parquet(tmp_path / "results.parquet", index=False)
    made = make_baseline(frame)
    assert read_baseline(tmp_path) == read_baseline(tmp_path / "results.parquet") == made
    assert (made.command, made.inputs, made.settings) == ("", [], {})
    assert made.floors == list(FLOORS)
    note_floors(frame, [120, 200.5])  # as pareto does
    frame.to_parquet(tmp_path / "results.parquet", index=False)
    assert read_baseline(tmp_path).floors == [120.0, 200.5]
    for odd in ("120", [], [-1.0], [True]):
        frame.attrs["specsim floors"] = odd
        assert make_baseline(frame).floors == list(FLOORS)
    assert make_baseline(frame, floors=[7]).floors == [7.0]


def broken(**changes):
    data = json.loads(make_baseline(table()).model_dump_json(by_alias=True))
    return json.dumps(data | changes)


RUN = json.loads(broken())["runs"][0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected JSON"),
        (broken()[:400], "expected JSON"),
        ("[]", "schema: expected 'specsim.baseline/1', got None"),
        (broken(schema="specsim.baseline/0"), "'specsim.baseline/0' is of another version of specsim, expected"),
        (broken(schema="specsim.baseline/2"), "run the file's command again"),
        (broken(schema="specsim.profile/1"), "not what specsim baseline wrote"),
        (broken(schema=1), "schema: expected"),
        (broken(speed=1), "speed: is not a known field"),
        (broken(seeds=[]), "seeds: expected at least 1"),
        (broken(seeds=[0, 0, 1]), "seeds: expected whole numbers, 0 or more, each once"),
        (broken(seeds=[0, 1]), "runs.0.throughput: expected 2 numbers, one a seed"),
        (broken(floors=[0]), "floors: expected numbers above 0"),
        (broken(runs=[]), "runs: expected at least 1"),
        (broken(runs=[RUN, RUN]), "runs.1: NoSpec() at load 8 stands here twice"),
        (broken(runs=[RUN | {"load": 0}]), "runs.0.load: expected"),
        (broken(runs=[RUN | {"tau": [1, -1, 1]}]), "runs.0.tau: expected numbers, 0 or more"),
        (broken(runs=[RUN | {"tau": [1, float("nan"), 1]}]), "runs.0.tau.1"),
        (broken(runs=[RUN | {"tau": ["1", 1, 1]}]), "runs.0.tau.0"),
        (broken(runs=[RUN, RUN | {"load": 9, "workload": "poisson 9"}]), "closed and poisson, expected one"),
        (broken().replace('"command"', '"schema"'), "stands twice"),
    ],
    ids=str,
)
def test_files_that_are_no_baseline(tmp_path, text, words):
    path = tmp_path / "base.json"
    path.write_text(text)
    with pytest.raises(SpecsimError) as error:
        read_baseline(path)
    assert str(path) in str(error.value)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_other_things_that_are_no_baseline(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\x93NUMPY\xff\x00")
    (tmp_path / "junk.parquet").write_bytes(b"PAR1 no")
    table().drop(columns="tau").to_parquet(tmp_path / "less.parquet", index=False)
    for name, words in (
        ("binary.json", "expected UTF-8"),
        ("junk.parquet", "expected a results.parquet"),
        ("less.parquet", "no column 'tau'"),
        ("none.json", "cannot read: No such file"),
        ("none.parquet", "none.parquet: cannot read: No such file"),
        (".", "is a folder without results.parquet"),
    ):
        with pytest.raises(SpecsimError) as error:
            read_baseline(tmp_path / name)
        assert words in str(error.value)
        assert str(tmp_path) in str(error.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_read_as_a_file_is(tmp_path):
    """Which can be read but once: compare <(git show main:front.json) front.json."""
    file, pipe = write_baseline(tmp_path / "a.json", make_baseline(table())), tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(file.read_bytes(),), daemon=True)
    writer.start()
    assert read_baseline(pipe) == read_baseline(file)
    writer.join(10)


def test_a_fingerprint_is_of_the_content(tmp_path):
    path = tmp_path / "deep" / "p.json"
    path.parent.mkdir()
    path.write_bytes(b"abc")
    found = fingerprint("--profile", path)
    assert (found.option, found.name) == ("--profile", "p.json")
    assert found.sha256.startswith("ba7816bf8f01cfea")
    with pytest.raises(SpecsimError, match="cannot read"):
        fingerprint("--profile", tmp_path / "none")


def test_spans():
    assert [spans(s) for s in ([], [3], [0, 1, 2], [0, 1, 5, 7, 8])] == ["", "3", "0-2", "0-1, 5, 7-8"]
