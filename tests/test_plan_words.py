"""What a plan says: what decides, what it adds up to, where it stands on a knife's edge, and what it cannot know."""

import math
from dataclasses import replace

import pandas as pd
import pytest
from conftest import make_arrivals, make_profile
from test_plan import FAST, POLICIES, TIERS, VERIFY, small

import specsim as ss
from specsim.capacity import Trials
from specsim.cli.planning import _print
from specsim.leaders import Leader
from specsim.offers import choose
from specsim.plan_words import compared, saving, up_to
from specsim.sensitivity import sensitivity_table
from specsim.trial import grid
from specsim.types import SpecsimError


@pytest.fixture(scope="module")
def planned():
    return ss.plan(small(), POLICIES, TIERS, users=100, gpu_price=2.0, seeds=(0, 1), jobs=1, sensitivity=False)


def test_what_a_change_makes_feasible_and_what_is_left_out_of_the_total():
    """A user alone gets 97 tok/s without drafts."""
    tiers = ["a: interactivity>=100@p10", "b: interactivity>=60@p10", "c: interactivity>=1e4@p10"]
    answer = ss.plan(small(), [ss.NoSpec()], tiers, users=9, gpu_price=2, seeds=(0, 1), jobs=1)
    a, b, _ = answer.tiers
    shown = answer.shown_sensitivity()
    assert shown.loc[shown["tier"] == "a", "change"].tolist() == ["step seconds −10%"]
    assert shown["tier"].tolist().count("b") == 6
    assert "c" not in set(shown["tier"])
    assert "with step seconds −10%, NoSpec() keeps it with " in answer.words(a)
    assert "10 % off" not in answer.words(b)
    assert not any("may be noise" in note for note in answer.notes)  # acceptance moves nothing without drafts
    one = answer.best("b")
    left = "In total: 1 GPU, $2 an hour, without a and c, which no scheduler keeps."
    assert (one.gpus, answer.total_words()) == (1, left)
    assert answer.gpus is None
    assert answer.infeasible == ("a", "c")
    assert answer.to_dict()["total"] == {"gpus": 1, "dollars_per_hour": 2.0, "left_out": ["a", "c"], "words": left}


def test_the_total_over_the_tiers(planned):
    gpus = planned.gpus
    assert planned.total() == (gpus, 2.0 * gpus)
    assert planned.total_words() == f"In total: {gpus} GPUs, ${2 * gpus} an hour."
    assert planned.total_words() in str(planned)
    assert planned.offers[0].dollars_per_hour == 2.0 * planned.offers[0].gpus
    assert planned.to_dict()["offers"][0]["dollars_per_hour"] == 2.0 * planned.offers[0].gpus


def test_a_choice_on_a_knifes_edge_is_told_in_words(planned, capsys):
    """Of the table's rows those that make another scheduler best, or the plan's choice need much more."""
    (fast, _), best = planned.tiers, planned.best("fast")
    kept = planned.of("fast")[1].capacity.value
    columns = planned.sensitivity.columns

    def words(*row):
        rows = [dict(zip(columns, ("fast", "step seconds −10%", "small", *row, False), strict=True))]
        return replace(planned, sensitivity=pd.DataFrame(rows)).words(fast)

    off = "If something is 10 % off (told by one seed): with step seconds −10%, "
    assert words("NoSpec()", 30.0, 2, 5).endswith(
        f"{off}NoSpec() becomes best with 2 GPUs, where StaticGamma(3) needs 5: 3 too many."
    )
    assert words("NoSpec()", 30.0, 2, 2).endswith("needs 2: as many, but dearer.")
    assert words("NoSpec()", 30.0, 2, None).endswith(
        "StaticGamma(3) no longer keeps the tier, NoSpec() does with 2 GPUs."
    )
    assert words("none", math.nan, None, None).endswith(f"{off}nothing keeps the tier.")
    assert words(best.policy, kept / 1.3, 2, 2).endswith(f"{off}StaticGamma(3) needs 2 GPUs instead of 1.")
    row = dict(zip(columns, ("fast", "step seconds −10%", "small", best.policy, 41.25, 2, 2, True), strict=True))
    _print(replace(planned, sensitivity=pd.DataFrame([row, row | {"load": 52.5, "noise": False}])))
    told = capsys.readouterr().out
    assert "≈ 41.25 " in told
    assert "≈ 52.5 " not in told
    assert "≈: within the plan's interval, perhaps noise" in told
    for row in ((best.policy, kept / 1.1, 2, 2), (best.policy, kept / 1.3, 1, 1)):
        assert "10 % off" not in words(*row)


def test_what_is_level_is_decided_by_dollars():
    """Two profiles with the same steps, one of two GPUs: level at half the price, and whole replicas decide."""
    pair = make_profile(verify=VERIFY, name="pair", gpus=2)
    given = {"profiles": [pair, small().profile], "seeds": (0, 1), "jobs": 1, "sensitivity": False}
    one, two = [ss.StaticGamma(3)], ["a: interactivity>=80@p50"]
    level = ss.plan(small(), one, two, users=9, gpu_price=[1.0, 2.0], **given)
    assert "Between them nothing decides: take either." in level.words(level.tiers[0])
    # A hundredth dearer is level still, and then costs more an hour.
    dearer = ss.plan(small(), one, two, users=9, gpu_price=[1.0, 1.99], **given)
    assert dearer.best("a").profile == "small"
    words = dearer.words(dearer.tiers[0])
    assert "Between them dollars an hour in whole replicas decide: $1.99 against $2." in words
    offer = level.of("a")[0]
    cheap = replace(offer, policy="cheap", tokens=2 * offer.tokens)
    found = replace(level, offers=(offer, cheap))
    assert found.best("a") is cheap
    assert "needs as many GPUs and sells fewer tokens: $" in found.words(level.tiers[0])
    # Whole replicas decide against a least burden that is within the noise.
    worse = replace(offer.capacity, value=0.995 * offer.capacity.value)
    worse = replace(worse, by_seed=tuple(0.995 * v for v in worse.by_seed))
    assert choose([replace(offer, replicas=3), replace(offer, policy="worse", capacity=worse)]).policy == "worse"
    assert choose([offer, cheap], keep=offer) is offer


def test_a_change_within_the_noise_does_not_unseat_the_choice():
    """Two names for one scheduler, one of them 3 % worse by the mean and better under a seed: dollars chose it."""
    twin = ss.Policy(ss.StaticGamma(3), replace(small().drafter, name="twin"))
    plan = ss.plan(small(), [ss.StaticGamma(3), twin], FAST, users=90, gpu_price=1, seeds=(0, 1, 2), jobs=1)

    def seeds(offer, value, *by_seed):
        own = offer.capacity.by_seed[0]
        return replace(offer.capacity, value=own * value, by_seed=tuple(own * v for v in by_seed))

    first, second = plan.offers
    first = replace(first, capacity=seeds(first, 1.0, 1.0, 0.9, 1.1))
    second = replace(second, capacity=seeds(second, 0.97, 1.0, 1.05, 0.86), tokens=2 * first.tokens)
    answer = replace(plan, offers=(first, second))
    assert answer.best("fast") is second
    table, _ = sensitivity_table(Trials(grid(True), 1), answer, 0)
    assert set(table["policy"]) == {"StaticGamma(3)@twin"}
    assert table["gpus"].tolist() == table["gpus_kept"].tolist()


def test_savings_from_loads_that_nothing_ended():
    base = small(max_num_seqs=4)
    given = {"users": 9, "seeds": (0, 1), "jobs": 1, "sensitivity": False}
    twins = [ss.StaticGamma(3), ss.Policy(ss.StaticGamma(3), replace(small().drafter, name="twin"))]
    answer = ss.plan(base, twins, ["a: interactivity>=1"], **given)
    words = answer.words(answer.tiers[0])
    assert "at least 4 users, the most that was asked about (--max-num-seqs sets it)." in words
    assert words.endswith(" ends any of them: a bound on ttft, e2e or queue would tell them apart.")
    told = ss.plan(base, twins, ["a: interactivity>=1, ttft<=1e300s"], **given)  # there is such a bound
    assert told.words(told.tiers[0]).endswith("asked about (--max-num-seqs sets it) ends any of them: take either.")
    alone = ss.plan(replace(base, max_num_seqs=1), twins, ["a: interactivity>=1"], headroom=0, **given)
    assert "\nFor 9 users: a replica sustains at least 1 user, the" in alone.words(alone.tiers[0])
    ended = replace(answer.offers[0], capacity=replace(answer.offers[0].capacity, at_least=False))
    assert answer.offers[0].capacity.at_least
    assert saving(answer.offers[0], answer.offers[1]) == "0.0"
    assert saving(ended, answer.offers[1]) == "at most 0.0"
    assert saving(answer.offers[0], ended) == "at least 0.0"


def variant(offer, policy, load, replicas=1, tokens=1.0, **fields):
    """``offer`` of ``load`` times the load of a replica and ``tokens`` times the tokens sold."""
    found = offer.capacity
    moved = replace(found, value=load * found.value, by_seed=tuple(load * v for v in found.by_seed))
    given = {"policy": policy, "capacity": moved, "replicas": replicas, "tokens": tokens * offer.tokens}
    return replace(offer, **given, **fields)


def test_whole_replicas_are_paid_and_then_tokens_count(planned):
    """One replica each: the scheduler with room for four times the load sells half of the tokens."""
    fast = planned.best("fast")
    roomy, scarce = variant(fast, "roomy", 4.0, tokens=0.5), variant(fast, "scarce", 0.5, tokens=0.9999)
    assert choose([roomy, fast, scarce]) is fast
    words = replace(planned, offers=(roomy, fast, scarce)).words(planned.tiers[0])
    one, two = (f"{offer.dollars_per_million:.3g}" for offer in (roomy, fast))
    assert f"roomy needs as many GPUs and would have room for more load, but sells fewer tokens: ${one} " in words
    assert f" against ${two} a million." in words
    assert "scarce needs as many GPUs, with less room for more load." in words
    assert "% fewer" not in words
    bare = [replace(offer, price=None) for offer in (roomy, fast)]
    assert choose(bare) is bare[1]
    assert compared(bare[1], [bare[0]], lambda o: o.policy, "fewer GPUs")[0].endswith(
        f"sells fewer tokens: {roomy.tokens:,.0f} against {fast.tokens:,.0f} tok/s."
    )
    # Whole replicas rule over what is needed before they are rounded.
    large = variant(fast, "large", 4.0, gpus_each=2)
    assert choose([large, fast]) is fast
    (told,) = compared(fast, [large], lambda o: o.policy, "fewer GPUs")
    assert told == "large would need less than that before replicas are rounded, but not in whole ones: $4 against $2."


def test_the_choice_is_kept_where_it_costs_no_more(planned):
    fast = planned.best("fast")
    better, fewer = variant(fast, "better", 2.0, tokens=2.0), variant(fast, "fewer", 2.0, replicas=1)
    assert choose([fast, better]) is better
    assert choose([fast, better], keep=fast) is fast
    three = replace(fast, replicas=3)
    assert choose([three, fewer], keep=three) is fewer
    level = variant(fast, "level", 1.001, replicas=2)
    assert choose([three, level], keep=three) is three


def test_large_counts_and_little_headroom_read_well(planned):
    (fast, _), offer = planned.tiers, planned.best("fast")
    many = replace(planned, offers=(replace(offer, replicas=38673076),), headroom=0.0)
    assert many.decision(fast).startswith("fast: buy 38,673,076 GPUs, 38,673,076 replicas of 1, $77,346,152 an hour")
    assert "0 % more" not in many.words(fast)
    assert "\nfast (interactivity p50 ≥ 80 tok/s)\nfast: buy 1 GPU, 1 replica of 1, $2 an hour, with " in str(planned)


def test_users_who_think_hold_no_seat():
    """Two seats, a second of thinking for a tenth of a second of service: more than two users are served well."""
    base = small(ss.ClosedLoop(1, 8, 8, think_s=1.0, measured=60), max_num_seqs=2)
    given = {"users": 40, "seeds": [0], "jobs": 1, "sensitivity": False}
    answer = ss.plan(base, [ss.NoSpec()], ["a: queue<=100ms@p50"], **given)
    assert 6 < answer.best("a").capacity.value < 32
    assert answer.best("a").capacity.binding.startswith("queue")
    lax = ss.plan(base, [ss.NoSpec()], ["a: queue<=100s@p50"], **given)
    assert "sustains at least 32 users, the most that was asked about (--max-num-seqs sets it)" in str(lax)


def test_percentiles_of_few_requests_are_noted_once():
    base = small(ss.ClosedLoop(1, 8, 32, measured=49))
    given = {"users": 9, "seeds": [0, 1], "jobs": 1, "sensitivity": False}
    tiers = ["a: interactivity>=30@p10, ttft<=9s@p50", "b: ttft<=9s@p99"]
    notes = ss.plan(base, POLICIES, tiers, **given).notes
    told = "fewer than 5 requests decide on interactivity p10, ttft p99 in a trial of 49: --num-requests has more"
    assert [note for note in notes if "fewer than" in note] == [told]
    enough = replace(base, workload=ss.ClosedLoop(1, 8, 32, measured=50))
    assert not any("fewer than" in note for note in ss.plan(enough, POLICIES, tiers[:1], **given).notes)


def test_what_is_hardly_known_or_seen_in_part_is_said():
    """Two seeds that differ, and trials of a hundred requests of more users than that."""
    given = {"users": 9, "seeds": [0, 1], "jobs": 1, "sensitivity": False}
    for measured, told in ((12, True), (1100, False)):
        base = small(ss.ClosedLoop(1, 8, 32, measured=measured))
        notes = ss.plan(base, POLICIES, ["a: interactivity>=60@p10"], **given).notes
        assert any(note.startswith(f"trials of as few as {measured} requests of ") for note in notes) == told
    given |= {"users": None, "rate": 9}
    for cv, told in ((2.0, False), (8.0, True)):
        base = small(ss.Gamma(1.0, cv, 100, 8, ss.LogNormal(40, 1.0)))
        answer = ss.plan(base, [ss.NoSpec()], ["a: ttft<=100ms@p99"], **given)
        assert any("NoSpec() in a: its load is hardly known (" in note for note in answer.notes) == told


@pytest.mark.parametrize("bound", ["interactivity>=1e6", "tpot<=1us"])
def test_a_promise_that_nothing_measures_is_refused(bound):
    """Answers of one token have no speed: any promise of it was kept."""
    base = small(ss.ClosedLoop(1, 8, 1, measured=20))
    given = {"users": 9, "seeds": [0], "jobs": 1, "sensitivity": False}
    words = f"tier 'a': {bound.partition('>')[0].partition('<')[0]}: no request has any where answers are of one token"
    with pytest.raises(SpecsimError, match=f"^{words}$"):
        ss.plan(base, [ss.NoSpec()], [f"a: {bound}".replace("1us", "0.001ms")], **given)
    assert ss.plan(base, [ss.NoSpec()], ["a: ttft<=9s"], **given).gpus == 1


def test_what_was_tried_in_vain_is_said_as_it_was():
    """Bursts do not thin out with the rate: not even the lightest load is a request alone."""
    given = {"rate": 5.0, "seeds": [0], "jobs": 1, "sensitivity": False}
    tier = ["a: interactivity>=96@p10"]  # a request alone gets 97
    bursts = ss.plan(small(ss.Gamma(1.0, 20.0, 100, 8, 32)), [ss.NoSpec()], tier, **given)
    lead = "a: no scheduler keeps this tier, not even the lightest load tried"
    assert bursts.words(bursts.tiers[0]).startswith(f"{lead}, whose arrivals come in bursts\nNoSpec() offers ")
    load = bursts.offers[0].capacity.lightest
    assert f" at {load:.3g} requests/s." in bursts.words(bursts.tiers[0])
    even = ss.plan(small(ss.Poisson(1.0, 100, 8, 32)), [ss.NoSpec()], ["a: interactivity>=200"], **given)
    assert even.words(even.tiers[0]).startswith(f"{lead}\nNoSpec() offers ")


@pytest.mark.parametrize(
    ("high", "ci", "words"),
    [(167.0, 4.27, "167 ± 4.27"), (11.0, 11.0, "somewhere below 22"), (30.0, math.nan, "about 30")],
)
def test_up_to_where_a_leader_leads(high, ci, words):
    assert up_to(Leader("a", 1.0, high, ci, ()), 1.0, last=False) == words


def test_what_profiles_do_not_tell_is_noted():
    qwen = make_profile(verify=VERIFY, name="qwen", model="Qwen")
    other = make_profile(verify=VERIFY, name="other", model="Llama")
    heavy = replace(ss.synthetic(0.7, gamma=3), weight_bytes=1e18)
    given = {"users": 9, "seeds": [0], "jobs": 1}
    answer = ss.plan(small(profile=qwen, drafter=heavy), [ss.NoSpec()], FAST, profiles=[qwen, other], **given)
    assert answer.notes[:2] == (
        "the profiles are of different models (Qwen, Llama), whose answers are not the same",
        "the drafter's memory has no effect on qwen, other: how large the KV cache is there is not known",
    )
    assert set(answer.shown_sensitivity()["profile"]) <= {"qwen", "other"}
    alike = ss.plan(small(profile=qwen), [ss.NoSpec()], FAST, **given)
    assert not any("models" in note or "memory" in note for note in alike.notes)
    assert "profile" not in alike.shown_sensitivity().columns
    told = make_profile(verify=VERIFY, name="told", kv_tokens=4000, kv_bytes_per_token=10.0)
    base = small(profile=told, drafter=heavy)
    with pytest.raises(SpecsimError, match=r"weights of 1e\+18 bytes leave nothing of the KV cache of profile told"):
        ss.plan(base, [ss.NoSpec()], FAST, **given)
    fixed = ss.plan(replace(base, kv_tokens=4000), [ss.NoSpec()], FAST, sensitivity=False, **given)
    assert fixed.notes[0].startswith("the drafter's memory has no effect: the size of the KV cache is given (4,000")


def test_what_is_noted_of_several_schedulers_is_noted_once():
    base = small(make_arrivals([k * 0.7 for k in range(60)], 8, 32))  # recorded ones are not made longer
    answer = ss.plan(base, POLICIES, slo=ss.SLO(interactivity=30), rate=9, seeds=[0], jobs=1, sensitivity=False)
    told = [note for note in answer.notes if "--num-requests" in note]
    assert [note.partition(": ")[0] for note in told] == ["NoSpec(), StaticGamma(3) in all"]
