"""The published schedulers: each against a literal restatement of its rule, and what all of them keep to."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace

import numpy as np
import pytest
from conftest import always, draft_cost, make_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedulers import brute_top_k, listed, view

import specsim
from specsim import zoo
from specsim.acceptance import synthetic
from specsim.asking import fresh
from specsim.cli.inputs import parse_scheduler
from specsim.engine import Scenario, simulate
from specsim.metrics import summarize
from specsim.schedulers import (
    MTP1,
    BuiltIn,
    DSparkAsync,
    DSparkGreedy,
    GlobalArgmax,
    Oracle,
    StaticGamma,
    Threshold,
)
from specsim.types import SpecsimError
from specsim.views import OracleView, StepRecord
from specsim.workload import ClosedLoop
from specsim.zoo import TETRIS, DCut, GammaBandit, SmartSpec, SpecDecPP, WrongCost

STALE = ((1, 1.0), (4, 1.5), (10, 4.0))
ALL = (
    TETRIS(5),
    SmartSpec(),
    SpecDecPP(),
    DCut(),
    GammaBandit(),
    GammaBandit(epsilon=0.5, decay=0.5, seed=3),
    WrongCost(DSparkAsync()),
    WrongCost(DSparkGreedy(), "scaled", 0.25),
    WrongCost(SmartSpec(decay=0.5), "stale", table=STALE),
    WrongCost(WrongCost(StaticGamma(1), "scaled"), "flat"),
)


class Steps:
    """Random views in a row, with the records of the steps before: what an engine shows a scheduler."""

    def __init__(self, seed: int, gamma: int = 3, most: int = 5) -> None:
        self.rng, self.gamma, self.most = np.random.default_rng(seed), gamma, most
        self.previous: list[StepRecord] = []

    def next(self, **fields):
        """A view; the seconds rise with the tokens, but not evenly."""
        rng = self.rng
        n = int(rng.integers(1, self.most + 1))
        survival = np.cumprod(rng.uniform(0.1, 1.0, (n, self.gamma)), axis=1)
        self.prices = 1.0 + np.cumsum(rng.uniform(0, 0.4, self.most * (self.gamma + 1) + 4))
        prefill = int(rng.integers(0, 4))
        ends = int(prefill > 2)
        return view(survival, listed(self.prices), prefill_tokens=prefill, finishing=ends, previous=self.previous)

    def end(self, v, lens):
        """Accept some of the drafts and keep the record."""
        accepted = np.minimum(self.rng.integers(0, self.gamma + 1, v.num_seqs), lens)
        self.previous = [*self.previous[-7:], StepRecord(v, lens, accepted + 1)]
        return accepted


seeds = st.integers(0, 10**6)


@settings(max_examples=60)
@given(seed=seeds, budget=st.integers(0, 20))
def test_tetris_takes_the_best_prefixes_that_fit_its_budget(seed, budget):
    v = Steps(seed).next()
    lens = TETRIS(budget)(v)
    assert lens.tolist() == brute_top_k(v.survival, budget).tolist()
    assert lens.sum() == min(budget, v.survival.size)


@settings(max_examples=60)
@given(seed=seeds, rejection=st.sampled_from([0.0, 0.3, 0.7, 0.99, 1.0]))
def test_specdecpp_stops_after_the_draft_that_makes_a_rejection_too_likely(seed, rejection):
    v = Steps(seed, gamma=4).next()
    expected = []
    for confidences in v.confidence.tolist():
        length, no_rejection = 0, 1.0
        while length < v.gamma and 1 - no_rejection <= rejection + 1e-12:
            no_rejection *= confidences[length]
            length += 1
        expected.append(length)
    assert SpecDecPP(rejection)(v).tolist() == expected


def test_specdecpp_and_a_threshold_differ_where_many_fair_chances_make_a_poor_one():
    v = view([[0.8, 0.64, 0.51, 0.41]])
    assert (SpecDecPP(0.4)(v).tolist(), Threshold(0.6)(v).tolist()) == ([3], [4])
    assert SpecDecPP(0.0)(view([[0.1, 0.1]])).tolist() == [1]  # the first draft is always verified


def test_dcut_is_the_argmax_on_what_the_trace_calls_a_confidence():
    steps = Steps(0)
    for _ in range(20):
        v = steps.next()
        assert DCut()(v).tolist() == GlobalArgmax()(v).tolist()
    assert DCut().synchronous
    assert DCut().replay == "approximate"


@settings(max_examples=60)
@given(seed=seeds, start=st.sampled_from([0.2, 0.7, 1.0]), decay=st.sampled_from([0.0, 0.5, 0.9]))
def test_smartspec_takes_the_length_of_the_most_goodput_from_a_moving_average(seed, start, decay):
    steps, schedule = Steps(seed), SmartSpec(start, decay).start()
    accepted = tried = 0.0
    for _ in range(8):
        v = steps.next()
        alpha = (accepted + start) / (tried + 1)
        goodput = []
        for k in range(v.gamma + 1):
            per_request = sum(alpha**j for j in range(k + 1))
            seconds = steps.prices[v.num_seqs * (1 + k) + v.prefill_tokens - 1]
            goodput.append((v.num_seqs * per_request + v.finishing_prefills) / seconds)
        lens = schedule(v)
        assert lens.tolist() == [int(np.argmax(goodput))] * v.num_seqs
        took = steps.end(v, lens)
        accepted, tried = accepted * decay, tried * decay
        for a, length in zip(took.tolist(), lens.tolist(), strict=True):
            accepted += a
            tried += a + (a < length)  # the draft that was rejected was tried, those after it were not


def test_smartspec_tries_again_after_a_long_time_without_drafts():
    # Drafts pay at α = 0.7 and never at 0: each costs half a second on top of a second for the first token.
    schedule, previous, lengths = SmartSpec().start(), [], []
    for _ in range(60):
        v = view([[0.5, 0.25]], lambda b: 0.5 + 0.5 * np.asarray(b), previous=previous)
        lens = schedule(v)
        lengths.append(int(lens[0]))
        previous = [StepRecord(v, lens, np.ones(1, dtype=np.int64))]
    assert lengths[:5] == [1, 0, 0, 0, 0]
    assert 1 <= sum(lengths[5:]) <= 8


@settings(max_examples=30)
@given(seed=seeds, epsilon=st.sampled_from([0.0, 0.3]))
def test_the_bandit_tries_every_length_and_then_takes_the_fastest(seed, epsilon):
    steps, schedule = Steps(seed, gamma=2), GammaBandit(epsilon, 0.9, seed).start()
    draws = np.random.default_rng(seed)
    learned: dict[tuple[int, int], tuple[float, float]] = {}  # by size of batch and length: tokens, seconds
    for _ in range(25):
        v = steps.next()
        size = int(np.log2(v.num_seqs))
        explore = draws.random() < epsilon
        rates = [np.divide(*learned[size, k]) if (size, k) in learned else np.inf for k in range(3)]
        expected = int(draws.choice(np.arange(3))) if explore else int(np.argmax(rates))
        lens = schedule(v)
        assert lens.tolist() == [expected] * v.num_seqs
        took = steps.end(v, lens)
        tokens, seconds = learned.get((size, expected), (0.0, 0.0))
        made = took.sum() + v.num_seqs + v.finishing_prefills
        took_seconds = steps.prices[v.num_seqs * (1 + expected) + v.prefill_tokens - 1]
        learned[size, expected] = tokens * 0.9 + made, seconds * 0.9 + took_seconds


def test_the_bandit_finds_the_best_static_length():
    # Three drafts are accepted and later ones never; each token costs a tenth of the first.
    verify = {"type": "table1d", "tokens": (1, 2000), "seconds": (1.0, 200.9), "below": "linear"}
    base = Scenario(
        make_profile(draft=draft_cost(0.0), verify=verify),
        ClosedLoop(8, 1, 64, measured=200),
        always(3, 6),
    )
    table = {g: summarize(simulate(replace(base, scheduler=StaticGamma(g)))).throughput[0] for g in range(7)}
    learned = summarize(simulate(replace(base, scheduler=GammaBandit(epsilon=0.02)))).throughput[0]
    assert max(table, key=table.get) == 3
    assert learned > 0.9 * table[3]
    assert learned > table[0]


# A wrong price


def wrong_price(scheduler, v):
    """The prices of 0, 1, ... drafts that the scheduler inside sees."""
    shown = scheduler._shown(v)
    curve = shown.step_curve(v.num_seqs * v.gamma)
    np.testing.assert_array_equal([shown.step_seconds(k) for k in range(len(curve))], curve)
    return curve


def test_wrong_prices_are_as_told_and_the_right_ones_stay():
    v = view(np.full((2, 2), 0.5), listed([1.0, 2.0, 3.0, 3.0, 7.0]), prefill_tokens=1)
    right = [3.0, 3.0, 7.0, np.inf, np.inf]  # 3, 4, 5 tokens; 6 and 7 have no price
    np.testing.assert_array_equal(v.step_curve(4), right)
    assert wrong_price(WrongCost(DCut()), v).tolist() == [3.0, 3.0, 3.0, np.inf, np.inf]
    assert wrong_price(WrongCost(DCut(), "scaled", 0.5), v).tolist() == [3.0, 3.0, 5.0, np.inf, np.inf]
    assert wrong_price(WrongCost(DCut(), "scaled"), v).tolist() == [3.0, 3.0, 11.0, np.inf, np.inf]
    stale = WrongCost(DCut(), "stale", table=((2, 1.0), (4, 2.0)))
    assert wrong_price(stale, v).tolist() == [1.5, 2.0, 2.0, np.inf, np.inf]  # between rows, then clamped
    np.testing.assert_array_equal(v.step_curve(4), right)
    nothing = view(np.full((2, 2), 0.5), lambda b: np.inf + 0.0 * np.asarray(b))
    assert wrong_price(WrongCost(DCut()), nothing).tolist() == [np.inf] * 5


@settings(max_examples=40)
@given(seed=seeds)
def test_a_scheduler_behind_right_prices_is_itself(seed):
    ours, theirs, steps = fresh(WrongCost(DSparkAsync(), "scaled", 1.0)), fresh(DSparkAsync()), Steps(seed)
    flat = fresh(WrongCost(GlobalArgmax(), "flat"))
    for _ in range(6):
        v = steps.next()
        lens = ours(v)
        assert lens.tolist() == theirs(v).tolist()
        assert flat(v).tolist() == [v.gamma] * v.num_seqs  # as an engine without a table: everything
        steps.end(v, lens)


def test_what_an_engine_asks_of_a_scheduler_it_asks_of_the_one_inside():
    def half(view):
        return np.full(view.num_seqs, view.gamma // 2)

    v = view(np.full((2, 3), 0.5), kind=OracleView)
    v.accepted = np.array([1, 3])
    assert WrongCost(Oracle()).oracle
    assert fresh(WrongCost(Oracle()))(v).tolist() == [1, 3]
    assert WrongCost(MTP1()).exact_gamma == 1
    assert WrongCost(StaticGamma(3)).gamma == 3
    assert (WrongCost(DSparkGreedy()).synchronous, WrongCost(DSparkAsync()).synchronous) == (True, False)
    assert WrongCost(half).uses_previous  # as for any scheduler that does not say
    assert repr(WrongCost(half)) == "WrongCost(half)"
    assert fresh(WrongCost(half))(v).tolist() == [1, 1]
    drafter = synthetic(0.6, 2)
    base = Scenario(make_profile(draft=draft_cost(0.001)), ClosedLoop(2, 8, 8, measured=4), drafter)
    with pytest.raises(SpecsimError, match=r"WrongCost\(StaticGamma\(3\)\): gamma: expected at most 2"):
        simulate(replace(base, scheduler=WrongCost(StaticGamma(3))))


# All of them


def test_the_zoo_is_exported_and_spelled_on_the_command_line_as_its_labels():
    names = [n for n, c in vars(zoo).items() if inspect.isclass(c) and issubclass(c, BuiltIn)]
    own = {n for n in names if vars(zoo)[n].__module__ == "specsim.zoo"}
    assert own == {type(s).__name__ for s in ALL}
    for name in own:
        assert getattr(specsim, name) is getattr(zoo, name)
    for scheduler in ALL:
        assert parse_scheduler(repr(scheduler)) == scheduler
        assert repr(parse_scheduler(repr(scheduler))) == repr(scheduler)
        assert pickle.loads(pickle.dumps(scheduler)) == scheduler
    assert parse_scheduler("WrongCost(DSparkGreedy, 'scaled')") == WrongCost(DSparkGreedy(), "scaled")
    assert parse_scheduler("TETRIS(64)") == TETRIS(64)


@pytest.mark.parametrize("scheduler", ALL, ids=repr)
def test_lengths_are_allowed_repeatable_and_forgotten_between_runs(scheduler):
    def run():
        steps, schedule, told = Steps(7, gamma=4), fresh(scheduler), []
        for _ in range(30):
            v = steps.next()
            lens = np.asarray(schedule(v))
            assert lens.shape == (v.num_seqs,)
            assert ((lens >= 0) & (lens <= v.gamma)).all()
            steps.end(v, lens)
            told.append(lens.tolist())
        return told

    assert run() == run()
    if hasattr(scheduler, "start"):
        with pytest.raises(TypeError, match="call start"):
            scheduler(Steps(7).next())


PRICED = (SmartSpec(), GammaBandit(), DCut(), WrongCost(DSparkAsync()), WrongCost(SmartSpec(), "stale", table=STALE))


@pytest.mark.parametrize("scheduler", PRICED, ids=repr)
def test_what_has_no_price_is_not_chosen_by_who_looks_at_prices(scheduler):
    schedule, previous = fresh(scheduler), []
    for _ in range(6):  # two requests of γ = 3 on a profile that ends at 5 tokens
        v = view(np.ones((2, 3)), listed([1.0] * 5), previous=previous)
        lens = schedule(v)
        assert lens.sum() <= 3
        previous = [StepRecord(v, lens, lens + 1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("TETRIS(-1)", "TETRIS: budget: expected a whole number, 0 or more, got -1"),
        ("TETRIS(1.5)", "TETRIS: budget: expected a whole number"),
        ("SmartSpec(acceptance=2)", r"SmartSpec: acceptance: expected 0\.\.1, got 2"),
        ("SmartSpec(decay=1)", "SmartSpec: decay: expected 0 or more and below 1, got 1"),
        ("SpecDecPP('h')", r"SpecDecPP: rejection: expected 0\.\.1, got 'h'"),
        ("GammaBandit(epsilon=-1)", r"GammaBandit: epsilon: expected 0\.\.1, got -1"),
        ("GammaBandit(seed=0.5)", "GammaBandit: seed: expected a whole number"),
        ("WrongCost(3)", r"WrongCost: scheduler: expected one, such as DSparkAsync\(\), got 3"),
        ("WrongCost(Nope())", "scheduler 'Nope': not known, expected one of"),
        ("WrongCost(nope)", "expected Name, Name"),
        ("WrongCost(DCut(), 'steep')", "WrongCost: kind: expected flat, scaled or stale, got 'steep'"),
        ("WrongCost(DCut(), 'scaled', factor=-1)", "WrongCost: factor: expected a number, 0 or more, got -1"),
        ("WrongCost(DCut(), 'stale')", r"WrongCost: table: expected rows .*, got \(\)"),
        ("WrongCost(DCut(), 'stale', table=((4, 1), (2, 1)))", "WrongCost: table: expected rows"),
        ("WrongCost(DCut(), 'stale', table=((1, 'a'),))", "WrongCost: table: expected rows"),
        ("WrongCost(DCut(), 'stale', table=3)", "WrongCost: table: expected rows .*, got 3"),
        ("WrongCost(DCut(), table=((1, 1),))", "WrongCost: table: has no meaning unless kind is stale"),
        ("WrongCost(DCut(), table=3)", "WrongCost: table"),
    ],
)
def test_bad_arguments_are_told_in_a_line(text, says):
    with pytest.raises(SpecsimError, match=says) as told:
        parse_scheduler(text)
    assert "\n" not in str(told.value)


def test_they_run_from_the_command_line(run):
    code, out, err = run(
        *("simulate", "--profile", "hw_profiles/dsv4-flash-b300-tp4.json", "--trace", "traces/qwen3-4b-dspark.json"),
        *("--gamma", "3", "--closed", "4", "--num-requests", "20", "--max-num-batched-tokens", "1024"),
        *("-s", "WrongCost(DSparkAsync(), kind='scaled', factor=0.5)"),
    )
    assert (code, err) == (0, "")
    assert "WrongCost(DSparkAsync(), kind='scaled', factor=0.5)" in out
