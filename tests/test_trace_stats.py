"""What is read off a trace, against loops that do it row by row and against laws with known answers."""

from types import SimpleNamespace

import numpy as np
import pytest
from conftest import make_blocks
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specsim.acceptance import Drafter
from specsim.calibration import calibration_report
from specsim.hardware import Provenance
from specsim.schedulers import Threshold
from specsim.synthesis import Domain, Synthetic, generate
from specsim.trace_stats import (
    acceptance_table,
    calibration_table,
    clustered_ratio,
    sample,
    tau_table,
    threshold_sweep,
    visited,
)
from specsim.types import SpecsimError

GAMMA = 3


@st.composite
def traces(draw, kind="dense"):
    """Small traces of one to three domains, ragged responses, blocks that may propose less than γ."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    request, domain, position = [], [], []
    for d in range(draw(st.integers(1, 3))):
        for r in range(draw(st.integers(1, 3))):
            length = draw(st.integers(1, 9))
            request += [f"{d}.{r}"] * length
            domain += [f"domain {d}"] * length
            start = int(rng.integers(0, 5))
            steps = np.ones(length, int) if kind == "dense" else rng.integers(1, 4, length)
            position += (start + np.cumsum(steps) - 1).tolist()
    n = len(request)
    proposed = np.full(n, GAMMA) if draw(st.booleans()) else rng.integers(0, GAMMA + 1, n)
    sts = draw(st.sampled_from([None, (0.5, 2.0, 1.5)]))
    return make_blocks(
        rng.integers(0, proposed + 1).tolist(), GAMMA, kind=kind, confidence=rng.random((n, GAMMA)),
        proposed=proposed.tolist(), request_id=request, domain=domain, position=position, sts=sts,
    )  # fmt: skip


def rows_of(trace, domain):
    return [i for i in range(len(trace)) if domain in ("all", trace.domains[trace.domain[i]])]


def walk(trace, lengths):
    """The rows that a replay reads, response by response, one at a time."""
    read = []
    for name in dict.fromkeys(zip(trace.domain, trace.request_id, strict=True)):
        mine = {int(trace.position[i]): i for i in range(len(trace)) if (trace.domain[i], trace.request_id[i]) == name}
        at = min(mine)
        while at in mine:
            read.append(mine[at])
            at += min(int(trace.accepted[mine[at]]), int(lengths[mine[at]])) + 1
    return read


@given(traces())
def test_acceptance_is_what_counting_gives(trace):
    table = acceptance_table(trace)
    assert table["domain"].drop_duplicates().tolist() == ["all", *trace.domains]
    for _, row in table.iterrows():
        rows, k = rows_of(trace, row["domain"]), row["position"]
        offered = [i for i in rows if trace.proposed[i] >= k]
        reached = [i for i in offered if trace.accepted[i] >= k - 1]
        survived = [i for i in offered if trace.accepted[i] >= k]
        assert (row["count"], row["reached"]) == (len(offered), len(reached))
        assert row["responses"] == len({(trace.domain[i], trace.request_id[i]) for i in rows})
        for value, among in ((row["survival"], offered), (row["conditional"], reached)):
            assert value == pytest.approx(len(survived) / len(among)) if among else np.isnan(value)
        if row["conditional_low"] == row["conditional_low"]:
            assert 0 <= row["conditional_low"] <= row["conditional"] <= row["conditional_high"] <= 1


@given(traces())
def test_tau_is_what_a_walk_gives(trace):
    table = tau_table(trace)
    assert len(table) == GAMMA * (1 + len(trace.domains))
    for gamma in range(1, GAMMA + 1):
        read = walk(trace, [gamma] * len(trace))
        for domain in ("all", *trace.domains):
            row = table[(table["domain"] == domain) & (table["gamma"] == gamma)].iloc[0]
            seen = [i for i in read if i in rows_of(trace, domain)]
            assert row["cycles"] == len(seen)
            assert row["tau"] == pytest.approx(np.mean([min(trace.accepted[i], gamma) + 1 for i in seen]))
            every = np.minimum(trace.accepted[rows_of(trace, domain)], gamma) + 1
            assert row["tau_anchors"] == pytest.approx(every.mean())


@given(traces(), st.booleans())
def test_a_threshold_does_what_the_scheduler_would(trace, calibrated):
    levels = [0.0, 0.3, 0.8, 1.0]
    table = threshold_sweep(trace, levels, calibrated)
    tape = Drafter(trace, GAMMA).tape(calibrated=calibrated)
    for level in levels:
        lengths = np.minimum(Threshold(level)(SimpleNamespace(confidence=tape.confidence)), trace.proposed)
        read = walk(trace, lengths)
        for domain in ("all", *trace.domains):
            row = table[(table["domain"] == domain) & (table["threshold"] == level)].iloc[0]
            seen = [i for i in read if i in rows_of(trace, domain)]
            kept = sum(min(trace.accepted[i], lengths[i]) + 1 for i in seen)
            verified = sum(lengths[i] + 1 for i in seen)
            assert row["cycles"] == len(seen)
            assert row["tau"] == pytest.approx(kept / len(seen))
            assert row["verified_tokens"] == pytest.approx(verified / len(seen))
            assert row["token_acceptance_rate"] == pytest.approx(kept / verified)


def test_threshold_zero_verifies_all_and_one_nothing_uncertain():
    trace = make_blocks([2, 0, 1, 2, 2, 0], 2)
    table = threshold_sweep(trace, [0.0, 1.0])
    assert table["verified_tokens"].tolist() == [3, 1, 3, 1]
    assert table.loc[table["threshold"] == 0, "tau"].tolist() == tau_table(trace).query("gamma == 2")["tau"].tolist()
    assert table.loc[table["threshold"] == 1, "token_acceptance_rate"].tolist() == [1, 1]
    assert threshold_sweep(make_blocks([1], 1), [0.5])["verified_tokens"].tolist() == [
        2,
        2,
    ]  # a confidence of 0.5 passes


@given(traces("sequential"))
def test_every_row_of_a_sequential_trace_is_a_cycle(trace):
    assert visited(trace, np.full(len(trace), 5)).all()
    table = tau_table(trace).query("domain == 'all'")
    assert (table["cycles"] == len(trace)).all()
    np.testing.assert_allclose(table["tau"], table["tau_anchors"])


def test_visited_by_hand():
    trace = make_blocks([0, 2, 0, 0, 1, 0], 2, request_id=["a"] * 4 + ["b"] * 2, position=[5, 6, 7, 8, 0, 1])
    # a: 5 → 6 → 9, past the end; b: 0 → 2, past the end.
    assert visited(trace, trace.accepted + 1).tolist() == [True, True, False, False, True, False]


# Laws


def test_constant_acceptance_gives_its_tau():
    alpha = 0.8
    law = Domain(conditional_acceptance=(alpha,) * 4)
    _, accepted = generate(law, 200_000, np.random.default_rng(3))
    names = np.repeat([f"{i:03d}" for i in range(100)], 2000).tolist()
    trace = make_blocks(accepted.tolist(), 4, request_id=names, position=np.tile(np.arange(2000), 100).tolist())
    inside = 0
    for _, row in acceptance_table(trace).query("domain == 'all'").iterrows():
        assert row["conditional"] == pytest.approx(alpha, abs=0.005)
        inside += row["conditional_low"] <= alpha <= row["conditional_high"]
    for _, row in tau_table(trace).query("domain == 'all'").iterrows():
        tau = (1 - alpha ** (row["gamma"] + 1)) / (1 - alpha)
        assert row["tau"] == pytest.approx(tau, rel=0.005)
        inside += row["tau_low"] <= tau <= row["tau_high"]
    assert inside >= 7  # of 8 intervals of 95 %


def test_intervals_cover_where_responses_differ_and_blocks_alone_would_not():
    rng = np.random.default_rng(0)
    truth, covered, naive = 0.6, 0, 0
    for _ in range(400):
        chance = rng.beta(6, 4, 25)  # mean 0.6, one a response
        size = rng.integers(20, 60, 25)
        hits = rng.binomial(size, chance)
        ratio, low, high = clustered_ratio(hits.astype(float), size.astype(float))
        covered += low <= truth <= high
        half = 1.96 * np.sqrt(ratio * (1 - ratio) / size.sum())
        naive += abs(ratio - truth) <= half
    assert 0.91 * 400 < covered < 0.985 * 400
    assert naive < 0.75 * 400


def test_the_interval_by_hand():
    y, x = np.array([1.0, 4.0, 4.0]), np.array([2.0, 4.0, 6.0])
    ratio = 9 / 12
    error = np.sqrt(3 / 2 * ((1 - 1.5) ** 2 + (4 - 3) ** 2 + (4 - 4.5) ** 2)) / 12
    t = stats.t.ppf(0.975, 2)
    assert clustered_ratio(y, x) == pytest.approx((ratio, ratio - t * error, ratio + t * error))


def test_the_distance_between_domains_widens_no_interval():
    y, x = np.array([1.0, 2.0, 9.0, 10.0]), np.full(4, 10.0)
    _, low, high = clustered_ratio(y, x, np.array([0, 0, 1, 1]))
    # Within either domain the two differ by 1: variance 0.5 each, 2 · 0.5 + 2 · 0.5 in all.
    assert high - low == pytest.approx(2 * stats.t.ppf(0.975, 2) * np.sqrt(2.0) / 40)
    assert high - low < 0.3 * np.ptp(clustered_ratio(y, x)[1:])


def test_no_interval_without_a_second_response():
    assert clustered_ratio(np.array([1.0]), np.array([2.0]))[0] == 0.5
    for case in (clustered_ratio(np.array([1.0]), np.array([2.0])), clustered_ratio(np.zeros(2), np.zeros(2))):
        assert np.isnan(case[1:]).all()
    assert np.isnan(clustered_ratio(np.ones(3), np.ones(3), np.array([0, 0, 1]))[1])
    assert acceptance_table(make_blocks([1, 0], 1))["conditional_low"].isna().all()


def test_calibration_is_told_by_domain():
    rng = np.random.default_rng(2)
    confidence = rng.random((40, 2)).astype(np.float32)
    accepted = (np.cumprod(confidence, axis=1) > rng.random((40, 1))).sum(axis=1)
    trace = make_blocks(accepted.tolist(), 2, confidence=confidence, domain=["x"] * 25 + ["y"] * 15, sts=(0.5, 2.0))
    for calibrated in (True, False):
        table = calibration_table(trace, calibrated).set_index("domain")
        for name, rows in (("all", slice(None)), ("x", slice(25)), ("y", slice(25, None))):
            report = calibration_report(trace.confidences(calibrated)[rows], trace.accepted[rows])
            np.testing.assert_array_equal(table.loc[name, report.columns].to_numpy(), report.to_numpy())
    assert calibration_table(make_blocks([0, 1], 2, confidence=None)).empty


@pytest.mark.parametrize("source", ["head", "position_mean", "none"])
def test_a_synthetic_trace_is_sampled_as_it_is_simulated(source):
    law = {"conditional_acceptance": (0.9, 0.7), "concentration": 4.0}
    parameters = Synthetic(
        drafter="d", target="t", gamma=2, confidence_source=source, temperature=0.5, sts=(1.5, 0.5),
        domains={"x": Domain(**law), "y": Domain(**law)}, provenance=Provenance(source="made up"),
    )  # fmt: skip
    trace = sample(parameters)
    tape = Drafter(parameters, 2).tape(0)
    assert len(trace) == 2 * 64 * 256
    assert int(trace.responses()[-1]) + 1 == 128
    assert (trace.accepted[: 64 * 256] == tape.accepted[: 64 * 256]).all()
    assert trace.meta.sts == (1.5, 0.5)
    if source == "none":
        assert trace.confidence is None
    else:
        np.testing.assert_array_equal(trace.confidences()[: 64 * 256], tape.confidence[: 64 * 256])
    np.testing.assert_allclose(acceptance_table(trace)["conditional"], [0.9, 0.7] * 3, atol=0.02)


def test_what_cannot_be_swept_is_named():
    with pytest.raises(SpecsimError, match="confidence: none in this trace"):
        threshold_sweep(make_blocks([0, 1], 2, confidence=None))
    for bad in (-0.1, 1.5, float("nan")):
        with pytest.raises(SpecsimError, match=r"threshold: .*, expected 0\.\.1"):
            threshold_sweep(make_blocks([0, 1], 2), [0.5, bad])
