"""Pictures: what is drawn, and that a file is the same every time or not there at all."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from specsim.crossovers import crossovers
from specsim.pareto import pareto
from specsim.plots import plot_load, plot_pareto, save_figure
from specsim.types import SpecsimError

LOADS = (1, 4, 16, 64)
POLICIES = ("NoSpec()", "MTP1()@mtp1", "DSparkGreedy()")


def sweep(policies=POLICIES, seeds=3, loads=LOADS, kind="closed"):
    """NoSpec leads at heavy loads, DSparkGreedy at light ones; seeds differ by a common percent."""
    rows = []
    for seed in range(seeds):
        for i, policy in enumerate(policies):
            for load in loads:
                y = (1 + 0.01 * seed) * load * (1 + i) * 100 / (1 + load * (0.02 + 0.02 * i))
                rows.append(
                    {
                        "policy": policy,
                        "workload": f"{kind} {load}",
                        "load": float(load),
                        "seed": seed,
                        "domain": "all",
                        "interactivity_p50": y / load,
                        "throughput": y - 15 * load * i,
                        "verified_tokens": 1.0 + 2 * i,
                        "goodput": np.nan,
                    }
                )
    return pd.DataFrame(rows)


def curves(figure):
    """The lines of policies: those drawn through at least two points."""
    return [line for line in figure.axes[0].lines if len(line.get_xdata()) > 2]


def texts(figure):
    return [t.get_text() for t in figure.axes[0].texts]


def legend(figure):
    return [t.get_text() for t in figure.axes[0].get_legend().get_texts()]


def test_pareto_draws_a_curve_a_policy_through_its_points():
    front = pareto(sweep())
    figure = plot_pareto(front)
    assert isinstance(figure, Figure)
    axes = figure.axes[0]
    assert axes.get_xlabel() == "interactivity, median user (tok/s/user)"
    assert axes.get_ylabel() == "throughput (output tok/s per GPU)"
    assert len(curves(figure)) == 3
    for policy, line in zip(front.policies, curves(figure), strict=True):
        points = front.points[front.points["policy"] == policy]
        assert line.get_label() == policy
        assert list(line.get_xdata()) == points["interactivity_p50"].tolist()
        assert list(line.get_ydata()) == points["throughput"].tolist()
    assert legend(figure)[:3] == list(POLICIES)


def test_curves_differ_without_colour():
    figure = plot_pareto(pareto(sweep([f"StaticGamma({i})" for i in range(9)])))
    assert len({line.get_marker() for line in curves(figure)}) == 9
    assert len({str(line._dash_pattern) for line in curves(figure)[:4]}) == 4
    assert len({line.get_color() for line in curves(figure)[:7]}) == 7


def test_bands_cover_the_intervals():
    front = pareto(sweep())
    figure = plot_pareto(front)
    bands = figure.axes[0].patches
    assert len(bands) == 3
    points = front.points[front.points["policy"] == POLICIES[0]]
    highest = (points["throughput"] + points["throughput_ci"]).max()
    lowest = (points["interactivity_p50"] - points["interactivity_p50_ci"]).min()
    assert bands[0].get_xy()[:, 1].max() == pytest.approx(highest)
    assert bands[0].get_xy()[:, 0].min() == pytest.approx(lowest)
    assert figure.axes[0].get_ylim()[1] > highest


def test_floors_are_drawn_and_named_even_beyond_the_curves():
    figure = plot_pareto(pareto(sweep()), floors=iter((50, 900)))
    drawn = [line.get_xdata()[0] for line in figure.axes[0].lines if list(line.get_ydata()) == [0, 1]]
    assert drawn == [50, 900]
    assert {"≥ 50", "≥ 900"} <= set(texts(figure))
    assert figure.axes[0].get_xlim()[1] > 900


def test_outer_points_carry_their_loads():
    figure = plot_pareto(pareto(sweep()))
    assert {"1", "4", "16", "64"} <= set(texts(figure))
    assert "concurrency at that point" in legend(figure)
    assert "requests/s at that point" in legend(plot_pareto(pareto(sweep(kind="poisson"))))


def test_labels_of_floors_that_crowd_go_up_a_row():
    front = pareto(sweep())
    crowded = plot_pareto(front, floors=[24, 20, 22, 70])
    up = {t.get_text(): t.xyann[1] for t in crowded.axes[0].texts if t.get_text().startswith("≥ ")}
    assert up == {"≥ 20": 2, "≥ 22": 12, "≥ 24": 22, "≥ 70": 2}
    apart = plot_pareto(front, floors=[20, 70])
    assert {t.xyann[1] for t in apart.axes[0].texts if t.get_text().startswith("≥ ")} == {2}


def test_labels_of_loads_that_crowd_are_left_out():
    loads = [1000 + i for i in range(40)]
    assert len(texts(plot_pareto(pareto(sweep(POLICIES[:1], loads=loads))))) < 10


def test_crossovers_every_seed_shows_are_ringed():
    note = "best policy at equal concurrency changes"
    figure = plot_pareto(pareto(sweep()))
    rings = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    assert len(rings) == sum(t.startswith("≈") for t in texts(figure)) > 0
    assert note in legend(figure)
    assert note not in legend(plot_pareto(pareto(sweep(POLICIES[:1]))))


def test_a_crossover_that_may_lie_below_every_load_is_not_ringed():
    table = sweep(POLICIES[:2], seeds=2, loads=(1, 4))
    first, second = (table["policy"] == p for p in POLICIES[:2])
    table.loc[first, "throughput"] = 10.0
    for seed, ends in enumerate(([9.9333, 10.9333], [9.9, 10.9])):  # level at 1.2 and at 1.3 users
        table.loc[second & (table["seed"] == seed), "throughput"] = ends
    front = pareto(table)
    assert len(crossovers(front)) == 1
    assert not [t for t in texts(plot_pareto(front)) if t[0] in "≈≤"]
    assert "best policy at equal concurrency changes" not in legend(plot_pareto(front))


def test_load_figure_has_a_log_axis_with_every_load():
    figure = plot_load(pareto(sweep()))
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "4", "16", "64"]
    assert axes.get_xlabel() == "concurrency"
    assert axes.get_ylabel() == "verified tokens per request and cycle"
    assert [list(line.get_ydata()) for line in curves(figure)] == [[1.0] * 4, [3.0] * 4, [5.0] * 4]
    assert legend(figure) == list(POLICIES)


def test_load_figure_of_another_metric_and_one_without_a_label_of_its_own():
    front = pareto(sweep().assign(mine=2.0))
    assert plot_load(front, "throughput").axes[0].get_ylabel() == "throughput (output tok/s per GPU)"
    assert plot_load(front, "mine").axes[0].get_ylabel() == "mine"


def test_metrics_that_cannot_be_drawn_are_named():
    front = pareto(sweep())
    with pytest.raises(SpecsimError, match=r"'speed' is not in the front, expected one of .*throughput"):
        plot_load(front, "speed")
    with pytest.raises(SpecsimError, match="'goodput' has no numbers"):
        plot_load(front, "goodput")


def test_a_domain_is_the_title_unless_one_is_given():
    front = pareto(sweep().assign(domain="math"), domain="math")
    assert plot_pareto(front).axes[0].get_title(loc="left") == "domain: math"
    assert plot_load(front, title="Mine").axes[0].get_title(loc="left") == "Mine"


@pytest.mark.parametrize("table", [sweep(seeds=1, loads=(4,)), sweep(seeds=1).assign(throughput=0.0)])
def test_degenerate_sweeps_are_drawn_without_a_warning(table, tmp_path):
    front = pareto(table)
    save_figure(plot_pareto(front, floors=[20]), tmp_path / "front.png")
    save_figure(plot_load(front, "throughput"), tmp_path / "load.svg")


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PNG", b"\x89PNG")])
def test_files_have_the_same_bytes_twice(tmp_path, suffix, magic):
    front = pareto(sweep())
    one = save_figure(plot_pareto(front, floors=[50]), tmp_path / f"one{suffix}")
    two = save_figure(plot_pareto(front, floors=[50]), tmp_path / "deeper" / f"two{suffix}")
    assert one == tmp_path / f"one{suffix}"
    assert one.read_bytes().startswith(magic)
    assert one.read_bytes() == two.read_bytes()


def test_another_suffix_is_refused_before_anything_is_written(tmp_path):
    for name in ("front.pdf", "front"):
        with pytest.raises(SpecsimError, match=r"expected \.png or \.svg"):
            save_figure(Figure(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_older_file_and_no_half_one(tmp_path, monkeypatch):
    path = tmp_path / "front.png"
    path.write_bytes(b"older")
    figure = Figure()

    def fails(target, **_):
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure, "savefig", fails)
    with pytest.raises(SpecsimError, match=r"front\.png: cannot write: No space left"):
        save_figure(figure, path)
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]
