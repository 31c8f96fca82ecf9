"""Fronts against answers worked out by hand and by brute force."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.crossovers import crossover_lines, crossovers
from specsim.pareto import (
    Reading,
    half_width,
    hypervolume,
    interactivity_at,
    pareto,
    sla_table,
    throughput_at,
)
from specsim.types import SpecsimError

T2 = 4.302652729696142  # 97.5 % quantile of Student's t with 2 degrees of freedom
FALLING = [(1, 100.0, 100.0), (2, 80.0, 160.0), (4, 40.0, 240.0)]  # (load, x, y)


def sweep(curves, factors=(1.0,), domain="all", kind="closed"):
    """A sweep's table: each seed is the curve with its y times that seed's factor."""
    rows = [
        {
            "policy": policy,
            "workload": f"{kind} {load}",
            "load": float(load),
            "seed": seed,
            "domain": domain,
            "interactivity_p50": x,
            "throughput": y * factor,
            "goodput": np.nan,
        }
        for seed, factor in enumerate(factors)
        for policy, points in curves.items()
        for load, x, y in points
    ]
    return pd.DataFrame(rows)


def test_points_are_means_with_student_intervals():
    front = pareto(sweep({"A": FALLING}, factors=(0.9, 1.0, 1.1)))
    assert front.points["throughput"].tolist() == pytest.approx([100, 160, 240])
    assert front.points["throughput_ci"].tolist() == pytest.approx([T2 * s / np.sqrt(3) for s in (10, 16, 24)])
    assert front.points["interactivity_p50_ci"].tolist() == [0, 0, 0]
    assert front.points["seeds"].tolist() == [3, 3, 3]
    assert front.points["goodput"].isna().all()
    assert front.points["goodput_ci"].isna().all()
    assert len(front.runs) == 9


def test_values_that_differ_by_rounding_alone_have_no_width():
    assert half_width([0.1 + 0.2, 0.3, 0.3]) == 0
    assert str(Reading(0.3, half_width([0.1 + 0.2, 0.3, 0.3]))) == "0.3 ± 0"
    assert half_width([1.0, 1.0 + 1e-9]) > 0


def test_one_seed_has_no_interval():
    assert pareto(sweep({"A": FALLING})).points["throughput_ci"].isna().all()


def test_a_metric_missing_in_one_seed_is_averaged_over_the_others():
    df = sweep({"A": FALLING[:1]}, factors=(1, 1, 1)).assign(goodput=[2.0, np.nan, 4.0])
    point = pareto(df).points.iloc[0]
    assert point["goodput"] == 3.0
    assert point["goodput_ci"] == pytest.approx(12.706204736 * np.sqrt(2) / np.sqrt(2))  # t with 1 degree


def test_policies_keep_the_order_of_the_sweep_and_loads_rise():
    df = sweep({"Zed()": FALLING[::-1], "Alpha()": FALLING})
    front = pareto(df)
    assert front.policies == ["Zed()", "Alpha()"]
    assert front.points["load"].tolist() == [1, 2, 4, 1, 2, 4]
    assert (front.workload, front.x, front.y) == ("closed", "interactivity_p50", "throughput")


def test_a_domain_is_chosen():
    df = pd.concat([sweep({"A": FALLING}), sweep({"A": [(1, 9.0, 3.0)]}, domain="math")])
    assert pareto(df, domain="math").points["throughput"].tolist() == [3.0]
    assert pareto(df).points["throughput"].tolist() == [100, 160, 240]


def test_throughput_at_a_floor_by_hand():
    front = pareto(sweep({"A": FALLING}, factors=(0.9, 1.0, 1.1)))
    half_way = throughput_at(front, "A", 60)
    assert half_way.value == pytest.approx(200)
    assert half_way.ci == pytest.approx(T2 * 20 / np.sqrt(3))
    assert str(half_way) == "200 ± 50"
    for corner, y in ((100, 100), (80, 160), (40, 240)):
        assert throughput_at(front, "A", corner).value == pytest.approx(y)


def test_nothing_is_read_beyond_the_measured_loads():
    front = pareto(sweep({"A": FALLING}))
    below = throughput_at(front, "A", 30)
    assert np.isnan(below.value)
    assert below.at_least == 240
    assert "highest load" in below.reason
    assert str(below) == "≥ 240"
    above = throughput_at(front, "A", 101)
    assert np.isnan([above.value, above.at_least]).all()
    assert "no load measured" in above.reason
    assert str(above) == "–"


def test_overload_that_bends_the_front_back_does_not_lower_what_is_sold():
    front = pareto(sweep({"A": [(1, 100.0, 100.0), (2, 80.0, 160.0), (4, 40.0, 120.0)]}))
    assert throughput_at(front, "A", 50).value == 160
    assert throughput_at(front, "A", 90).value == 130


def test_interactivity_at_a_throughput_by_hand():
    front = pareto(sweep({"A": FALLING}, factors=(1, 1)))
    assert interactivity_at(front, "A", 200).value == pytest.approx(60)
    assert interactivity_at(front, "A", 200).ci == pytest.approx(0)
    assert interactivity_at(front, "A", 100).value == 100
    light = interactivity_at(front, "A", 50)
    assert (str(light), light.at_least) == ("≥ 100", 100)
    assert "lowest load" in light.reason
    assert str(interactivity_at(front, "A", 300)) == "–"


def test_an_interval_needs_every_seed_to_reach_the_floor():
    df = sweep({"A": FALLING}, factors=(1, 1, 1))
    df.loc[(df["seed"] == 0) & (df["load"] == 1), "interactivity_p50"] = 94.0  # the mean is 98
    reading = throughput_at(pareto(df), "A", 97)
    assert reading.value == pytest.approx(100 + 60 / 18)
    assert np.isnan(reading.ci)


def test_loads_without_numbers_are_not_measured():
    df = sweep({"A": FALLING})
    df.loc[df["load"] == 2, "interactivity_p50"] = np.nan
    assert throughput_at(pareto(df), "A", 70).value == pytest.approx(170)  # straight from load 1 to 4


def test_sla_table_pairs_gains_by_seed():
    # Seeds differ by 10 %, but B is 20 % above A in every one of them.
    better = [(load, x, 1.2 * y) for load, x, y in FALLING]
    front = pareto(sweep({"A": FALLING, "B": better}, factors=(0.9, 1.0, 1.1)))
    table = sla_table(front, floors=[60, 30, 120])
    assert table["policy"].tolist() == ["A"] * 3 + ["B"] * 3
    assert table["floor"].tolist() == [60, 30, 120] * 2
    b = table.set_index(["policy", "floor"]).loc[("B", 60)]
    assert b["throughput"] == pytest.approx(240)
    assert b["ci"] == pytest.approx(T2 * 24 / np.sqrt(3))
    assert (b["gain"], b["gain_ci"]) == pytest.approx((0.2, 0.0))
    assert table["text"].tolist() == ["200 ± 50", "≥ 240", "–", "240 ± 60", "≥ 288", "–"]
    assert table["at_least"].dropna().tolist() == [240, 288]
    assert (table["reason"] != "").tolist() == [False, True, True] * 2
    over_b = sla_table(front, [60], base_policy="B")
    assert over_b["gain"].tolist() == pytest.approx([-1 / 6, 0])


def test_crossover_by_hand():
    a = [(1, 50.0, 10.0), (2, 40.0, 20.0), (4, 30.0, 20.0)]
    b = [(1, 60.0, 5.0), (2, 45.0, 18.0), (4, 23.0, 40.0)]
    table = crossovers(pareto(sweep({"A": a, "B": b}, factors=(1, 1))))
    share = 1 / 11  # 20 = 18 + 22 share
    assert len(table) == 1
    assert table.iloc[0].to_dict() == {
        "load": pytest.approx(2 + 2 * share),
        "load_ci": pytest.approx(0),
        "before": "A",
        "after": "B",
        "interactivity": pytest.approx(45 - 22 * share),
        "throughput": pytest.approx(20),
    }


def lines(**ys):
    return {p: [(load, 1.0, float(v)) for load, v in zip((1, 2, 4), y, strict=False)] for p, y in ys.items()}


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        (lines(A=(50, 50), B=(40, 56), C=(10, 70)), [(1.625, "A", "B"), (1 + 30 / 44, "B", "C")]),
        (lines(A=(10, 10), B=(5, 15), C=(0, 20)), [(1.5, "A", "C")]),  # all three meet, C goes on top
        (lines(A=(10, 10, 10), B=(5, 10, 15)), [(2, "A", "B")]),  # at a measured load
        (lines(A=(10, 10, 10), B=(5, 10, 5)), []),  # they touch
        (lines(A=(10, 10), B=(5, 6, 7)), []),  # A ends, nobody overtook it
        (lines(A=(10, 20), B=(10, 30)), []),  # B leads from the start
        (lines(A=(10, 20)), []),
    ],
)
def test_crossovers_at_corners_and_ends(curves, expected):
    table = crossovers(pareto(sweep(curves)))
    found = list(table[["load", "before", "after"]].itertuples(index=False, name=None))
    assert found == [(pytest.approx(load), before, after) for load, before, after in expected]


def test_a_crossover_some_seeds_do_not_show_has_no_interval():
    df = sweep(lines(A=(10, 10), B=(8, 11)), factors=(1, 1))
    df.loc[(df["seed"] == 1) & (df["policy"] == "B"), "throughput"] -= 1.5  # 6.5 to 9.5: never ahead
    df.loc[(df["seed"] == 0) & (df["policy"] == "B"), "throughput"] += 1.0
    table = crossovers(pareto(df))
    assert table["load"].tolist() == pytest.approx([1.75])
    assert table["load_ci"].isna().all()


@pytest.mark.parametrize(
    ("b_by_seed", "said"),
    [
        (
            [(8, 12), (8, 12)],
            "At 2.5 ± 0 users, B overtakes A in throughput: 10 tok/s/GPU, where B's users get 1 tok/s.",
        ),
        ([(9.9333, 10.9333), (9.9, 10.9)], "At about 1.25 users (from 1 or fewer, the lowest simulated, to 1.88), B"),
        ([(8, 10.1), (8, 10.3)], "At about 3.73 users (from 2.15 to 4 or more, the highest simulated), B"),
        (
            [(6, 10.5), (9.5, 16)],
            "At about 2.23 users (from 1 or fewer, the lowest simulated, to 4 or more, the highest simulated)",
        ),
        ([(8, 9), (8, 15)], "Not every seed shows it: it may be noise."),
    ],
)
def test_a_crossover_is_told_with_what_it_is_worth(b_by_seed, said):
    parts = [sweep(lines_to(4, A=(10, 10), B=b)).assign(seed=seed) for seed, b in enumerate(b_by_seed)]
    (line,) = crossover_lines(pareto(pd.concat(parts)))
    assert said in line
    one = crossover_lines(pareto(sweep(lines_to(4, A=(10, 10), B=(8, 12)), kind="poisson")))
    assert one == ["At 2.5 requests/s, B overtakes A in throughput: 10 tok/s/GPU, where B's users get 1 tok/s."]


def lines_to(last, **ys):
    return {p: [(load, 1.0, float(v)) for load, v in zip((1, last), y, strict=True)] for p, y in ys.items()}


heights = st.lists(st.integers(0, 12), min_size=4, max_size=4)


@settings(deadline=None, max_examples=50)
@given(st.lists(heights, min_size=1, max_size=4))
def test_between_crossovers_the_leader_leads(ys):
    loads = (1, 2, 4, 8)
    curves = {f"P{i}": [(x, 1.0, float(v)) for x, v in zip(loads, y, strict=True)] for i, y in enumerate(ys)}
    table = crossovers(pareto(sweep(curves)))
    edges = [1.0, *table["load"], 8.0]
    assert edges == sorted(edges)
    for i, (low, high) in enumerate(pairwise(edges)):
        leader = table["before"].iloc[i] if i < len(table) else (None if table.empty else table["after"][i - 1])
        for load in np.linspace(low, high, 7):
            at = {p: np.interp(load, loads, [y for _, _, y in c]) for p, c in curves.items()}
            if leader is not None:
                assert at[leader] == pytest.approx(max(at.values()))


def test_hypervolume_by_hand():
    base = [(1, 100.0, 100.0), (2, 50.0, 200.0)]  # 50 x 200 + 50 x 150
    beyond = [(1, 400.0, 70.0)]  # only [0, 100] counts
    table = hypervolume(pareto(sweep({"base": base, "beyond": beyond}, factors=(0.9, 1.1))), "base")
    assert table["policy"].tolist() == ["base", "beyond"]
    assert table["hypervolume"].tolist() == pytest.approx([17_500, 7_000])
    assert table["relative"].tolist() == pytest.approx([1, 0.4])
    assert table["relative_ci"].tolist() == pytest.approx([0, 0])  # paired by seed


def test_hypervolume_fills_a_valley_up_to_the_level_right_of_it():
    # Down to 40 at x = 60, back at 100 where x = 60 - 40 * 60/140, and on to 180 at x = 20.
    valley = [(1, 100.0, 100.0), (2, 60.0, 40.0), (4, 20.0, 180.0)]
    area = hypervolume(pareto(sweep({"A": valley})), "A")["hypervolume"].item()
    back = 60 - 40 * 60 / 140
    assert area == pytest.approx((100 - back) * 100 + (back - 20) * 140 + 20 * 180)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6))
def test_hypervolume_against_brute_force(points):
    curve = [(i + 1, float(x), float(y)) for i, (x, y) in enumerate(points)]
    front = pareto(sweep({"base": [(1, 15.0, 1.0)], "A": curve}))
    area = hypervolume(front, "base").set_index("policy").loc["A", "hypervolume"]
    # A dense walk along the polyline, and at each x the highest point of it not left of x.
    walk = np.concatenate([np.linspace(p[1:], q[1:], 4001) for p, q in pairwise(curve)] or [[curve[0][1:]]])
    xs = (np.arange(3000) + 0.5) * 15 / 3000
    walk = walk[np.argsort(walk[:, 0])]
    highest = np.append(np.maximum.accumulate(walk[::-1, 1])[::-1], 0.0)
    brute = highest[np.searchsorted(walk[:, 0], xs)].sum() * 15 / 3000
    assert area == pytest.approx(brute, rel=0.01, abs=0.3)


def test_bad_tables_are_named():
    df = sweep({"A": FALLING})
    for column in ("policy", "load", "seed", "domain", "workload", "interactivity_p50"):
        with pytest.raises(SpecsimError, match=f"no column '{column}'"):
            pareto(df.drop(columns=column))
    with pytest.raises(SpecsimError, match="no rows"):
        pareto(df.iloc[:0])
    with pytest.raises(SpecsimError, match="domain: 'math' is not in the sweep, expected one of all"):
        pareto(df, domain="math")
    with pytest.raises(SpecsimError, match="closed and poisson are mixed"):
        pareto(pd.concat([df, sweep({"B": FALLING}, kind="poisson")]))
    with pytest.raises(SpecsimError, match="two rows for A at load 1, seed 0"):
        pareto(pd.concat([df, df]))
    with pytest.raises(SpecsimError, match=r"'throughput' is .*expected numbers"):
        pareto(df.assign(throughput="fast"))
    with pytest.raises(SpecsimError, match="'goodput' is empty"):
        pareto(df, y="goodput")
    with pytest.raises(SpecsimError, match="'load' has gaps"):
        pareto(df.assign(load=[1.0, np.nan, 4.0]))


def test_an_unknown_policy_lists_the_known():
    front = pareto(sweep({"A": FALLING, "B": FALLING}))
    for ask in (
        lambda: throughput_at(front, "C", 50),
        lambda: interactivity_at(front, "C", 50),
        lambda: hypervolume(front, "C"),
        lambda: sla_table(front, [50], base_policy="C"),
    ):
        with pytest.raises(SpecsimError, match=r"'C' is not in the front, expected one of .*A.*B"):
            ask()


def test_the_table_given_is_left_as_it_was():
    df = sweep({"B": FALLING[::-1], "A": FALLING})
    before = df.copy()
    pareto(df)
    pd.testing.assert_frame_equal(df, before)


def test_importing_loads_neither_scipy_stats_nor_matplotlib():
    code = "import specsim.pareto, sys; print([m for m in ('scipy.stats', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
