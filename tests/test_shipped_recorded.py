"""What the recorded SmolLM2 traces and drafters promise: their size, where they come from, and what they show."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from specsim.blocktrace import Trace, read_trace
from specsim.trace_calibration import calibrate
from specsim.trace_stats import acceptance_table, tau_table

ROOT = Path(__file__).parents[1]
DOMAINS = ("chat", "code", "math")
DRAFTERS = ("dspark", "dspark-rnn", "dflash", "eagle3", "mtp", "ngram")
NAMES = [f"{drafter}-{tag}" for drafter in DRAFTERS for tag in ("t1", "t06")] + ["dspark-t0"]
WEIGHTS = ("dspark", "dflash", "eagle3")


@cache
def trace(name: str) -> Trace:
    return read_trace(ROOT / f"traces/smollm2-{name}.parquet")


def tau(name: str, gamma: int) -> dict[str, float]:
    rows = tau_table(trace(name))
    return rows[rows["gamma"] == gamma].set_index("domain")["tau"].to_dict()


def conditional(name: str) -> np.ndarray:
    rows = acceptance_table(trace(name))
    return rows[rows["domain"] == "all"]["conditional"].to_numpy()


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_large_enough_to_use_small_enough_to_ship_and_says_where_it_comes_from(name: str) -> None:
    recorded, meta = trace(name), trace(name).meta
    assert (ROOT / f"traces/smollm2-{name}.parquet").stat().st_size < 5e6
    assert len(recorded) >= 40_000
    assert recorded.domains == DOMAINS
    assert meta.gamma == (1 if name.startswith("mtp") else 7)
    assert meta.temperature == {"t1": 1.0, "t06": 0.6, "t0": 0.0}[name.rpartition("-")[2]]
    assert meta.command.startswith("specsim record ")
    assert "/tmp" not in meta.command
    assert {"specsim", "torch", "transformers"} <= set(meta.versions)
    assert "sha256:" in meta.dataset
    assert meta.seed is not None


def test_no_other_recorded_trace_lies_there() -> None:
    assert {p.stem.removeprefix("smollm2-") for p in (ROOT / "traces").glob("smollm2-*")} == set(NAMES)


@pytest.mark.parametrize("drafter", WEIGHTS)
def test_weights_come_in_shards_that_fit(drafter: str) -> None:
    sizes = [path.stat().st_size for path in (ROOT / "experiments/smollm2" / drafter).glob("*.safetensors")]
    assert 0 < sum(sizes) <= 24e6
    assert max(sizes) < 10e6


def test_dspark_is_ahead_of_dflash_in_every_domain_and_more_so_with_longer_blocks() -> None:
    gaps = {gamma: {d: tau("dspark-t1", gamma)[d] - tau("dflash-t1", gamma)[d] for d in DOMAINS} for gamma in (1, 3, 7)}
    for domain in DOMAINS:
        assert 0 < gaps[1][domain] < gaps[3][domain] < gaps[7][domain]


def test_dflash_decays_where_dspark_and_eagle3_hold() -> None:
    dflash, dspark, eagle3 = (conditional(f"{d}-t1") for d in ("dflash", "dspark", "eagle3"))
    assert (dflash[1:3] < 0.75 * dflash[0]).all()
    for steady in (dspark, eagle3):
        assert (steady[1:3] > 0.95 * steady[0]).all()


@pytest.mark.parametrize("name", ["dspark-t1", "dspark-t06", "dspark-t0"])
def test_confidences_are_calibrated_and_tell_blocks_apart(name: str) -> None:
    assert trace(name).meta.sts is not None
    report = calibrate(trace(name)).report
    overall = report[report["domain"] == "all"]
    assert overall["ece_after"].mean() <= 0.015
    auc = overall["auc_after"].to_numpy()
    assert auc[0] >= (0.69 if name == "dspark-t1" else 0.72)
    assert (np.diff(auc[:6]) > 0).all()
