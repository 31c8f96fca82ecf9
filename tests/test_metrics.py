"""What a run was worth, on a result made by hand, and which part of a run is measured."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from conftest import always, make_arrivals, make_profile

from specsim.acceptance import synthetic
from specsim.engine import Scenario, simulate
from specsim.metrics import meets, request_metrics, summarize, window_warning
from specsim.schedulers import StaticGamma
from specsim.types import SLO, Result, Window
from specsim.workload import ClosedLoop, Empirical, Gamma, Poisson

NAN = float("nan")
COLUMNS = ("domain", "arrival", "scheduled", "first_token", "finish", "output_tokens", "cycles", "verified", "accepted",
           "preemptions")  # fmt: skip
# Requests 1 to 4 are measured. Before them a warm-up request, after them one that did not finish.
ROWS = [
    ("chat", 0.0, 0.0, 99.0, 99.5, 50, 70, 700, 600, 9),
    ("chat", 1.0, 1.5, 2.0, 6.0, 5, 2, 4, 2, 0),
    ("code", 2.0, 2.0, 2.5, 4.5, 9, 4, 12, 6, 1),
    ("chat", 3.0, 4.0, 5.0, 5.0, 1, 0, 0, 0, 2),
    ("code", 4.0, 4.0, 4.5, 7.0, 6, 5, 0, 0, 0),
    ("code", 5.0, 5.0, 5.5, NAN, 50, 30, 300, 30, 7),
]


def result(rows=ROWS, tokens=(7, 14), **fields) -> Result:
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table.insert(0, "request_id", range(len(rows)))
    table["domain"] = pd.Categorical(table["domain"], ["chat", "code"])
    given = {
        "requests": table, "steps": None, "window": Window(1, 5, 1.0, 7.0, np.array(tokens)),
        "domains": ("chat", "code"),
        "gpus": 2, "num_steps": 17, "extrapolated_steps": 3, "label": "made by hand",
    }  # fmt: skip
    return Result(**(given | fields))


def test_latencies_of_the_measured_requests_by_hand():
    table = request_metrics(result())
    assert table["request_id"].tolist() == [1, 2, 3, 4]
    expected = {
        "ttft": [1.0, 0.5, 2.0, 0.5],
        "queue": [0.5, 0.0, 1.0, 0.0],
        "e2e": [5.0, 2.5, 2.0, 3.0],
        "tpot": [1.0, 0.25, NAN, 0.5],  # over the tokens after the first; one token has none
        "itl": [2.0, 0.5, NAN, 0.5],  # over emissions, so not tpot where a cycle yields several tokens
        "interactivity": [1.0, 4.0, NAN, 2.0],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(table[name], values, name)


def test_every_metric_of_the_whole_by_hand():
    row = summarize(result(), SLO(interactivity=2.0, ttft=1.0)).iloc[0]
    expected = {
        "domain": "all",
        "requests": 4,
        "throughput": 21 / 6 / 2,
        "request_rate": 4 / 6,
        "goodput": 2 / 6,
        "interactivity_mean": 7 / 3, "interactivity_p10": 1.2, "interactivity_p50": 2.0,
        "ttft_mean": 1.0, "ttft_p50": 0.75, "ttft_p90": 1.7, "ttft_p95": 1.85, "ttft_p99": 1.97,
        "tpot_mean": 1.75 / 3, "tpot_p50": 0.5, "tpot_p90": 0.9, "tpot_p95": 0.95, "tpot_p99": 0.99,
        "e2e_mean": 3.125, "e2e_p50": 2.75, "e2e_p90": 4.4, "e2e_p95": 4.7, "e2e_p99": 4.94,
        "itl_mean": 1.0,
        "queue_mean": 0.375,
        "tau": 19 / 11,
        "verified_tokens": 27 / 11,
        "acceptance_rate": 0.5,
        "token_acceptance_rate": 19 / 27,
        "waste": 0.5,
        "preemptions": 3,
        "single_token_requests": 1,
        "steps": 17, "extrapolated_steps": 3, "gpus": 2, "window_s": 6.0,
    }  # fmt: skip
    assert set(expected) <= set(row.index)
    for name, value in expected.items():
        assert row[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-12)), name
    unknown = set(row.index) - set(expected)
    assert not unknown, f"say here what these metrics are worth: {unknown}"


def test_metrics_of_a_domain_by_hand():
    table = summarize(result(), SLO(e2e=2.5)).set_index("domain")
    assert table.index.tolist() == ["all", "chat", "code"]
    chat, code = table.loc["chat"], table.loc["code"]
    assert (chat["requests"], code["requests"]) == (2, 2)
    assert chat["throughput"] == pytest.approx(7 / 12)
    assert code["throughput"] == pytest.approx(14 / 12)
    assert (chat["tpot_p50"], code["tpot_p50"]) == (1.0, 0.375)
    assert (chat["tau"], code["tau"]) == (2.0, pytest.approx(15 / 9))
    assert (chat["single_token_requests"], code["single_token_requests"]) == (1, 0)
    assert (chat["goodput"], code["goodput"]) == (pytest.approx(1 / 6), pytest.approx(1 / 6))


@pytest.mark.parametrize("name", ["throughput", "requests", "request_rate", "goodput", "preemptions"])
def test_domains_add_up_to_the_whole(name):
    drafter = synthetic(0.7, 3, concentration=4.0)
    scenario = Scenario(
        make_profile(), ClosedLoop(4, 9, Empirical((1, 6, 20)), measured=80), drafter, StaticGamma(2),
        domains={"a": 1, "b": 2, "c": 1}, kv_tokens=64,
    )  # fmt: skip
    for run in (result(), simulate(scenario)):
        table = summarize(run, SLO(ttft=5.0)).set_index("domain")
        assert table.loc["all", name] > 0
        assert table[name].drop("all").sum() == pytest.approx(table.loc["all", name], rel=1e-12)


def test_a_run_of_one_domain_has_one_row():
    rows = [("chat", *row[1:]) for row in ROWS]
    assert summarize(result(rows, (21,), domains=("chat",)))["domain"].tolist() == ["all"]


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (SLO(), [True, True, True, True]),
        (SLO(interactivity=2.0), [False, True, True, True]),  # one token has no tpot to miss
        (SLO(interactivity=2.1), [False, True, True, False]),
        (SLO(ttft=1.0), [True, True, False, True]),
        (SLO(ttft=0.4), [False] * 4),
        (SLO(e2e=2.5), [False, True, True, False]),
        (SLO(interactivity=1.0, ttft=1.5, e2e=3.0), [False, True, False, True]),
    ],
)
def test_every_bound_of_an_slo_must_be_met(slo, good):
    assert meets(request_metrics(result()), slo).tolist() == good
    assert summarize(result(), slo)["goodput"][0] == pytest.approx(sum(good) / 6)


def test_no_goodput_without_an_slo():
    assert np.isnan(summarize(result())["goodput"][0])


def test_a_run_without_speculation_has_no_acceptance_rate():
    rows = [(*row[:7], 0, 0, 0) for row in ROWS]
    row = summarize(result(rows)).iloc[0]
    assert row["tau"] == 1
    assert row["verified_tokens"] == 1
    assert np.isnan(row[["acceptance_rate", "waste"]].astype(float)).all()


def test_a_run_of_single_tokens_has_no_tpot():
    rows = [(*row[:3], row[3], row[3], 1, 0, 0, 0, 0) for row in ROWS]
    row = summarize(result(rows)).iloc[0]
    assert row["single_token_requests"] == 4
    none = ["tpot_mean", "tpot_p50", "interactivity_mean", "interactivity_p10", "itl_mean", "tau", "verified_tokens"]
    assert np.isnan(row[none].astype(float)).all()
    assert row["ttft_p50"] > 0


def test_a_window_without_time_has_no_rates():
    row = summarize(result(window=Window(1, 5, 3.0, 3.0, np.array([7, 14])))).iloc[0]
    assert np.isnan(row[["throughput", "request_rate", "goodput"]].astype(float)).all()


def test_a_window_shorter_than_a_request_is_warned_of_and_one_shorter_than_its_service_has_no_rates():
    """Measured requests take 3.125 s end to end on average, 2.75 s of it in service."""
    rates = ["throughput", "request_rate", "goodput"]
    for seconds, tokens, has_rates, is_short in (
        (6.0, [7, 14], True, False),
        (3.2, [7, 14], True, False),
        (3.0, [7, 14], True, True),
        (2.7, [7, 14], False, True),
        (1e-7, [7, 14], False, True),
        (6.0, [0, 0], False, True),
        (6.0, [0, 9], True, False),
    ):
        table = summarize(result(window=Window(1, 5, 1.0, 1.0 + seconds, np.array(tokens))), SLO(ttft=1.0))
        assert (table[rates].notna().all().all(), bool(window_warning(table))) == (has_rates, is_short), seconds
        assert table["window_s"].tolist() == pytest.approx([seconds] * 3)
    words = window_warning(summarize(result(window=Window(1, 5, 1.0, 1.5, np.array([7, 14])))))
    assert words.startswith("the measurement window, first measured arrival to last arrival, lasts 0.5 s")
    assert "0.5 s, and a request 3.12 s end to end: rates" in words
    both = pd.concat([summarize(result()), summarize(result(window=Window(1, 5, 1.0, 1.5, np.array([7, 14]))))])
    assert window_warning(both).startswith("in 1 of 2 runs the measurement window")
    assert window_warning(both.drop(columns="window_s")) == ""


# Which part of a run is measured


def emitted_between(run, start, end):
    """Tokens of the steps that ended after ``start`` and not after ``end``."""
    steps = run.steps
    ended = steps["start"] + steps["duration"]
    return steps.loc[(ended > start) & (ended <= end), "emitted"].sum()


@pytest.mark.parametrize(("users", "first", "last"), [(1, 5, 505), (2, 10, 510), (60, 300, 900)])
def test_the_window_of_a_closed_loop(users, first, last):
    workload = ClosedLoop(users, 9, Empirical((1, 3, 8)))
    run = simulate(Scenario(make_profile(), workload, always(1, 2), StaticGamma(1)), steps=True)
    assert (run.window.first, run.window.last) == (first, last)
    measured = run.requests.iloc[first:last]
    assert run.window.start == measured["arrival"].min() == measured["arrival"].iloc[0]
    assert run.window.end == measured["finish"].max()
    assert measured["finish"].notna().all()
    # Load is kept up until the last of them finishes: as many are in the system as there are users.
    arrived_by_then = run.requests["arrival"] <= run.window.end
    still_there = ~(run.requests["finish"] < run.window.end)
    assert (arrived_by_then & still_there).sum() >= users
    # Every token between the edges counts, also those of requests that are not measured.
    assert run.window.tokens.sum() == emitted_between(run, run.window.start, run.window.end)
    assert len(summarize(run)) == 1
    assert summarize(run)["requests"][0] == last - first


def test_a_closed_loop_may_measure_another_number():
    run = simulate(Scenario(make_profile(), ClosedLoop(3, 4, 4, measured=7)))
    assert (run.window.first, run.window.last) == (15, 22)
    assert run.requests["finish"].iloc[15:22].notna().all()


@pytest.mark.parametrize(
    "workload", [Poisson(0.7, 150, 9, Empirical((1, 3, 20))), Gamma(0.7, 3.0, 150, 9, Empirical((1, 3, 20)))]
)
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_window_of_an_open_loop(workload, replicas):
    scenario = Scenario(make_profile(), workload, always(1, 2), StaticGamma(1), replicas=replicas)
    run = simulate(scenario, 2, steps=True)
    arrival = run.requests["arrival"].to_numpy()
    first = int((arrival < 0.1 * arrival[-1]).sum())
    assert 0 < first < 40
    assert (run.window.first, run.window.last) == (first, 150)
    assert (run.window.start, run.window.end) == (arrival[first], arrival[-1])
    assert run.window.tokens.sum() == emitted_between(run, arrival[first], arrival[-1]) > 0
    assert run.requests["finish"].notna().all()  # those that are measured run until they finish
    row = summarize(run).iloc[0]
    assert row["throughput"] == pytest.approx(run.window.tokens.sum() / (arrival[-1] - arrival[first]) / replicas)


def test_the_window_counts_by_domain():
    arrivals = make_arrivals([0.0, 4.0, 8.0, 12.0, 16.0, 20.0], 4, 3, [0, 1, 0, 1, 1, 0], ("x", "y"))
    run = simulate(Scenario(make_profile(), arrivals), steps=True)
    # Request 0 is warm-up. From 4 to 20 s requests 1 to 4 run, alone and to their ends: three tokens each.
    assert (run.window.first, run.window.start, run.window.end) == (1, 4.0, 20.0)
    assert run.window.tokens.tolist() == [3, 9]
    table = summarize(run).set_index("domain")
    assert table["throughput"].tolist() == [12 / 16, 3 / 16, 9 / 16]
    assert table["requests"].tolist() == [5, 2, 3]
