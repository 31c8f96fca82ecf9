"""Hardware profiles: prices by hand, against scipy, and what is said about a file that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import TICK, always, make_arrivals, make_profile, staircase
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import RegularGridInterpolator

from specsim.engine import Scenario, simulate
from specsim.hardware import Shape, load_profile, save_profile, sps, step_cost
from specsim.schedulers import StaticGamma
from specsim.types import SpecsimError

PUBLISHED = Path(__file__).parents[1] / "hw_profiles" / "dsv4-flash-b300-tp4.json"
BELOW = ("next_size", "linear", "floor")


def table(tokens, seconds, **fields):
    return make_profile(verify=staircase(tokens, seconds, **fields))


# Prices of a verify table


@pytest.mark.parametrize(
    ("below", "expected"),
    [
        # at 1, 2, 3, 4, 5, 7, 8 tokens
        ("next_size", [1, 2, 4, 4, 8, 8, 8]),
        ("linear", [1, 2, 3, 4, 5, 7, 8]),
        ("floor", [1, 2, 2, 4, 4, 4, 8]),
    ],
)
def test_below_the_capture_limit(below, expected):
    p = table([1, 2, 4, 8], [1, 2, 4, 8], below=below)
    assert p.step_seconds([1, 2, 3, 4, 5, 7, 8]).tolist() == expected


def test_next_size_pads_up_from_one_token():
    assert table([4, 8], [4, 8]).step_seconds([1, 3, 4, 5]).tolist() == [4, 4, 4, 8]


@pytest.mark.parametrize("below", ["linear", "floor"])
def test_other_rules_start_at_the_first_size(below):
    p = table([4, 8], [4, 8], below=below)
    assert p.step_seconds(4) == 4
    with pytest.raises(SpecsimError, match=r"profile tiny: a step of 3 tokens .* measured range 4\.\.8"):
        p.step_seconds(3)


@pytest.mark.parametrize("below", BELOW)
def test_above_the_capture_limit_its_own_line_and_the_cliff_stays(below):
    p = table([1, 2, 4, 8, 12, 20], [1, 2, 3, 4, 10, 26], capture_limit=8, below=below)
    # 9..11 lie between the limit and the first eager size: they cost that size, never a mix with the graph's.
    assert p.step_seconds([8, 9, 11, 12, 14, 20]).tolist() == [4, 10, 10, 10, 14, 26]


def test_a_limit_between_two_sizes_splits_the_table_there():
    p = table([1, 4, 12, 20], [1, 2, 10, 18], capture_limit=8)
    assert p.step_seconds([4, 5, 8, 12, 16]).tolist() == [2, 10, 10, 10, 14]


def test_a_limit_below_the_table_makes_all_of_it_eager():
    p = table([4, 8], [4, 8], capture_limit=1)
    assert p.step_seconds([1, 4, 6, 8]).tolist() == [4, 4, 6, 8]


def test_the_published_cliff_past_1024_tokens():
    p = load_profile(PUBLISHED)
    verify = dict(zip(p.verify.tokens, p.verify.seconds, strict=True))
    at_1008, at_1024, at_1025 = p.step_seconds([1008, 1024, 1025])
    assert at_1024 == pytest.approx(verify[1024] + p.host_seconds)
    assert at_1008 == pytest.approx(verify[1008] + p.host_seconds)
    assert at_1025 == pytest.approx(verify[1536] + p.host_seconds)
    assert at_1025 > 4 * at_1024  # 20.6 ms to 104 ms


def test_monotone_is_a_running_maximum_over_sizes():
    tokens, seconds = [1, 2, 4, 8, 16], [1, 5, 3, 6, 2]
    assert table(tokens, seconds).step_seconds(tokens).tolist() == seconds
    assert table(tokens, seconds, monotone=True).step_seconds(tokens).tolist() == [1, 5, 5, 6, 6]


def test_host_seconds_are_in_every_step_and_sync_seconds_in_none():
    p = make_profile(verify=staircase([1, 2], [1, 2]), host_seconds=0.5, sync_seconds=0.25)
    assert p.step_seconds([1, 2]).tolist() == [1.5, 2.5]


def test_sps_is_one_over_the_step():
    assert sps(table([1, 2], [0.25, 0.5]), [1, 2]).tolist() == [4, 2]


# Two dimensions


def grid(tokens=(1, 4, 16), kv=(0, 100, 1000), price=lambda t, k: 1 + 0.25 * t + 0.001 * k, **fields):
    seconds = [[float(price(t, k)) for k in kv] for t in tokens]
    return make_profile(
        verify={"type": "table2d", "tokens": tokens, "kv_tokens": kv, "seconds": seconds, "below": "linear"} | fields
    )


def test_two_dimensions_against_scipy():
    tokens, kv = (1, 3, 8, 20), (0, 50, 400, 1600)
    rng = np.random.default_rng(3)
    seconds = rng.uniform(1, 9, (4, 4))
    at = {(t, k): seconds[i, j] for i, t in enumerate(tokens) for j, k in enumerate(kv)}
    p = grid(tokens, kv, lambda t, k: at[t, k])
    reference = RegularGridInterpolator((tokens, kv), seconds)
    for read in (0, 1, 49, 50, 51, 399.5, 400, 1000, 1600):
        ours = p.step_seconds(np.arange(1, 21), kv_tokens=read)
        assert ours == pytest.approx(reference([(t, read) for t in range(1, 21)]), rel=1e-12)


def test_each_kv_column_is_a_staircase_of_its_own():
    p = grid((1, 8), (0, 100), lambda t, k: t + k, below="next_size")
    assert p.step_seconds([1, 2, 8], kv_tokens=50).tolist() == [51, 58, 58]


def test_a_kv_total_before_the_first_column_costs_the_first():
    p = grid(kv=(64, 128), price=lambda t, k: t + k)
    assert p.step_seconds(4, kv_tokens=0) == 68
    assert p.step_seconds(4, kv_tokens=64) == 68


@pytest.mark.parametrize("kv", [1001, 1000.5, 10**6])
def test_a_kv_total_beyond_the_last_column_is_outside(kv):
    with pytest.raises(SpecsimError, match=r"profile tiny: a step of \S+ KV tokens .* 0\.\.1000; extrapolate=True"):
        grid().step_seconds(4, kv_tokens=kv)


def test_extrapolation_over_kv_follows_the_last_slope():
    p = grid()
    assert p.step_seconds(4, kv_tokens=3000, extrapolate=True) == pytest.approx(1 + 1 + 3)
    assert p.step_seconds(16, kv_tokens=1000, extrapolate=True) == pytest.approx(1 + 4 + 1)


# Sums of parts


def parts(**fields):
    """1 s + 0.1 s a token, 0.5 s a sequence beyond the first, 1 ms a KV token beyond 100."""
    verify = {
        "type": "additive", "tokens": [1, 11], "seconds": [1.1, 2.1], "below": "linear",
        "num_seqs": [1, 5], "seqs_seconds": [0.0, 2.0], "kv_tokens": [100, 1100], "kv_seconds": [0.0, 1.0],
    }  # fmt: skip
    return make_profile(verify=verify | fields, host_seconds=10.0)


@pytest.mark.parametrize(
    ("shape", "drafts", "expected"),
    [
        (Shape(1), 0, 1.1),
        (Shape(1, 50), 5, 1.6),  # below the first KV size: that size
        (Shape(3, 600), 4, 1.7 + 1.0 + 0.5),
        (Shape(2, 100, [4, 3], [0, 500]), 1, 2.0 + 1.5 + 0.5),  # prefills are sequences, and read their history
    ],
)
def test_parts_add_up(shape, drafts, expected):
    cost = step_cost(parts(), 11, 5, 0)
    assert cost.seconds(shape, drafts) == pytest.approx(10 + expected)
    assert cost.curve(shape, drafts)[-1] == pytest.approx(10 + expected)
    assert not cost.is_outside(shape, drafts)


@pytest.mark.parametrize(
    ("shape", "drafts", "axis"),
    [
        (Shape(4), 8, r"12 tokens .* 1\.\.11"),
        (Shape(6), 0, r"6 sequences .* 0\.\.5"),
        (Shape(2, 1101), 0, r"1101 KV tokens .* 0\.\.1100"),
    ],
)
def test_outside_a_part_the_axis_is_named_and_slopes_go_on(shape, drafts, axis):
    with pytest.raises(SpecsimError, match=axis):
        step_cost(parts(), 20, 20, 0).seconds(shape, drafts)
    beyond = step_cost(parts(), 20, 20, 0, extrapolate=True)
    assert beyond.is_outside(shape, drafts)
    tokens, seqs, kv = shape.num_seqs + drafts, shape.num_seqs - 1, max(shape.kv_tokens - 100, 0)
    assert beyond.seconds(shape, drafts) == pytest.approx(10 + 1 + 0.1 * tokens + 0.5 * seqs + 0.001 * kv)


def test_a_flat_end_costs_the_last_price_whatever_the_step():
    cost = step_cost(parts(above="flat"), 5000, 500, 0)
    assert cost.seconds(Shape(400, 10**6), 4000) == pytest.approx(10 + 2.1 + 2.0 + 1.0)
    assert not cost.is_outside(Shape(400, 10**6), 4000)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"seqs_seconds": [0.0]}, "seqs_seconds: expected 2 entries"),
        ({"num_seqs": [5, 1]}, r"num_seqs\[1\]: expected more than 5, got 1"),
        ({"kv_seconds": None}, "kv_tokens, kv_seconds: expected both"),
        ({"kv_seconds": [0.0]}, "kv_seconds: expected 2 entries"),
        ({"low": [1.0]}, "low: expected 2 entries"),
    ],
)
def test_parts_that_do_not_fit_are_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        parts(**fields)


# Drafting


def drafts(kind, seconds=(0.5, 1.5)):
    return make_profile(draft={"type": kind, "num_seqs": [2, 4], "seconds": list(seconds)})


@pytest.mark.parametrize("gamma", [1, 2, 7])
@pytest.mark.parametrize(("kind", "forwards"), [("parallel", lambda g: 1), ("autoregressive", lambda g: g)])
def test_draft_cost_by_sequences_and_gamma(kind, forwards, gamma):
    p = drafts(kind)
    alone = p.step_seconds(10)
    for n, price in [(0, 0), (1, 0.5), (2, 0.5), (3, 1.0), (4, 1.5)]:
        assert p.step_seconds(10, num_seqs=n, gamma=gamma) - alone == pytest.approx(price * forwards(gamma))


def test_more_sequences_than_drafting_was_measured_for():
    p = drafts("autoregressive")
    with pytest.raises(SpecsimError, match=r"a step of 5 drafting sequences is outside the measured range 0\.\.4"):
        p.step_seconds(10, num_seqs=5, gamma=2)
    beyond = p.step_seconds(10, num_seqs=6, gamma=2, extrapolate=True) - p.step_seconds(10)
    assert beyond == pytest.approx(2 * 2.5)  # 1.5 at 4, and half a second a sequence


def test_no_drafter_no_draft_cost_however_many_sequences():
    assert drafts("parallel").step_seconds(10, num_seqs=500) == drafts("parallel").step_seconds(10)


def test_a_drafter_on_a_profile_without_a_draft_cost_is_refused():
    p = make_profile(draft=None)
    assert p.step_seconds(1) == 1 + TICK
    with pytest.raises(
        SpecsimError, match=r"profile tiny: draft: .* γ=3 .*; .*roofline --draft-layers .*import --draft "
    ):
        p.step_seconds(4, num_seqs=1, gamma=3)


# Outside the measured range


@pytest.mark.parametrize("tokens", [9, [1, 9], [9, 1, 8]])
def test_too_many_tokens_name_profile_and_range(tokens):
    with pytest.raises(SpecsimError, match=r"profile tiny: a step of 9 tokens is outside the measured range 1\.\.8"):
        table([1, 8], [1, 8]).step_seconds(tokens)


@pytest.mark.parametrize("tokens", [0, [0, 5], [5, 0]])
def test_too_few_tokens_name_the_range_too(tokens):
    with pytest.raises(SpecsimError, match=r"a step of 0 tokens is outside the measured range 1\.\.8"):
        table([1, 8], [1, 8]).step_seconds(tokens)


def test_extrapolation_follows_the_last_slope_of_the_eager_tail():
    p = table([1, 4, 8, 12], [1, 2, 20, 24], capture_limit=4)
    assert p.step_seconds([12, 13, 20], extrapolate=True).tolist() == [24, 25, 32]


def test_extrapolation_from_a_single_point_is_flat():
    assert table([4], [4]).step_seconds([1, 4, 99], extrapolate=True).tolist() == [4, 4, 4]


def test_extrapolation_below_the_first_size_costs_the_first():
    assert table([4, 8], [4, 8], below="linear").step_seconds([1, 4, 6], extrapolate=True).tolist() == [4, 4, 6]


def test_a_run_counts_its_extrapolated_steps():
    # Two prompts of 12 tokens on a table that ends at 8 (its slope 1): two steps outside, two a token each.
    p = table([1, 8], [1, 8], below="linear")
    workload = make_arrivals([0.0, 50.0], 12, 2)
    run = simulate(Scenario(p, workload, extrapolate=True), steps=True)
    assert run.steps["duration"].tolist() == [12, 1, 12, 1]
    assert run.num_steps == 4
    assert run.extrapolated_steps == 2
    with pytest.raises(SpecsimError, match=r"a step of 12 tokens is outside the measured range 1\.\.8"):
        simulate(Scenario(p, workload))


def test_a_run_inside_the_range_extrapolates_nothing(profile):
    assert simulate(Scenario(profile, make_arrivals([0.0], 12, 2), extrapolate=True)).extrapolated_steps == 0


def test_a_run_counts_steps_beyond_the_drafts_and_the_kv_columns():
    two = make_profile(draft={"type": "parallel", "num_seqs": [1], "seconds": [0.5]})
    scenario = Scenario(two, make_arrivals([0.0, 0.0], 4, 4), always(0, 2), StaticGamma(2), extrapolate=True)
    assert simulate(scenario).extrapolated_steps == 3  # two sequences draft in each of three steps
    # KV read: 0 while prefilling, then 4, 5, 6 tokens; the last column stands at 4.
    short = grid(kv=(0, 4))
    assert simulate(Scenario(short, make_arrivals([0.0], 4, 4), extrapolate=True)).extrapolated_steps == 2


# One price, however it is asked for


@settings(max_examples=60)
@given(data=st.data())
def test_vectorised_equals_scalar(data):
    tokens = sorted(data.draw(st.sets(st.integers(1, 40), min_size=2, max_size=8)))
    seconds = data.draw(st.lists(st.floats(0.5, 9), min_size=len(tokens), max_size=len(tokens)))
    limit = data.draw(st.none() | st.integers(1, 45))
    p = table(tokens, seconds, below=data.draw(st.sampled_from(BELOW)), capture_limit=limit)
    first = p.verify.range[0]
    counts = np.arange(first, tokens[-1] + 1)
    together = p.step_seconds(counts)
    assert together.tolist() == [float(p.step_seconds(int(c))) for c in counts]
    # A size that was measured costs what was measured.
    assert p.step_seconds(tokens).tolist() == seconds
    # What the engine looks up is the same price, and infinite outside.
    column = step_cost(p, 50, 4, 0).curve(Shape(), 50)
    assert column[first : tokens[-1] + 1].tolist() == together.tolist()
    assert np.isinf(column[tokens[-1] + 1 :]).all()
    assert np.isinf(column[:first]).all()


# Files


def test_a_profile_comes_back_from_json_as_it_was(tmp_path):
    for p in (
        table([1, 2, 4], [0.1, 0.2, 1 / 3], capture_limit=2, monotone=True),
        grid(),
        make_profile(draft=None, kv_tokens=1000, kv_bytes_per_token=0.5, host_seconds=1e-3, engine="x"),
        load_profile(PUBLISHED),
    ):
        assert load_profile(save_profile(p, tmp_path / "p.json")) == p


GOOD = json.loads(make_profile(verify=staircase([1, 2], [1.0, 2.0]), host_seconds=0.5).model_dump_json(by_alias=True))


def changed(path, value):
    """The good profile with one field set (or, for ..., taken out), as JSON text."""
    document = json.loads(json.dumps(GOOD))
    *above, last = path.split("/")
    place = document
    for key in above:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("verify/tokens", [2, 1], r"tokens\[1\]: expected more than 2, got 1"),
        ("verify/tokens", [1, 1], r"tokens\[1\]: expected more than 1, got 1"),
        ("verify/tokens", [0, 1], r"tokens\.0: .*greater than or equal to 1"),
        ("verify/tokens", [], "tokens"),
        ("verify/tokens", [1, 2, 3], "seconds: expected 3 entries, one for each of tokens, got 2"),
        ("verify/seconds", [1.0, -2.0], r"seconds\.1: .*greater than 0, got -2"),
        ("verify/seconds", [1.0, 0.0], r"seconds\.1: .*greater than 0"),
        ("verify/seconds", [1.0, float("nan")], r"seconds\.1: .*finite number"),
        ("verify/seconds", [1.0, float("inf")], r"seconds\.1: .*finite number"),
        ("verify/seconds", [1.0, "fast"], r"seconds\.1: .*number.*'fast'"),
        ("verify/capture_limit", 0, r"capture_limit: .*greater than or equal to 1"),
        ("verify/below", "cubic", r"below: .*'next_size'.*'cubic'"),
        ("verify/type", "table9d", "verify: type: expected one of 'table1d', .*table9d"),
        ("verify/extra", 1, r"verify.*extra: is not a known field"),
        ("verify", ..., "verify: is missing"),
        ("draft/type", "psychic", r"draft\.type: .*'parallel' or 'autoregressive'"),
        ("draft/num_seqs", [4, 2], r"draft.*num_seqs\[1\]: expected more than 4, got 2"),
        ("draft/seconds", [0.1], "draft.*seconds: expected 2 entries, one for each of num_seqs, got 1"),
        ("draft/seconds", [0.1, -0.1], r"draft\.seconds\.1: .*greater than or equal to 0"),
        ("host_seconds", -1, "host_seconds: .*greater than or equal to 0"),
        ("sync_seconds", float("nan"), "sync_seconds: .*finite"),
        ("gpus", 0, "gpus: .*greater than or equal to 1"),
        ("tp", 4, "gpus: expected a multiple of tp = 4, got 1"),
        ("gpus", 1.5, "gpus: .*integer"),
        ("kv_tokens", -5, "kv_tokens: .*greater than or equal to 1"),
        ("kind", "guessed", "kind: .*'measured'"),
        ("colour", "red", "colour: is not a known field"),
        ("schema", "specsim.profile/9", "schema: .*'specsim.profile/1'"),
        ("schema", ..., "schema: is missing"),
        ("provenance", ..., "provenance: is missing"),
        ("provenance", {}, r"provenance\.source: is missing"),
        ("provenance/source", "", r"provenance\.source: "),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_with_file_and_field(tmp_path, path, value, says):
    file = tmp_path / "wrong.json"
    file.write_text(changed(path, value))
    with pytest.raises(SpecsimError, match=says) as error:
        load_profile(file)
    assert str(error.value).startswith(f"{file}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kv_tokens": [100, 0]}, r"kv_tokens\[1\]: expected more than 100, got 0"),
        ({"kv_tokens": [0]}, "kv_tokens"),
        ({"seconds": [[1, 2]]}, "seconds: expected 2 entries, one for each of tokens, got 1"),
        ({"seconds": [[1, 2], [3]]}, r"seconds\[1\]: expected 2 entries, one for each of kv_tokens, got 1"),
        ({"seconds": [[1, 2], [3, -4]]}, r"seconds\.1\.1: .*greater than 0"),
    ],
)
def test_what_is_wrong_with_two_dimensions(tmp_path, fields, says):
    verify = {"type": "table2d", "tokens": [1, 2], "kv_tokens": [0, 100], "seconds": [[1, 2], [3, 4]]}
    file = tmp_path / "wrong.json"
    file.write_text(changed("verify", verify))
    load_profile(file)  # sound before the change
    file.write_text(changed("verify", verify | fields))
    with pytest.raises(SpecsimError, match=says) as error:
        load_profile(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "not json", "{", "[1, 2]", "null"])
def test_a_file_that_is_no_json_object(tmp_path, text):
    file = tmp_path / "wrong.json"
    file.write_text(text)
    with pytest.raises(SpecsimError) as error:
        load_profile(file)
    assert str(error.value).startswith(f"{file}: ")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SpecsimError, match=r"nowhere\.json: cannot read: No such file"):
        load_profile(tmp_path / "nowhere.json")


def test_the_engine_never_prices_a_step_at_the_wrong_place():
    """Golden of a whole run on the published profile, its law beside it: each step costs its own look-up."""
    p = load_profile(PUBLISHED)
    workload = make_arrivals([0.0] * 40, 700, 30)
    run = simulate(Scenario(p, workload, always(1, 3), StaticGamma(2)), steps=True)
    steps = run.steps
    assert steps["num_tokens"].max() > 1024 > steps["num_tokens"].min()  # on both sides of the cliff
    decoding = steps["num_seqs"] > 0
    for row, drafting in zip(steps.itertuples(), decoding, strict=True):
        expected = p.step_seconds(row.num_tokens, row.num_seqs, 3 if drafting else 0)
        assert row.duration == pytest.approx(float(expected), rel=1e-12)


def test_extrapolation_does_not_follow_a_curve_that_ends_falling():
    """Its last slope would lead to steps that take no time, or less."""
    profile = table([1, 2, 3], [3.0, 3.0, 1.0])
    assert profile.step_seconds([4, 50], extrapolate=True) == pytest.approx([1.0, 1.0])


def test_no_step_beyond_what_the_engine_takes():
    """max_num_tokens bounds the range, even where more was measured."""
    profile = make_profile(verify=staircase([1, 8, 64], [1.0, 2.0, 3.0]), max_num_tokens=16)
    assert profile.step_seconds(16) == pytest.approx(3.0)
    with pytest.raises(SpecsimError, match=r"17 tokens is outside the measured range 1\.\.16"):
        profile.step_seconds(17)
