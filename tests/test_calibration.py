"""Calibration against hand counts, and Sequential Temperature Scaling against temperatures known."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specsim.calibration import (
    GRID,
    apply_sts,
    calibration_report,
    ece,
    fit_sts,
    reliability_table,
    roc_auc,
    survival,
)
from specsim.types import SpecsimError


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def blocks(n, temperatures, seed=0):
    """Confidences whose truth is sigmoid(logit(c)/T), and what was accepted under that truth."""
    rng = np.random.default_rng(seed)
    confidence = rng.beta(4.0, 1.5, (n, len(temperatures)))
    truth = sigmoid(np.log(confidence / (1 - confidence)) / np.asarray(temperatures))
    accepted = np.cumprod(rng.random(truth.shape) < truth, axis=1).sum(axis=1)
    return confidence, accepted


def test_survival_is_the_running_product_and_keeps_the_type():
    c = np.array([[0.5, 0.5, 1.0], [1.0, 0.0, 0.9]], dtype=np.float32)
    assert survival(c).tolist() == [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]
    assert survival(c).dtype == np.float32


def test_ece_by_hand():
    # Two bins: {0.1, 0.4} mean .25, observed .5 (gap .25); {0.6, 0.9, 1.0} mean .8333, observed .3333 (.5).
    p, o = [0.1, 0.4, 0.6, 0.9, 1.0], [0, 1, 0, 1, 0]
    assert ece(p, o, bins=2) == pytest.approx(2 / 5 * 0.25 + 3 / 5 * 0.5)


def test_ece_puts_an_edge_in_the_upper_bin_and_one_in_the_last():
    assert ece([0.5, 0.25], [1, 0], bins=2) == pytest.approx((0.5 + 0.25) / 2)  # in one bin: 0.125
    assert ece([1.0], [0], bins=4) == 1.0


def test_ece_is_zero_for_a_perfect_forecast_and_nan_for_none():
    assert ece([0.25] * 4, [1, 0, 0, 0]) == 0.0
    assert np.isnan(ece([], []))
    assert np.isnan(ece([np.nan], [1]))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.2, 0.7, 0.9]), st.booleans()), max_size=30))
def test_auc_is_the_share_of_pairs_in_the_right_order(entries):
    winners = [s for s, o in entries if o]
    losers = [s for s, o in entries if not o]
    auc = roc_auc([s for s, _ in entries], [o for _, o in entries])
    if not winners or not losers:
        assert np.isnan(auc)
    else:
        pairs = [(a > b) + 0.5 * (a == b) for a in winners for b in losers]
        assert auc == pytest.approx(sum(pairs) / len(pairs))


def test_reliability_table_by_hand():
    confidence = np.array([[0.9, 0.5], [0.8, 1.0], [0.2, 0.5], [0.9, np.nan]])
    table = reliability_table(confidence, np.array([2, 1, 0, 1]), bins=2)
    # Survivals at position 2: 0.45, 0.8, 0.1 and one not proposed.
    expected = [(1, 0, 1, 0.2, 0.0), (1, 1, 3, 2.6 / 3, 1.0), (2, 0, 2, 0.275, 0.5), (2, 1, 1, 0.8, 0.0)]
    assert list(table.columns) == ["position", "bin", "count", "predicted", "observed"]
    np.testing.assert_allclose(table.to_numpy(dtype=float), expected)


def test_reliability_table_and_ece_agree():
    confidence, accepted = blocks(3000, [1.0, 2.0, 0.5])
    table = reliability_table(confidence, accepted)
    gap = (table["predicted"] - table["observed"]).abs() * table["count"] / len(accepted)
    report = calibration_report(confidence, accepted)
    np.testing.assert_allclose(gap.groupby(table["position"]).sum(), report["ece"])


def test_report_judges_the_survival_not_the_confidence():
    # Each c is right 80 % of the time on its own, and so is the product: the report finds no error.
    rng = np.random.default_rng(1)
    confidence = np.full((20_000, 3), 0.8)
    accepted = np.cumprod(rng.random((20_000, 3)) < 0.8, axis=1).sum(axis=1)
    report = calibration_report(confidence, accepted)
    np.testing.assert_allclose(report["predicted"], [0.8, 0.64, 0.512])
    np.testing.assert_allclose(report["observed"], [0.8, 0.64, 0.512], atol=0.015)
    assert (report["ece"] < 0.015).all()
    assert report["auc"].tolist() == [0.5, 0.5, 0.5]
    assert report["position"].tolist() == [1, 2, 3]
    assert report["count"].tolist() == [20_000] * 3


def test_report_of_tokens_never_proposed_is_nan_without_a_warning():
    report = calibration_report(np.array([[0.5, np.nan], [0.5, np.nan]]), np.array([1, 0]))
    assert report["count"].tolist() == [2, 0]
    assert report.loc[1, ["predicted", "observed", "ece", "auc"]].isna().all()


def test_sts_recovers_known_temperatures():
    truth = GRID[[20, 26, 12, 24]]  # on the grid: 1, 2, 0.4, 1.6
    confidence, accepted = blocks(200_000, truth)
    fitted = fit_sts(confidence, accepted)
    step = np.log(GRID[1] / GRID[0])
    assert np.abs(np.log(fitted / truth) / step).max() < 2.01


def test_sts_lowers_the_ece_of_overconfident_blocks():
    confidence, accepted = blocks(30_000, [2.0, 2.5, 3.0])
    before = calibration_report(confidence, accepted)["ece"]
    after = calibration_report(apply_sts(confidence, fit_sts(confidence, accepted)), accepted)["ece"]
    assert (before > 0.05).all()
    assert (after < 0.25 * before).all()


def test_sts_is_the_best_of_the_grid_position_by_position():
    confidence, accepted = blocks(2_000, [1.7, 0.6], seed=5)
    fitted = fit_sts(confidence, accepted)
    first = [ece(apply_sts(confidence[:, :1], [t])[:, 0], accepted >= 1) for t in GRID]
    assert fitted[0] == GRID[np.argmin(first)]
    second = [ece(survival(apply_sts(confidence, [fitted[0], t]))[:, 1], accepted >= 2) for t in GRID]
    assert fitted[1] == GRID[np.argmin(second)]


def test_sts_takes_the_temperature_nearest_one_where_all_are_equal():
    # Confidences of 0, 1/2 and 1 are the same at every temperature.
    confidence = np.array([[0.0, 0.5], [1.0, 0.5], [0.5, 1.0]])
    assert fit_sts(confidence, np.array([0, 1, 2])).tolist() == [1.0, 1.0]
    assert fit_sts(confidence, np.array([0, 1, 2]), grid=[0.2, 3.0, 8.0]).tolist() == [3.0, 3.0]


def test_sts_leaves_out_tokens_not_proposed():
    confidence, accepted = blocks(20_000, [2.0, 2.0])
    half = confidence.copy()
    half[10_000:, 1] = np.nan
    fitted = fit_sts(half, np.where(np.isnan(half[:, 1]), np.minimum(accepted, 1), accepted))
    alone = fit_sts(confidence[:10_000], accepted[:10_000], grid=GRID)
    assert fitted[0] == fit_sts(confidence[:, :1], np.minimum(accepted, 1))[0]
    assert abs(np.log(fitted[1] / alone[1])) < 0.25


confidences = hnp.arrays(
    np.float64,
    st.tuples(st.integers(2, 20), st.just(2)),
    elements=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1, width=32)),
)
temperatures = st.lists(st.sampled_from(list(GRID)), min_size=2, max_size=2)


@settings(deadline=None)
@given(confidences, temperatures, st.sampled_from([np.float32, np.float64]))
def test_apply_keeps_the_order_at_a_position(confidence, ts, dtype):
    confidence = confidence.astype(dtype)
    scaled = apply_sts(confidence, ts)
    assert scaled.dtype == dtype
    assert scaled.shape == confidence.shape
    assert ((scaled >= 0) & (scaled <= 1)).all()
    for k in range(2):
        by_confidence = np.argsort(confidence[:, k], kind="stable")
        assert (np.diff(scaled[by_confidence, k]) >= 0).all()
        assert (scaled[confidence[:, k] == 0, k] == 0).all()
        assert (scaled[confidence[:, k] == 1, k] == 1).all()
        if ts[k] == 1:
            assert (scaled[:, k] == confidence[:, k]).all()


@settings(deadline=None)
@given(st.floats(0.01, 0.95), st.floats(0.001, 0.01), st.sampled_from(list(GRID)))
def test_apply_rises_strictly_where_floats_can_tell(c, more, t):
    low, high = apply_sts(np.array([[c], [c + more]]), [t])[:, 0]
    assert low < high


def test_apply_by_hand():
    # logit(0.8) = ln 4; halved it is ln 2, whose sigmoid is 2/3; doubled ln 16, 16/17.
    scaled = apply_sts(np.array([[0.8, 0.8, 0.8, np.nan]]), [2.0, 0.5, 1.0, 2.0])
    np.testing.assert_allclose(scaled, [[2 / 3, 16 / 17, 0.8, np.nan]])


def test_temperature_one_changes_no_digit():
    confidence = np.random.default_rng(0).random((1000, 1))
    assert (apply_sts(confidence, [1.0]) == confidence).all()


def test_a_trace_of_65k_blocks_is_fitted_in_about_a_second():
    confidence, accepted = blocks(65_536, [1.5] * 7)
    start = time.process_time()
    fit_sts(confidence.astype(np.float32), accepted)
    assert time.process_time() - start < 3.0  # it takes about 0.4 s; slack for a busy machine


@pytest.mark.parametrize(
    ("confidence", "accepted", "told"),
    [
        (np.array([0.5]), np.array([1]), "confidence"),
        (np.array([[1.5]]), np.array([1]), "0..1"),
        (np.array([[1]]), np.array([1]), "floats"),
        (np.array([[0.5]]), np.array([2]), "0..1 (gamma)"),
        (np.array([[0.5]]), np.array([1, 0]), "accepted"),
        (np.array([[0.5]]), np.array([0.5]), "integers"),
        (np.empty((0, 2)), np.empty(0, dtype=int), "no blocks"),
    ],
)
def test_bad_input_is_named(confidence, accepted, told):
    with pytest.raises(SpecsimError) as caught:
        fit_sts(confidence, accepted)
    assert told in str(caught.value)


def test_bad_temperatures_bins_and_grid_are_named():
    c = np.array([[0.5, 0.5]])
    for bad in ([1.0], [1.0, 0.0], [1.0, np.nan], [[1.0, 1.0]]):
        with pytest.raises(SpecsimError, match="temperatures"):
            apply_sts(c, bad)
    with pytest.raises(SpecsimError, match="grid"):
        fit_sts(c, np.array([1]), grid=[])
    with pytest.raises(SpecsimError, match="bins"):
        ece([0.5], [1], bins=0)
    with pytest.raises(SpecsimError, match="probability"):
        ece([1.5], [1])
    with pytest.raises(SpecsimError, match="one length"):
        roc_auc([0.5, 0.1], [1])
