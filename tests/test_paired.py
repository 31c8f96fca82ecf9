"""A against B seed by seed: by hand, against the table of promises, and what cannot be paired."""

import numpy as np
import pandas as pd
import pytest
from conftest import make_profile
from scipy import stats

import specsim as ss

RUNS = {  # throughput by (policy, load): one a seed
    ("A()", 1): [10.0, 12.0, 17.0], ("B()", 1): [8.0, 9.0, 10.0],
    ("A()", 2): [20.0, 20.0, 20.0], ("B()", 2): [40.0, 40.0, 40.0],
    ("A()", 4): [1.0, 2.0, 3.0],
}  # fmt: skip


def table(runs=RUNS):
    rows = [
        {"policy": p, "workload": f"closed {load}", "load": load, "seed": seed, "domain": domain,
         "throughput": v * (1 + (domain == "math")), "interactivity_p50": 100.0 / load}
        for (p, load), values in runs.items() for seed, v in enumerate(values) for domain in ("all", "math")
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_by_hand_and_against_scipy():
    found = ss.paired(table().sample(frac=1, random_state=0), "throughput", "A()", "B()")
    assert found["load"].tolist() == [1, 2]  # what one of them lacks is left out
    first, second = found.itertuples(index=False)
    assert (first.seeds, first.value, first.value_against, first.difference) == (3, 13.0, 9.0, 4.0)
    assert first.ratio == pytest.approx((10 / 8 + 12 / 9 + 17 / 10) / 3)
    low, high = stats.ttest_rel([10, 12, 17], [8, 9, 10]).confidence_interval()
    assert (high - low) / 2 == pytest.approx(first.difference_ci)
    assert (second.difference, second.difference_ci, second.ratio, second.ratio_ci) == (-20, 0, 0.5, 0)
    domain = ss.paired(table(), "throughput", "A()", "B()", domain="math")
    assert domain["difference"].tolist() == [8, -40]


def test_seeds_that_one_lacks_are_left_out_and_one_seed_has_no_interval():
    runs = {("A()", 1): [1.0, 2.0, 3.0], ("B()", 1): [1.0]}
    row = ss.paired(table(runs), "throughput", "A()", "B()").iloc[0]
    assert (row["seeds"], row["value"]) == (1, 1.0)
    assert np.isnan(row["difference_ci"])
    runs = {("A()", 1): [1.0, 2.0], ("B()", 1): [0.0, 1.0]}
    row = ss.paired(table(runs), "throughput", "A()", "B()").iloc[0]
    assert np.isnan(row["ratio"])
    assert row["difference"] == 1


def test_schedulers_stand_for_their_labels():
    mtp = ss.Policy(ss.MTP1(), ss.synthetic(0.7, gamma=1, name="mtp"))
    base = ss.Scenario(make_profile(), ss.ClosedLoop(4, 16, 16, measured=20), ss.synthetic(0.7, gamma=3))
    frame = ss.sweep(base, [ss.StaticGamma(2), mtp], seeds=range(3), jobs=1)
    found = ss.paired(frame, "tau", ss.StaticGamma(2), mtp)
    assert found.equals(ss.paired(frame, "tau", "StaticGamma(2)", "MTP1()@mtp"))
    assert found["difference"].iloc[0] > found["difference_ci"].iloc[0] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("throughput", "A()", "C()"), r"policy: 'C\(\)' is not in the sweep, expected one of A\(\), B\(\)"),
        (("speed", "A()", "B()"), r"no column 'speed', expected (?!.*(speed|policy)).*throughput"),
        (("throughput", "A()", ss.NoSpec()), r"policy: 'NoSpec\(\)' is not in the sweep"),
    ],
)
def test_what_cannot_be_paired(arguments, words):
    with pytest.raises(ss.SpecsimError, match=words):
        ss.paired(table(), *arguments)
    apart = table({("A()", 1): [1.0], ("B()", 2): [1.0]})
    with pytest.raises(ss.SpecsimError, match="have no load and seed in common"):
        ss.paired(apart, "throughput", "A()", "B()")
