"""Pictures of traces: each panel shows the table's numbers, and the same drafter looks the same everywhere."""

import numpy as np
import pandas as pd
import pytest
from conftest import make_blocks
from matplotlib.colors import to_hex
from test_trace_calibration import recorded

from specsim.calibration import calibration_report, reliability_table
from specsim.plots import save_figure
from specsim.plots_trace import FEW, plot_acceptance, plot_reliability, plot_thresholds
from specsim.trace_calibration import calibrate
from specsim.trace_stats import acceptance_table, tau_table, threshold_sweep
from specsim.types import SpecsimError


def reliability(trace):
    done = calibrate(trace)
    return done, [reliability_table(c, done.accepted) for c in (done.before, done.after)]


def legend(figure):
    return [t.get_text() for t in figure.legends[0].get_texts()]


def test_reliability_has_a_panel_a_position_with_the_tables_points():
    done, (before, after) = reliability(recorded())
    figure = plot_reliability(before, after, "Mine")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["first token", "first 2 tokens", "first 3 tokens"]
    assert figure.get_suptitle() == "Mine"
    assert legend(figure) == ["raw", "calibrated (STS)", "perfect", "marker area: share of the blocks"]
    for k, axes in enumerate(figure.axes):
        for table, dots in zip((before, after), axes.collections, strict=True):
            rows = table[table["position"] == k + 1]
            np.testing.assert_allclose(dots.get_offsets(), rows[["predicted", "observed"]])
            np.testing.assert_allclose(dots.get_sizes() / dots.get_sizes().sum(), rows["count"] / rows["count"].sum())
        errors = [calibration_report(c, done.accepted)["ece"][k] for c in (done.before, done.after)]
        assert axes.texts[0].get_text() == f"ECE {errors[0]:.3f} → {errors[1]:.3f}"


def test_no_line_goes_through_bins_of_few_blocks():
    _, (before, after) = reliability(recorded())
    before = before.assign(count=np.where(before.index % 2, FEW, FEW - 1))
    axes = plot_reliability(before, after).axes[0]
    rows = before[(before["position"] == 1) & (before["count"] >= FEW)]
    _, line, _ = axes.lines
    np.testing.assert_allclose(line.get_xydata(), rows[["predicted", "observed"]])


@pytest.mark.parametrize(("gamma", "rows", "columns"), [(1, 1, 1), (4, 1, 4), (7, 2, 4), (9, 2, 8)])
def test_panels_stand_in_rows_with_numbers_below_and_to_the_left(gamma, rows, columns, tmp_path):
    table = pd.DataFrame(
        {"position": range(1, gamma + 1), "bin": 0, "count": 50, "predicted": 0.5, "observed": 0.25}
    )  # fmt: skip
    figure = plot_reliability(table, table)
    assert len(figure.axes) == gamma
    grid = figure.axes[0].get_gridspec()
    assert (grid.nrows, grid.ncols) == (rows, columns)
    lowest = [axes.get_xlabel() != "" for axes in figure.axes]
    assert lowest == [i + columns >= gamma for i in range(gamma)]
    assert [axes.get_ylabel() != "" for axes in figure.axes] == [i % columns == 0 for i in range(gamma)]
    save_figure(figure, tmp_path / "r.png")  # lays it out: a warning would be an error


def drafters():
    return {"one": recorded(), "none": recorded(seed=1), "two": recorded((5, 5), seed=2)}


def accepted(traces, title=None):
    """The picture of acceptance, with the tables it is of."""
    tables, taus = ({name: table(trace) for name, trace in traces.items()} for table in (acceptance_table, tau_table))
    return plot_acceptance(tables, taus, title), tables, taus


def test_acceptance_has_positions_above_and_tau_below_a_column_a_domain_and_a_line_a_drafter():
    figure, tables, taus = accepted(drafters(), "target")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["a", "b", "", ""]
    assert legend(figure) == ["one", "none", "two"]
    for i, axes in enumerate(figure.axes):
        shown, x, y = ((tables, "position", "conditional"), (taus, "gamma", "tau"))[i // 2]
        for table, line, band in zip(shown.values(), axes.lines, axes.collections, strict=True):
            rows = table[table["domain"] == "ab"[i % 2]]
            np.testing.assert_array_equal(line.get_xydata(), rows[[x, y]])
            ends = set(band.get_paths()[0].vertices[:, 1])
            assert set(rows[f"{y}_low"]) | set(rows[f"{y}_high"]) <= ends
    low, high = figure.axes[0].get_ylim()
    values = pd.concat(tables.values())["conditional"]
    assert low <= values.min() < values.max() < high
    assert list(figure.axes[0].get_xticks()) == [1, 2, 3]
    labels = ["conditional acceptance", "", "tokens a cycle, τ", ""]
    assert [axes.get_ylabel() for axes in figure.axes] == labels


def test_positions_that_few_blocks_reached_are_left_out_of_the_picture():
    figure, *_ = accepted({"d": make_blocks([2] * (FEW - 1) + [0], 3)})
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[1, (FEW - 1) / FEW]]
    assert f"fewer than {FEW} blocks" in figure.legends[0].get_title().get_text()
    figure, *_ = accepted({"d": make_blocks([2] * FEW + [0], 3)})
    assert [x for x, _ in figure.axes[0].lines[0].get_xydata()] == [1, 2, 3]
    assert figure.legends[0].get_title().get_text() == ""


@pytest.mark.parametrize(("length", "columns"), [(1, 4), (20, 2), (45, 1)])
@pytest.mark.parametrize("domains", [(12,), (6, 6)])
def test_the_legend_fits_the_figure(domains, length, columns, tmp_path):
    figure, *_ = accepted({str(i) * length: recorded(domains, rows=20) for i in range(4)})
    save_figure(figure, tmp_path / "a.png")
    legend = figure.legends[0]
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert legend._ncols == columns


def test_a_drafter_without_a_name_is_drawn(tmp_path):
    save_figure(accepted({"": recorded(rows=20), "b": recorded(rows=20)})[0], tmp_path / "a.png")


def test_thresholds_have_rates_above_and_tau_below():
    tables = {name: threshold_sweep(trace, [0, 0.5, 0.9]) for name, trace in drafters().items()}
    figure = plot_thresholds(tables)
    assert len(figure.axes) == 4
    for i, axes in enumerate(figure.axes):
        column = ("token_acceptance_rate", "tau")[i // 2]
        for table, line in zip(tables.values(), axes.lines, strict=True):
            rows = table[table["domain"] == "ab"[i % 2]]
            np.testing.assert_array_equal(line.get_xydata(), rows[["threshold", column]])
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "confidence threshold", "confidence threshold"]
    assert [axes.get_ylabel() for axes in figure.axes] == ["token acceptance rate", "", "tokens a cycle, τ", ""]


def test_a_drafter_without_confidences_keeps_its_colour_free():
    tables = {name: threshold_sweep(trace, [0, 0.9]) for name, trace in drafters().items()}
    full = plot_thresholds(tables)
    part = plot_thresholds(tables | {"none": tables["none"].iloc[:0]})
    assert legend(part) == ["one", "two"]
    colours = [to_hex(line.get_color()) for line in full.axes[0].lines]
    assert [to_hex(line.get_color()) for line in part.axes[0].lines] == [colours[0], colours[2]]


def test_what_serves_any_domain_is_drawn_in_each():
    wild = make_blocks([1, 0, 1, 1] * FEW, 1, domain=["*"] * 4 * FEW)
    figure, *_ = accepted({"one": recorded(), "wild": wild})
    assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == ["a", "b"]
    for axes in figure.axes[:2]:
        np.testing.assert_array_equal(axes.lines[1].get_xydata(), [[1, 0.75]])
    assert accepted({"wild": wild})[0].axes[0].get_title(loc="left") == "any domain"


def test_domains_that_one_drafter_lacks_leave_its_line_out():
    other = make_blocks([1, 0] * FEW, 1, domain=["c"] * 2 * FEW)
    figure, *_ = accepted({"one": recorded(), "other": other})
    assert [len(axes.lines) for axes in figure.axes] == [1] * 6


def test_degenerate_tables_are_drawn_without_a_warning(tmp_path):
    trace = make_blocks([0, 0], 12, proposed=[0, 0])
    save_figure(accepted({"d": trace})[0], tmp_path / "a.png")
    save_figure(plot_thresholds({"d": threshold_sweep(trace, [1.0])}), tmp_path / "t.svg")


def test_files_have_the_same_bytes_twice(tmp_path):
    _, tables = reliability(recorded())
    sweep = {"one": threshold_sweep(recorded(), [0, 0.5])}
    for name, draw in {"r": lambda: plot_reliability(*tables), "t": lambda: plot_thresholds(sweep)}.items():
        one, two = (save_figure(draw(), tmp_path / f"{name}{i}.png").read_bytes() for i in range(2))
        assert one == two


def test_nothing_to_draw_is_named():
    empty = reliability_table(np.empty((0, 1)), np.empty(0, dtype=int))
    with pytest.raises(SpecsimError, match="reliability: no blocks"):
        plot_reliability(empty, empty)
    with pytest.raises(SpecsimError, match="tables: no domain"):
        plot_acceptance({"one": acceptance_table(recorded()).iloc[:0]}, {})
