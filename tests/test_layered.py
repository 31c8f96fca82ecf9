"""Step costs put together from kernels: prices by hand, against scipy, and laws on random, holed grids."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from conftest import always, make_arrivals, make_profile
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.interpolate import RegularGridInterpolator

from specsim.engine import Scenario, simulate
from specsim.hardware import Shape, load_profile, save_profile, step_cost
from specsim.schedulers import StaticGamma
from specsim.types import SpecsimError

AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
FREE = {"at": [1, 4096], "seconds": [0.0, 0.0]}


def attention(points, price=None):
    """Points as they stand in a profile: (chunk, history, n, context), with prices or priced by a function."""
    prices = [price(*p) for p in points] if price else list(points.values())
    columns = dict(zip(AXES, map(list, zip(*points, strict=True)), strict=True))
    return columns | {"seconds": [float(s) for s in prices]}


def grid(chunks=(), histories=(0,), ns=(1, 4), contexts=(10, 100), beside=True):
    """Points of decodes, of prefills, and of both together."""
    decodes = list(itertools.product(ns, contexts))
    prefills = list(itertools.product(chunks, histories))
    points = [(0, 0, n, k) for n, k in decodes] + [(c, h, 0, 0) for c, h in prefills]
    return points + [(*p, *d) for p in prefills for d in decodes if beside]


def layered(points, price=None, tokens=FREE, rows=FREE, **fields):
    verify = {"type": "layered", "tokens": tokens, "rows": rows, "attention": attention(points, price)}
    return make_profile(verify=verify | fields)


def seconds(profile, n=0, kv=0.0, chunks=(), histories=(), drafts=0, extrapolate=False, **lengths):
    shape = Shape(n, kv, list(chunks), list(histories), **lengths)
    return step_cost(profile, 4096, 512, 0, extrapolate=extrapolate).seconds(shape, drafts)


LINEAR = lambda c, h, n, k: 1 + c + c * h + n * k  # noqa: E731


# By hand


def test_a_step_is_tokens_and_rows_and_attention():
    p = layered(
        grid([8], [0, 16]),
        LINEAR,
        tokens={"at": [1, 100], "seconds": [100.0, 199.0]},
        rows={"at": [1, 11], "seconds": [1000.0, 2000.0]},
    )
    # 2 sequences of 10 tokens, 3 drafts: 5 tokens, 5 rows; attention as measured at 2 sequences (1 + 20).
    assert seconds(p, 2, 20, drafts=3) == pytest.approx(104 + 1400 + 21)
    # A prefill adds its tokens, one row, and its attention: 13 tokens, 6 rows.
    assert seconds(p, 2, 20, [8], [4], drafts=3) == pytest.approx(112 + 1500 + (1 + 8 + 32 + 20))
    # Two of them: the one of the longer history beside the decodes, the other as it is alone.
    both = seconds(p, 2, 20, [8, 8], [4, 0], drafts=3)
    assert both == pytest.approx(120 + 1600 + (1 + 8 + 32 + 20) + (1 + 8))
    # A prefill alone.
    assert seconds(p, chunks=[8], histories=[16]) == pytest.approx(107 + 1000 + (1 + 8 + 128))


def test_draft_tokens_read_the_kv_once_or_once_each():
    points = grid(ns=(1, 2, 8), contexts=(10, 100))
    once = layered(points, LINEAR)
    each = layered(points, LINEAR, kv_reads="per_query")
    assert seconds(once, 2, 100, drafts=3) == pytest.approx(1 + 2 * 50)
    assert seconds(each, 2, 100, drafts=3) == pytest.approx(1 + 5 * 50)
    assert seconds(each, 2, 100, drafts=6) == pytest.approx(1 + 8 * 50)
    assert seconds(each, 2, 100) == seconds(once, 2, 100)
    with pytest.raises(SpecsimError, match=r"a step of 9 decoding sequences is outside the measured range 0\.\.8"):
        seconds(each, 2, 100, drafts=7)
    assert seconds(each, 2, 100, drafts=7, extrapolate=True) == pytest.approx(1 + 9 * 50)


def test_queries_below_the_first_measured_batch_cost_what_it_does():
    p = layered(grid(ns=(4, 8)), LINEAR, kv_reads="per_query")
    assert [seconds(p, 2, 20, drafts=d) for d in range(5)] == pytest.approx([41, 41, 41, 51, 61])


def test_sizes_below_the_first_measured_cost_the_first():
    p = layered(grid([8, 16], [32, 64], [4, 8], [10, 100]), LINEAR)
    assert seconds(p, 1, 3) == 1 + 4 * 10
    assert seconds(p, 1, 0) == 1 + 4 * 10
    assert seconds(p, chunks=[2], histories=[32]) == 1 + 8 + 8 * 32
    # A history shorter than any measured, 0 too.
    assert seconds(p, chunks=[8], histories=[0]) == seconds(p, chunks=[8], histories=[32])
    assert seconds(p, 4, 40, [8], [5]) == seconds(p, 4, 40, [8], [32])


def test_a_history_is_a_length_like_any_other():
    p = layered(grid([8], [0, 64]), LINEAR)
    assert seconds(p, chunks=[8], histories=[32]) == pytest.approx(1 + 8 + 8 * 32)


def test_prefills_that_were_never_measured_beside_decodes_add_up():
    p = layered(grid([8], [0, 64], beside=False), LINEAR)
    assert seconds(p, 2, 100, [8], [32]) == pytest.approx((1 + 8 + 8 * 32) + (1 + 100))


def test_of_several_prefills_the_largest_stands_beside_the_decodes():
    """Even where noise lets a prefill and its decodes cost less than the decodes alone."""
    p = layered({(0, 0, 1, 10): 10.0, (8, 0, 0, 0): 1.0, (8, 0, 1, 10): 6.0, (16, 0, 0, 0): 2.0, (16, 0, 1, 10): 7.0})
    assert seconds(p, 1, 10, [8], [0]) == 6.0  # as measured
    assert seconds(p, 1, 10, [8] * 3, [0] * 3) == 6.0 + 1 + 1
    assert seconds(p, 1, 10, [8, 16, 8], [0, 0, 0]) == seconds(p, 1, 10, [16, 8, 8], [0, 0, 0]) == 7.0 + 1 + 1
    assert seconds(p, chunks=[8, 16], histories=[0, 0]) == 2.0 + 1


@pytest.mark.parametrize("most", [5, 8, 100])
def test_captured_sizes_pad_the_tokens_whatever_the_run_may_hold(most):
    tokens = {"at": [1, 64], "seconds": [1.0, 64.0]}
    p = layered(grid(ns=(1, 64)), lambda *_: 1, tokens=tokens, capture_sizes=[2, 8, 16])
    cost = step_cost(p, most, 64, 0)
    assert [cost.seconds(Shape(1, 10), d) - 1 for d in range(5)] == [2, 2, 8, 8, 8]
    alone, together = p.step_seconds(3, num_seqs=1), p.step_seconds([3, 16, 17], num_seqs=1)
    assert float(alone) == together[0] == 9
    assert together.tolist() == [9, 17, 18]  # above the largest graph nothing is padded


def test_a_step_without_tokens_has_no_price():
    p = layered(grid(), LINEAR)
    with pytest.raises(SpecsimError, match=r"a step of 0 tokens is outside the measured range 1\.\.4096"):
        p.step_seconds(0)
    padded = layered(grid(), LINEAR, capture_sizes=[8])
    with pytest.raises(SpecsimError, match="a step of 0 tokens"):
        padded.step_seconds([0, 4])


# Against another implementation


@settings(max_examples=60)
@given(data=st.data())
def test_a_full_grid_against_scipy(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    axes = [np.sort(rng.choice(np.arange(1, 200), size, replace=False)) for size in (3, 4, 3, 4)]
    axes[1][0] = 0
    chunks, histories, ns, contexts = (axis.tolist() for axis in axes)
    table = rng.uniform(1, 9, (3, 4, 3, 4))
    points = {
        (c, h, n, k): table[a, b, i, j]
        for (a, c), (b, h), (i, n), (j, k) in itertools.product(*map(enumerate, (chunks, histories, ns, contexts)))
    }
    decodes = {(0, 0, n, k): 0.5 for n in ns for k in contexts}
    prefills = {(c, h, 0, 0): 0.5 for c in chunks for h in histories}
    p = layered(points | decodes | prefills)
    reference = RegularGridInterpolator((chunks, histories, ns, contexts), table)
    for _ in range(10):
        c, h, n, k = (int(rng.integers(axis[0], axis[-1] + 1)) for axis in axes)
        assert seconds(p, n, n * k, [c], [h]) == pytest.approx(float(reference((c, h, n, k))), rel=1e-9)


# Holes and edges


def test_a_hole_between_measured_points_is_interpolated():
    points = grid(ns=(1, 2, 4), contexts=(10, 100))
    points.remove((0, 0, 2, 100))
    assert seconds(layered(points, LINEAR), 2, 200) == pytest.approx(1 + 200)


def test_a_gap_that_another_axis_closes():
    """(2, 100) has no neighbour on either side of its own axis until (4, 100) is filled from the contexts."""
    points = [(0, 0, n, k) for n, k in [(1, 10), (1, 100), (2, 10), (4, 10), (4, 50), (4, 200)]]
    assert seconds(layered(points, LINEAR), 2, 200) == pytest.approx(1 + 200)


RAGGED = [(0, 0, n, k) for n, k in [(1, 10), (1, 100), (1, 1000), (8, 10), (8, 100), (64, 10)]]


def test_a_ragged_edge_names_the_sequences_that_were_measured():
    """Long sequences in small batches alone: what a pool of KV blocks allows."""
    p = layered(RAGGED, LINEAR)
    assert seconds(p, 8, 800) == 801
    with pytest.raises(
        SpecsimError,
        match=r"a step of 9 decoding sequences of 100 KV tokens is outside the measured range 1\.\.8; "
        r"a lower max_num_seqs keeps steps inside",
    ):
        seconds(p, 9, 900)
    assert seconds(p, 9, 900, extrapolate=True) == pytest.approx(901)
    with pytest.raises(SpecsimError, match=r"a step of 1,?001 KV tokens of a sequence .* range 0\.\.1000"):
        seconds(p, 1, 1001)


def test_a_ragged_prefill_names_its_history():
    points = [*grid(), (8, 0, 0, 0), (8, 64, 0, 0), (32, 0, 0, 0), (32, 16, 0, 0)]
    p = layered(points, LINEAR)
    assert seconds(p, chunks=[32], histories=[16]) == 1 + 32 + 32 * 16
    with pytest.raises(SpecsimError, match=r"a step of 17 KV tokens before a prefill is outside .* range 0\.\.16"):
        seconds(p, chunks=[32], histories=[17])


def test_fewer_sequences_beside_a_prefill_than_alone():
    points = [*grid([8], ns=(1, 4)), (0, 0, 16, 10), (0, 0, 16, 100)]
    p = layered(points, LINEAR)
    assert seconds(p, 16, 160) == 161
    says = r"a step of 5 decoding sequences of 10 KV tokens beside a prefill is outside the measured range 0\.\.4"
    with pytest.raises(SpecsimError, match=says):
        seconds(p, 5, 50, [8], [0])
    assert seconds(p, 5, 50, [8], [0], extrapolate=True) == pytest.approx(1 + 8 + 50)


@pytest.mark.parametrize("extrapolate", [False, True])
def test_without_prefill_points_no_prefill_has_a_price(extrapolate):
    with pytest.raises(SpecsimError, match="tokens in a prefill chunk is outside"):
        seconds(layered(grid(), LINEAR), 1, 10, [8], [0], extrapolate=extrapolate)


@pytest.mark.parametrize("extrapolate", [False, True])
def test_a_prefill_measured_only_beside_decodes_has_no_price_alone(extrapolate):
    points = [p for p in grid([8]) if p[2]]
    p = layered(points, LINEAR)
    assert seconds(p, 1, 10, [8], [0]) == 1 + 8 + 10
    with pytest.raises(SpecsimError, match="a step of 8 tokens in a prefill chunk is outside"):
        seconds(p, chunks=[8], histories=[0], extrapolate=extrapolate)


def test_one_size_of_an_axis_holds_for_that_size_alone():
    p = layered(grid([8], ns=(4,), contexts=(10,)), LINEAR)
    for n, kv, chunks in [(5, 50, []), (4, 44, []), (4, 40, [9])]:
        with pytest.raises(SpecsimError, match="outside the measured range"):
            seconds(p, n, kv, chunks, [0] * len(chunks))
        assert math.isfinite(seconds(p, n, kv, chunks, [0] * len(chunks), extrapolate=True))


def test_extrapolation_follows_the_last_slope_of_each_axis():
    p = layered(grid([8, 16], [0, 32]), LINEAR)
    assert seconds(p, 8, 8 * 200, extrapolate=True) == pytest.approx(1 + 8 * 200)
    assert seconds(p, chunks=[32], histories=[64], extrapolate=True) == pytest.approx(1 + 32 + 32 * 64)


def test_extrapolation_does_not_follow_an_axis_that_ends_falling():
    p = layered({(0, 0, 1, 10): 5.0, (0, 0, 2, 10): 1.0, (0, 0, 1, 20): 5.0, (0, 0, 2, 20): 1.0})
    assert seconds(p, 50, 500, extrapolate=True) == 1.0


def test_a_run_counts_the_steps_it_extrapolates():
    """Decodes of 9 sequences of about 100 tokens lie inside the box of all points, and outside the points."""
    p = layered(RAGGED, LINEAR, tokens={"at": [1, 4096], "seconds": [1.0, 1.0]})
    p = p.model_copy(update={"draft": None})
    scenario = Scenario(p, make_arrivals([0.0] * 9, 90, 4), prefill="free", extrapolate=True)
    run = simulate(scenario)
    assert run.extrapolated_steps == run.num_steps > 0
    inside = Scenario(p, make_arrivals([0.0] * 8, 60, 4), prefill="free", extrapolate=True)
    assert simulate(inside).extrapolated_steps == 0


def test_the_engine_pays_each_step_its_own_shape():
    """Two prompts of 8 and 16 tokens admitted together, then decodes: durations by hand."""
    p = layered(grid([8, 16], [0, 64], [1, 2], [8, 100]), LINEAR)
    workload = make_arrivals([0.0, 0.0], [8, 16], 3)
    run = simulate(Scenario(p, workload, always(0, 2), StaticGamma(2)), steps=True)
    # After the prompts the sequences hold 8 and 16 tokens, and one more after each step.
    assert run.steps["duration"].tolist() == pytest.approx([9 + 17, 1 + 24, 1 + 26])


# Unequal lengths

SKEW = {
    "prefill_chunk": [0, 0, 8, 8],
    "n_decode": [2, 1 << 31, 2, 2],
    "skew_rate": [0.5, 1.0, 0.5, 1.0],
    "kv_longest": [100, 100, 100, 100],
    "kv_prefill": [0, 0, 0, 0],
    "alpha": [0.25, 0.5, 0.75, -40.0],
    "default": 0.1,
}


def skewed(**fields):
    return layered(grid([8], ns=(1, 2, 4), contexts=(10, 100)), LINEAR, skew=SKEW | fields)


def test_unequal_lengths_cost_a_share_of_the_way_to_the_longest():
    p = skewed()
    # Mean 40 and longest 100 of 2: 1 + 80 and 1 + 200; rate (40 - 10) / 90 is at most 0.5.
    assert seconds(p, 2, 80, shortest=10, longest=100) == pytest.approx(81 + 0.25 * 120)
    # No bucket of two sequences with a rate above 0.5: the default.
    assert seconds(p, 2, 160, shortest=10, longest=100) == pytest.approx(161 + 0.1 * 40)
    # Three sequences fall into the last bucket, which has no upper edge.
    assert seconds(p, 3, 240, shortest=10, longest=100) == pytest.approx(241 + 0.5 * 60)
    # Beside a prefill its own buckets.
    assert seconds(p, 2, 80, [8], [0], shortest=10, longest=100) == pytest.approx(89 + 0.75 * 120)


@pytest.mark.parametrize(("n", "kv", "lengths"), [(2, 80, (40, 40)), (1, 40, (40, 40)), (2, 80, (0, 0))])
def test_equal_lengths_need_no_correction(n, kv, lengths):
    assert seconds(skewed(), n, kv, shortest=lengths[0], longest=lengths[1]) == seconds(layered(
        grid(ns=(1, 2, 4), contexts=(10, 100)), LINEAR), n, kv)  # fmt: skip


def test_a_correction_never_makes_time_negative():
    assert seconds(skewed(), 2, 160, [8], [0], shortest=10, longest=100) == 0


@pytest.mark.parametrize("default", [0.0, 0.5, -1.0])
def test_a_longest_sequence_beyond_the_measured_is_outside_whatever_its_alpha(default):
    p = skewed(n_decode=[7, 8, 7, 7], alpha=[0.0] * 4, default=default)
    with pytest.raises(SpecsimError, match=r"a step of 200 KV tokens of a sequence .* range 0\.\.100"):
        seconds(p, 2, 80, shortest=10, longest=200)


# Laws


@st.composite
def profiles(draw):
    """A profile on some of a grid's points, with or without prefills, holes, unequal lengths, graphs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    axes = [np.sort(rng.choice([1, 2, 3, 5, 8, 13, 21], rng.integers(1, 4), replace=False)).tolist() for _ in range(4)]
    points = grid(axes[0] if rng.random() < 0.8 else (), [0, *axes[1]][: rng.integers(1, 4)], axes[2], axes[3])
    kept = [p for p in points if rng.random() < 0.8]
    assume(any(p[0] == 0 for p in kept))
    fields = {"kv_reads": "per_query"} if rng.random() < 0.4 else {}
    if rng.random() < 0.4:
        buckets = {(int(rng.choice([0, 8])), int(rng.choice([4, 64]))) for _ in range(3)}
        fields["skew"] = {
            "prefill_chunk": [c for c, _ in buckets], "n_decode": [n for _, n in buckets],
            "skew_rate": [1.0] * len(buckets), "kv_longest": [64] * len(buckets), "kv_prefill": [64] * len(buckets),
            "alpha": rng.uniform(-2, 3, len(buckets)).tolist(), "default": float(rng.choice([0.0, 0.3])),
        }  # fmt: skip
    tokens = {"at": [1, 30, 60], "seconds": np.sort(rng.uniform(1, 9, 3)).tolist()}
    if rng.random() < 0.3:
        fields["capture_sizes"] = [4, 16]
    prices = {p: float(rng.uniform(1, 9)) for p in kept}
    return layered(prices, tokens=tokens, rows={"at": [1, 40], "seconds": [0.5, 2.0]}, **fields), prices


@st.composite
def shapes(draw):
    lengths = draw(st.lists(st.integers(1, 25), max_size=24))
    chunks = draw(st.lists(st.integers(1, 25), max_size=3, min_size=0 if lengths else 1))
    histories = [draw(st.integers(0, 25)) for _ in chunks]
    ends = (min(lengths), max(lengths)) if lengths else (0, 0)
    return Shape(len(lengths), sum(lengths), chunks, histories, *ends)


@settings(max_examples=300)
@given(profiles(), shapes(), st.integers(0, 20), st.booleans())
def test_a_price_is_infinite_exactly_where_the_error_names_an_axis(made, shape, most, extrapolate):
    profile, _ = made
    cost = step_cost(profile, 200, 32, 0, extrapolate=extrapolate)
    most = most if shape.num_seqs else 0
    curve = cost.curve(shape, most)
    assert curve.shape == (most + 1,)
    assert not np.isnan(curve).any()
    assert (curve >= 0).all()
    inside = step_cost(profile, 200, 32, 0).curve(shape, most)
    outside = [cost.is_outside(shape, d) for d in range(most + 1)]
    assert outside == np.isinf(inside).tolist()
    if extrapolate:
        assert curve[~np.isinf(inside)] == pytest.approx(inside[~np.isinf(inside)], rel=1e-9)


@settings(max_examples=150)
@given(profiles())
def test_a_measured_point_costs_what_was_measured(made):
    profile, prices = made
    for extrapolate in (False, True):
        grid = step_cost(profile, 200, 32, 0, extrapolate=extrapolate).surface.attention
        assert {p: grid.at(*p) for p in prices} == prices


@settings(max_examples=100)
@given(profiles(), st.lists(st.tuples(*[st.integers(0, 25)] * 3, st.floats(0.5, 25)), min_size=20, max_size=20))
def test_a_price_lies_between_those_of_its_corners(made, shapes):
    grid = step_cost(made[0], 200, 32, 0).surface.attention
    for chunk, history, n, context in shapes:
        values = (chunk, history if chunk else 0, n, context if n else 0)
        price = grid.at(*values)
        if price == math.inf:
            continue
        corners = []
        for axis, value in enumerate(values):
            places = np.array(grid.places[axis])
            if value and axis != 1 and value < places[1]:
                corners.append([int(places[1])])
            else:
                corners.append([int(places[places <= value].max()), int(places[places >= value].min())])
        at = [grid.at(*corner) for corner in itertools.product(*corners)]
        assert min(at) * (1 - 1e-9) <= price <= max(at) * (1 + 1e-9)


@settings(max_examples=100)
@given(profiles(), shapes(), st.integers(0, 20))
def test_candidates_cost_the_same_together_and_alone(made, shape, most):
    profile, _ = made
    most = most if shape.num_seqs else 0
    together = step_cost(profile, 200, 32, 0).curve(shape, most)
    for drafts in {0, most // 2, most}:
        size = shape.num_seqs + sum(shape.chunks) + drafts
        alone = step_cost(profile, size, max(1, shape.num_seqs), 0).curve(shape, drafts)
        assert alone[drafts] == together[drafts]


# Files


def test_a_layered_profile_comes_back_from_json_as_it_was(tmp_path):
    p = layered(grid([8]), LINEAR, skew=SKEW, capture_sizes=[4, 8], kv_reads="per_query")
    assert load_profile(save_profile(p, tmp_path / "p.json")) == p


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ({(0, 0, 1, 0): 1.0}, r"kv_decode\[0\]: expected KV tokens of each of n_decode, got 0 for 1"),
        ({(0, 0, 1, 1): 1.0, (8, 0, 0, 5): 1.0}, r"kv_decode\[1\]: expected KV tokens .* got 5 for 0"),
        ({(0, 4, 1, 1): 1.0}, r"kv_prefill\[0\]: expected 0 without a prefill, got 4"),
        ({(0, 0, 0, 0): 1.0}, r"prefill_chunk\[0\]: expected a prefill or decodes"),
        ({(8, 0, 0, 0): 1.0}, "n_decode: expected points of decoding without a prefill"),
        ({(0, 0, 1, 1): -1.0}, r"seconds\.0\n.*greater than 0"),
        ({(0, 0, 1, 1): float("nan")}, r"seconds\.0\n.*finite"),
    ],
)
def test_points_that_contradict_themselves_are_refused(points, says):
    with pytest.raises(ValueError, match=says):
        layered(points)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"capture_sizes": [4, 8192]}, "capture_sizes: expected at most 4096, the last of tokens.at, got 8192"),
        ({"capture_sizes": [8, 4]}, r"capture_sizes\[1\]: expected more than 8"),
        ({"skew": SKEW | {"skew_rate": [0.5] * 4}}, "alpha: expected one entry a bucket, got a bucket twice"),
        ({"skew": SKEW | {"alpha": [0.1]}}, "alpha: expected 4 entries, one for each of prefill_chunk, got 1"),
        ({"skew": SKEW | {"alpha": [math.inf] * 4}}, r"skew\.alpha\.0\n.*finite"),
        ({"kv_reads": "twice"}, "kv_reads"),
        ({"rows": {"at": [2, 1], "seconds": [1, 1]}}, r"rows.*at\[1\]: expected more than 2"),
    ],
)
def test_what_is_wrong_with_the_parts(fields, says):
    layered(grid(), LINEAR)  # sound without
    with pytest.raises(ValueError, match=f"(?s){says}"):
        layered(grid(), LINEAR, **fields)
