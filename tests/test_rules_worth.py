"""The experiment on what each assumption is worth: it runs, and what its README says holds."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "experiments" / "rules_worth" / "worth.py"


@pytest.mark.slow
def test_what_matters_and_what_does_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--seeds", "2", "--json", str(tmp_path / "out.json")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "What each assumption is worth" in capsys.readouterr().out
    rows = {(r["change"], r["users"]): r for r in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert len(rows) == 36
    for users in (64, 128):
        worth = {change: row["throughput"] for (change, n), row in rows.items() if n == users}
        assert 0.08 < worth["drafting costs nothing"] < 0.2
        assert worth["steps of up to 8,192 tokens, past the graphs"] < -0.3
        assert worth["prompts and decodes in steps of their own"] < -0.05
        assert worth["KV for 30,000 tokens"] < -0.1
        assert -0.12 < worth["host time of 2 ms a step"] < -0.05
        assert worth["the same, hidden behind the forward"] > 0.05
        for small in (
            "confidences one step old, not two",
            "newcomers at the mean, not at 1",
            "no padding to captured sizes",
        ):
            assert abs(worth[small]) < 0.01
