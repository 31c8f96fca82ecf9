"""Block traces: what a file keeps, and what is said about one that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_blocks

from specsim.blocktrace import Trace, TraceMeta, lossless_dtypes, make_trace, read_trace, write_trace
from specsim.calibration import apply_sts, calibration_report
from specsim.types import SpecsimError

ARRAYS = ("position", "confidence", "accepted", "proposed", "draft_prob", "accept_rate", "prompt_tokens",
          "output_tokens")  # fmt: skip


def assert_same(a: Trace, b: Trace) -> None:
    assert a.meta == b.meta
    for codes, names in (("request_id", "request_ids"), ("domain", "domains")):
        # Codes may be given out in another order; what they stand for may not change.
        words = [[getattr(t, names)[c] for c in getattr(t, codes)] for t in (a, b)]
        assert words[0] == words[1]
    for name in ARRAYS:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.dtype == y.dtype, name
            np.testing.assert_array_equal(x, y, name)


def full(kind: str = "dense") -> Trace:
    """Two domains, three responses, every optional column, given out of order."""
    request = ["b"] * 3 + ["a"] * 2 + ["c"] * 2
    position = [0, 1, 2, 4, 5, 0, 1] if kind == "dense" else [0, 3, 4, 1, 9, 0, 2]
    accepted = np.array([2, 0, 1, 1, 2, 0, 2])
    order = [6, 0, 3, 2, 5, 1, 4]
    rng = np.random.default_rng(5)
    rate = rng.random((7, 2)).astype(np.float32)
    rate[np.arange(2) >= accepted[:, None] + 1] = np.nan
    columns = {
        "request_id": request,
        "domain": ["chat"] * 5 + ["code"] * 2,
        "position": np.array(position),
        "confidence": rng.random((7, 2)).astype(np.float32),
        "accepted": accepted,
        "proposed": np.full(7, 2),
        "draft_prob": rng.random((7, 2)).astype(np.float32),
        "accept_rate": rate,
        "prompt_tokens": np.array([9, 9, 9, 4, 4, 7, 7]),
        "output_tokens": np.array([5, 5, 5, 8, 8, 2, 2]),
    }
    meta = TraceMeta(
        drafter="small", target="big", gamma=2, kind=kind, temperature=0.7, draft_sampling="probabilistic",
        sts=(0.9, 1.1), dataset="none", seed=3, command="made", versions={"specsim": "0"}, notes="γ in it",
    )  # fmt: skip
    return make_trace(meta, {name: np.asarray(values)[order] for name, values in columns.items()})


# A good file


@pytest.mark.parametrize("kind", ["dense", "sequential"])
def test_everything_comes_back_from_a_file(tmp_path, kind):
    trace = full(kind)
    path = write_trace(trace, tmp_path / "deep" / "trace.parquet")
    assert_same(read_trace(path), trace)


def test_rows_are_sorted_by_domain_response_and_position():
    trace = full()
    names = [(trace.domains[d], trace.request_ids[r]) for d, r in zip(trace.domain, trace.request_id, strict=True)]
    for key in set(names):
        rows = [i for i, name in enumerate(names) if name == key]
        assert rows == list(range(rows[0], rows[-1] + 1))
        assert (np.diff(trace.position[rows]) == 1).all()
    domains = [d for d, _ in names]
    assert domains == sorted(domains, key=domains.index)
    # Every column moves along: response "a" (4 prompt tokens) accepted 1 at position 4 and 2 at position 5.
    a = trace.prompt_tokens == 4
    assert trace.position[a].tolist() == [4, 5]
    assert trace.accepted[a].tolist() == [1, 2]


def test_domains_stand_together_though_their_responses_alternate():
    trace = make_blocks(
        [0, 1, 2, 0, 1], 2, domain=["x", "y", "x", "y", "x"], request_id=list("abcde"), position=[0] * 5
    )  # fmt: skip
    assert trace.domain.tolist() == [0, 0, 0, 1, 1]
    assert trace.accepted.tolist() == [0, 2, 1, 1, 0]
    assert [trace.request_ids[r] for r in trace.request_id] == ["a", "c", "e", "b", "d"]


def test_an_ngram_trace_proposes_less_and_has_no_confidence(tmp_path):
    trace = make_blocks([0, 1, 2, 0], 3, proposed=[0, 2, 3, 1], confidence=None)
    again = read_trace(write_trace(trace, tmp_path / "t.parquet"))
    assert_same(again, trace)
    assert again.confidence is None
    assert again.proposed.tolist() == [0, 2, 3, 1]
    table = pq.read_table(tmp_path / "t.parquet")
    assert table.column("confidence").null_count == 4
    assert table.schema.field("confidence").type == pa.list_(pa.float32(), 3)


def test_confidences_past_what_was_proposed_count_as_zero():
    confidence = np.array([[0.5, np.nan], [0.5, 7.0], [0.5, 0.25]])
    trace = make_blocks([0, 1, 2], 2, proposed=[1, 1, 2], confidence=confidence)
    assert trace.confidence.tolist() == [[0.5, 0], [0.5, 0], [0.5, 0.25]]


def test_half_precision_and_plain_strings_are_read(tmp_path):
    table = pq.read_table(write_trace(full(), tmp_path / "t.parquet"))
    half = pa.FixedSizeListArray.from_arrays(pa.array(np.full(14, 0.5, np.float16)), 2)
    plain = table.column("domain").cast(pa.string())
    for name, column in (("confidence", half), ("domain", plain)):
        table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, tmp_path / "t.parquet")
    trace = read_trace(tmp_path / "t.parquet")
    assert trace.confidence.dtype == np.float32
    assert (trace.confidence == 0.5).all()
    assert set(trace.domains) == {"chat", "code"}


def test_a_folder_name_with_an_equals_sign_adds_no_column(tmp_path):
    path = write_trace(full(), tmp_path / "gamma=2" / "t.parquet")
    assert_same(read_trace(path), full())


def test_rows_know_their_response():
    trace = make_blocks([0] * 6, 1, domain=list("xxxyyy"), request_id=list("aabbcc"), position=[0, 1, 0, 0, 0, 1])
    # "b" of x and "b" of y are two responses.
    assert trace.responses().tolist() == [0, 0, 1, 2, 3, 3]


def test_confidences_are_calibrated_and_nan_where_nothing_was_proposed():
    confidence = np.full((2, 2), 0.8)
    trace = make_blocks([0, 1], 2, proposed=[1, 2], confidence=confidence, sts=(2.0, 0.5))
    # logit(0.8) = ln 4; halved it is ln 2, doubled ln 16.
    np.testing.assert_allclose(trace.confidences(), [[2 / 3, np.nan], [2 / 3, 16 / 17]], rtol=1e-6)
    np.testing.assert_allclose(trace.confidences(calibrated=False), [[0.8, np.nan], [0.8, 0.8]], rtol=1e-6)
    assert trace.confidences().dtype == np.float32
    assert make_blocks([0, 1], 2, confidence=None, sts=(1.0, 1.0)).confidences() is None


# Half precision


def sure_head(rows: int = 6000, gamma: int = 3) -> Trace:
    """A head that is often very sure: half of its confidences lie above 0.97, a tenth above 0.999."""
    rng = np.random.default_rng(11)
    logit = rng.normal(3.5, 2.6, (rows, gamma))
    confidence = 1 / (1 + np.exp(-logit))
    accepted = (np.cumprod(apply_sts(confidence, [2.0] * gamma), axis=1) > rng.random((rows, 1))).sum(axis=1)
    return make_blocks(accepted.tolist(), gamma, confidence=confidence.astype(np.float32))


def test_float16_keeps_all_but_the_last_digits_of_the_lists(tmp_path):
    trace = full()
    path = write_trace(trace, tmp_path / "t.parquet", dtype="float16")
    schema = pq.read_schema(path)
    for name in ("confidence", "draft_prob", "accept_rate"):
        assert schema.field(name).type == pa.list_(pa.float16(), 2), name
    again = read_trace(path)
    for name in ("confidence", "draft_prob", "accept_rate"):
        assert getattr(again, name).dtype == np.float32
        np.testing.assert_allclose(getattr(again, name), getattr(trace, name), rtol=0, atol=2**-12)
    lists = {name: getattr(trace, name) for name in ("confidence", "draft_prob", "accept_rate")}
    assert_same(replace(again, **lists), trace)


def test_float16_makes_nothing_certain_that_was_not(tmp_path):
    confidence = np.array([[1e-12, 0.999999], [0.0, 1.0], [np.nextafter(np.float32(1), np.float32(0)), 1e-30]])
    trace = make_blocks([0, 1, 2], 2, confidence=confidence.astype(np.float32))
    again = read_trace(write_trace(trace, tmp_path / "t.parquet", dtype="float16")).confidence
    assert again[1].tolist() == [0.0, 1.0]
    others = again[[0, 2]]
    assert ((others > 0) & (others < 1)).all()
    assert np.abs(again - confidence).max() < 0.0005


def test_float16_moves_no_figure(tmp_path):
    trace = sure_head()
    half = read_trace(write_trace(trace, tmp_path / "t.parquet", dtype="float16"))
    assert (half.accepted == trace.accepted).all()  # and τ with it
    for temperatures in ([1.0] * 3, [2.0] * 3):
        before, after = (
            calibration_report(apply_sts(t.confidence, temperatures), t.accepted)[["ece", "auc", "predicted"]]
            for t in (trace, half)
        )
        assert np.abs(before - after).to_numpy().max() < 0.0015


def test_an_ngram_trace_in_float16_has_no_confidence(tmp_path):
    trace = make_blocks([0, 1, 2, 0], 3, confidence=None)
    path = write_trace(trace, tmp_path / "t.parquet", dtype="float16")
    assert_same(read_trace(path), trace)
    assert pq.read_schema(path).field("confidence").type == pa.list_(pa.float16(), 3)


def test_lists_may_differ_in_type_and_are_told_to_lose_nothing(tmp_path):
    trace = full()
    assert set(lossless_dtypes(trace).values()) == {"float32"}
    types = {"draft_prob": "float16", "accept_rate": "float16"}
    path = write_trace(trace, tmp_path / "t.parquet", dtype=types)
    assert pq.read_schema(path).field("draft_prob").type == pa.list_(pa.float16(), 2)
    mixed = read_trace(path)
    assert (mixed.confidence == trace.confidence).all()
    assert lossless_dtypes(mixed) == {"confidence": "float32", **types}
    again = write_trace(mixed, tmp_path / "again.parquet", dtype=lossless_dtypes(mixed))
    assert again.read_bytes() == path.read_bytes()
    assert lossless_dtypes(make_blocks([0, 1], 2, confidence=None)) == {}


def test_files_are_small(tmp_path):
    trace = sure_head(30_000, 7)
    size = {dtype: write_trace(trace, tmp_path / dtype, dtype=dtype).stat().st_size for dtype in ("float32", "float16")}
    assert size["float32"] < 0.80 * trace.confidence.nbytes
    assert size["float16"] < 0.40 * trace.confidence.nbytes


@pytest.mark.parametrize("dtype", ["int8", {"confidence": "float64"}, {"accepted": "float16"}])
def test_another_type_is_refused(tmp_path, dtype):
    with pytest.raises(SpecsimError, match="expected float32 or float16 of confidence, draft_prob, accept_rate"):
        write_trace(full(), tmp_path / "t.parquet", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


# A wrong file


@pytest.fixture
def wrong(tmp_path):
    """Write a sound file after a change to its table or metadata, and return what reading it says."""

    def read(change=lambda table: table, trace=None, **meta):
        path = tmp_path / "wrong.parquet"
        table = change(pq.read_table(write_trace(trace if trace is not None else full(), path)))
        said = json.loads(table.schema.metadata[b"specsim"]) | meta
        said = {key: value for key, value in said.items() if value is not ...}
        pq.write_table(table.replace_schema_metadata({"specsim": json.dumps(said)}), path)
        with pytest.raises(SpecsimError) as error:
            read_trace(path)
        message = str(error.value)
        assert message.startswith(f"{path}: ")
        assert "\n" not in message
        return message.removeprefix(f"{path}: ")

    return read


def set_column(name, values):
    return lambda table: table.set_column(table.column_names.index(name), name, values)


def set_value(name, row, value):
    def change(table):
        column = table.column(name).to_pylist()
        column[row] = value
        return set_column(name, pa.array(column, table.schema.field(name).type))(table)

    return change


@pytest.mark.parametrize("name", ["request_id", "domain", "position", "confidence", "accepted", "proposed"])
def test_a_missing_column(wrong, name):
    assert wrong(lambda t: t.drop_columns([name])).startswith(f"column {name!r} is missing: expected request_id, ")


def test_a_column_too_many(wrong):
    assert wrong(lambda t: t.append_column("colour", pa.array(["red"] * 7))).startswith("column 'colour' is not known")


def test_gamma_of_metadata_and_lists_differ(wrong):
    said = wrong(gamma=3, sts=None)
    assert said == "column 'confidence': expected lists of gamma = 3, got lists of 2"


@pytest.mark.parametrize("value", [1.5, -0.25, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["confidence", "draft_prob"])
def test_a_probability_out_of_range(wrong, name, value):
    assert wrong(set_value(name, 3, [0.5, value])).startswith(
        f"column {name!r}, row 3, position 2: expected 0..1, got {value}"
    )


def test_an_accept_rate_out_of_range_where_there_is_one(wrong):
    # accepted of the first row decides which positions have a rate; position 1 always has one.
    assert wrong(set_value("accept_rate", 0, [1.5, 0.5])).startswith("column 'accept_rate', row 0, position 1")


def test_more_accepted_than_proposed(wrong):
    said = wrong(lambda t: set_value("accepted", 4, 2)(set_value("proposed", 4, 1)(t)))
    assert said == "column 'accepted', row 4: expected 0..1, got 2"


def test_more_proposed_than_gamma(wrong):
    assert wrong(set_value("proposed", 1, 3)) == "column 'proposed', row 1: expected 0..2, got 3"


@pytest.mark.parametrize("name", ["accepted", "proposed", "position"])
def test_a_negative_count(wrong, name):
    said = wrong(set_value(name, 0, -1))
    assert said.startswith(f"column {name!r}, row 0: expected 0")
    assert said.endswith("got -1")


def test_a_gap_in_the_positions_of_a_dense_trace(wrong):
    trace = make_blocks([1, 1, 1], 2)
    said = wrong(set_value("position", 2, 7), trace)
    assert said.startswith("column 'position', row 2: expected one more than the row before (dense)")
    assert "'r-text', got 7 after 1" in said


def test_a_position_twice(wrong):
    said = wrong(set_value("position", 2, 1), make_blocks([1, 1, 1], 2, kind="sequential", position=[0, 1, 4]))
    assert said.startswith("column 'position', row 2: expected more than the row before")


def test_a_gap_is_fine_in_a_sequential_trace_and_between_responses():
    make_blocks([1, 1, 1], 2, kind="sequential", position=[0, 2, 9])
    make_blocks([1, 1, 1], 2, request_id=["a", "a", "b"], position=[3, 4, 0])


def test_an_empty_trace(wrong):
    assert wrong(lambda t: t.slice(0, 0)) == "expected at least one row, got an empty trace"


@pytest.mark.parametrize("name", ["confidence", "accepted", "domain"])
def test_a_null_in_the_middle(wrong, name):
    assert wrong(set_value(name, 5, None)) == f"column {name!r}, row 5: expected a value, got null"


def test_a_domain_with_the_name_of_the_total(wrong):
    said = wrong(set_value("domain", 2, "all"))
    assert said == "column 'domain', row 2: 'all' is the name of the total, expected another"


def test_fractions_where_whole_numbers_are_expected(wrong):
    said = wrong(set_column("accepted", pa.array([0.5] * 7)))
    assert said == "column 'accepted': expected whole numbers, got float64"


def test_lists_of_any_length_where_blocks_are_expected(wrong):
    said = wrong(set_column("confidence", pa.array([[0.5]] * 7, pa.list_(pa.float32()))))
    assert said.startswith("column 'confidence': expected fixed_size_list[2], got list<")


def test_confidences_that_the_metadata_denies_and_the_other_way_round(wrong):
    assert wrong(confidence_source="none") == "column 'confidence': numbers, but confidence_source says 'none'"
    bare = make_blocks([1], 2, confidence=None)
    said = wrong(trace=bare, confidence_source="head")
    assert said == "column 'confidence': null, but confidence_source says 'head'"


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"gamma": 0}, "metadata gamma: "),
        ({"gamma": ...}, "metadata gamma: is missing"),
        ({"kind": "thin"}, "metadata kind: "),
        ({"drafter": ...}, "metadata drafter: is missing"),
        ({"schema": "specsim.trace/9"}, "metadata schema: "),
        ({"mood": "good"}, "metadata mood: is not a known field"),
        ({"temperature": -1}, "metadata temperature: "),
        ({"sts": [1.0]}, "metadata sts: expected 2 temperatures, got 1"),
        ({"sts": [1.0, -1.0]}, "metadata sts.1: "),
    ],
)
def test_wrong_metadata(wrong, meta, says):
    assert wrong(**meta).startswith(says)


def test_no_metadata(tmp_path):
    path = write_trace(full(), tmp_path / "t.parquet")
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    with pytest.raises(SpecsimError, match=r"t\.parquet: metadata key 'specsim' is missing"):
        read_trace(path)


def test_metadata_that_is_no_json(tmp_path):
    path = write_trace(full(), tmp_path / "t.parquet")
    pq.write_table(pq.read_table(path).replace_schema_metadata({"specsim": "{"}), path)
    with pytest.raises(SpecsimError, match=r"t\.parquet: metadata .*JSON"):
        read_trace(path)


def test_not_a_parquet(tmp_path):
    path = tmp_path / "t.parquet"
    path.write_text("request_id,domain\n")
    with pytest.raises(SpecsimError, match=r"t\.parquet: expected a parquet file") as error:
        read_trace(path)
    assert "\n" not in str(error.value)
    assert "Buffer" not in str(error.value)


def test_a_damaged_parquet(tmp_path):
    path = write_trace(full(), tmp_path / "t.parquet")
    path.write_bytes(b"PAR1" + bytes(200) + path.read_bytes()[204:])
    with pytest.raises(SpecsimError, match=r"t\.parquet: cannot read: ") as error:
        read_trace(path)
    assert "\n" not in str(error.value)


def test_not_there(tmp_path):
    with pytest.raises(SpecsimError, match=r"nowhere\.parquet: cannot read: No such file"):
        read_trace(tmp_path / "nowhere.parquet")


def test_columns_of_different_lengths_are_named():
    columns = {
        "request_id": ["a", "a"], "domain": ["x", "x"], "position": np.array([0, 1]), "confidence": np.ones((2, 1)),
        "accepted": np.array([0, 1]), "proposed": np.array([1]),
    }  # fmt: skip
    with pytest.raises(SpecsimError, match="my rows: column 'proposed': expected 2 rows, got 1"):
        make_trace(TraceMeta(drafter="d", target="t", gamma=1, kind="dense"), columns, "my rows")


def test_a_trace_does_not_write_over_what_it_cannot_replace(tmp_path):
    path = write_trace(full(), tmp_path / "t.parquet")
    before = path.read_bytes()
    broken = replace(full(), accepted=np.full(7, 1000))  # does not fit the file's int8
    with pytest.raises((SpecsimError, pa.ArrowInvalid)):
        write_trace(broken, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_a_folder_is_not_a_trace(tmp_path):
    write_trace(full(), tmp_path / "traces" / "t.parquet")
    with pytest.raises(SpecsimError, match="traces: cannot read: Is a directory"):
        read_trace(tmp_path / "traces")
