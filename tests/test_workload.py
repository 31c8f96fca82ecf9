"""Workloads: laws of lengths, arrivals, their files. Statistics are checked within sampling error."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.types import Requests, SpecsimError
from specsim.workload import (
    Arrivals,
    ClosedLoop,
    Empirical,
    Fixed,
    Gamma,
    LogNormal,
    Poisson,
    Quantiles,
    Ramp,
    as_lengths,
    inspect_requests,
    parse_lengths,
    read_requests,
    write_requests,
)
from specsim.workload_file import read_workload

TRACES = Path(__file__).parents[1] / "traces"


def table(**changes: object) -> Requests:
    good = Requests(
        arrival_s=np.array([0.0, 0.5, 0.5, 4.5]),
        prompt_tokens=np.array([10, 20, 30, 40]),
        output_tokens=np.array([1, 2, 3, 4]),
        domain=np.array([0, 1, 1, 0]),
        domains=("chat", "code"),
    )
    return replace(good, **changes)


# Lengths


def test_lognormal_has_its_median_mean_and_sigma():
    x = LogNormal(500, 1.2).sample(np.random.default_rng(1), 100_000)
    assert x.dtype == np.int64
    assert np.median(x) == pytest.approx(500, rel=4 * 1.2533 * 1.2 / np.sqrt(1e5))
    assert np.log(x).std() == pytest.approx(1.2, abs=0.012)
    assert x.mean() == pytest.approx(500 * np.exp(1.2**2 / 2), rel=0.03)


def test_lognormal_is_rounded_and_clipped():
    x = LogNormal(1, 1.0, maximum=3).sample(np.random.default_rng(1), 10_000)
    assert set(x) == {1, 2, 3}
    # 2 is what rounds to it: 1.5 to 2.5; truncation would make it 2 to 3.
    assert (x == 2).mean() == pytest.approx(0.1628, abs=0.015)
    assert LogNormal(1000, 1e6).sample(np.random.default_rng(1), 100).max() == 2**31 - 1


def test_empirical_resamples_its_values():
    x = Empirical([3, 3, 9]).sample(np.random.default_rng(1), 9000)
    assert set(x) == {3, 9}
    assert (x == 3).mean() == pytest.approx(2 / 3, abs=0.02)


def test_quantiles_are_reproduced_and_linear_between():
    x = Quantiles((0, 0.5, 0.9, 1), (10, 100, 1000, 2000)).sample(np.random.default_rng(1), 50_000)
    assert np.quantile(x, [0.5, 0.9]) == pytest.approx([100, 1000], rel=0.03)
    assert np.quantile(x, [0.25, 0.7]) == pytest.approx([55, 550], rel=0.03)
    assert (x.min(), x.max()) == (10, 2000)


@given(
    st.sampled_from([Fixed(7), LogNormal(1, 3.0), LogNormal(40, 0), Empirical((1, 5)), Quantiles((0, 1), (1, 9.6))]),
    st.integers(0, 50),
    st.integers(0, 99),
)
def test_every_length_is_at_least_one(law, n, seed):
    x = law.sample(np.random.default_rng(seed), n)
    assert x.shape == (n,)
    assert x.dtype == np.int64
    assert (x >= 1).all()


def test_plain_ints_are_lengths():
    assert as_lengths(12) == as_lengths(np.int64(12)) == Fixed(12)
    assert as_lengths(Fixed(3)) == Fixed(3)


@pytest.mark.parametrize(
    ("text", "law"),
    [
        ("512", Fixed(512)),
        (" fixed(12) ", Fixed(12)),
        ("lognormal(500, 1.2)", LogNormal(500, 1.2)),
        ("lognormal(500, sigma=1.2, maximum=4096)", LogNormal(500, 1.2, maximum=4096)),
        (repr(LogNormal(500, 1.2, 2, 9)), LogNormal(500, 1.2, 2, 9)),
        (repr(Quantiles((0, 1), (1, 9))), Quantiles((0, 1), (1, 9))),
    ],
)
def test_parse_lengths(text, law):
    assert parse_lengths(text) == law


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-3",
        "5.5",
        "lognormal(500)",
        "lognormal(500, -1)",
        "uniform(1, 2)",
        "fixed(x)",
        "1, 2",
        "a\0",
    ],
)
def test_parse_lengths_refuses(text):
    with pytest.raises(SpecsimError, match=r"^lengths") as error:
        parse_lengths(text)
    assert "expected" in str(error.value)
    assert "\n" not in str(error.value)


# Arrivals


def within_error(values, expected, deviation):
    """Whether the mean of ``values`` is within four standard errors of ``expected``."""
    return abs(np.mean(values) - expected) < 4 * deviation / np.sqrt(len(values))


@pytest.mark.parametrize(("workload", "cv"), [(Poisson(50, 20_000), 1), (Gamma(50, 0.3, 20_000), 0.3)])
def test_gaps_have_their_rate_and_cv(workload, cv):
    gaps = np.diff(workload.requests(3).arrival_s, prepend=0)
    assert len(gaps) == 20_000
    assert within_error(gaps, 1 / 50, cv / 50)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_bursty_gamma_keeps_rate_and_cv_on_average():
    runs = [np.diff(Gamma(10, 4, 4000).requests(seed).arrival_s, prepend=0) for seed in range(20)]
    gaps = np.concatenate(runs)
    assert within_error(gaps, 0.1, 0.4)
    assert gaps.std() / gaps.mean() == pytest.approx(4, rel=0.06)


def test_gamma_of_cv_one_is_poisson_and_of_cv_zero_is_even():
    assert np.array_equal(Gamma(8, 1).requests(2).arrival_s, Poisson(8).requests(2).arrival_s)
    assert Gamma(8, 0, 3).requests(2).arrival_s == pytest.approx([0.125, 0.25, 0.375])


def test_poisson_counts_have_dispersion_one():
    report = inspect_requests(Poisson(5, 20_000).requests(4))
    assert report["dispersion_1s"] == pytest.approx(1, abs=4 * np.sqrt(2 / 4000))


@pytest.mark.parametrize("ends", [(2, 10), (10, 2), (0, 6), (6, 0), (4, 4)])
def test_ramp_counts_follow_the_rate(ends):
    ramp = Ramp(*ends, duration_s=300)
    runs = [ramp.requests(seed).arrival_s for seed in range(30)]
    expected = (ends[0] + ends[1]) / 2 * 300
    assert ramp.load == (ends[0] + ends[1]) / 2
    assert within_error([len(run) for run in runs], expected, np.sqrt(expected))
    assert len({len(run) for run in runs}) > 5
    times = np.concatenate(runs)
    assert 0 <= times.min() <= times.max() <= 300
    # In the first third the rate runs from a to a + (b - a)/3.
    share = (ends[0] + (ends[1] - ends[0]) / 6) * 100 / expected
    assert within_error(times < 100, share, np.sqrt(share * (1 - share)))


def test_ramp_without_arrivals_says_so():
    with pytest.raises(SpecsimError, match=r"Ramp.duration_s: expected time for at least one arrival"):
        Ramp(1e-9, 1e-9, 1).requests(0)


SPREAD = {"prompt_tokens": LogNormal(500, 1), "output_tokens": Quantiles((0, 1), (1, 900))}


def lengths(requests):
    return np.stack([requests.prompt_tokens, requests.output_tokens])


def test_lengths_do_not_depend_on_load_law_or_number():
    base = lengths(Poisson(1, 3000, **SPREAD).requests(5))
    assert np.array_equal(base, lengths(Poisson(90, 3000, **SPREAD).requests(5)))
    assert np.array_equal(base, lengths(Gamma(7, 3, 3000, **SPREAD).requests(5)))
    assert np.array_equal(base[:, :1500], lengths(Poisson(1, 1500, **SPREAD).requests(5)))
    ramp = lengths(Ramp(1, 9, 100, **SPREAD).requests(5))
    assert np.array_equal(base[:, : ramp.shape[1]], ramp)
    for users in (1, 64):
        blocks = list(islice(ClosedLoop(users, **SPREAD).lengths(5), 3))
        assert all(b.shape == (1024,) and b.dtype == np.int64 for pair in blocks for b in pair)
        assert np.array_equal(base, np.concatenate([np.stack(pair) for pair in blocks], axis=1)[:, :3000])
    assert not np.array_equal(base, lengths(Poisson(1, 3000, **SPREAD).requests(6)))


def test_outputs_do_not_depend_on_the_law_of_prompts():
    one = Poisson(1, 50, prompt_tokens=9, output_tokens=LogNormal(50, 1)).requests(5)
    other = Poisson(1, 50, prompt_tokens=LogNormal(9, 1), output_tokens=LogNormal(50, 1)).requests(5)
    assert np.array_equal(one.output_tokens, other.output_tokens)


def test_prompts_outputs_and_gaps_are_independent():
    law = LogNormal(500, 1)
    requests = Poisson(1, 10_000, law, law).requests(5)
    gaps = np.diff(requests.arrival_s, prepend=0)
    r = np.corrcoef(np.log([requests.prompt_tokens, requests.output_tokens, gaps]))
    assert np.abs(r[np.triu_indices(3, 1)]).max() < 4 / np.sqrt(10_000)


def test_times_scale_with_the_rate_and_repeat_with_the_seed():
    slow, fast = Poisson(5).requests(1), Poisson(50).requests(1)
    assert slow.arrival_s == pytest.approx(10 * fast.arrival_s)
    assert np.array_equal(slow.arrival_s, Poisson(5).requests(1).arrival_s)
    assert not np.array_equal(slow.arrival_s, Poisson(5).requests(2).arrival_s)


def test_labels_loads_and_measured_requests():
    loop = ClosedLoop(64)
    assert (loop.label, loop.load, loop.closed) == ("closed 64", 64.0, True)
    assert (loop.first_measured, loop.num_measured) == (320, 640)
    assert ClosedLoop(4).num_measured == 500
    assert (Poisson(50).label, Poisson(50).load, Poisson(50).closed) == ("poisson 50/s", 50.0, False)
    assert Gamma(2.5, 4).label == "gamma 2.5/s cv 4"
    assert Ramp(1, 9, 60).label == "ramp 1-9/s over 60 s"
    requests = Poisson(50, domain="chat").requests(0)
    assert (requests.domains, set(requests.domain)) == (("chat",), {0})
    assert Poisson(50).requests(0).domains == ("",)


def test_arrivals_replay_scale_and_head():
    tagged = table(session_id=np.array([7, 7, 8, 8]), prefix_hashes=((1,), (1, 2), (), (3,)), rejected={"x": 1})
    trace = Arrivals(tagged, name="t")
    assert trace.requests(0) is trace.requests(1) is tagged
    assert (trace.load, trace.label, trace.closed) == (3 / 4.5, "t 0.6667/s", False)
    fast = trace.scaled(6)
    assert fast.load == pytest.approx(6)
    assert fast.table.arrival_s == pytest.approx([0, 1 / 18, 1 / 18, 0.5])
    assert np.array_equal(fast.table.prompt_tokens, tagged.prompt_tokens)
    head = trace.head(3).table
    assert len(head) == 3
    assert (head.session_id.tolist(), head.prefix_hashes) == ([7, 7, 8], ((1,), (1, 2), ()))
    assert len(trace.head(99).table) == 4
    with pytest.raises(SpecsimError, match="expected arrivals at different times"):
        trace.head(1).scaled(2)


NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0), "Poisson.rate: expected a number of at least 1e-06, got 0"),
        (lambda: Poisson(NAN), "Poisson.rate: expected a number of at least 1e-06, got nan"),
        (lambda: Poisson(float("inf")), "Poisson.rate: expected a number of at least 1e-06, got inf"),
        (lambda: Poisson(10**400), "Poisson.rate: expected a number of at least 1e-06"),
        (lambda: Poisson("5"), "Poisson.rate: expected a number of at least 1e-06, got '5'"),
        (lambda: Poisson(True), "Poisson.rate: expected a number of at least 1e-06, got True"),
        (lambda: Poisson(1, 0), "Poisson.num_requests: expected a whole number of at least 1, got 0"),
        (lambda: Poisson(1, 2.5), "Poisson.num_requests: expected a whole number of at least 1, got 2.5"),
        (lambda: Poisson(1, prompt_tokens=0), "Poisson.prompt_tokens: expected a whole number of at least 1"),
        (lambda: Poisson(1, output_tokens="9"), "Poisson.output_tokens: expected a number of tokens"),
        (lambda: Poisson(1, domain=None), "Poisson.domain: expected text, got None"),
        (lambda: Gamma(-1, 2), "Gamma.rate: expected a number of at least 1e-06, got -1"),
        (lambda: Gamma(1, -2), "Gamma.cv: expected a number of at least 0 and of at most 1000, got -2"),
        (lambda: Gamma(1, 2, 0), "Gamma.num_requests: expected"),
        (lambda: Ramp(-1, 2, 9), "Ramp.start_rate: expected a number of at least 0, got -1"),
        (lambda: Ramp(1, -2, 9), "Ramp.end_rate: expected"),
        (lambda: Ramp(0, 0, 9), "Ramp.end_rate: expected a number above 0 where start_rate is 0"),
        (lambda: Poisson(1e-7), "Poisson.rate: expected a number of at least 1e-06, got 1e-07"),
        (lambda: Ramp(5, 1, 1e12), "Ramp: expected at most 100,000,000 requests, got about 3e+12"),
        (lambda: Ramp(1, 2, 0), "Ramp.duration_s: expected a number above 0, got 0"),
        (lambda: ClosedLoop(0), "ClosedLoop.concurrency: expected a whole number of at least 1, got 0"),
        (lambda: ClosedLoop(1.5), "ClosedLoop.concurrency: expected a whole number"),
        (
            lambda: ClosedLoop(1, think_s=-0.1),
            "ClosedLoop.think_s: expected a number of at least 0 and of at most 1000000, got -0.1",
        ),
        (
            lambda: ClosedLoop(1, think_s=1e9),
            "ClosedLoop.think_s: expected a number of at least 0 and of at most 1000000",
        ),
        (lambda: ClosedLoop(1, think_cv=-1), "ClosedLoop.think_cv: expected a number of at least 0"),
        (lambda: Arrivals([1.0]), "Arrivals.table: expected Requests, got list"),
        (lambda: Arrivals(table()).scaled(0), "Arrivals.scaled rate: expected a number of at least 1e-06, got 0"),
        (lambda: Arrivals(table()).head(0), "Arrivals.head n: expected a whole number of at least 1, got 0"),
        (
            lambda: Fixed(0),
            "Fixed.tokens: expected a whole number of at least 1 and of at most 2147483647, got 0",
        ),
        (lambda: LogNormal(0.5, 1), "LogNormal.median: expected a number of at least 1"),
        (lambda: LogNormal(5, -1), "LogNormal.sigma: expected a number of at least 0, got -1"),
        (lambda: LogNormal(5, 1, 0), "LogNormal.minimum: expected a whole number of at least 1"),
        (lambda: LogNormal(5, 1, 4, 3), "LogNormal.maximum: expected a whole number of at least 4"),
        (lambda: Empirical(()), "Empirical.values: expected at least 1 entries, got 0"),
        (lambda: Empirical((4, 0)), r"Empirical.values[1]: expected a whole number of at least 1"),
        (lambda: Empirical(7), "Empirical.values: expected a list of numbers, got 7"),
        (lambda: Quantiles((0, 1), (1,)), "Quantiles.tokens: expected at least 2 entries, got 1"),
        (
            lambda: Quantiles((0, 0.5, 1), (1, 2)),
            "Quantiles.tokens: expected 3 entries as in probabilities, got 2",
        ),
        (
            lambda: Quantiles((0.1, 1), (1, 2)),
            "Quantiles.probabilities: expected numbers climbing from 0 to 1",
        ),
        (lambda: Quantiles((0, 0, 1), (1, 2, 3)), "Quantiles.probabilities: expected numbers climbing"),
        (lambda: Quantiles((0, 1), (3, 2)), "Quantiles.tokens: expected numbers that do not fall"),
        (lambda: Quantiles((0, 1), (0, 2)), "Quantiles.tokens[0]: expected a number of at least 1"),
    ],
)
def test_bad_values_are_told_in_one_line(make, message):
    with pytest.raises(SpecsimError) as error:
        make()
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


# Tables


def test_inspect_by_hand():
    report = inspect_requests(
        table(session_id=np.array([1, 1, 2, 2]), prefix_hashes=((1, 2), (1, 3), (4,), (1,)), rejected={"why": 2})
    )
    gaps = np.array([0.5, 0, 4])
    assert report["requests"] == 4
    assert report["rejected"] == {"why": 2}
    assert (report["duration_s"], report["mean_rate"]) == (4.5, 3 / 4.5)
    assert report["gap_cv"] == pytest.approx(gaps.std() / 1.5)
    assert report["dispersion_1s"] == pytest.approx(np.var([3, 0, 0, 0]) / 0.75)  # the 4.5 s one is left out
    assert report["zero_gap_share"] == pytest.approx(1 / 3)
    assert report["prompt_tokens"] == pytest.approx(
        {"mean": 25, "p10": 13, "p50": 25, "p90": 37, "p99": 39.7, "max": 40}
    )
    assert report["domains"] == {"chat": 2, "code": 2}
    assert report["sessions"] == 2
    assert report["prefix_reuse_share"] == pytest.approx(2 / 6)
    json.dumps(report, allow_nan=False)


def test_inspect_says_none_where_nothing_is_determined():
    report = inspect_requests(Arrivals(table()).head(1).table)
    undetermined = (
        "mean_rate",
        "gap_cv",
        "dispersion_1s",
        "zero_gap_share",
        "sessions",
        "prefix_reuse_share",
    )
    assert {report[key] for key in undetermined} == {None}
    json.dumps(report, allow_nan=False)


def same(a, b):
    assert len(a) == len(b)
    for column in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert np.array_equal(getattr(a, column), getattr(b, column))
        assert getattr(a, column).dtype == getattr(b, column).dtype
    assert [a.domains[d] for d in a.domain] == [b.domains[d] for d in b.domain]
    assert (a.session_id is None) == (b.session_id is None)
    assert a.session_id is None or np.array_equal(a.session_id, b.session_id)
    assert a.prefix_hashes == b.prefix_hashes
    assert a.rejected == b.rejected


@pytest.mark.parametrize(
    "requests",
    [
        table(),
        table(domain=np.array([1, 1, 0, 0]), rejected={"no tokens": 3}),
        table(session_id=np.array([5, -1, 5, 2**60]), prefix_hashes=((1, 2**62), (), (-3,), (1,))),
        Poisson(9, 1500, **SPREAD).requests(1),
    ],
)
def test_parquet_round_trip(tmp_path, requests):
    path = write_requests(tmp_path / "sub" / "r.parquet", requests)
    same(requests, read_requests(path))
    assert [p.name for p in path.parent.iterdir()] == ["r.parquet"]


def columns(**changes):
    good = {
        "arrival_s": pa.array([0.0, 0.5, 1.0]),
        "prompt_tokens": pa.array([1, 2, 3], pa.int32()),
        "output_tokens": pa.array([4, 5, 6]),
        "domain": pa.array(["a", "b", "a"]),
    }
    return {name: column for name, column in (good | changes).items() if column is not None}


def test_parquet_of_others_is_read(tmp_path):
    path = tmp_path / "r"
    pq.write_table(pa.table(columns(domain=pa.array(["b", "a", "b"]).dictionary_encode())), path)
    requests = read_requests(path)
    assert requests.domains == ("b", "a")
    assert requests.domain.tolist() == [0, 1, 0]
    assert requests.prompt_tokens.dtype == np.int64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"domain": None}, "column domain: missing; got arrival_s, prompt_tokens, output_tokens"),
        ({"colour": pa.array([1, 2, 3])}, "column colour: unknown; expected arrival_s, "),
        ({"arrival_s": pa.array([0.0, None, 1.0])}, "row 1 (from 0): arrival_s: expected a value, got null"),
        ({"domain": pa.array(["a", "b", None])}, "row 2 (from 0): domain: expected a value, got null"),
        (
            {"prefix_hashes": pa.array([[1], None, [2]])},
            "row 1 (from 0): prefix_hashes: expected a value, got null",
        ),
        (
            {"prefix_hashes": pa.array([[1], [2, None], []])},
            "row 1 (from 0): prefix_hashes: expected a value",
        ),
        (
            {"prefix_hashes": pa.array([["x"], [], []])},
            "column prefix_hashes: expected lists of whole numbers",
        ),
        (
            {"arrival_s": pa.array([0.0, -1.0, 1.0])},
            "row 1 (from 0): arrival_s: expected seconds of at least 0",
        ),
        (
            {"arrival_s": pa.array([0.0, 2.0, 1.0])},
            "row 2 (from 0): arrival_s: expected no earlier than the row",
        ),
        ({"arrival_s": pa.array([0.0, NAN, 1.0])}, "row 1 (from 0): arrival_s: expected a finite number"),
        (
            {"arrival_s": pa.array([0.0, 1.0, float("inf")])},
            "row 2 (from 0): arrival_s: expected a finite number",
        ),
        ({"arrival_s": pa.array(["0", "1", "2"])}, "column arrival_s: expected numbers, got string"),
        (
            {"prompt_tokens": pa.array([1, 0, 1])},
            "row 1 (from 0): prompt_tokens: expected 1 to 2147483647 tokens",
        ),
        ({"output_tokens": pa.array([1, 1, -5])}, "row 2 (from 0): output_tokens: expected 1 to 2147483647"),
        (
            {"output_tokens": pa.array([1.5, 2, 2])},
            "column output_tokens: expected whole numbers, got double",
        ),
        ({"session_id": pa.array(["a", "b", "c"])}, "column session_id: expected whole numbers, got string"),
        (
            {"session_id": pa.array([2**63, 1, 1], pa.uint64())},
            "column session_id: expected whole numbers that fit",
        ),
    ],
)
def test_bad_parquet_is_named(tmp_path, changes, message):
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.table(columns(**changes)), path)
    with pytest.raises(SpecsimError) as error:
        read_requests(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_files_that_are_no_requests(tmp_path):
    path = tmp_path / "f"
    path.touch()
    with pytest.raises(SpecsimError, match=r"f: expected a parquet file, got an empty file"):
        read_requests(path)
    path.write_text("PAR1 but not really")
    with pytest.raises(SpecsimError, match=r"f: expected a parquet file, got something else"):
        read_requests(path)
    pq.write_table(pa.table(columns()).slice(0, 0), path)
    with pytest.raises(SpecsimError, match=r"f: expected at least one request, got none"):
        read_requests(path)
    whole = pq.write_table(pa.table(columns()), path) or path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SpecsimError, match=r"f: expected a parquet file, got something else or a damaged one"):
        read_requests(path)
    two = pa.Table.from_arrays([*columns().values(), pa.array([1, 2, 3])], names=[*columns(), "output_tokens"])
    pq.write_table(two, path)
    with pytest.raises(SpecsimError, match=r"f: column output_tokens: expected once, got 2 times"):
        read_requests(path)
    pq.write_table(pa.table(columns()).replace_schema_metadata({"specsim": '{"schema": "other/1"}'}), path)
    with pytest.raises(SpecsimError, match=r"f: metadata specsim.schema: expected specsim.requests/1, got 'other/1'"):
        read_requests(path)
    with pytest.raises(SpecsimError, match=r"absent: cannot read: No such file"):
        read_requests(tmp_path / "absent")


@pytest.mark.parametrize(
    "changes",
    [
        {"arrival_s": np.array([0.0, 2.0, 1.0, 3.0])},
        {"output_tokens": np.array([1, 1, 0, 1])},
        {"prompt_tokens": np.array([1])},
        {"domain": np.array([0, 1, 2, 0])},
        {"session_id": np.array([1, 2])},
    ],
)
def test_unsound_tables_are_not_written(tmp_path, changes):
    with pytest.raises(SpecsimError, match=f"{next(iter(changes))}: expected"):
        write_requests(tmp_path / "x.parquet", table(**changes))
    assert list(tmp_path.iterdir()) == []


# Workload files

FILE = {
    "schema": "specsim.workload/1",
    "name": "mine",
    "kind": "fitted",
    "domain": "chat",
    "arrivals": {"type": "gamma", "rate": 5, "cv": 1.5},
    "prompt_tokens": {"type": "quantiles", "probabilities": [0, 0.5, 1], "tokens": [1, 20, 90]},
    "output_tokens": {"type": "lognormal", "median": 100, "sigma": 0.5, "maximum": 400},
    "provenance": {"source": "s", "command": "c", "date": "2026-11-29", "notes": ""},
}


def edited(path, value):
    """Return FILE with the field at the dotted ``path`` set to ``value`` (None: removed)."""
    file = json.loads(json.dumps(FILE))
    *parents, last = path.split(".")
    node = file
    for parent in parents:
        node = node[parent]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return json.dumps(file)


def test_workload_file_is_read(tmp_path):
    path = tmp_path / "w.json"
    path.write_text(json.dumps(FILE))
    law = read_workload(path)
    assert law == Gamma(
        5, 1.5, 2000, Quantiles((0, 0.5, 1), (1, 20, 90)), LogNormal(100, 0.5, maximum=400), domain="chat"
    )
    assert len(replace(law, num_requests=7).requests(0)) == 7
    poisson = edited("arrivals", {"type": "poisson", "rate": 3})
    path.write_text(poisson)
    assert read_workload(path).label == "poisson 3/s"
    path.write_text(edited("output_tokens", {"type": "fixed", "tokens": 9}))
    assert read_workload(path).output_tokens == Fixed(9)
    path.write_text(edited("output_tokens", {"type": "empirical", "values": [9, 3]}))
    assert read_workload(path).output_tokens == Empirical((9, 3))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", "specsim.workload/2"),
        ("kind", "measured"),
        ("name", None),
        ("extra", 1),
        ("arrivals.rate", None),
        ("arrivals.rate", "5"),
        ("arrivals.rate", 0),
        ("arrivals.rate", NAN),
        ("arrivals.cv", -1),
        ("prompt_tokens.tokens", [1, 2]),
        ("prompt_tokens.tokens", [5, 2, 9]),
        ("prompt_tokens.probabilities", [0.1, 0.5, 1]),
        ("output_tokens.sigma", "wide"),
        ("output_tokens.median", 0),
        ("output_tokens.mean", 3),
        ("provenance.date", "yesterday"),
        ("provenance", None),
    ],
)
def test_bad_workload_files_name_file_and_field(tmp_path, field, value):
    path = tmp_path / "w.json"
    path.write_text(edited(field, 1) if field == "extra" else edited(field, value))
    with pytest.raises(SpecsimError) as error:
        read_workload(path)
    message = str(error.value)
    assert message.startswith(f"{path}: {field.split('.')[0]}")
    assert field.split(".")[-1] in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "{", "[]", edited("arrivals.type", "weibull"), edited("arrivals", 3)])
def test_broken_workload_files(tmp_path, text):
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(SpecsimError, match=r"w\.json: ") as error:
        read_workload(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("domain", "rate", "cv", "medians"),
    [("chat", 5.5301, 1.094, (1020, 129)), ("code", 2.5664, 13.151, (1469, 13))],
)
def test_shipped_workloads(domain, rate, cv, medians):
    law = read_workload(TRACES / f"azure-2023-{domain}.json")
    assert (law.rate, law.cv, law.domain) == (rate, cv, domain)
    requests = replace(law, num_requests=20_000).requests(0)
    assert requests.domains == (domain,)
    assert np.median(requests.prompt_tokens) == pytest.approx(medians[0], rel=0.05)
    assert np.median(requests.output_tokens) == pytest.approx(medians[1], rel=0.05)
    provenance = json.loads((TRACES / f"azure-2023-{domain}.json").read_text())["provenance"]
    assert "CC-BY-4.0" in provenance["source"]
    assert "measured" in provenance["notes"]
    assert not any(word.startswith("/") for word in provenance["command"].split())


def test_import_is_light():
    heavy = "{'torch', 'matplotlib', 'scipy'} & set(sys.modules)"
    code = f"import sys, specsim.workload, specsim.workload_file; print({heavy})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
