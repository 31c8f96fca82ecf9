"""Schedulers against brute force, against the paper's example, and against what they must not see."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from conftest import always, draft_cost, make_arrivals, make_blocks, make_profile, staircase
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.acceptance import Drafter, synthetic
from specsim.engine import Policy, Scenario, simulate
from specsim.metrics import summarize
from specsim.plan import plan
from specsim.rules import Rules
from specsim.schedulers import (
    MTP1,
    BatchSizeTable,
    DSparkAsync,
    DSparkGreedy,
    GlobalArgmax,
    LoadBlind,
    NoSpec,
    Oracle,
    StaticGamma,
    Threshold,
    top_k,
)
from specsim.sweep import sweep
from specsim.types import SLO, SpecsimError
from specsim.views import OracleView, StepView
from specsim.workload import ClosedLoop


def view(survival, price=lambda b: 1.0 + 0.0 * b, *, ids=None, prefill_tokens=0, finishing=0, kind=StepView, **fields):
    """A view of blocks with these survivals; ``price`` gives the seconds of a step of b tokens in all."""
    survival = np.asarray(survival, dtype=np.float64)
    base = len(survival) + prefill_tokens
    return kind(
        np.arange(len(survival)) if ids is None else np.asarray(ids),
        survival,
        lambda k: price(base + np.asarray(k)),
        gamma=survival.shape[1],
        prefill_tokens=prefill_tokens,
        finishing_prefills=finishing,
        **fields,
    )


def listed(prices):
    """A price by number of tokens 1, 2, ..., infinite beyond the list."""
    table = np.array([np.inf, *prices, np.inf])
    return lambda b: table[np.minimum(b, len(table) - 1)]


def survivals(draw, requests, gamma, choices=None):
    """Draw survivals [requests, γ] that do not increase along a block."""
    element = st.sampled_from(choices) if choices else st.floats(0.01, 1.0)
    rows = draw(
        st.lists(st.lists(element, min_size=gamma, max_size=gamma), min_size=requests, max_size=requests),
    )
    return np.sort(np.array(rows, dtype=np.float64), axis=1)[:, ::-1].copy()


# Fixed rules


def test_static_gamma_and_mtp1_verify_the_same_everywhere():
    v = view(np.full((3, 4), 0.5))
    assert StaticGamma(2)(v).tolist() == [2, 2, 2]
    assert StaticGamma(0)(v).tolist() == [0, 0, 0]
    assert MTP1()(v).tolist() == [1, 1, 1]
    assert NoSpec()(v).tolist() == [0, 0, 0]


def test_batch_size_table_takes_the_row_that_fits_or_the_one_before():
    table = BatchSizeTable(((1, 2, 6), (3, 3, 2), (6, 9, 1), (20, 30, 0)))
    lens = {n: table(view(np.full((n, 4), 0.5))).tolist() for n in (1, 2, 3, 4, 5, 6, 9, 10, 19, 20, 30, 31)}
    k = {1: 4, 2: 4, 3: 2, 4: 2, 5: 2, 6: 1, 9: 1, 10: 1, 19: 1, 20: 0, 30: 0, 31: 0}  # 6 is more than γ
    assert lens == {n: [k[n]] * n for n in lens}
    assert BatchSizeTable(((3, 9, 1), (1, 2, 3))) == BatchSizeTable([(1, 2, 3), (3, 9, 1)])


def test_threshold_stops_at_the_first_confidence_below():
    confidence = np.array([[0.9, 0.5, 0.4, 0.9], [0.4, 0.9, 0.9, 0.9], [0.5, 0.5, 0.5, 0.5], [0.9, 0.9, 0.9, 0.49]])
    v = view(np.cumprod(confidence, axis=1), confidence=confidence)
    assert Threshold(0.5)(v).tolist() == [2, 0, 4, 3]
    assert Threshold(0.0)(v).tolist() == [4, 4, 4, 4]
    assert Threshold(1.0)(v).tolist() == [0, 0, 0, 0]


def test_a_views_confidence_follows_from_its_survival():
    v = view([[0.5, 0.25, 0.0, 0.0], [1.0, 0.8, 0.6, 0.6]])
    np.testing.assert_allclose(v.confidence, [[0.5, 0.5, 0, 0], [1, 0.8, 0.75, 1]])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: StaticGamma(-1), "StaticGamma: gamma: expected a whole number, 0 or more, got -1"),
        (lambda: StaticGamma(1.5), "StaticGamma: gamma: expected a whole number"),
        (lambda: Threshold(1.5), r"Threshold: confidence: expected 0\.\.1, got 1.5"),
        (lambda: Threshold(float("nan")), "Threshold: confidence"),
        (lambda: BatchSizeTable(((3, 1, 2),)), r"BatchSizeTable: expected rows .*\(3, 1, 2\)"),
        (lambda: BatchSizeTable(((1, 2),)), "BatchSizeTable: expected rows"),
        (
            lambda: BatchSizeTable(((9, 9, 0), (2, 8, 3))),
            r"BatchSizeTable: .* of them from 1, got \(2, 8, 3\)",
        ),
        (lambda: BatchSizeTable(()), r"BatchSizeTable: .* of them from 1, got \(\)"),
        (lambda: DSparkAsync(staleness=0), "DSparkAsync: staleness: expected a whole number, 1 or more, got 0"),
        (lambda: DSparkAsync(newcomer=1.5), "DSparkAsync: newcomer"),
        (lambda: DSparkAsync(newcomer="median"), "DSparkAsync: newcomer: .*'median'"),
    ],
)
def test_bad_arguments_are_told_when_given(make, says):
    with pytest.raises(SpecsimError, match=says):
        make()


def test_labels_are_what_one_would_type():
    for scheduler in (
        NoSpec(),
        StaticGamma(5),
        StaticGamma(np.int64(5)),
        MTP1(),
        Threshold(0.5),
        DSparkGreedy(),
        GlobalArgmax(),
        DSparkAsync(),
        DSparkAsync(staleness=1, newcomer="mean"),
        BatchSizeTable(((1, 4, 3),)),
        Oracle(),
    ):
        assert eval(repr(scheduler)) == scheduler
    assert repr(DSparkAsync(staleness=2, newcomer=0.5)) == "DSparkAsync(newcomer=0.5)"
    assert repr(StaticGamma(np.int64(5))) == "StaticGamma(5)"


# The k largest


def brute_top_k(survival, k):
    """The first k of all positions sorted by survival descending, position, request."""
    requests, gamma = survival.shape
    places = sorted(itertools.product(range(gamma), range(requests)), key=lambda p: -survival[p[1], p[0]])
    lens = np.zeros(requests, dtype=int)
    for _, request in places[:k]:
        lens[request] += 1
    return lens


def test_ties_go_to_the_smaller_position_then_the_earlier_request():
    even = np.full((3, 2), 0.5)
    assert [top_k(even, k).tolist() for k in range(7)] == [
        [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2],
    ]  # fmt: skip
    # 0.5 stands at (request 0, position 2) and at (request 1, position 1): position decides before request.
    assert top_k(np.array([[0.9, 0.5], [0.5, 0.1]]), 2).tolist() == [1, 1]
    assert top_k(np.array([[0.9, 0.5], [0.5, 0.1]]), 3).tolist() == [2, 1]


@settings(max_examples=300)
@given(data=st.data())
def test_top_k_is_the_head_of_a_stable_sort(data):
    requests, gamma = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    many_ties = data.draw(st.booleans())
    survival = survivals(data.draw, requests, gamma, [0.0, 0.25, 0.5, 1.0] if many_ties else None)
    if data.draw(st.booleans()):
        survival = survival.astype(np.float32)
    k = data.draw(st.integers(-1, requests * gamma + 2))
    lens = top_k(survival, k)
    assert lens.tolist() == brute_top_k(survival, max(k, 0)).tolist()
    assert lens.sum() == min(max(k, 0), requests * gamma)


# Algorithm 1


def naive_algorithm_1(v, survival, prices):
    """Algorithm 1 of arXiv 2607.05147, word for word: admit the next best, stop once throughput does not rise."""
    requests, gamma = survival.shape
    candidates = sorted(itertools.product(range(gamma), range(requests)), key=lambda p: -survival[p[1], p[0]])
    tokens = v.num_seqs + v.prefill_tokens
    expected = float(v.num_seqs + v.finishing_prefills)
    lens = np.zeros(requests, dtype=int)
    best = expected / prices(tokens)
    for position, request in candidates:
        expected += survival[request, position]
        tokens += 1
        theta = expected / prices(tokens)
        if theta <= best:
            break
        best = theta
        lens[request] += 1
    return lens


@settings(max_examples=300)
@given(data=st.data())
def test_greedy_is_algorithm_1_on_any_curve(data):
    requests, gamma = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    survival = survivals(data.draw, requests, gamma, [0.2, 0.4, 0.7, 1.0] if data.draw(st.booleans()) else None)
    prefill = data.draw(st.integers(0, 5))
    n = requests * (1 + gamma) + prefill
    prices = listed(data.draw(st.lists(st.floats(0.5, 4.0), min_size=n, max_size=n)))
    v = view(survival, prices, prefill_tokens=prefill, finishing=data.draw(st.integers(0, 1)) if prefill else 0)
    assert DSparkGreedy()(v).tolist() == naive_algorithm_1(v, survival, prices).tolist()


@settings(max_examples=150)
@given(data=st.data())
def test_greedy_is_the_optimum_where_step_time_is_convex_and_increasing(data):
    requests, gamma = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    seed = data.draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    survival = np.cumprod(rng.uniform(0.1, 0.999, (requests, gamma)), axis=1)
    n = requests * (1 + gamma)
    prices = 1.0 + np.cumsum(np.sort(rng.exponential(0.2, n)))
    lens = DSparkGreedy()(view(survival, listed(prices)))

    def theta(lengths):
        return (requests + sum(survival[r, :ell].sum() for r, ell in enumerate(lengths))) / prices[
            requests + sum(lengths) - 1
        ]

    best = max(itertools.product(range(gamma + 1), repeat=requests), key=theta)
    assert theta(lens.tolist()) == pytest.approx(theta(best), rel=1e-12)
    assert lens.tolist() == list(best)
    assert GlobalArgmax()(view(survival, listed(prices))).tolist() == list(best)


def test_greedy_stops_at_a_plateau_and_the_argmax_does_not():
    # Θ(K) of one request with survivals 1, 1, 1: 1/1, 2/2, 3/1 -> equal, then better.
    v = view(np.ones((1, 3)), listed([1.0, 2.0, 1.0, 1.0]))
    assert DSparkGreedy()(v).tolist() == [0]
    assert GlobalArgmax()(v).tolist() == [3]


def test_finishing_prefills_count_as_tokens_that_come_anyway():
    # Survival .6, a step from 1.0 to 1.5 s: alone 1 -> 1.6/1.5 pays; beside three first tokens 4 -> 4.6/1.5 does not.
    prices = lambda b: np.where(np.asarray(b) > 1, 1.5, 1.0)  # noqa: E731
    assert DSparkGreedy()(view([[0.6]], prices)).tolist() == [1]
    later = lambda b: np.where(np.asarray(b) > 4, 1.5, 1.0)  # noqa: E731
    assert DSparkGreedy()(view([[0.6]], later, prefill_tokens=3, finishing=3)).tolist() == [0]
    # The same prompt tokens without a first token: they fill the step, but nothing is emitted for them.
    assert DSparkGreedy()(view([[0.6]], later, prefill_tokens=3, finishing=0)).tolist() == [1]


@pytest.mark.parametrize("c2", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_papers_appendix_a(c2):
    """R = 1, γ = 2, SPS(1, 2, 3) = 1.0, 0.5, 0.45, c1 = 0.8: what comes after c1 may not decide about it."""
    v = view([[0.8, 0.8 * c2]], listed([1 / 1.0, 1 / 0.5, 1 / 0.45]))
    assert DSparkGreedy()(v).tolist() == [0]


def test_the_papers_appendix_a_is_where_the_argmax_looks_ahead():
    prices = listed([1 / 1.0, 1 / 0.5, 1 / 0.45])
    assert GlobalArgmax()(view([[0.8, 0.8 * 0.9]], prices)).tolist() == [2]
    assert GlobalArgmax()(view([[0.8, 0.0]], prices)).tolist() == [0]
    # Θ = 1.0, 1.8 · 0.5, (1.8 + .72) · .45 = 1.134


@pytest.mark.parametrize("scheduler", [DSparkGreedy(), GlobalArgmax(), DSparkAsync().start()])
def test_what_cannot_be_priced_is_never_chosen(scheduler):
    # Two requests of γ = 3 on a profile that ends at 5 tokens: at most 3 draft tokens, however sure they are.
    assert scheduler(view(np.ones((2, 3)), listed([1.0] * 5))).sum() == 3


# DSparkAsync


def brute_async(history, v, prices, staleness, newcomer):
    """K by hand: the argmax of Θ over the survivals that each request now here had ``staleness`` steps ago."""
    requests, gamma = v.survival.shape
    stale = np.empty((requests, gamma))
    old = dict(zip(*history[-staleness], strict=True)) if len(history) >= staleness else {}
    known = [old[i] for i in v.request_ids.tolist() if i in old]
    for row, request in enumerate(v.request_ids.tolist()):
        if request in old:
            stale[row] = old[request]
        elif newcomer == "mean":
            stale[row] = np.mean(known, axis=0) if known else 1.0
        else:
            stale[row] = newcomer
    ranked = sorted(stale.ravel().tolist(), reverse=True)
    base = requests + v.prefill_tokens
    thetas = [
        (requests + v.finishing_prefills + sum(ranked[:k])) / float(prices(base + k)) for k in range(len(ranked) + 1)
    ]
    return int(np.argmax(thetas))


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10**6),
    staleness=st.integers(1, 3),
    newcomer=st.sampled_from([1.0, 0.0, 0.5, "mean"]),
    change=st.booleans(),
)
def test_async_plans_on_stale_survivals_and_admits_on_current_ones(seed, staleness, newcomer, change):
    rng = np.random.default_rng(seed)
    gamma, ids, history = 3, [7, 3], []
    schedule = DSparkAsync(staleness, newcomer).start()
    prices = listed(1.0 + np.cumsum(rng.uniform(0, 0.6, 40)))
    frozen = np.array(ids)
    for step in range(8):
        if change and step % 2:
            gone = [i for i in ids if rng.random() < 0.3][: len(ids) - 1]
            ids = [i for i in ids if i not in gone] + ([100 + step] if rng.random() < 0.7 else [])
            frozen = np.array(ids)  # the engine hands out the same array as long as nobody comes or goes
        survival = np.cumprod(rng.uniform(0.1, 1.0, (len(ids), gamma)), axis=1)
        prefill = int(rng.integers(0, 4))
        v = view(survival, prices, ids=frozen, prefill_tokens=prefill, finishing=int(prefill > 2))
        expected = brute_async(history, v, prices, staleness, newcomer)
        lens = schedule(v)
        assert lens.sum() == expected
        assert lens.tolist() == brute_top_k(survival, expected).tolist()
        history.append((list(ids), survival))


def test_async_by_hand():
    # Each draft token costs 0.5 s on top of 1 s for the first token: one of survival s pays if (1 + s)/1.5 > 1.
    prices = lambda b: 0.5 + 0.5 * np.asarray(b)  # noqa: E731
    schedule = DSparkAsync(staleness=2).start()
    good, poor = [[0.9]], [[0.1]]
    # Steps 1 and 2: everyone is a newcomer at 1.0 -> verify. Step 3 plans on step 1, step 4 on step 2.
    assert [schedule(view(s, prices)).tolist() for s in (good, poor, poor, good, good)] == [[1], [1], [1], [0], [0]]


def test_async_drops_who_left_and_newcomers_count_as_told():
    prices = lambda b: 0.5 + 0.5 * np.asarray(b)  # noqa: E731

    def run(newcomer):
        schedule = DSparkAsync(1, newcomer).start()
        schedule(view([[0.6], [0.1]], prices, ids=[1, 2]))
        # Request 2 left; 5 is new. With 2 requests, one token in the step lasts 1.5 s, two 2 s, three 2.5 s.
        return schedule(view([[0.1], [0.9]], prices, ids=[1, 5]))

    # Θ over {.6, 1.0}: 2/1.5 = 1.333, 3/2 = 1.5, 3.6/2.5 = 1.44 -> one token, and it goes to the best *current* one.
    assert run(1.0).tolist() == [0, 1]
    # Over {.6, 0}: 1.333, 2.6/2 = 1.3 -> none.
    assert run(0.0).tolist() == [0, 0]
    # "mean" counts request 5 at .6 like the only one known (2's .1 left with it): 1.333, 1.3, 1.28 -> none.
    assert run("mean").tolist() == [0, 0]
    # With nobody known, "mean" has nothing to go by and starts at 1.0.
    alone = DSparkAsync(1, "mean").start()
    alone(view([[0.1]], prices, ids=[1]))
    assert alone(view([[0.1], [0.1]], prices, ids=[8, 9])).tolist() == [1, 1]


def test_async_must_be_started_and_each_start_has_a_memory_of_its_own():
    with pytest.raises(TypeError, match=r"call start\(\)"):
        DSparkAsync()(view([[0.5]]))
    prices = lambda b: 0.5 + 0.5 * np.asarray(b)  # noqa: E731
    policy = DSparkAsync(staleness=1)
    one, other = policy.start(), policy.start()
    assert one(view([[0.1]], prices)).tolist() == [1]
    assert one(view([[0.1]], prices)).tolist() == [0]
    assert other(view([[0.1]], prices)).tolist() == [1]


def test_async_in_the_engine_is_told_what_its_staleness_promises():
    """In a run: K of every step from the survivals that a spy beside it saw ``staleness`` steps before."""

    class Spy:
        needs_confidence = True

        def start(self):
            self.inner, self.history = DSparkAsync(staleness=2).start(), []
            return self.schedule

        def schedule(self, v):
            prices = lambda b: v.step_seconds(b - v.num_seqs - v.prefill_tokens)  # noqa: E731
            expected = brute_async(self.history, v, prices, 2, 1.0)
            lens = self.inner(v)
            assert lens.sum() == expected
            assert [len(r.request_ids) for r in v.previous][-2:] == [len(ids) for ids, _ in self.history[-2:]]
            self.history.append((v.request_ids.tolist(), v.survival.copy()))
            return lens

    spy = Spy()
    slow = make_profile(verify=staircase([1, 8, 400], [1.0, 1.1, 30.0], below="linear"))
    arrivals = make_arrivals(sorted(np.random.default_rng(1).uniform(0, 60, 12)), 5, 25)
    run = simulate(Scenario(slow, arrivals, synthetic(0.7, 4, concentration=3.0), spy), steps=True)
    assert len(spy.history) > 40
    assert 0 < run.steps["draft_tokens"].sum() < 4 * run.steps["num_seqs"].sum()


# What engines add to DSparkAsync


def priced(stairs):
    """Seconds by tokens from (last token, seconds) stairs."""
    return lambda b: np.array([s for _, s in stairs])[np.searchsorted([last for last, _ in stairs], np.asarray(b))]


def test_async_fills_the_padding_with_drafts_that_cost_nothing():
    # Two requests, prices of up to 4, 8 and 20 tokens. Planned: the two first drafts; a third and fourth are free.
    prices = priced([(4, 1.0), (6, 1.1), (20, 9.0)])
    survival = np.array([[0.9, 0.05, 0.01], [0.8, 0.04, 0.02]])

    def second(**fields):
        schedule = DSparkAsync(1, **fields).start()
        schedule(view(survival, prices))
        return schedule(view(survival, prices)).tolist()

    assert second() == [1, 1]
    assert second(fill=True) == [1, 1]  # 4 tokens fill their graph
    wider = priced([(5, 1.0), (20, 9.0)])
    prices = wider
    assert second() == [2, 1]  # the argmax takes what is free and may survive
    survival = np.array([[0.9, 0.0, 0.0], [0.8, 0.0, 0.0]])
    assert second() == [1, 1]
    assert second(fill=True) == [2, 1]


def test_async_never_verifies_below_the_floor_and_at_least_what_is_asked():
    survival = np.array([[0.9, 1e-7, 1e-8], [0.8, 0.7, 1e-9]])
    free = lambda b: np.ones_like(b, dtype=float)  # noqa: E731
    assert DSparkAsync().start()(view(survival, free)).tolist() == [3, 3]
    assert DSparkAsync(floor=1e-6).start()(view(survival, free)).tolist() == [1, 2]
    assert DSparkAsync(floor=1e-6, least=2).start()(view(survival, free)).tolist() == [2, 2]
    dear = lambda b: np.asarray(b, dtype=float) ** 3  # noqa: E731
    schedule = DSparkAsync(1, newcomer=0.0, least=1).start()
    assert schedule(view(survival, dear)).tolist() == [1, 1]
    assert DSparkAsync(1, least=9).start()(view(survival, dear)).tolist() == [3, 3]


@settings(max_examples=60)
@given(st.data(), st.integers(1, 6), st.integers(0, 4), st.booleans())
def test_async_stays_within_its_budget_whatever_every_block_gets(data, requests, least, fill):
    """``least`` of every block go first and the rest by survival: no more than planned, filled or not."""
    survival = survivals(data.draw, requests, 3)
    stair = priced([(requests + 4, 1.0), (requests * 4, 3.0)])
    lens = DSparkAsync(1, newcomer=0.0, least=least, fill=fill).start()(view(survival, stair))
    base = min(least, 3) * requests
    assert (lens >= min(least, 3)).all()
    expected = max(base, 4 if fill and base <= 4 else 3 * requests if fill else base)
    assert lens.sum() == min(expected, 3 * requests)


def test_async_forgets_at_prompts_if_it_is_told_to():
    prices = lambda b: 0.5 + 0.5 * np.asarray(b)  # noqa: E731

    def lens(reset, **prompts):
        schedule = DSparkAsync(1, reset=reset).start()
        schedule(view([[0.1]], prices))
        return schedule(view([[0.1]], prices, **prompts)).tolist()

    assert lens(False) == lens(True) == lens(False, prefilled=True) == [0]
    assert lens(True, prefilled=True) == [1]  # everyone is a newcomer again


def test_a_view_tells_of_prompts_in_steps_without_decodes():
    """Where prompts and decodes do not share steps, as in SGLang."""
    seen = []

    def spy(v):
        seen.append((v.prefill_tokens, v.prefilled))
        return np.zeros(v.num_seqs, dtype=np.int64)

    arrivals = make_arrivals([0.0, 2.5], [4, 20], [8, 3])
    fields = {"max_num_batched_tokens": 10, "drafter": synthetic(0.5, 1)}
    simulate(Scenario(make_profile(), arrivals, scheduler=spy, rules=Rules(mixed=False), **fields))
    assert seen[:4] == [(0, True), (0, False), (0, True), (0, False)]
    seen.clear()
    simulate(Scenario(make_profile(), arrivals, scheduler=spy, **fields))
    assert (8, True) in seen


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"floor": 1.0}, "floor: expected a survival"),
        ({"least": -1}, "least: expected a whole number, 0 or more"),
        ({"least": True}, "least: expected a whole number"),
        ({"staleness": 10**20}, "staleness: expected a whole number"),
        ({"newcomer": True}, "newcomer: expected 0..1 or 'mean', got True"),
        ({"fill": "no"}, "fill: expected True or False, got 'no'"),
        ({"reset": 1}, "reset: expected True or False, got 1"),
    ],
)
def test_what_engines_add_has_bounds(fields, says):
    with pytest.raises(SpecsimError, match=says):
        DSparkAsync(**fields)


def test_load_blind_budgets_by_what_survived_and_not_by_price():
    free, dear = (lambda b: np.ones_like(b, dtype=float)), (lambda b: np.asarray(b, dtype=float) ** 9)
    sure, unsure = [[0.9, 0.8, 0.7, 0.6], [0.6, 0.6, 0.5, 0.2]], [[0.9, 0.6, 0.2, 0.2], [0.4, 0.1, 0.1, 0.0]]
    for prices in (free, dear):
        schedule = LoadBlind(survival=0.5, every=2, first=2).start()
        assert schedule(view(sure, prices)).tolist() == [3, 1]  # the first budget; one of each go first
        assert schedule(view(unsure, prices)).tolist() == [1, 1]  # 2 of two requests at 0.5 or more: 1 each, at once
        assert schedule(view(sure, prices)).tolist() == [1, 1]
        assert schedule(view(sure, prices)).tolist() == [4, 4]  # 7 of two: 4, as many as γ
        assert schedule(view(unsure, prices)).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("row", "k"),
    [([0.2, 0.1, 0.1, 0.1], 1), ([0.3, 0.2, 0.1, 0.1], 1), ([0.9, 0.3, 0.2, 0.1], 3), ([0.9, 0.9, 0.3, 0.1], 3),
     ([0.9, 0.9, 0.9, 0.9], 4)],
)  # fmt: skip
def test_load_blind_makes_even_budgets_odd_below_the_block(row, k):
    """At 0.3 or more: 0 and 2 become 1 and 3; 4 is γ."""
    assert LoadBlind(every=1).start()(view([row])).tolist() == [k]
    later = LoadBlind(every=1, first=2, at_once=False).start()
    assert [later(view([row])).tolist() for _ in range(2)] == [[2], [k]]


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), gamma=st.integers(1, 8), least=st.integers(0, 3), at_once=st.booleans())
def test_load_blind_by_its_words(seed, gamma, least, at_once):
    """The budget from every third step alone, spread over what lies beyond ``least`` of every block."""
    rng, schedule = np.random.default_rng(seed), LoadBlind(0.4, 3, least, 5, at_once).start()
    k = 5
    for step in range(1, 10):
        survival = np.cumprod(rng.uniform(0.4, 1.0, (int(rng.integers(1, 6)), gamma)), axis=1)
        counted = k
        if step % 3 == 0:
            counted = math.ceil(sum(s >= 0.4 for row in survival.tolist() for s in row) / len(survival))
            if counted % 2 == 0 and counted < gamma:
                counted += 1
        used = min(counted if at_once else k, gamma)
        k, floor = counted, min(least, gamma)
        want = floor + np.array(brute_top_k(survival[:, floor:], max(used - floor, 0) * len(survival)))
        assert schedule(view(survival)).tolist() == want.tolist()


def test_load_blinds_fields_have_bounds():
    with pytest.raises(TypeError, match=r"call start\(\)"):
        LoadBlind()(view([[0.5]]))
    for field, value in (("every", 0), ("least", -1), ("first", 1.5), ("survival", 1.5), ("at_once", 1)):
        with pytest.raises(SpecsimError, match=f"LoadBlind: {field}: expected"):
            LoadBlind(**{field: value})


@pytest.mark.parametrize("table", [5, (1, 4, 3), ((1, 4, "a"),), ((1, 4, 3), (3, 9, 2)), ((4, 1, 2),), ((1, 2, -1),)])
def test_a_table_by_batch_size_has_rows_that_do_not_overlap(table):
    with pytest.raises(SpecsimError, match=r"BatchSizeTable: expected rows \(lo, hi, K\)"):
        BatchSizeTable(table)
    with pytest.raises(SpecsimError, match=r"Threshold: confidence: expected 0\.\.1, got 'a'"):
        Threshold("a")


# The upper bound


def test_the_oracle_verifies_accepted_tokens_alone():
    v = view(np.ones((3, 4)), lambda b: 1 + 0.01 * np.asarray(b), kind=OracleView)
    v.accepted = np.array([2, 0, 4])
    assert Oracle()(v).tolist() == [2, 0, 4]
    v = view(np.ones((3, 4)), lambda b: np.where(np.asarray(b) > 5, 9.0, 1.0), kind=OracleView)
    v.accepted = np.array([2, 0, 4])
    assert Oracle()(v).sum() == 2  # past five tokens a step takes nine times as long


POLICIES = (
    NoSpec(),
    StaticGamma(0),
    StaticGamma(1),
    StaticGamma(4),
    Threshold(0.5),
    DSparkGreedy(),
    GlobalArgmax(),
    DSparkAsync(),
    DSparkAsync(1, "mean"),
)


@pytest.mark.parametrize("prices", [[1.0, 1.5, 4.0], [1.0, 1.02, 1.1]], ids=["steep", "flat"])
def test_nothing_beats_the_oracle(prices):
    profile = make_profile(verify=staircase([1, 16, 128], prices, below="linear"))
    base = Scenario(profile, ClosedLoop(8, 4, 24), synthetic(0.7, 4, concentration=3.0), prefill="free")
    runs = {p: simulate(base.with_policy(p), 3) for p in (*POLICIES, Oracle())}
    sold = {p: summarize(run)["throughput"][0] for p, run in runs.items()}
    assert all(sold[Oracle()] > sold[p] for p in POLICIES)
    oracle = runs[Oracle()].requests
    assert (oracle["verified"] == oracle["accepted"]).all()
    assert oracle["verified"].sum() > 0
    assert len({round(x, 9) for x in sold.values()}) > 6  # the others do differ


# Schedulers of a user's own


def tiny_run(scheduler, **fields):
    drafter = fields.pop("drafter", always(2, 3))
    return simulate(Scenario(make_profile(), make_arrivals([0.0, 0.0], 4, 9), drafter, scheduler, **fields))


@pytest.mark.parametrize(
    "lens",
    [
        lambda v: np.full(v.num_seqs + 1, 1),
        lambda v: np.ones((v.num_seqs, 1), dtype=int),
        lambda v: 1,
        lambda v: None,
        lambda v: np.full(v.num_seqs, 1.0),
        lambda v: np.full(v.num_seqs, True),
        lambda v: ["1"] * v.num_seqs,
        lambda v: [[1], [1, 2]],
        lambda v: np.full(v.num_seqs, v.gamma + 1),
        lambda v: np.full(v.num_seqs, -1),
        lambda v: [],
    ],
    ids=["long", "matrix", "number", "none", "float", "bool", "text", "ragged", "above", "below", "empty"],
)
def test_what_a_scheduler_may_not_return(lens):
    def mine(v):
        return lens(v)

    says = r"scheduler mine: (expected 2 whole draft lengths within 0\.\.3, got|ValueError: .* inhomogeneous)"
    with pytest.raises(SpecsimError, match=says) as error:
        tiny_run(mine)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "lens", [lambda v: [1] * v.num_seqs, lambda v: (3,) * v.num_seqs, lambda v: np.full(v.num_seqs, 2, np.uint8)]
)
def test_lists_and_small_integers_are_fine(lens):
    run = tiny_run(lens)
    assert run.requests["emitted"].tolist() == [9, 9]
    assert run.requests["verified"].sum() > 0


def test_a_scheduler_that_uses_one_array_again_does_not_rewrite_history():
    history = []

    class Reuses:
        def start(self):
            self.out = np.zeros(2, dtype=np.int64)
            return self.schedule

        def schedule(self, v):
            history.append([r.draft_lens.tolist() for r in v.previous])
            self.out[:] = len(history) % 4
            return self.out[: v.num_seqs]

    tiny_run(Reuses())
    assert history == [[], [[1, 1]], [[1, 1], [2, 2]]]


@pytest.mark.parametrize("scheduler", [StaticGamma(4), StaticGamma(np.int64(4))])
def test_a_block_longer_than_the_drafters_is_refused(scheduler):
    with pytest.raises(SpecsimError, match=r"gamma: expected at most 3, the block length of drafter 'always'"):
        tiny_run(scheduler)


def test_a_class_in_place_of_a_scheduler_is_told():
    for kind in (DSparkAsync, NoSpec, StaticGamma):
        with pytest.raises(SpecsimError, match=kind.__name__):
            tiny_run(kind)


def test_a_functions_label_is_its_name():
    def half(v):
        return np.full(v.num_seqs, v.gamma // 2)

    assert tiny_run(half).label == "half@always"
    assert tiny_run(StaticGamma(2)).label == "StaticGamma(2)@always"
    assert tiny_run(NoSpec()).label == "NoSpec()"
    assert tiny_run(partial(half)).label


def test_a_scheduler_with_memory_gets_a_fresh_one_for_each_replica_and_run():
    starts = []

    @dataclass(frozen=True)
    class Counting:
        def start(self):
            starts.append(0)
            return lambda v: np.zeros(v.num_seqs, dtype=int)

        def __call__(self, v):
            raise AssertionError("start() was there to be called")

    tiny_run(Counting(), replicas=2)
    tiny_run(Counting())
    assert len(starts) == 3


# What no scheduler may see


class Spy:
    """Walks over everything that a view shows and keeps it."""

    needs_confidence = True

    def __init__(self):
        self.names: set[str] = set()
        self.arrays: list[tuple[str, np.ndarray]] = []
        self.previous: list[list[dict]] = []
        self.views: list[dict] = []

    def look(self, thing, where):
        for name in dir(thing):
            if name.startswith("__"):
                continue
            self.names.add(name)
            value = getattr(thing, name, None)  # a slot may be empty
            if isinstance(value, np.ndarray | int | list | tuple) or np.isscalar(value):
                self.arrays.append((f"{where}.{name}", np.array(value)))

    def __call__(self, v):
        self.look(v, "view")
        for record in v.previous:
            self.look(record, "previous")
        self.previous.append(
            [{n: np.array(getattr(r, n)) for n in ("request_ids", "survival", "draft_lens", "emitted")}
             for r in v.previous]
        )  # fmt: skip
        lens = (v.request_ids + len(self.views)) % (v.gamma + 1)
        self.views.append({"request_ids": v.request_ids.copy(), "survival": v.survival.copy(), "lens": lens})
        return lens


def test_no_view_shows_acceptance_or_lengths():
    spy = Spy()
    rng = np.random.default_rng(3)
    accepted = rng.integers(0, 4, 64)
    arrivals = make_arrivals([0.0, 0.5, 9.0], [1009, 2003, 4001], [53, 59, 61])  # numbers that nothing else has
    scenario = Scenario(make_profile(), arrivals, Drafter(make_blocks(accepted.tolist(), 3), 3), spy)
    simulate(scenario)
    public = {name for name in spy.names if not name.startswith("_")}
    assert public == {
        "confidence", "draft_lens", "emitted", "finishing_prefills", "gamma", "num_seqs", "prefill_tokens", "prefilled",
        "previous", "request_ids", "step_curve", "step_seconds", "survival",
    }  # fmt: skip
    secret = {1009, 2003, 4001, 53, 59, 61}
    for where, values in spy.arrays:
        # Prompts are in the forward, for everyone to see; prices and places on the tape are numbers of their own.
        if where not in ("view.prefill_tokens", "view._column", "view._rows"):
            assert not secret & set(values.ravel().tolist()), where


def test_only_the_oracles_view_tells_what_is_accepted():
    seen = []

    @dataclass(frozen=True)
    class Cheat:
        oracle = True

        def __call__(self, v):
            seen.append(v.accepted.tolist())
            return v.accepted

    run = tiny_run(Cheat())
    assert seen[0] == [2, 2]
    assert (run.requests["accepted"] == run.requests["verified"]).all()
    assert not hasattr(view([[0.5]]), "accepted")


def test_a_view_cannot_change_the_run():
    def vandal(v):
        for array in (v.survival, v.confidence, v.request_ids):
            if array.flags.writeable:
                array[:] = 0
        return np.full(v.num_seqs, 2)

    clean, spoilt = tiny_run(StaticGamma(2)), tiny_run(vandal)
    assert clean.requests.equals(spoilt.requests)
    again = tiny_run(StaticGamma(2))  # nor the blocks that later runs read
    assert clean.requests.equals(again.requests)


def test_previous_tells_what_the_last_steps_did():
    spy = Spy()
    accepted = np.random.default_rng(4).integers(0, 4, 64)
    arrivals = make_arrivals([0.0, 3.0, 6.0, 20.0], 5, [25, 9, 30, 12])
    drafter = Drafter(make_blocks(accepted.tolist(), 3), 3)
    run = simulate(Scenario(make_profile(), arrivals, drafter, spy), steps=True)
    assert spy.previous[0] == []
    assert max(map(len, spy.previous)) == 8
    for step, previous in enumerate(spy.previous):
        for back, record in enumerate(reversed(previous), start=1):  # newest last
            was = spy.views[step - back]
            assert record["request_ids"].tolist() == was["request_ids"].tolist()
            assert record["draft_lens"].tolist() == was["lens"].tolist()
            np.testing.assert_array_equal(record["survival"], was["survival"])
    # What was emitted adds up to the run's own count: everything but the first tokens and the last step of all.
    emitted: dict[int, int] = {}
    for previous in spy.previous[1:]:
        for request, tokens in zip(previous[-1]["request_ids"].tolist(), previous[-1]["emitted"].tolist(), strict=True):
            emitted[request] = emitted.get(request, 0) + tokens
    last = spy.views[-1]["request_ids"].tolist()
    for request, output in enumerate([25, 9, 30, 12]):
        if request not in last:
            assert emitted[request] == output - 1
    decoding = run.steps[run.steps["num_seqs"] > 0]
    assert len(decoding) == len(spy.views)


def test_a_view_tells_the_prompts_in_the_forward():
    told = []

    def note(v):
        told.append((v.num_seqs, v.prefill_tokens, v.finishing_prefills))
        return [0] * v.num_seqs

    # Ten tokens a step: the decode reserves four, six go to prompts of 9, 2 and 5 tokens.
    arrivals = make_arrivals([0.0, 0.5, 0.5, 0.5], [4, 9, 2, 5], [9, 1, 1, 1])
    run = simulate(Scenario(make_profile(), arrivals, always(0, 3), note, max_num_batched_tokens=10), steps=True)
    assert told[:4] == [(1, 6, 0), (1, 6, 2), (1, 4, 1), (1, 0, 0)]
    decoding = run.steps[run.steps["num_seqs"] > 0]
    assert [f for _, _, f in told] == (decoding["emitted"] - decoding["num_seqs"]).tolist()


def test_step_seconds_is_the_price_of_the_step():
    told = []

    class Asks:
        synchronous = True

        def __call__(self, v):
            told.append(float(v.step_seconds(2 * v.num_seqs)))
            many = v.step_seconds(np.arange(4))
            assert [float(v.step_seconds(k)) for k in range(4)] == many.tolist() == v.step_curve(3).tolist()
            return np.full(v.num_seqs, 2)

    profile = make_profile(sync_seconds=0.25, host_seconds=0.125)
    drafter = always(1, 3, cost=draft_cost(0.5))
    run = simulate(Scenario(profile, make_arrivals([0.0, 2.5], 7, 9), drafter, Asks()), steps=True)
    decoding = run.steps[run.steps["num_seqs"] > 0]
    assert decoding["duration"].tolist() == told


def test_two_settings_without_a_repr_cannot_be_told_apart():
    class Old:
        def __init__(self, at):
            self.at = at

        def __call__(self, view):
            return np.full(view.num_seqs, self.at)

    twice = "policy Old is given twice: labels tell results apart; two settings of a class cannot be told apart"
    scenario = Scenario(make_profile(), ClosedLoop(2), synthetic(0.7, gamma=3))
    for call in (sweep, partial(plan, slo=SLO(ttft=1), users=1)):
        with pytest.raises(SpecsimError, match=twice):
            call(scenario, [Old(1), Old(2)])
        with pytest.raises(SpecsimError, match=r"policy StaticGamma\(2\) is given twice: labels tell results apart$"):
            call(scenario, [StaticGamma(2), StaticGamma(2)])


def test_a_label_is_one_line_without_addresses():
    """It is the same in every run: functools.partial and fields that are functions print where they lie."""

    @dataclass(frozen=True)
    class Built:
        rule: object

    class Long:
        def __repr__(self):
            return "Long(\n  1)"

    for scheduler, label in (
        (Long(), "Long( 1)"),
        (partial(half, share=2), f"functools.partial(<function {half.__name__}>, share=2)"),
        (Built(half), f"<function {half.__name__}>)"),
    ):
        assert repr(Policy(scheduler)).endswith(label)
        assert " at 0x" not in repr(Policy(scheduler))


def half(view, share=2):
    return np.full(view.num_seqs, view.gamma // share)
