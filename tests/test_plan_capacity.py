"""The search for capacity: against closed forms, against a fine grid, and from wherever it starts."""

import math

import numpy as np
import pytest
from conftest import make_arrivals, make_profile

import specsim as ss
from specsim.capacity import Ask, Case, Trials, find, worst
from specsim.engine import Scenario
from specsim.tiers import parse_tier
from specsim.trial import GROWTH, at_load, demanded, grid, run_trial
from specsim.types import SpecsimError
from specsim.workload import ClosedLoop, Gamma, Poisson, Ramp

SEEDS = (0, 1, 2)


def one_server():
    """One seat, a request a step of one second: M/D/1, which saturates at one request/s."""
    verify = {"type": "table1d", "tokens": [1, 1 << 16], "seconds": [1.0, 1.0], "below": "linear"}
    return Case("server", Scenario(make_profile(verify=verify), Poisson(1.0, 1000, 1, 1), max_num_seqs=1))


def small(workload, **fields):
    """Three-token blocks on a machine of 10 ms and 0.5 ms a token."""
    verify = {"type": "table1d", "tokens": [1, 4096], "seconds": [0.0105, 2.058], "below": "linear"}
    drafter = ss.synthetic(0.7, gamma=3, concentration=2.0)
    return Scenario(make_profile(verify=verify), workload, drafter, max_num_batched_tokens=256, **fields)


def capacity(case, tier, start=4.0, seeds=SEEDS):
    trials = Trials(grid(case.scenario.workload.closed), 1)
    (found,) = trials.drive([find(trials, case, parse_tier(tier), seeds, trials.grid.near(start))])
    return found, trials


def test_the_grid_has_every_user_and_then_steps_of_three_percent():
    users = grid(True, 1000)
    assert users.loads[:34] == tuple(range(1, 35))
    steps = np.diff(users.loads) / users.loads[:-1]
    assert steps[34:].max() < 0.045  # whole numbers of users
    assert [users.loads[r] for r in users.rungs] == [1, 4, 16, 64, 256, 1000]
    rates = grid(False)
    assert np.diff(np.log(rates.loads)).max() < 0.03
    assert [rates.loads[r] for r in rates.rungs][7] == pytest.approx(1.0)


def test_few_requests_sustain_what_many_do():
    """Of a hundred requests a few pile up by chance: taken for a growing queue, they halved the capacity."""
    many, few = (capacity(Case("s", small(Poisson(1.0, n, 16, 64))), "a: tpot<=60ms")[0] for n in (2000, 100))
    assert few.value == pytest.approx(many.value, rel=0.03)
    assert few.binding == many.binding
    assert max(few.by_seed) < 1.05 * min(few.by_seed)


@pytest.mark.parametrize(("mean_time", "load"), [("3s", 0.8), ("1.6s", 6 / 11)])
def test_the_capacity_of_a_single_server_is_pollaczek_khinchines(mean_time, load):
    """Mean time 1 + ρ/(2(1 − ρ)) seconds at ρ requests/s."""
    found, trials = capacity(one_server(), f"a: e2e<={mean_time}@mean")
    assert found.low <= load <= found.high
    assert found.value == pytest.approx(load, rel=0.05)
    assert found.binding.startswith("e2e mean")
    assert len(trials.done) <= 20


def test_a_rate_above_saturation_is_not_sustained_however_short_the_run():
    """A promise of a thousand seconds is kept by a run that is too short to break it: the queue tells."""
    case, lax = one_server(), parse_tier("a: e2e<=1000s@mean")
    trial = run_trial(case.scenario, 1.3, 0)
    assert trial.statistics["e2e_mean"] < 1000
    assert worst(trial, lax) == (pytest.approx(trial.growth / GROWTH), "queue growth")
    assert trial.growth == pytest.approx(1 - 1 / 1.3, abs=0.05)
    assert abs(run_trial(case.scenario, 0.5, 0).growth) < 0.01
    found, _ = capacity(case, "a: e2e<=1000s@mean")
    assert found.binding == "queue growth"
    assert found.value == pytest.approx(1.0, abs=0.06)


def test_a_short_run_is_lengthened_until_its_swings_tell_nothing():
    """50 requests of a stable queue pile up by chance; of recorded ones there are no more."""
    trial = run_trial(small(Poisson(1.0, 50, 16, 64)), 4.0, 0)
    assert not trial.short
    assert abs(trial.growth) < GROWTH
    assert trial.requests > 200
    assert run_trial(small(make_arrivals([k / 4 for k in range(50)], 16, 64)), 4.0, 0).short


WORKLOADS = {
    "users": (small(ClosedLoop(1, 16, 48, measured=60), scheduler=ss.StaticGamma(2)), "a: interactivity>=60@p50"),
    "users of many lengths": (
        small(ClosedLoop(1, ss.workload.LogNormal(24, 1.0), ss.workload.LogNormal(40, 0.7), measured=80),
              scheduler=ss.DSparkAsync()),
        "a: interactivity>=50@p10, ttft<=200ms@p95",
    ),
    "requests": (small(Poisson(1.0, 300, 16, 32), scheduler=ss.DSparkGreedy()), "a: interactivity>=50@p10, ttft<=1s"),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_capacity_lies_within_its_interval_of_a_fine_grid_search(name):
    scenario, text = WORKLOADS[name]
    tier = parse_tier(text)
    found, trials = capacity(Case(name, scenario), text)
    assert len(trials.done) <= 24
    near = [i for i, load in enumerate(trials.grid.loads) if 0.6 * found.value <= load <= 1.5 * found.value]
    if scenario.workload.closed:
        loads = range(int(trials.grid.loads[near[0]]), int(trials.grid.loads[near[-1]]) + 1)
    else:
        loads = np.geomspace(trials.grid.loads[near[0]], trials.grid.loads[near[-1]], 20)
    best = []
    for seed in SEEDS:
        kept = [load for load in loads if worst(run_trial(scenario, load, seed), tier)[0] <= 1]
        best.append(max(kept))
    step = 1 if scenario.workload.closed else found.value * 0.05
    assert found.low - step <= np.mean(best) <= found.high + step
    assert found.low <= found.value <= found.high
    assert found.value == pytest.approx(np.mean(best), abs=step)  # the very seeds: closer than the interval


@pytest.mark.parametrize("name", WORKLOADS)
def test_where_the_search_starts_does_not_matter(name):
    scenario, text = WORKLOADS[name]
    values = {capacity(Case(name, scenario), text, start, seeds=(0, 1))[0].by_seed for start in (1, 4, 64)}
    assert len(values) == 1


def test_more_seeds_share_trials_and_searches_do_too():
    scenario, text = WORKLOADS["users"]
    case, trials = Case("users", scenario), Trials(grid(True), 1)
    searches = [find(trials, case, parse_tier(text), (0,), trials.grid.near(16)) for _ in range(3)]
    alone = Trials(grid(True), 1)
    alone.drive([find(alone, case, parse_tier(text), (0,), alone.grid.near(16))])
    assert len({c.value for c in trials.drive(searches)}) == 1
    assert len(trials.done) == len(alone.done) <= 12


def test_an_infeasible_tier_says_what_is_nearest():
    scenario, _ = WORKLOADS["users"]
    found, trials = capacity(Case("users", scenario), "a: interactivity>=5000@p10, ttft<=1ms@p95")
    assert not found.feasible
    one = trials(Ask(found.case, 0, 0)).statistics
    assert f"interactivity p10 {one['interactivity_p10']:.3g}"[:20] in found.nearest
    assert "ttft p95" in found.nearest
    scenario, _ = WORKLOADS["requests"]
    found, trials = capacity(Case("requests", scenario), "a: interactivity>=5000@p10")
    assert not found.feasible
    assert found.nearest.startswith("interactivity p10")
    assert min(t.in_system for t in trials.done.values()) < 0.1


def test_a_tier_that_any_load_keeps_is_told_to_hold_at_least_so_many():
    scenario, _ = WORKLOADS["users"]
    case, trials = Case("users", scenario), Trials(grid(True, 8), 1)
    (found,) = trials.drive([find(trials, case, parse_tier("a: interactivity>=1"), (0, 1), 0)])
    assert found.at_least
    assert found.value == 8


def test_a_load_that_the_profile_cannot_price_ends_the_search():
    verify = {"type": "table1d", "tokens": [1, 40], "seconds": [0.01, 0.02], "below": "linear"}
    scenario = Scenario(make_profile(verify=verify), ClosedLoop(1, 4, 32, measured=40), prefill="free")
    found, trials = capacity(Case("small", scenario), "a: interactivity>=1", seeds=(0,))
    assert found.value == 40
    assert found.binding == "the profile's range"
    beyond = [t for t in trials.done.values() if t.beyond]
    assert beyond
    assert "outside the measured range 1..40" in beyond[0].beyond


def test_what_cannot_run_at_all_is_an_error_not_an_answer():
    scenario = Scenario(make_profile(draft=None), ClosedLoop(1), ss.synthetic(0.7, gamma=3), ss.StaticGamma(3))
    with pytest.raises(SpecsimError, match="expected a draft cost"):
        capacity(Case("no draft", scenario), "a: ttft<=1s")


def test_loads_of_every_kind():
    assert at_load(ClosedLoop(1), 7).concurrency == 7
    assert at_load(Gamma(1.0, 2.0), 3).load == 3
    assert at_load(make_arrivals([0.0, 1.0, 2.0], 4, 4), 5.0).load == pytest.approx(5)
    assert demanded(ClosedLoop(9, 5, 6), closed=False) == Poisson(1.0, 2000, 5, 6)
    assert demanded(Poisson(9, 10, 5, 6), closed=True) == ClosedLoop(1, 5, 6)
    for workload, closed, words in (
        (Ramp(1, 2, 3), False, "expected a steady load"),
        (ClosedLoop(1, think_s=1), False, "who alone hold conversations or think"),
        (make_arrivals([0.0, 1.0], 4, 4), True, "they need a rate"),
    ):
        with pytest.raises(SpecsimError, match=words):
            demanded(workload, closed)


def test_trials_are_the_same_in_one_process_and_in_several():
    scenario, text = WORKLOADS["users"]
    one, two = (Trials(grid(True), jobs) for jobs in (1, 2))
    for trials in (one, two):
        trials.drive([find(trials, Case("users", scenario), parse_tier(text), (0, 1), 10)])
    assert list(one.done) == list(two.done)
    assert all(one.done[k] == two.done[k] or math.isnan(one.done[k].tau) for k in one.done)
    with pytest.raises(SpecsimError, match="jobs: expected"):
        Trials(grid(True), 0)
