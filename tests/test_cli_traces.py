"""calibrate and trace compare as typed: what they print, write and draw, and one line for each mistake."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_blocks
from test_trace_calibration import recorded

from specsim.acceptance import load_trace
from specsim.blocktrace import read_trace, write_trace
from specsim.plots_trace import FEW
from specsim.trace_calibration import calibrate
from specsim.trace_stats import acceptance_table, calibration_table, sample, tau_table, threshold_sweep

ROOT = Path(__file__).parents[1]
DSPARK, EAGLE, MTP = (ROOT / "traces" / f"{name}.json" for name in ("qwen3-4b-dspark", "qwen3-4b-eagle3", "mtp1"))


# calibrate


def test_calibrate_writes_prints_and_draws(run, tmp_path):
    path = write_trace(recorded(), tmp_path / "t.parquet", dtype="float16")
    raw = read_trace(path)
    out, json_path, picture = (tmp_path / name for name in ("new/out.parquet", "c.json", "c.png"))
    code, text, err = run("calibrate", path, "--out", out, "--picture", picture, "--json", json_path, "--seed", 4)
    assert (code, err) == (0, "")
    done = calibrate(raw, seed=4)
    again = read_trace(out)
    assert again.meta == done.trace.meta
    assert (again.confidence == raw.confidence).all()
    assert pq.read_schema(out).field("confidence").type == pa.list_(pa.float16(), 3)  # as it was
    data = json.loads(json_path.read_text())
    assert data["temperatures"] == list(done.trace.meta.sts)
    assert data["responses"] == {"fitted": 9, "held_out": 9}
    assert pd.DataFrame(data["report"])["ece_after"].tolist() == done.report["ece_after"].tolist()
    assert sum(row["count"] for row in data["reliability"]["after"]) == 3 * data["held_out_blocks"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    overall = done.report[done.report["domain"] == "all"]
    mean = next(line.split() for line in text.splitlines() if line.split()[:1] == ["mean"])
    assert mean[6] == f"{overall['ece_before'].mean():.4g}"
    assert mean[7] == f"{overall['ece_after'].mean():.4g}"
    assert {"all", "a", "b"} <= {line.split()[0] for line in text.splitlines() if line.strip()}


def test_calibrate_may_write_over_its_input_and_gives_the_same_bytes(run, tmp_path):
    path = write_trace(recorded(), tmp_path / "t.parquet")
    other = tmp_path / "other.parquet"
    assert run("calibrate", path, "--out", other)[0] == 0
    assert run("calibrate", path, "--out", path)[0] == 0
    assert path.read_bytes() == other.read_bytes()
    assert run("calibrate", path, "--out", path)[0] == 0
    assert path.read_bytes() == other.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.parquet", "t.parquet"]


def test_mistakes_of_calibrate_are_one_line_and_leave_nothing(run, tmp_path):
    path = write_trace(recorded(rows=5), tmp_path / "t.parquet")
    bare = write_trace(make_blocks([0, 1], 2, confidence=None), tmp_path / "bare.parquet")
    synthetic = tmp_path / "s.json"
    synthetic.write_text("{}")
    out = tmp_path / "out.parquet"
    for arguments, words in [
        ((bare, "--out", out), "bare.parquet: column 'confidence': null, expected confidences"),
        ((synthetic, "--out", out), "s.json: expected a block trace (parquet), got JSON"),
        ((tmp_path / "no.parquet", "--out", out), "no.parquet: cannot read"),
        ((path, "--out", tmp_path), "--out: expected a file name, got the folder"),
        ((path, "--out", out, "--picture", "c.pdf"), "--picture: c.pdf: expected a name that ends in .png or .svg"),
        ((path, "--out", out, "--fit-share", "1"), "--fit-share: expected a number between 0 and 1, got 1"),
        ((path, "--out", out, "--seed", "-1"), "--seed"),
        ((path,), "--out"),
    ]:
        code, text, err = run("calibrate", *arguments)
        assert (code, text) == (2, ""), arguments
        assert words in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert not out.exists()


def test_calibrate_writes_over_its_input_by_out_alone(run, tmp_path):
    path = write_trace(recorded(rows=5), tmp_path / "t.parquet")
    link = tmp_path / "link.png"
    link.symlink_to(path)
    old, out, picture = path.read_bytes(), tmp_path / "new/d.parquet", tmp_path / "new/e.png"
    for flags, words in [
        (("--out", out, "--json", path), f"--json: {path}: is the input TRACE, expected another path"),
        (("--out", path, "--json", path), f"--json: {path}: is also written by --out, expected another path"),
        (("--out", out, "--picture", link), f"--picture: {link}: is the input TRACE"),
        (("--out", picture, "--picture", picture), f"--picture: {picture}: is also written by --out"),
        (("--out", out, "--json", tmp_path / "new/../new/d.parquet"), "--json"),
    ]:
        code, text, err = run("calibrate", path, *flags)
        assert (code, text, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"error: {words}")
        assert path.read_bytes() == old
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("verb", ["calibrate", "trace compare"])
def test_help_has_an_example(run, verb):
    code, text, _ = run(*verb.split(), "--help")
    assert code == 0
    assert f"Example: specsim {verb} " in " ".join(text.split())


# trace compare


def test_compare_help_says_what_its_picture_leaves_out(run):
    assert f"leaves out positions that fewer than {FEW} blocks reached" in " ".join(
        run("trace", "compare", "--help")[1].replace("│", " ").split()
    )


def lines(text, *start):
    """The first printed row that begins with these words, split."""
    return next(line.split() for line in text.splitlines() if line.split()[: len(start)] == list(start))


def test_compare_prints_writes_and_draws(run, tmp_path):
    one, two = recorded(drafter="one", temperature=0.7), recorded(seed=3, drafter="two", confidence_source="head")
    bare = make_blocks([1] * 36, 2, confidence=None, drafter="bare", domain=["a"] * 36)
    paths = [write_trace(t, tmp_path / f"{i}.parquet") for i, t in enumerate((one, bare, two))]
    out, json_path = tmp_path / "deep/out", tmp_path / "c.json"
    code, text, err = run("trace", "compare", *paths, "--out", out, "--json", json_path, "--thresholds", "0.5,0")
    assert (code, err) == (0, "")
    tau = tau_table(one).set_index(["domain", "gamma"])
    row = lines(text, "one,", "T", "=", "0.7", "3", "18")
    half = tau.loc[("a", 3), "tau_high"] - tau.loc[("a", 3), "tau"]
    assert row[7:10] == [f"{tau.loc[('a', 3), 'tau']:.3f}", "±", f"{half:.3f}"]
    assert lines(text, "bare", "2", "1")[3:] == ["36", "2.000", "–", "2.000"]
    assert (
        lines(text, "two", "b")[2]
        == f"{acceptance_table(two).set_index(['domain', 'position']).loc[('b', 1), 'conditional']:.4g}"
    )
    assert lines(text, "two", "b", "raw")[3] == f"{calibration_table(two).groupby('domain')['ece'].mean()['b']:.4g}"
    assert {p.name for p in out.iterdir()} == {
        "acceptance.csv", "tau.csv", "threshold.csv", "calibration.csv", "acceptance.png", "threshold.png",
    }  # fmt: skip
    sweep = pd.read_csv(out / "threshold.csv")
    assert sweep["drafter"].unique().tolist() == ["one, T = 0.7", "two"]
    assert sorted(sweep["threshold"].unique()) == [0.0, 0.5]
    expected = threshold_sweep(one, [0.0, 0.5])["token_acceptance_rate"]
    assert sweep.loc[sweep["drafter"] == "one, T = 0.7", "token_acceptance_rate"].tolist() == pytest.approx(
        list(expected)
    )
    data = json.loads(json_path.read_text())
    assert data["drafters"]["one, T = 0.7"]["gamma"] == 3
    assert len(data["acceptance"]) == 3 * 3 + 2 * 2 + 3 * 3


def test_compare_applies_temperatures_unless_told_not_to(run, tmp_path):
    path = write_trace(calibrate(recorded()).trace, tmp_path / "t.parquet")
    trace = read_trace(path)
    for flags, state in (((), "calibrated"), (("--raw-confidence",), "raw")):
        _, text, _ = run("trace", "compare", path, *flags)
        expected = calibration_table(trace, not flags).groupby("domain")["ece"].mean()["all"]
        assert lines(text, "d", "all", state)[3] == f"{expected:.4g}"
        assert ("those that temperatures were fitted on" in text) == (not flags)


def test_compare_takes_synthetic_traces(run, tmp_path):
    code, text, _ = run(
        "trace", "compare", DSPARK, EAGLE, MTP, "--out", tmp_path, "--format", "svg", "--thresholds", "0"
    )
    assert code == 0
    assert lines(text, "DSpark", "for", "Qwen3-4B", "math")
    assert (tmp_path / "threshold.svg").exists()
    table = pd.read_csv(tmp_path / "tau.csv").set_index(["drafter", "domain", "gamma"])["tau"]
    assert table["Eagle3 for Qwen3-4B", "chat", 7] == pytest.approx(
        tau_table(sample(load_trace(EAGLE))).set_index(["domain", "gamma"]).loc[("chat", 7), "tau"]
    )


def test_compare_tells_drafters_of_one_name_apart(run, tmp_path):
    paths = [write_trace(recorded(rows=5, seed=s), tmp_path / f"{name}.parquet") for s, name in enumerate("xy")]
    _, text, _ = run("trace", "compare", *paths)
    assert lines(text, "d", "(x)", "3")
    assert lines(text, "d", "(y)", "3")


def test_names_print_as_they_are(run, tmp_path):
    odd = {"drafter": "dspark[v2]", "target": "[red]t", "notes": "n[/b]"}
    trace = replace(recorded(**odd), domains=("a[/b]", ":fire:"))
    path = write_trace(trace, tmp_path / "t.parquet")
    _, text, _ = run("trace", "inspect", path)
    assert "dspark[v2] for [red]t: " in text
    assert "Notes: n[/b]" in text
    assert lines(text, "a[/b]")
    assert lines(text, ":fire:")
    _, text, _ = run("trace", "compare", path)
    assert lines(text, "dspark[v2]", "a[/b]")
    _, text, _ = run("calibrate", path, "--out", tmp_path / "[b]out.parquet")
    assert "dspark[v2] for [red]t, " in text
    assert lines(text, "a[/b]")
    assert f"Wrote {tmp_path}/[b]out.parquet" in text.replace("\n", "")


def test_mistakes_of_compare_are_one_line(run, tmp_path):
    path = write_trace(recorded(rows=5), tmp_path / "t.parquet")
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    for arguments, words in [
        ((path, path), "t.parquet: given twice"),
        ((path, os.path.relpath(path)), "t.parquet: given twice"),
        ((path, "--thresholds", "0.5,2"), "--thresholds: expected numbers in 0..1, separated by commas, got '2'"),
        ((path, "--thresholds", "x"), "--thresholds: expected numbers"),
        ((path, "--format", "pdf"), "--format: expected png or svg, got 'pdf'"),
        ((path, tmp_path / "no.parquet"), "no.parquet: cannot read"),
        ((broken,), "broken.json: drafter: is missing"),
        ((path, "--out", broken / "x"), f"x: cannot write there: {broken} is not a folder"),
        ((path, "--out", path), "t.parquet: is the input TRACES, expected another path"),
        ((broken, path, "--json", path), "--json: " + f"{path}: is the input TRACES"),
        ((tmp_path / "o/tau.csv", "--out", tmp_path / "o"), "o/tau.csv: is the input TRACES"),
        ((path, "--out", tmp_path / "o", "--json", tmp_path / "o/threshold.png"), "is also written by --out"),
        ((), "trace"),
    ]:
        code, text, err = run("trace", "compare", *arguments)
        assert (code, text) == (2, ""), arguments
        assert words.lower() in err.lower()
        assert err.startswith("error: ")
        assert err.count("\n") == 1
