"""The ranking of the zoo: it runs, its statistics are what they are called, and what it misleads is misled."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from specsim.acceptance import load_drafter
from specsim.hardware import load_profile

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "zoo"


@pytest.fixture
def rank(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(FOLDER)
    import rank

    yield rank
    for name in ("rank", "heatmap"):
        sys.modules.pop(name, None)


def test_a_quick_ranking_writes_its_tables_and_its_picture(rank, tmp_path, monkeypatch, capsys):
    arguments = ["rank.py", "--quick", "--jobs", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    rank.main()
    out = capsys.readouterr().out
    table = pd.read_csv(tmp_path / "results.csv")
    known = {name for names in rank.GROUPS.values() for name in names}
    assert set(table["policy"]) == known
    assert len(table) == 2 * len(known) - 2  # no softmax on the synthetic trace, no old table of the CPU
    assert (tmp_path / "tables.md").read_text(encoding="utf-8") in out
    assert (tmp_path / "ranking.png").read_bytes().startswith(b"\x89PNG")
    b300 = table[table["setting"] == "B300×4, DSpark"].set_index("policy")["gain_percent"]
    assert b300["DSparkAsync"] == 0
    assert b300["NoSpec"] < -20
    assert b300["Oracle"] > 0
    first = (tmp_path / "results.csv").read_bytes(), (tmp_path / "ranking.png").read_bytes()
    monkeypatch.setattr(sys, "argv", [*arguments[:-1], str(tmp_path / "again")])
    rank.main()
    again = (tmp_path / "again/results.csv").read_bytes(), (tmp_path / "again/ranking.png").read_bytes()
    assert first == again


def test_the_tables_shown_are_those_of_the_results_kept(rank):
    if not (FOLDER / "results.csv").exists():
        pytest.skip("experiments/zoo/results.csv: the whole ranking has not been run here")
    table = pd.read_csv(FOLDER / "results.csv")
    columns = {(setting.name, users) for setting in rank.SETTINGS for users in setting.users}
    assert set(zip(table["setting"], table["users"], strict=True)) == columns
    told = (FOLDER / "tables.md").read_text(encoding="utf-8")
    assert told.endswith(f"\n{rank.winners(table)}\n\n{rank.costs(table)}\n")


def test_numbers_have_a_sign_unless_they_are_none(rank):
    assert [rank.signed(v, 1) for v in (0.04, -0.04, 0.06, -12.34, 0.0)] == ["0.0", "0.0", "+0.1", "−12.3", "0.0"]


def test_one_seed_is_refused(rank, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rank.py", "--seeds", "1"])
    with pytest.raises(SystemExit, match="2"):
        rank.main()
    assert "--seeds: expected 2 or more" in capsys.readouterr().err


def test_differences_are_paired_t_tests(rank):
    rng = np.random.default_rng(0)
    a, b = rng.normal(1.0, 0.2, 9), rng.normal(1.1, 0.2, 9)
    mean, half, p = rank.paired(a - b)
    told = stats.ttest_rel(a, b)
    assert (mean, p) == pytest.approx((np.mean(a - b), told.pvalue))
    low, high = told.confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert rank.paired(np.zeros(4)) == (0.0, 0.0, 1.0)
    assert rank.paired(np.full(4, 0.5)) == (0.5, 0.0, 0.0)


def test_holm_against_its_steps_by_hand(rank):
    p = np.array([0.01, 0.04, 0.03, 0.005])
    np.testing.assert_allclose(rank.holm(p), [0.03, 0.06, 0.06, 0.02])
    rng = np.random.default_rng(1)
    for _ in range(20):
        p = rng.uniform(size=7) ** 3
        left, rejected = sorted(range(7), key=lambda i: p[i]), set()
        while left and p[left[0]] <= 0.05 / len(left):  # the smallest first, until one is not rejected
            rejected.add(left.pop(0))
        assert set(np.flatnonzero(rank.holm(p) <= 0.05)) == rejected


def test_noise_is_called_noise_and_differences_are_not(rank):
    """Runs made up: B is 3 % ahead of the reference on every seed, C equal to it but for noise, NoSpec far behind."""
    rng = np.random.default_rng(2)
    rows = []
    for seed in range(12):
        level = rng.normal(0, 0.2)  # what all policies of a seed share
        for name, gain in ((rank.REFERENCE, 0.0), ("SmartSpec", 0.03), ("LoadBlind", 0.0), ("NoSpec", -0.5)):
            value = 100 * np.exp(level + gain + rng.normal(0, 0.002))
            rows.append({"setting": "x", "users": 1, "policy": name, "seed": seed, "throughput": value,
                         "interactivity_p50": 1.0, "verified_tokens": 1.0})  # fmt: skip
    runs = pd.DataFrame(rows)
    table = rank.ranking(runs, rank.compare(runs)).set_index("policy")
    assert table["noise"].to_dict() == {rank.REFERENCE: True, "SmartSpec": False, "LoadBlind": True, "NoSpec": False}
    assert table.index[table["best"]].tolist() == ["SmartSpec"]
    assert table.index[table["ties_with_best"]].tolist() == ["SmartSpec"]
    assert table.loc["SmartSpec", "gain_percent"] == pytest.approx(3.0, abs=0.4)
    assert table.loc["NoSpec", "behind_best_percent"] == pytest.approx(41.1, abs=0.4)
    backwards = runs.iloc[::-1]
    other = rank.ranking(backwards, rank.compare(backwards)).set_index("policy")
    pd.testing.assert_series_equal(table["gain_percent"], other["gain_percent"][table.index])


def test_what_is_taken_from_a_drafter_is_only_its_calibration(rank):
    recorded = load_drafter(ROOT / "traces/smollm2-dspark-t1.parquet", 5)
    raw, softmax = rank.uncalibrated(recorded).tape(), rank.by_softmax(recorded).tape()
    np.testing.assert_array_equal(raw.confidence, recorded.tape(calibrated=False).confidence)
    np.testing.assert_array_equal(softmax.confidence, recorded.acceptance.draft_prob[:, :5])
    np.testing.assert_array_equal(raw.accepted, recorded.tape().accepted)
    synthetic = load_drafter(ROOT / "traces/qwen3-4b-dspark.json", 5)
    told, sure = synthetic.tape(3), rank.uncalibrated(synthetic).tape(3)
    np.testing.assert_array_equal(told.accepted, sure.accepted)

    def logit(c):
        c = np.clip(c.astype(np.float64), 1e-4, 1 - 1e-4)
        return np.log(c / (1 - c))

    inside = (told.confidence > 0.05) & (told.confidence < 0.95)
    np.testing.assert_allclose(logit(sure.confidence)[inside], 2 * logit(told.confidence)[inside], rtol=1e-2, atol=1e-2)


def test_an_old_table_is_the_old_machines_steps_with_this_ones_drafting(rank):
    setting = replace(rank.SETTINGS[1], budget=512)
    profile, old = (load_profile(ROOT / f"hw_profiles/{name}.json") for name in (setting.profile, setting.stale))
    table = dict(rank.old_table(setting, 64, profile))
    assert max(table) == 512
    drafting = profile.draft.spread(64, 7, True)[64]
    steps = rank.decode_seconds(old, list(table), 640, 64)
    np.testing.assert_allclose(list(table.values()), steps + drafting, atol=1e-6)
