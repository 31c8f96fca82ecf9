"""Tiers as they are typed, and the shares of the traffic."""

import math

import pytest

import specsim as ss
from specsim.tiers import Bound, Tier, merged, parse_tier, tier_of, with_shares
from specsim.types import SLO, SpecsimError


def test_a_tier_as_it_is_typed():
    tier = parse_tier("pro: interactivity>=80@p10, ttft<=1s@p95, e2e <= 250ms, share=0.3")
    assert parse_tier("pro: interactivity>=80@p10, ttft<=1s@p95, e2e <= 250ms, share = 30%") == tier
    assert tier == Tier(
        "pro", (Bound("interactivity", "p10", 80), Bound("ttft", "p95", 1.0), Bound("e2e", "p90", 0.25)), 0.3
    )
    assert str(tier) == "pro (interactivity p10 ≥ 80 tok/s, ttft p95 ≤ 1 s, e2e p90 ≤ 250 ms)"
    assert parse_tier("a: interactivity>=80").bounds == (Bound("interactivity", "p10", 80),)  # nine of ten requests


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pro", "expected NAME: BOUNDS"),
        (": ttft<=1s", "expected NAME: BOUNDS"),
        ("pro:", "expected NAME: BOUNDS"),
        ("pro: fast", "'fast': expected a bound such as"),
        ("pro: ttft<=1s,", "'': expected a bound"),
        ("pro: ttft<=1s@p95 please", "expected a bound such as"),
        ("pro: latency<=1s", "expected interactivity, ttft, tpot, e2e or queue, got 'latency'"),
        ("pro: ttft>=1s", "expected ttft<="),
        ("pro: interactivity<=80", "expected interactivity>="),
        ("pro: ttft<=1", "expected a unit, s or ms"),
        ("pro: interactivity>=80s", "expected tokens/s without a unit"),
        ("pro: ttft<=1s@p96", "expected @mean, p10, p50, p90, p95 or p99"),
        ("pro: ttft<=0s", "expected a number above 0"),
        ("pro: ttft<=1e999s", "expected a number above 0"),
        ("pro: ttft<=1s, ttft<=2s", "ttft@p90 is given twice"),
        ("pro: share=0.5", "expected at least one bound"),
        ("pro: ttft<=1s, share=2", "share: expected above 0 and at most 1, such as 0.3 or 30%, got '2'"),
        ("pro: ttft<=1s, share=nan", "share: expected above 0"),
        ("pro: ttft<=1s, share=much", "share: expected above 0"),
        ("pro: ttft<=1s, share=200%", "share: expected above 0"),
        ("pro: ttft<=1s, share=%", "share: expected above 0"),
        ("pro: ttft<=1s, share=0.1, share=0.2", "share is given twice"),
    ],
)
def test_what_is_no_tier_is_told_in_one_line(text, words):
    with pytest.raises(SpecsimError) as error:
        parse_tier(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_use_of_a_bound():
    fast, soon = Bound("interactivity", "p10", 80), Bound("ttft", "p90", 2)
    assert fast.use(160) == 0.5
    assert fast.use(0) == math.inf
    assert soon.use(3) == 1.5
    assert fast.use(math.nan) == 0  # answers of one token have no speed to miss
    assert fast.slower(1.1).limit == pytest.approx(88)
    assert soon.slower(1.1).limit == pytest.approx(2 / 1.1)


def test_shares():
    a, b, c = (Tier(n, (Bound("ttft", "p90", 1),), s) for n, s in (("a", 0.5), ("b", None), ("c", None)))
    assert [t.share for t in with_shares([a, b, c])] == [0.5, 0.25, 0.25]
    assert with_shares([b])[0].share == 1
    for tiers, words in (
        ([], "expected at least one"),
        ([a], "expected a sum of 1, got 0.5"),
        ([a, a], "'a' is given twice"),
        ([Tier("x", a.bounds, 0.7), a], "expected a sum of 1, got 1.2"),
        ([Tier("x", a.bounds, 1.0), b], "nothing is left for b"),
    ):
        with pytest.raises(SpecsimError, match=words):
            with_shares(tiers)


def test_a_shared_pool_keeps_the_strictest_of_each_kind():
    one = parse_tier("one: interactivity>=80, ttft<=2s")
    other = parse_tier("other: interactivity>=50, ttft<=1s, ttft<=3s@p99")
    assert merged([one, other]).bounds == (
        Bound("interactivity", "p10", 80), Bound("ttft", "p90", 1), Bound("ttft", "p99", 3),
    )  # fmt: skip
    assert merged([other, one]).bounds[0].limit == 80


def test_an_slo_is_kept_by_nine_requests_of_ten():
    assert tier_of(SLO(interactivity=80, ttft=1)).bounds == (Bound("interactivity", "p10", 80), Bound("ttft", "p90", 1))
    with pytest.raises(SpecsimError, match="expected at least one bound"):
        tier_of(SLO())
    assert ss.Tier is Tier
