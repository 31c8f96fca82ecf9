"""The picture of a check on a running engine."""

from __future__ import annotations

import pytest

pytest.importorskip("httpx", reason="the extra live is not installed")

from specsim.live.comparing import Row
from specsim.plots import save_figure
from specsim.plots_live import plot_live


def rows() -> list[Row]:
    found = []
    for load, users in (("closed 2", 2.0), ("closed 4", 4.0), ("poisson 0.5/s", float("nan"))):
        for metric, value in (("throughput", 50.0), ("tpot", 0.02), ("ttft", 0.1), ("speed", 50.0)):
            measured = (value, 1.02 * value, 0.98 * value)
            gate = 0.08 if load == "closed 4" and metric == "tpot" else None
            found.append(Row(load, users, metric, measured, (1.1 * value,) * 3, gate))
    return found


def test_a_panel_a_metric_with_the_errors_above_each_load():
    figure = plot_live(rows(), "vLLM 0.99, tiny", ["a note"])
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "throughput (output tok/s)", "time per output token (ms)", "time to first token (ms)",
    ]  # fmt: skip
    tpot = figure.axes[1]
    assert [label.get_text() for label in tpot.get_xticklabels()] == ["2", "4", "Poisson\n0.5/s"]
    assert [text.get_text() for text in tpot.texts] == ["+10.0 %"] * 3
    # The one beyond its bound stands out.
    assert [text.get_fontweight() for text in tpot.texts] == ["normal", "bold", "normal"]
    assert figure.get_supxlabel() == "a note"


def test_the_same_rows_give_the_same_bytes(tmp_path):
    one, two = (save_figure(plot_live(rows()), tmp_path / name).read_bytes() for name in ("1.png", "2.png"))
    assert one == two


def test_a_single_repetition_has_no_interval(tmp_path):
    single = [Row("closed 2", 2, m, (1.0,), (1.1,)) for m in ("throughput", "tpot", "ttft")]
    assert save_figure(plot_live(single), tmp_path / "one.png").exists()
