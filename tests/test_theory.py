"""Closed forms: mean accepted length, queueing theory, and closed loops worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import TICK, always, draft_cost, make_arrivals, make_profile

from specsim.acceptance import synthetic
from specsim.engine import Scenario, simulate
from specsim.hardware import load_profile
from specsim.metrics import request_metrics, summarize
from specsim.schedulers import NoSpec, StaticGamma
from specsim.types import stream
from specsim.workload import Arrivals, ClosedLoop, Poisson

STEP = 1 + TICK  # seconds of a step of one token


# Mean accepted length


def measured_tau(drafter, scheduler, seeds=6):
    """τ over runs of many cycles, and how many independent cycles stand behind it."""
    cycles = accepted = 0
    for seed in range(seeds):
        arrivals = make_arrivals([0.0] * 20, 4, 400)
        table = simulate(Scenario(make_profile(), arrivals, drafter, scheduler, prefill="free"), seed).requests
        cycles += int(table["cycles"].sum())
        accepted += int(table["accepted"].sum())
    # 8000 tokens a seed out of 65536 positions: now and then two requests read the same ones.
    return (accepted + cycles) / cycles, 0.8 * cycles


def law_of_accepted(chances):
    """Mean and deviation of the draft tokens accepted in a block with these conditional chances."""
    survival = np.cumprod(chances)
    probability = survival * np.append(1 - np.array(chances[1:]), 1.0)  # of exactly 1, 2, ...
    mean = survival.sum()
    return mean, np.sqrt((probability * np.arange(1, len(chances) + 1) ** 2).sum() - mean**2)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.8, 3), (0.5, 5), (0.9, 7), (0.3, 1)])
def test_tau_of_a_constant_acceptance(alpha, gamma):
    tau, cycles = measured_tau(synthetic(alpha, gamma), StaticGamma(gamma))
    _, deviation = law_of_accepted((alpha,) * gamma)
    error = 4 * deviation / np.sqrt(cycles)
    assert error < 0.03 * tau
    assert tau == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), abs=error)


@pytest.mark.parametrize("spread", [{}, {"concentration": 5.0}])
def test_tau_of_any_chances_and_of_a_trimmed_block(spread):
    chances = (0.9, 0.6, 0.8, 0.5)
    drafter = synthetic(chances, **spread)
    for verified in (4, 2):
        tau, cycles = measured_tau(drafter, StaticGamma(verified))
        mean, deviation = law_of_accepted(chances[:verified])
        assert tau == pytest.approx(1 + mean, abs=4 * deviation / np.sqrt(cycles))


# One server: an engine of one seat


def waits(workload, seeds, skip=200, **fields):
    """Mean wait, and share of requests that do not wait, of each seed's run on an engine of one seat."""
    means, idle = [], []
    for seed in seeds:
        work = workload(seed) if callable(workload) else workload
        table = simulate(Scenario(make_profile(), work, max_num_seqs=1, **fields), seed).requests[skip:]
        wait = (table["scheduled"] - table["arrival"]).to_numpy()
        assert (wait >= 0).all()
        means.append(wait.mean())
        idle.append((wait == 0).mean())
    return np.array(means), np.array(idle)


def assert_mean(samples, expected, most_error):
    """The mean of independent runs is the expected one, and the runs are good enough to tell."""
    error = samples.std(ddof=1) / np.sqrt(len(samples))
    assert error < most_error * expected
    assert abs(samples.mean() - expected) < 3.5 * error, (samples.mean(), expected, error)


@pytest.mark.parametrize("load", [0.4, 0.75])
@pytest.mark.parametrize(("prefill", "output"), [("free", 2), ("chunked", 1)])
def test_the_wait_of_m_d_1(load, prefill, output):
    """One step a request: the free prefill's one decode, or the one step of a prompt of one token."""
    workload = Poisson(load / STEP, 2000, 1, output)
    mean, idle = waits(workload, range(10), prefill=prefill)
    assert_mean(mean, load / (2 * (1 - load)) * STEP, 0.05)
    assert_mean(idle, 1 - load, 0.05)  # Poisson arrivals see time averages


def test_the_wait_of_m_d_1_with_many_steps_a_request():
    load, service = 0.6, STEP * 3 + STEP  # a prompt of one token and three decodes
    mean, _ = waits(Poisson(load / service, 1500, 1, 4), range(8))
    assert_mean(mean, load / (2 * (1 - load)) * service, 0.06)


def test_the_wait_of_m_g_1_with_geometric_lengths():
    """Pollaczek and Khinchine with the discrete moments; for long answers this is M/M/1."""
    p, load, n = 1 / 8, 0.6, 1500
    rate = load * p / STEP

    def workload(seed):
        arrival = np.cumsum(stream(seed, "arrivals").exponential(1 / rate, n))
        steps = stream(seed, "lengths").geometric(p, n)
        return make_arrivals(arrival.tolist(), 1, (1 + steps).tolist())  # type: ignore[arg-type]

    mean, idle = waits(workload, range(10), prefill="free")
    second_moment = (2 - p) / p**2 * STEP**2
    expected = rate * second_moment / (2 * (1 - load))
    assert expected == pytest.approx(load / (1 - load) * STEP / p, rel=0.07)  # M/M/1's, less p/2
    assert_mean(mean, expected, 0.06)
    assert_mean(idle, 1 - load, 0.05)


def test_speculation_shortens_the_service_by_tau():
    """All accepted at γ = 3: 1 + 8 tokens take a prefill and two cycles, whose steps hold four tokens."""
    service = STEP + 2 * (1 + 4 * TICK + 0.25)
    load = 0.6
    mean, _ = waits(
        Poisson(load / service, 1500, 1, 9),
        range(8),
        drafter=always(3, 3, cost=draft_cost(0.25)),
        scheduler=StaticGamma(3),
    )
    assert_mean(mean, load / (2 * (1 - load)) * service, 0.06)


# Little's law and utilisation, with a rate that is known


def test_littles_law_holds_for_the_mean_number_in_decode():
    """L from the step table, λ from the workload, W from the request table: three sources, one equation."""
    rate, seeds = 0.5, range(8)
    gap = []
    for seed in seeds:
        run = simulate(Scenario(make_profile(), Poisson(rate, 800, 4, 12), prefill="free"), seed, steps=True)
        span = run.requests["finish"].max()
        number = (run.steps["num_seqs"] * run.steps["duration"]).sum() / span
        sojourn = (run.requests["finish"] - run.requests["scheduled"]).mean()
        gap.append(number - rate * sojourn)
    gap = np.array(gap)
    error = gap.std(ddof=1) / np.sqrt(len(gap))
    assert error < 0.2  # of about seven
    assert number > 5
    assert abs(gap.mean()) < 3.5 * error


# Closed loops by hand


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (5, 9), (40, 2)])
def test_one_user_without_speculation(prompt, output):
    seconds = 1 + prompt * TICK + (output - 1) * STEP
    row = summarize(simulate(Scenario(make_profile(), ClosedLoop(1, prompt, output)))).iloc[0]
    assert row["throughput"] == pytest.approx(output / seconds, rel=1e-9)
    assert row["request_rate"] == pytest.approx(1 / seconds, rel=1e-9)
    assert row["ttft_mean"] == pytest.approx(1 + prompt * TICK, rel=1e-9)
    if output > 1:
        assert row["interactivity_p50"] == pytest.approx(1 / STEP, rel=1e-9)


def test_one_user_whose_every_token_is_accepted():
    # 14 tokens: the first, then 4 + 4 + 4 + 1 in cycles that each hold four tokens and draft for 1/4 s.
    seconds = 1 + 6 * TICK + 4 * (1 + 4 * TICK + 0.25)
    drafter = always(3, 3, cost=draft_cost(0.25))
    row = summarize(simulate(Scenario(make_profile(gpus=2), ClosedLoop(1, 6, 14), drafter, StaticGamma(3)))).iloc[0]
    assert row["throughput"] == pytest.approx(14 / seconds / 2, rel=1e-9)
    assert row["tau"] == 4
    assert row["acceptance_rate"] == 1


def test_one_user_who_thinks():
    seconds = 1 + 4 * TICK + 2 * STEP
    row = summarize(simulate(Scenario(make_profile(), ClosedLoop(1, 4, 3, think_s=7.0, think_cv=0)))).iloc[0]
    # The window opens with an arrival and closes with a finish: of 500 requests, 499 thoughts.
    assert row["throughput"] == pytest.approx(1500 / (500 * seconds + 499 * 7.0), rel=1e-9)


def test_many_users_who_think_are_poisson_arrivals_at_their_rate():
    """A thousand users who think half a minute: no waves, each is served as among requests that come at random."""
    root = Path(__file__).parents[1]
    profile = load_profile(root / "hw_profiles/dsv4-flash-b300-tp4.json")
    users, think = 1024, 30.0
    run = {}
    for name, load in (("users", ClosedLoop(users, think_s=think, measured=3000)), ("random", Poisson(31.0, 3000))):
        table = request_metrics(simulate(Scenario(profile, load, max_num_batched_tokens=1024)))
        gaps = np.diff(table["arrival"])
        run[name] = [
            *table[["ttft", "e2e"]].mean(),
            table["tpot"].quantile(0.9),
            table["ttft"].quantile(0.95),
            gaps.std(),
        ]
        if name == "users":
            assert 1 / gaps.mean() == pytest.approx(users / (think + table["e2e"].mean()), rel=0.02)
    assert run["users"] == pytest.approx(run["random"], rel=0.05)


@pytest.mark.parametrize("users", [2, 7])
def test_users_in_lockstep(users):
    """Free prefill and equal lengths: all decode together, and each round takes the steps of one answer."""
    seconds = 10 * (1 + users * TICK)
    run = simulate(Scenario(make_profile(), ClosedLoop(users, 4, 11), prefill="free"))
    row = summarize(run).iloc[0]
    assert row["tpot_p50"] == pytest.approx(seconds / 10, rel=1e-9)
    # Eleven tokens a user and round; the last round of the 500 may be part full, the window counts whole rounds.
    assert row["throughput"] == pytest.approx(11 * users / seconds, rel=0.01)


def test_recorded_arrivals_far_apart_never_wait():
    work = make_arrivals([0.0, 100.0, 200.0], 4, 4)
    assert isinstance(work, Arrivals)
    table = simulate(Scenario(make_profile(), work, scheduler=NoSpec())).requests
    assert (table["scheduled"] == table["arrival"]).all()
