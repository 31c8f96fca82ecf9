"""Pictures of profiles: the panels show the profile's numbers, and an analytic one is named."""

import numpy as np
import pytest
from conftest import make_profile, staircase

from specsim.marginal import draft_curve, expected_tokens, look_ahead_threshold, next_threshold
from specsim.pareto import pareto
from specsim.plots import plot_load, plot_pareto, save_figure
from specsim.plots_profile import NEVER, plot_profiles
from specsim.sweep import sweep
from specsim.types import SpecsimError

STAIRS = staircase([4, 8, 16], [1.0, 1.5, 4.0], low=[0.9, 1.4, 3.5], high=[1.2, 1.75, 4.5])


def measured(name="one", **fields):
    return make_profile(name=name, kind="measured", draft=None, verify=STAIRS, **fields)


def thresholds(profile, cases=(2, 4), gamma=3):
    found = {}
    for r in cases:
        seconds, expected = draft_curve(profile, r, gamma, 0), expected_tokens(r, gamma)
        found[r] = next_threshold(seconds, expected), look_ahead_threshold(seconds, expected)
    return found


def draw(*profiles, **options):
    named = {p.name: p for p in profiles}
    return plot_profiles(named, {name: thresholds(p) for name, p in named.items()}, **options)


def test_the_curves_are_steps_a_second_and_step_times_with_every_stair():
    speed, time, _ = draw(measured()).axes
    tokens, sps = speed.lines[0].get_data()
    assert set(range(1, 17)) == set(tokens)
    expected = np.select([tokens <= 4, tokens <= 8], [1.0, 1.5], 4.0)
    np.testing.assert_allclose(sps, 1 / expected)
    np.testing.assert_allclose(time.lines[0].get_ydata(), 1e3 * expected)
    assert (speed.get_yscale(), speed.get_xscale(), time.get_yscale()) == ("log", "log", "log")


def test_a_band_spans_what_bounds_the_seconds():
    speed, time, _ = draw(measured(host_seconds=1.0)).axes
    (band,) = time.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((1900, 5500))
    (band,) = speed.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((1 / 5.5, 1 / 1.9))
    assert not draw(make_profile()).axes[0].collections


def test_thresholds_are_drawn_where_the_next_token_costs_something():
    profile = measured()
    *_, pays = draw(profile).axes
    found = thresholds(profile)
    lines = {line.get_label(): line for line in pays.lines if line.get_label().startswith("R =")}
    assert list(lines) == ["R = 2", "R = 4"]
    for r, (one, ahead) in found.items():
        dear = np.flatnonzero(one > 0)
        np.testing.assert_array_equal(lines[f"R = {r}"].get_xdata(), r + dear)
        np.testing.assert_allclose(lines[f"R = {r}"].get_ydata(), np.minimum(ahead[dear], NEVER))
    dots = np.concatenate([c.get_offsets() for c in pays.collections])
    assert [4.0, NEVER] in dots.tolist()  # four sequences: 4·0.5 > 1
    assert [text.get_text() for text in pays.texts] == ["R = 2", "R = 4"]


def test_several_profiles_share_the_panels_and_have_a_legend():
    figure = draw(measured("one"), measured("two"), make_profile(name="three"))
    speed, _, pays = figure.axes
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["one", "two", "three (analytic)"]
    assert len({line.get_color() for line in speed.lines}) == 3
    assert [text.get_text() for text in pays.texts] == ["R = 2", "R = 4"]
    assert not pays.collections  # dots would be three profiles' on top of each other


def test_several_profiles_tell_numbers_of_sequences_apart_by_dash_and_shade():
    pays = draw(measured("one"), measured("two")).axes[2]
    lines = [line for line in pays.lines if line.get_label().startswith("R =")]
    assert [line.get_label() for line in lines] == ["R = 2", "R = 4", "R = 2", "R = 4"]
    assert len({line.get_color() for line in lines}) == 4
    dashes = [line._unscaled_dash_pattern for line in lines]
    assert dashes[0] == dashes[2] != dashes[1] == dashes[3]
    legend = pays.get_legend()
    assert [t.get_text() for t in legend.get_texts()] == ["R = 2", "R = 4"]
    assert [line._unscaled_dash_pattern for line in legend.get_lines()] == dashes[:2]


def test_what_does_not_fit_in_the_kv_cache_is_not_drawn():
    profile = measured(kv_tokens=300)
    found = {r: tuple(np.full(3 * r, np.nan if r > 3 else 0.5) for _ in range(2)) for r in (2, 4)}
    speed, _, pays = plot_profiles({"one": profile}, {"one": found}, context=100).axes
    assert speed.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert [text.get_text() for text in pays.texts] == ["R = 2"]


def test_a_narrow_range_of_times_has_some_ticks(tmp_path):
    figure = draw(make_profile(verify=staircase([4, 8, 16], [0.0016, 0.003, 0.0055]), draft=None))
    save_figure(figure, tmp_path / "p.png")
    for axes in figure.axes[:2]:
        low, high = axes.get_ylim()
        shown = [t.get_text() for t in axes.get_yticklabels() if low <= t.get_position()[1] <= high]
        assert len(shown) == len(set(shown)) >= 3
        assert all(shown)


def test_an_analytic_profile_is_named_below_the_picture():
    line = "profile tiny is analytic: no measurement behind these step times"
    assert draw(make_profile()).get_supxlabel() == line
    assert draw(measured()).get_supxlabel() == ""


def test_fronts_and_loads_of_an_analytic_profile_name_it_too():
    from specsim.engine import Scenario
    from specsim.schedulers import NoSpec
    from specsim.workload import ClosedLoop

    for kind in ("analytic", "measured"):
        base = Scenario(make_profile(kind=kind), ClosedLoop(1, 4, 4, measured=2), None, NoSpec(), prefill="free")
        front = pareto(sweep(base, workload=[ClosedLoop(c, 4, 4, measured=2) for c in (1, 2)], seeds=[0], jobs=1))
        for figure in (plot_pareto(front), plot_load(front, "throughput")):
            assert ("profile tiny is analytic" in figure.get_supxlabel()) == (kind == "analytic")


def test_files_have_the_same_bytes_twice(tmp_path):
    one, two = (save_figure(draw(measured()), tmp_path / f"{i}.png").read_bytes() for i in range(2))
    assert one == two


def test_what_cannot_be_drawn_is_named():
    with pytest.raises(SpecsimError, match="profiles: none given"):
        plot_profiles({}, {})
    with pytest.raises(SpecsimError, match="context: nothing to draw, no step fits at 500 KV tokens"):
        draw(measured(kv_tokens=400), context=500)
    with pytest.raises(SpecsimError, match="num_seqs: expected at most 16"):
        draw(measured(), num_seqs=17)
