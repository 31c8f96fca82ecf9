"""The planner: what it offers, what it says in words, and how the answer moves."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import make_blocks, make_profile

import specsim as ss
from specsim.acceptance import Drafter
from specsim.leaders import _walk
from specsim.plan import default_policies
from specsim.sensitivity import memory_note, scaled_acceptance
from specsim.tiers import parse_tier
from specsim.trial import run_trial
from specsim.types import SpecsimError
from specsim.workload import ClosedLoop, Poisson

ROOT = Path(__file__).parents[1]
VERIFY = {"type": "table1d", "tokens": [1, 4096], "seconds": [0.0101, 0.4196], "below": "linear"}
TIERS = ("fast: interactivity>=80@p50, share=0.25", "slow: interactivity>=30@p50, ttft<=2s@p95")
FAST = ("fast: interactivity>=80@p50",)


def small(workload=None, **fields):
    """Three-token blocks on a machine of 10 ms and 0.1 ms a token."""
    given = {"profile": make_profile(verify=VERIFY, name="small"), "drafter": ss.synthetic(0.7, gamma=3)}
    workload = workload or ClosedLoop(1, 8, 32, measured=40)
    return ss.Scenario(workload=workload, max_num_batched_tokens=2048, **{**given, **fields})


POLICIES = [ss.NoSpec(), ss.StaticGamma(3)]


@pytest.fixture(scope="module")
def planned():
    return ss.plan(small(), POLICIES, TIERS, users=100, gpu_price=2.0, seeds=(0, 1, 2), jobs=1)


def test_a_plan_holds_demand_and_headroom_in_whole_replicas(planned):
    assert [t.share for t in planned.tiers] == [0.25, 0.75]
    assert len(planned.offers) == 4
    for offer in planned.offers:
        assert offer.demand == 100 * offer.capacity.tier.share
        needed = 1.2 * offer.demand / offer.capacity.value
        assert offer.replicas == offer.gpus == math.ceil(needed)
    fast, slow = (planned.best(tier) for tier in planned.tiers)
    assert fast.policy == "StaticGamma(3)"
    assert fast.capacity.value < slow.capacity.value
    assert planned.gpus == fast.gpus + slow.gpus


def test_the_words_say_what_the_numbers_do(planned):
    best, other = planned.best("fast"), planned.of("fast")[0]
    saving, ci = best.saving(other)
    assert saving == pytest.approx(1 - other.capacity.value / best.capacity.value)
    words = planned.words(planned.tiers[0])
    decision, because = words.split("\n")[:2]
    assert decision == "fast: buy 1 GPU, 1 replica of 1, $2 an hour, with StaticGamma(3)"
    assert because.startswith("For 25 users and 20 % more: a replica sustains ")
    assert f"{100 * saving:.1f} ± {100 * ci:.1f} % fewer GPUs than NoSpec() ({other.gpus} GPUs)" in words
    assert "what ends it is interactivity p50 ≥ 80 tok/s" in words
    assert words in str(planned)
    assert "StaticGamma(3)" in planned.leaders_words()[0]


def test_doubling_the_price_doubles_the_cost(planned):
    twice = ss.plan(small(), POLICIES, TIERS, users=100, gpu_price=4.0, jobs=1, sensitivity=False)
    for one, two in zip(planned.offers, twice.offers, strict=True):
        assert two.dollars_per_million == 2 * one.dollars_per_million > 0
        assert two.gpus == one.gpus
    # Dollars an hour over tokens an hour, by hand: what each user gets at the load that the replicas have.
    offer = planned.best("fast")
    at = run_trial(small(scheduler=ss.StaticGamma(3)), round(25 / offer.replicas), 0)
    tokens = 25 / at.load * at.tokens
    assert offer.dollars_per_million == pytest.approx(offer.gpus * 2.0 / 3600 / tokens * 1e6, rel=0.1)


def test_more_gpus_never_lower_a_feasible_tier(planned):
    """At the load that any number of replicas from the plan's on leaves each, every promise is kept."""
    for tier in planned.tiers:
        offer = planned.best(tier)
        for more in range(4):
            load = max(math.floor(offer.demand / (offer.replicas + more)), 1)
            trial = run_trial(offer.capacity.case.scenario, load, 0)
            assert all(bound.use(trial.statistics[bound.column]) <= 1.0 for bound in tier.bounds)
    fewer = math.ceil(planned.best("slow").capacity.high * 1.1)
    trial = run_trial(planned.best("slow").capacity.case.scenario, fewer, 0)
    assert any(b.use(trial.statistics[b.column]) > 1 for b in planned.tiers[1].bounds)


def test_where_searches_start_does_not_change_the_plan(planned):
    other = ss.plan(
        small(), POLICIES, TIERS, users=100, gpu_price=2.0, seeds=(0, 1, 2), jobs=2, start=3, sensitivity=False
    )
    assert [o.capacity.by_seed for o in other.offers] == [o.capacity.by_seed for o in planned.offers]
    assert [o.gpus for o in other.offers] == [o.gpus for o in planned.offers]


def test_a_shared_pool_keeps_all_tiers_and_separate_ones_need_no_more(planned):
    shared = ss.plan(small(), POLICIES, TIERS, users=100, shared=True, jobs=1, sensitivity=False)
    (tier,) = shared.tiers
    assert tier.name == "fast + slow"
    assert tier.share == 1
    for k, offer in enumerate(shared.offers):
        strictest = min(planned.of(t)[k].capacity.value for t in planned.tiers)
        assert offer.capacity.value == pytest.approx(strictest, rel=0.02)
    assert shared.gpus >= planned.gpus - 2  # whole replicas


def test_how_the_answer_moves(planned):
    table = planned.sensitivity.set_index(["tier", "change"])
    assert len(table) == 12
    base = planned.best("fast")

    def load(change):
        return table.loc[("fast", change), "load"]

    assert load("acceptance −10%") < base.capacity.value < load("acceptance +10%")
    assert load("step seconds +10%") < base.capacity.value < load("step seconds −10%")
    assert load("traffic +10%") == base.capacity.value
    for name, row in table.loc["fast"].iterrows():
        within = "traffic" not in name and base.capacity.low <= row["load"] <= base.capacity.high
        assert row["noise"] == (within and row["policy"] == base.policy)
    assert not any("noise" in note for note in planned.notes)
    assert table.loc[("slow", "traffic +10%"), "gpus"] == math.ceil(
        1.1 * 1.2 * 75 / planned.best("slow").capacity.value
    )


def test_slower_steps_are_what_a_slower_profile_gives():
    """Time is stretched instead of the profile: the same capacity, whatever kind the profile is."""

    def scaled(factor):
        verify = VERIFY | {"seconds": [factor * s for s in VERIFY["seconds"]]}
        return make_profile(verify=verify, name="small")

    thinking = ClosedLoop(1, 8, 32, measured=40, think_s=0.2)
    for workload, demand in (
        (ClosedLoop(1, 8, 32, measured=40), {"users": 50}),
        (thinking, {"users": 50}),
        (Poisson(1, 300, 8, 32), {"rate": 9}),
    ):
        tier = ["a: interactivity>=40@p50, e2e<=2s@p90"]
        answer = ss.plan(small(workload), [ss.StaticGamma(3)], tier, **demand, seeds=[0], jobs=1)
        table = answer.sensitivity.set_index("change")["load"]
        for change, factor in (("step seconds +10%", 1.1), ("step seconds −10%", 0.9)):
            there = small(workload, profile=scaled(factor))
            found = ss.plan(there, [ss.StaticGamma(3)], tier, **demand, seeds=[0], jobs=1, sensitivity=False)
            assert table[change] == pytest.approx(found.offers[0].capacity.value, rel=0.04)


def test_nothing_is_claimed_within_the_noise():
    """The same scheduler under two names is level with itself."""
    twin = ss.Policy(ss.StaticGamma(3), replace(small().drafter, name="twin"))
    answer = ss.plan(small(), [ss.StaticGamma(3), twin], FAST, users=9, seeds=(0, 1), jobs=1, sensitivity=False)
    words = answer.words(answer.tiers[0])
    assert "Level with it in GPUs and tokens: StaticGamma(3)@twin. " in words
    assert "Between them nothing decides: take either." in words
    assert "fewer" not in words
    assert "level with it" in answer.leaders_words()[0]
    one = ss.plan(small(), POLICIES, FAST, users=90, seeds=[0], jobs=1, sensitivity=False)
    assert "one seed: how much of it is noise is not known" in one.words(one.tiers[0])


def test_tiers_that_cannot_be_kept_are_said_to_be_so():
    answer = ss.plan(small(), POLICIES, ["a: interactivity>=150@p10"], users=9, seeds=(0, 1), jobs=1)
    words = answer.words(answer.tiers[0])
    assert "Not even one user a replica gets the tier from NoSpec() (interactivity p10 9" in words
    answer = ss.plan(small(), POLICIES, ["a: interactivity>=1e4@p10"], users=9, seeds=(0, 1), jobs=1)
    assert answer.best("a") is None
    assert answer.gpus is None
    assert "no scheduler keeps this tier, not even one user a replica" in answer.words(answer.tiers[0])
    assert answer.words(answer.tiers[0]).endswith("No change of 10 % that was tried makes it feasible.")
    assert answer.to_dict()["offers"][0]["gpus"] is None
    one = ss.plan(small(), POLICIES, ["a: interactivity>=100@p10"], users=9, seeds=[0], jobs=1, sensitivity=False)
    counts = [(offer["replicas"], offer["gpus"]) for offer in one.to_dict()["offers"]]
    assert counts == [(None, None), (1, 1)]
    assert all(isinstance(count, int) for count in counts[1])  # JSON has them as whole numbers
    assert "NA" not in str(one)
    assert answer.total_words() == "In total: no tier can be kept."
    assert len(answer.sensitivity) == 6
    assert len(answer.shown_sensitivity()) == 0
    assert "none" not in str(answer)


def test_a_rate_of_fixed_answers_costs_what_its_tokens_do():
    answer = ss.plan(
        small(Poisson(1, 200, 8, 32)), [ss.StaticGamma(3)], slo=ss.SLO(interactivity=30, ttft=1.0), rate=50,
        gpu_price=3.6, headroom=0, seeds=[0], jobs=1, sensitivity=False,
    )  # fmt: skip
    (offer,) = answer.offers
    assert offer.replicas == math.ceil(50 / offer.capacity.value)
    assert offer.dollars_per_million == pytest.approx(offer.gpus * 3.6 / 3600 / (50 * 32) * 1e6)
    assert answer.unit == "requests/s"


def test_profiles_compete_by_price():
    dear = make_profile(verify=VERIFY, name="dear", gpus=2)
    answer = ss.plan(
        small(), [ss.StaticGamma(3)], FAST, users=50, profiles=[dear, small().profile], gpu_price=[1.0, 1.5],
        seeds=(0, 1), jobs=1, sensitivity=False,
    )  # fmt: skip
    assert (
        answer.best("fast").profile == "small"
    )  # the same replica for half as many GPUs, at less than twice the price
    assert "less cost than StaticGamma(3) on dear" in answer.words(answer.tiers[0])


def test_the_drafters_memory_costs_users():
    """Half of the KV cache goes to the drafter: where memory is what binds, load is lost."""
    profile = make_profile(verify=VERIFY, name="tight", kv_tokens=400, kv_bytes_per_token=10.0)
    heavy = replace(ss.synthetic(0.7, gamma=3), weight_bytes=2000.0)
    scenario = small(profile=profile, drafter=heavy)
    answer = ss.plan(scenario, POLICIES, ["a: ttft<=300ms@p90"], users=50, seeds=[0], jobs=1)
    (line,) = [note for note in answer.notes if "its drafter takes" in note]
    assert line.startswith(
        "StaticGamma(3) in a: its drafter takes 50 % of the KV cache: 200 tokens are left of 400, which"
    )
    assert float(line.partition("which costs ")[2].split(" ")[0]) > 30
    assert memory_note(small().profile, heavy) is None


def test_scaled_acceptance():
    parameters = scaled_acceptance(ss.synthetic((0.9, 0.99), concentration=3.0), 1.1).acceptance.domains["*"]
    assert parameters.conditional_acceptance == (pytest.approx(0.99), 1.0)
    trace = make_blocks([3, 1, 0, 2] * 2000, 3)
    recorded = Drafter(trace, 3, name="mine")
    thin = scaled_acceptance(recorded, 0.9).acceptance
    for k in (1, 2, 3):
        before, after = ((t.accepted >= k).mean() for t in (trace, thin))
        assert after == pytest.approx(before * 0.9**k, abs=0.02)
    assert (thin.accepted <= trace.accepted).all()
    np.testing.assert_allclose(thin.confidence, 0.9 * trace.confidence, rtol=1e-6)
    assert (scaled_acceptance(recorded, 0.9).acceptance.accepted == thin.accepted).all()
    with pytest.raises(SpecsimError, match="can be thinned, not made better"):
        scaled_acceptance(recorded, 1.1)
    answer = ss.plan(
        small(drafter=recorded), [ss.StaticGamma(3)], FAST, users=9, seeds=[0], jobs=1,
    )  # fmt: skip
    assert "acceptance +10%" not in set(answer.sensitivity["change"])
    assert any(note.startswith("acceptance +10% is left out: drafter 'mine'") for note in answer.notes)


def test_the_schedulers_that_are_compared_unasked():
    names = [repr(p) for p in default_policies(small(drafter=ss.synthetic(0.7, gamma=3, name="d")))]
    assert names == ["NoSpec()", "MTP1()@d:1", "StaticGamma(3)", "DSparkGreedy()", "DSparkAsync()"]
    assert [repr(p) for p in default_policies(small(drafter=None))] == ["NoSpec()"]
    assert repr(default_policies(small(drafter=ss.synthetic(0.7)))[1]) == "MTP1()"
    own = default_policies(small(scheduler=ss.Threshold(0.3)))
    assert repr(own[-1]) == "Threshold(0.3)"


def test_a_leader_stays_until_another_is_better_beyond_noise():
    a, b = np.array([[10.0, 10.1], [8, 8.1], [5, 5.1]]), np.array([[9.0, 9.1], [8.01, 8.11], [6, 6.1]])
    assert _walk(np.stack([a, b])) == [(0, 1), (1, 2)]
    noisy = np.array([[9.0, 9.1], [8.1, 8.0], [4.0, 6.3]])  # ahead at the end by the mean, not by every seed
    assert _walk(np.stack([a, noisy])) == [(0, 2)]
    assert _walk(np.stack([np.where(a < 6, np.nan, a), b])) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("users", [1, 2, 30])
def test_tokens_of_users_are_those_at_the_load_that_replicas_have(users):
    """Not what a straight line to the loads that the search came by would give."""
    answer = ss.plan(small(), POLICIES, FAST, users=users, gpu_price=2.0, seeds=(0, 1), jobs=1, sensitivity=False)
    for offer, scheduler in zip(answer.offers, POLICIES, strict=True):
        each = max(round(users / offer.replicas), 1)
        trial = run_trial(small(scheduler=scheduler), each, 0)
        assert offer.tokens == pytest.approx(users * trial.tokens / each)
        assert offer.dollars_per_million == pytest.approx(offer.gpus * 2.0 / 3600 / offer.tokens * 1e6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "expected either rate"),
        ({"rate": 1, "users": 1}, "expected either rate"),
        ({"rate": 0}, "rate: expected a number above 0"),
        ({"users": 10**400}, "users: expected a number above 0, at most 1e\\+12, got 1e\\+300"),
        ({"users": 1, "headroom": -0.1}, "headroom: expected a share of 0 to 10"),
        ({"users": 1, "headroom": 20}, "headroom: expected a share of 0 to 10, like 0.2, got 20"),
        ({"users": 1, "seeds": []}, "seeds: expected at least one"),
        ({"users": 1, "tiers": []}, "tiers: expected at least one"),
        ({"users": 1, "slo": ss.SLO(ttft=1)}, "expected tiers or slo, not both"),
        ({"users": 1, "gpu_price": 0.0}, "gpu_price: expected dollars above 0"),
        ({"users": 1, "gpu_price": [1.0, 2.0]}, "gpu_price: expected one, or one a profile, got 2 for 1"),
        ({"users": 1, "policy": [ss.NoSpec(), ss.NoSpec()]}, "NoSpec\\(\\) is given twice"),
        ({"users": 1, "base": small(replicas=2)}, "replicas: expected 1"),
    ],
)
def test_what_cannot_be_planned(fields, words):
    with pytest.raises(SpecsimError, match=words):
        ss.plan(**{"base": small(), "tiers": TIERS, "jobs": 1, **fields})


def test_a_scheduler_that_draws_from_chance_has_no_plan():
    def draws(view):
        return np.random.default_rng().integers(0, view.gamma + 1, view.num_seqs)

    with pytest.raises(SpecsimError, match="scheduler draws: answers otherwise when the same seed is run again"):
        ss.plan(small(), [ss.NoSpec(), draws], FAST, users=20, seeds=(0,), sensitivity=False, jobs=1)


def test_a_plan_of_the_readme_prints():
    base = small(Poisson(1, 100, 8, 32))
    text = str(ss.plan(base, slo=ss.SLO(interactivity=30), rate=20.0, seeds=[0], jobs=1, sensitivity=False))
    assert "MTP1()" in text
    assert parse_tier("all: interactivity>=30").bounds[0].limit == 30


def test_a_saving_from_a_load_that_was_not_ended_is_told_as_the_least():
    """With sixteen seats a replica holds them all; NoSpec does not."""
    base = ss.Scenario(
        make_profile(verify={"type": "table1d", "tokens": [1, 4096], "seconds": [0.01, 0.4], "below": "linear"}),
        ClosedLoop(1, 8, 32, measured=40),
        ss.synthetic(0.9, gamma=3),
        max_num_seqs=16,
    )
    tier = ["a: interactivity>=88@p50"]
    answer = ss.plan(base, [ss.NoSpec(), ss.StaticGamma(3)], tier, users=90, seeds=(0, 1), jobs=1, sensitivity=False)
    assert answer.best("a").capacity.at_least
    assert not answer.of("a")[0].capacity.at_least
    assert "that is at least" in answer.words(answer.tiers[0])
    assert answer.leaders_words()[0].split(", from ")[1].startswith("1 user:")


def test_of_as_many_users_who_sells_most_leads_and_waiting_counts():
    """Sixteen tokens a step: without drafts sixteen users are served at once, with three drafts each four of them."""
    base = small(ClosedLoop(1, 8, 32, measured=120))
    base = replace(base, max_num_batched_tokens=16)
    tier = ["a: e2e<=800ms@p50"]
    answer = ss.plan(base, POLICIES, tier, users=9, seeds=(0, 1), jobs=1, sensitivity=False)
    assert [leader.policy for leader in answer.leaders["small"]] == ["StaticGamma(3)", "NoSpec()"]
    assert answer.leaders_words()[0].startswith("Most tok/s at equal load")
    of_served = ss.plan(replace(base, workload=Poisson(1, 60, 8, 32)), POLICIES, tier, rate=2.0, seeds=(0, 1), jobs=1,
                        sensitivity=False)  # fmt: skip
    assert of_served.leaders_words()[0].startswith("Best tok/s/user (p50) at equal load")
