"""LLMServingSim bundles: real ones reproduced point by point, small ones by hand, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from bundles import CONFIG, DENSE, EXPERTS, LAYER, LINK, META, ONE_FORWARD, SKEW, bundle, csv_text, load, microseconds
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.hardware import Shape, load_profile, step_cost
from specsim.importers.profile_parts import Ask
from specsim.importers.profiles import load_profile_source
from specsim.types import SpecsimError

RUNS = Path(__file__).parents[1].parent / "shared" / "data" / "engine_runs"
BLACKWELL = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
REAL = ("RTX4090-Llama-3.1-8B", "RTXPRO6000-Llama-3.1-8B")
LAYERS = 32
AXES = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]

real = pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.skipif(not (RUNS / n).exists(), reason=f"{RUNS / n} is not here"))
        for n in REAL
    ],
)


# The real ones


@cache
def imported(name, **answers):
    profile, warnings = load_profile_source(RUNS / name / "profile", ask=Ask(**answers))
    assert not warnings
    return profile


@cache
def cost_of(name, no_skew=True):
    return step_cost(imported(name, no_skew=no_skew), 2048, 256, 0)


@cache
def tables(name):
    """The bundle's microseconds as pandas reads them: kernels by tokens, rows by sequences, attention."""
    folder = RUNS / name / "profile"
    dense = pd.read_csv(folder / "dense.csv").pivot_table(index="tokens", columns="layer", values="time_us")
    rows = pd.read_csv(folder / "per_sequence.csv").pivot_table(index="sequences", columns="layer", values="time_us")
    return dense, rows, pd.read_csv(folder / "attention.csv")


def by_tokens(name):
    """Microseconds of all kernels but attention, at every measured token count: Llama's forward, by hand."""
    dense, _, _ = tables(name)
    layer = dense[["qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj"]].sum(axis=1)
    return dense["embedding"] + dense["final_layernorm"] + LAYERS * (layer + 2 * dense["layernorm"])


def shape_of(point):
    chunk, history, n, context = (int(v) for v in point)
    return Shape(n, n * context, [chunk] if chunk else [], [history] if chunk else [])


@real
def test_every_measured_token_count_is_reproduced_with_every_measured_row_count(name):
    """T tokens and R rows: a prefill of T - R + 1, with one row, and one sequence with R - 2 drafts."""
    _, rows, points = tables(name)
    cost, tokens, logits = cost_of(name), by_tokens(name), rows.sum(axis=1)
    context = int(points.kv_decode.max())
    checked = 0
    for t, r in itertools.product(tokens.index, logits.index):
        chunk, drafts = int(t - r + 1), int(r - 2)
        if chunk >= 1 and drafts >= 0:
            got = cost.seconds(Shape(1, context, [chunk], [0]), drafts) - cost.surface.attention.at(
                chunk, 0, 1, context
            )
            assert got * 1e6 == pytest.approx(tokens[t] + logits[r], rel=1e-9)  # a difference of larger numbers
            checked += 1
    assert checked > 4500


@real
def test_every_measured_attention_point_is_reproduced(name):
    _, rows, points = tables(name)
    tokens, logits, cost = by_tokens(name), rows.sum(axis=1), cost_of(name)
    steps = points.assign(tokens=points.prefill_chunk + points.n_decode)
    steps["rows"] = points.n_decode + (points.prefill_chunk > 0)
    inside = steps[steps.tokens <= 2048]
    assert len(inside) > 0.85 * len(points)
    expected = LAYERS * inside.time_us
    expected += np.interp(inside.tokens, tokens.index, tokens) + np.interp(inside.rows, logits.index, logits)
    got = [cost.seconds(shape_of(point)) * 1e6 for point in inside[AXES].to_numpy()]
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    # All points, whatever their tokens: the attention alone, to the bit.
    grid = cost.surface.attention
    alone = [grid.at(*map(int, point)) for point in points[AXES].to_numpy()]
    assert alone == (points.time_us / 1e6 * LAYERS).tolist()


@real
@settings(max_examples=150)
@given(data=st.data())
def test_between_measured_points_a_step_lies_between_them(name, data):
    _, rows, points = tables(name)
    priced = points.set_index(AXES).time_us
    chunk = data.draw(st.sampled_from([0, 0]) | st.integers(16, 1900))
    n = data.draw(st.integers(1, 128) if chunk else st.integers(1, 256))
    context = data.draw(st.integers(16, 16384))
    history = data.draw(st.integers(0, 16384)) if chunk else 0
    around = []
    for axis, value in zip(AXES, (chunk, history, n, context), strict=True):
        places = np.unique(points.loc[(points.prefill_chunk > 0) if chunk else (points.prefill_chunk == 0), axis])
        around.append(sorted({int(places[places <= value].max()), int(places[places >= value].min())}))
    corners = [priced.get(corner) for corner in itertools.product(*around)]
    tokens, logits = by_tokens(name), rows.sum(axis=1)
    sizes = [tokens.iloc[i] for i in _beside(tokens.index, chunk + n)]
    heads = [logits.iloc[i] for i in _beside(logits.index, n + (chunk > 0))]
    got = cost_of(name).seconds(shape_of((chunk, history, n, context))) * 1e6
    if None not in corners:  # a hole in the measured grid has no corner of its own
        low = min(sizes) + min(heads) + LAYERS * min(corners)
        high = max(sizes) + max(heads) + LAYERS * max(corners)
        assert low * (1 - 1e-9) <= got <= high * (1 + 1e-9)
    assert math.isfinite(got)


def _beside(sizes, value):
    right = int(np.searchsorted(sizes, value))
    return {right, right if sizes[right] == value else right - 1}


@real
def test_the_shard_is_the_one_that_the_bundle_tells(name):
    """Of one degree by tp_degrees; of two by the samples of skew_fit.csv. Neither is that of two."""
    assert "assumed" not in imported(name).provenance.notes
    with pytest.raises(SpecsimError, match=r"--tp: (expected one of .* tp_degrees \[1\]|.* is the shard of 1), got 2"):
        load_profile_source(RUNS / name / "profile", ask=Ask(tp=2, **LINK))


@real
def test_what_the_bundle_says_of_itself_is_kept(name):
    p = imported(name, host_seconds=0.001, kv_tokens=41408)
    assert (p.kind, p.model, p.engine, p.gpus, p.tp) == ("imported", "meta-llama/Llama-3.1-8B", "vLLM", 1, 1)
    assert p.device == dict(zip(REAL, ("NVIDIA GeForce RTX 4090", BLACKWELL), strict=True))[name]
    assert p.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert (p.host_seconds, p.kv_tokens) == (0.001, 41408)
    assert p.provenance.versions["vllm"] == "0.19.0"
    assert p.provenance.date.startswith("2026-")
    assert "times fall with more tokens at" in p.provenance.notes
    assert p.verify.range == (1, 2048)


@real
def test_unequal_lengths_by_the_bundles_own_table(name):
    """One bucket by hand: no prefill, 64 sequences whose mean is at 38.5 % of the way from 100 to 4,000."""
    table = pd.read_csv(RUNS / name / "profile" / "skew_fit.csv")
    row = table.query("pc == 0 and n_label == 'n<=64' and skew_rate_label == 'sr<=40%' and kv_big_label == 'kvB<=4k'")
    alpha = float(row.alpha.item())
    shape = Shape(64, 64 * 1600.0, shortest=100, longest=4000)
    mean, longest = (cost_of(name).seconds(Shape(64, 64.0 * k)) for k in (1600, 4000))
    assert longest > mean
    got = cost_of(name, no_skew=False).seconds(shape)
    assert got == pytest.approx(mean + alpha * (longest - mean), rel=1e-12)
    assert cost_of(name).seconds(shape) == mean


# Small ones by hand


def test_a_forward_runs_each_kernel_as_often_as_the_model_does(tmp_path):
    p = load(bundle(tmp_path / "b"))
    assert microseconds(p, 1, 10) == pytest.approx(ONE_FORWARD + (512 + 1024) + 3 * 10)
    # Four sequences, four rows; a prefill adds 8 tokens, one row and its attention.
    by_four = ONE_FORWARD * (1 + 3 / 16)
    assert microseconds(p, 4, 100) == pytest.approx(by_four + 4 * 1536 + 3 * 400)
    beside = ONE_FORWARD * (1 + 11 / 16)
    assert microseconds(p, 4, 100, [8], [16]) == pytest.approx(beside + 5 * 1536 + 3 * (24 + 400))
    # Drafts are tokens and rows; the sequences' attention is read once.
    assert microseconds(p, 1, 10, drafts=3) == pytest.approx(by_four + 4 * 1536 + 3 * 10)
    assert microseconds(load(tmp_path / "b", kv_reads="per_query"), 1, 10, drafts=3) == pytest.approx(
        by_four + 4 * 1536 + 3 * 40
    )


def test_kernels_measured_at_other_sizes_meet_on_all_of_them(tmp_path):
    rows = [("embedding", b, b) for b in (1, 3, 10)]
    rows += [(name, b, b * b) for name in DENSE if name != "embedding" for b in (1, 2, 8, 20)]
    p = load(bundle(tmp_path / "b", dense__csv=csv_text("layer,tokens,time_us", rows)))
    assert p.verify.tokens.at == (1, 2, 3, 8, 10)
    weight = 1 + 3 * 8  # final_layernorm once, eight kernels a layer (layernorm twice)
    expected = [1 + weight, 2 + 4 * weight, 3 + weight * (4 + 10), 8 + 64 * weight, 10 + weight * (64 + 2 / 12 * 336)]
    assert np.array(p.verify.tokens.seconds) * 1e6 == pytest.approx(expected)
    assert "Priced up to 10 tokens" in p.provenance.notes


def test_config_and_meta_may_lie_one_folder_up_or_be_named(tmp_path):
    inner = bundle(tmp_path / "run" / "profile", config=None)
    (tmp_path / "run" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "other.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    three, one = load(inner), load(inner, config=tmp_path / "other.json")
    assert microseconds(three, 1, 10) - microseconds(one, 1, 10) == pytest.approx(2 * (LAYER + 10))


def test_qk_norm_runs_once_a_layer_where_it_was_measured(tmp_path):
    plain = load(bundle(tmp_path / "a"))
    normed = load(bundle(tmp_path / "b", layers=DENSE | {"qk_norm": 7}))
    assert microseconds(normed, 1, 10) - microseconds(plain, 1, 10) == pytest.approx(3 * 7)
    with pytest.raises(SpecsimError, match=r"dense\.csv: missing layers: qk_norm: this model's forward runs them"):
        load(bundle(tmp_path / "c", config=CONFIG | {"model_type": "qwen3"}, meta=None))


def test_answers_go_before_what_the_bundle_says(tmp_path):
    folder = bundle(tmp_path / "b")
    p = load(folder)
    assert (p.name, p.model, p.device, p.engine) == ("tiny-1b-x-tp1", "org/Tiny-1B", "GPU X", "vLLM")
    p = load(
        folder,
        name="mine",
        model="tiny-1b",
        device="GPU Y",
        engine="other",
        gpus=1,
        max_num_tokens=8,
        date="2026-08-14",
    )
    assert (p.name, p.model, p.device, p.engine, p.gpus) == ("mine", "tiny-1b", "GPU Y", "other", 1)
    assert (p.last_tokens, p.provenance.date) == (8, "2026-08-14")


NEWER = "layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us"


def newer(folder):
    """The same bundle with attention.csv as newer profilers write it, and points of verification besides."""
    points = [("attention", 0, 0.0, n, k, 1, n * k) for n in (1, 4) for k in (10, 100)]
    points += [("attention", c, h + c / 2, 0, 0, 1, c + h) for c in (4, 8) for h in (0, 16)]
    both = [(c, h, n, k) for c in (4, 8) for h in (0, 16) for n in (1, 4) for k in (10, 100)]
    points += [("attention", c, h + c / 2, n, k, 1, c + h + n * k) for c, h, n, k in both]
    points += [("attention", 0, 0.0, n, 10, 4, 5 * n) for n in (1, 4)]
    return bundle(folder, attention__csv=csv_text(NEWER, points))


def test_a_newer_table_of_attention_says_the_same(tmp_path):
    new, old = load(newer(tmp_path / "new")), load(bundle(tmp_path / "old"))
    assert new.verify == old.verify
    assert "2 points of decodes with several queries each are left out" in new.provenance.notes


@pytest.mark.parametrize(
    ("old", "fresh", "says"),
    [
        ("attention,0,0.0,1,10,1", "indexer,0,0.0,1,10,1", "layer: expected attention, got 'indexer'"),
        ("attention,4,2.0,0,0", "attention,4,1.0,0,0", r"prefill_key: expected half of the 4 tokens or more, got 1\.0"),
        ("1,10,1,10", "1,10,x,10", "decode_q_len: expected a whole number"),
    ],
)
def test_a_newer_table_that_is_wrong(tmp_path, old, fresh, says):
    folder = newer(tmp_path / "b")
    text = (folder / "attention.csv").read_text()
    assert old in text
    (folder / "attention.csv").write_text(text.replace(old, fresh, 1))
    with pytest.raises(SpecsimError, match=r"attention\.csv: line \d+: " + says):
        load(folder)


# Experts

RAGGED = [(1, 2, 20), (4, 2, 24), (4, 4, 44), (4, 8, 84), (16, 2, 36), (16, 4, 56), (16, 8, 96)]
SPARSE_DENSE = {k: v for k, v in DENSE.items() if k not in ("gate_up_proj", "act_fn", "down_proj")} | {"qk_norm": 2048}
SPARSE_LAYER = 2 * 4 + 8 + 16 + 32 + 2048


def sparse(folder, config=EXPERTS, moe=RAGGED, layers=SPARSE_DENSE, **more):
    return bundle(folder, config=config, moe=moe, layers=layers, meta=META | {"architecture": "qwen3"}, **more)


def distinct(tokens, experts=8, taken=2):
    return experts * (1 - (1 - taken / experts) ** tokens)


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_experts_cost_what_the_expected_number_of_them_does(tmp_path, tokens):
    """2, 5.5 and 7.9 distinct ones: between the counts measured at as many tokens."""
    p = load(sparse(tmp_path / "b"))
    rows = {t: ([e for x, e, _ in RAGGED if x == t], [u for x, _, u in RAGGED if x == t]) for t in (1, 4, 16)}
    experts = 3 * np.interp(distinct(tokens), *rows[tokens])
    expected = (3 + 3 * SPARSE_LAYER) * (1 + (tokens - 1) / 16) + experts
    assert p.verify.tokens.seconds[p.verify.tokens.at.index(tokens)] * 1e6 == pytest.approx(expected)
    assert "expected under uniform routing" in p.provenance.notes


def test_a_count_of_experts_that_few_tokens_cannot_reach_costs_what_more_tokens_do(tmp_path):
    """At 2 tokens 3.5 experts: between (1, 2..4) and (4, 2..4), where (1, 4) stands in for (4, 4)."""
    p = load(sparse(tmp_path / "b", sizes=(1, 2, 4, 16)))
    assert distinct(2) == 3.5
    at_one = 20 + 0.75 * (44 - 20)
    at_four = 24 + 0.75 * (44 - 24)
    expected = (3 + 3 * SPARSE_LAYER) * (1 + 1 / 16) + 3 * (at_one + (at_four - at_one) / 3)
    assert p.verify.tokens.seconds[1] * 1e6 == pytest.approx(expected)


def test_some_layers_of_a_mixture_have_a_dense_mlp(tmp_path):
    config = EXPERTS | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    p = load(sparse(tmp_path / "b", config, layers=DENSE | {"qk_norm": 2048}))
    # Layers 3 and 5 of 0..5 hold experts (every second, and not layer 1); the other four a dense MLP.
    expected = 3 + 6 * SPARSE_LAYER + 4 * (64 + 128 + 256) + 2 * 20
    assert p.verify.tokens.seconds[0] * 1e6 == pytest.approx(expected)


def test_experts_spread_over_ranks(tmp_path):
    one, two = load(sparse(tmp_path / "b")), load(tmp_path / "b", expert_parallel=2)
    # Each of 2 ranks: half of the experts, so half of the distinct ones, of all tokens.
    assert distinct(4) / 2 == pytest.approx(2.734375)
    price = 24 + (distinct(4) / 2 - 2) * 10
    full = 44 + (distinct(4) - 4) * 10
    at = one.verify.tokens.at.index(4)
    assert (one.verify.tokens.seconds[at] - two.verify.tokens.seconds[at]) * 1e6 == pytest.approx(3 * (full - price))
    assert "on 2 ranks, 4 each" in two.provenance.notes
    # A table that says of how many ranks it is: theirs alone.
    by_rank = csv_text("ep,tokens,activated_experts,time_us", [(1, *r) for r in RAGGED] + [(2, 1, 1, 7), (2, 16, 4, 7)])
    flat = load(sparse(tmp_path / "c", moe__csv=by_rank), expert_parallel=2)
    assert flat.verify.tokens.seconds[0] * 1e6 == pytest.approx(3 + 3 * SPARSE_LAYER + 3 * 7)
    with pytest.raises(SpecsimError, match=r"moe\.csv: ep: expected rows of 4 ranks .* got none"):
        load(tmp_path / "c", expert_parallel=4)
    # A replica is one of the ranks, or all of them.
    assert [load(tmp_path / "b", expert_parallel=4, gpus=gpus).gpus for gpus in (None, 1, 4)] == [1, 1, 4]
    with pytest.raises(SpecsimError, match=r"--gpus: expected 1 or 4, --tp or the ranks of .* got 8"):
        load(tmp_path / "b", expert_parallel=4, gpus=8)
    with pytest.raises(SpecsimError, match="--gpus: expected 1, --tp: the prices are those of so many GPUs, got 8"):
        load(tmp_path / "b", gpus=8)
    with pytest.raises(SpecsimError, match="--expert-parallel: expected a divisor of the 8 experts, got 3"):
        load(tmp_path / "b", expert_parallel=3)


def test_a_draft_cost_may_come_with_a_bundle(tmp_path, run):
    folder, draft, out = bundle(tmp_path / "b"), tmp_path / "d.csv", tmp_path / "p.json"
    draft.write_text("num_seqs,ms\n1,1\n4,2\n")
    code, _, said = run("profile", "import", folder, "--draft", draft, "--out", out)
    assert (code, said) == (0, "")
    p = load_profile(out)
    assert (p.draft.num_seqs, p.draft.seconds) == ((1, 4), (0.001, 0.002))
    assert "The draft cost is that of d.csv" in p.provenance.notes
    assert f"--draft {draft}" in p.provenance.command


# Unequal lengths


def test_labels_become_upper_edges(tmp_path):
    p = load(bundle(tmp_path / "b", skew_fit__csv=SKEW))
    skew = p.verify.skew
    assert skew.prefill_chunk == (0, 0, 8)
    assert skew.n_decode == (2, 1 << 31, 2)
    assert skew.skew_rate == (0.15, 1.0, 0.05)
    assert skew.kv_longest == (1024, 1 << 31, 64)
    assert skew.kv_prefill == (0, 16384, 1 << 31)
    assert (skew.alpha, skew.default) == ((0.25, -0.5, 0.5), 0.0)
    assert "3 fitted corrections (skew_fit.csv), 1 of them outside 0..1" in p.provenance.notes
    assert load(tmp_path / "b", no_skew=True).verify.skew is None


@pytest.mark.parametrize(("tp", "default"), [(1, 0.05), (2, 0.0)])
def test_the_default_is_that_of_the_shard(tmp_path, tp, default):
    meta = META | {"skew_fit": {"per_tp": {1: {"alpha_default": 0.05}}}}
    folder = bundle(tmp_path / f"tp{tp}", skew_fit__csv=SKEW, meta=meta)
    p = load(folder, tp=tp, **(LINK if tp > 1 else {}))
    assert p.verify.skew.default == default


# What is refused

BAD = {
    "other model told": ({}, {"model": "Llama-3.1-8B"}, r"model: expected Llama-3\.1-8B, got a bundle of org/Tiny-1B"),
    "other architecture": (
        {"config": CONFIG | {"model_type": "llama"}}, {},
        r"config\.json: model_type: expected tiny, .* got llama: a bundle for another model",
    ),
    "same family, other size": (
        {"meta": META | {"engine_effective": {"hf_overrides": {"num_attention_heads": 8}}, "tp_degrees": [1, 2]}},
        {}, r"config\.json: num_attention_heads: expected 8 or 16, by the shard in meta\.yaml, got 4: another model",
    ),
    "missing layers": (
        {"layers": {k: v for k, v in DENSE.items() if k not in ("o_proj", "act_fn")}}, {},
        r"dense\.csv: missing layers: o_proj, act_fn: ",
    ),
    "missing head": (
        {"per_sequence__csv": "layer,sequences,time_us\nsampler,1,5\n"}, {},
        r"per_sequence\.csv: missing layers: lm_head: ",
    ),
    "unknown layer": (
        {"layers": DENSE | {"shared_expert": 5}}, {},
        r"dense\.csv: line 29: layer 'shared_expert' has no place in this model's forward: expected embedding, ",
    ),
    "dense MLP of a mixture": (
        {"config": EXPERTS | {"model_type": "tiny"}, "moe": RAGGED}, {},
        "layer 'gate_up_proj' has no place in this model's forward",
    ),
    "experts of a dense model": ({"moe": RAGGED}, {}, r"moe\.csv: has no place in a model without experts"),
    "ranks of a dense model": ({}, {"expert_parallel": 2}, "--expert-parallel: has no place in a model without"),
    "no experts": (
        {"config": EXPERTS | {"model_type": "tiny"}, "layers": SPARSE_DENSE}, {}, r"moe\.csv: cannot read: No such file"
    ),
    "too few experts": (
        {"config": EXPERTS | {"model_type": "tiny"}, "layers": SPARSE_DENSE, "moe": RAGGED[:3]}, {},
        r"moe\.csv: activated_experts: expected up to 8, the experts of a rank, got at most 4",
    ),
    "point of experts twice": (
        {"config": EXPERTS | {"model_type": "tiny"}, "layers": SPARSE_DENSE, "moe": [*RAGGED, RAGGED[0]]}, {},
        r"moe\.csv: line 9: 1 tokens with 2 experts stand there twice",
    ),
    "another table": ({"linear_attention__csv": "x\n1\n"}, {}, r"linear_attention\.csv: is not a table of a bundle"),
    "negative time": (
        {"per_sequence__csv": "layer,sequences,time_us\nlm_head,1,5\nsampler,1,-5\n"}, {},
        r"per_sequence\.csv: line 3: time_us: expected a time above 0, got '-5'",
    ),
    "no time": (
        {"attention__csv": "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,0\n"}, {},
        r"attention\.csv: line 2: time_us: expected a time above 0, got '0'",
    ),
    "no tokens": (
        {"sizes": (0, 4)}, {}, r"dense\.csv: line 2: tokens: expected a whole number of at least 1, got '0'",
    ),
    "half a token": ({"sizes": (1, 2.5)}, {}, r"line 3: tokens: expected a whole number of at least 1, got '2.5'"),
    "size twice": ({"sizes": (1, 4, 4)}, {}, r"dense\.csv: line 4: 4 tokens of embedding stand there and at line 3"),
    "point twice": (
        {"attention__csv": "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,5\n0,0,1,16,6\n"}, {},
        r"attention\.csv: line 3: the same point as line 2, expected each once",
    ),
    "point of nothing": (
        {"attention__csv": "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,5\n0,0,0,0,6\n"}, {},
        r"prefill_chunk\[1\]: expected a prefill or decodes, got neither",
    ),
    "mixed units": (
        {"attention__csv": "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,5\n0,0,1,32,6000\n"}, {},
        r"attention\.csv: line 3: expected one unit, got a jump of 1,200 times",
    ),
    "mixed units of a layer": (
        {"per_sequence__csv": "layer,sequences,time_us\nlm_head,1,5\nlm_head,2,5000\nsampler,1,5\n"}, {},
        r"per_sequence\.csv: line 3: expected one unit, .* a jump of 1,000 times looks like mixed units",
    ),
    "milliseconds": ({"dense__csv": "layer,tokens,time_ms\n"}, {}, r"expected the columns layer, tokens, time_us, got"),
    "short row": ({"dense__csv": "layer,tokens,time_us\nembedding,1\n"}, {}, r"line 2: expected 3 columns, got 2"),
    "empty table": ({"dense__csv": ""}, {}, r"dense\.csv: expected the columns .* got none"),
    "header alone": ({"dense__csv": "layer,tokens,time_us\n"}, {}, "expected rows below the header, got none"),
    "bucket": (
        {"skew_fit__csv": SKEW.replace("sr<=5%", "sr<=5")}, {},
        r"skew_fit\.csv: line 4: skew_rate_label: expected a bucket such as sr<=8%, got 'sr<=5'",
    ),
    "bucket twice": ({"skew_fit__csv": SKEW + SKEW.splitlines()[1]}, {}, "alpha: expected one entry a bucket"),
    "alpha": ({"skew_fit__csv": SKEW.replace("0.25", "nan")}, {}, "line 2: alpha: expected a number, got 'nan'"),
    "no layers in config": ({"config": {"hidden_size": 4}}, {}, "num_hidden_layers: expected a whole number"),
    "other architecture's fields": (
        {"config": CONFIG | {"kv_lora_rank": 512}}, {}, "kv_lora_rank: is of an architecture whose kernels",
    ),
    "dtype": ({"config": CONFIG | {"torch_dtype": "int3"}}, {}, "torch_dtype: expected one of float32, .* got 'int3'"),
    "no config": ({"config": None}, {}, r"expected the model's config\.json there or one folder up, or --config"),
    "meta is no mapping": ({"meta": [1]}, {}, r"meta\.yaml: expected a mapping, got list"),
    "degrees are no list": ({"meta": META | {"tp_degrees": 2}}, {}, r"bad/meta\.yaml: tp_degrees: expected a list"),
    "half a degree": ({"meta": META | {"tp_degrees": [0.5]}}, {}, r"bad/meta\.yaml: tp_degrees: expected a whole"),
    "default alpha": (
        {"skew_fit__csv": SKEW, "meta": META | {"skew_fit": {"per_tp": {"1": {"alpha_default": "x"}}}}}, {},
        r"bad: meta\.yaml: skew_fit: alpha_default: expected a number, got 'x'",
    ),
    "a table's answer": ({}, {"capture_limit": 8}, "--capture-limit: has no meaning for the format bundle"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_one_line_says_what_is_wrong(tmp_path, name):
    made, answers, says = BAD[name]
    load(bundle(tmp_path / "good"))  # sound without the change
    folder = bundle(tmp_path / "bad", **made)
    with pytest.raises(SpecsimError, match=says) as error:
        load(folder, **answers)
    assert "\n" not in str(error.value)


def test_what_of_attention_was_not_measured_is_in_the_notes(tmp_path):
    whole = bundle(tmp_path / "whole")
    assert "missing" not in load(whole).provenance.notes
    assert "measured." not in load(whole).provenance.notes.replace("kernels measured", "")
    head, *points = (whole / "attention.csv").read_text().splitlines()
    # Of 4 decodes, 4 prefills and 16 of both, one each is gone.
    gone = ("0,0,4,100,", "8,16,0,0,", "8,16,4,100,")
    rows = [row for row in points if not row.startswith(gone)]
    notes = load(bundle(tmp_path / "holes", attention__csv="\n".join([head, *rows]))).provenance.notes
    assert (
        "attention.csv: points missing in the grids that its sizes span: 1 of 4 of decodes; 1 of 4 of prefills; "
        "1 of 16 of prefills beside decodes." in notes
    )
    rows = [row for row in points if row.startswith("0,0,")]
    notes = load(bundle(tmp_path / "decodes", attention__csv="\n".join([head, *rows]))).provenance.notes
    assert "attention.csv: no prefills were measured." in notes
    assert "attention.csv: no prefills beside decodes were measured." in notes


def test_the_command_says_that_kv_is_not_limited(tmp_path, run):
    folder, out = bundle(tmp_path / "b"), tmp_path / "p.json"
    assert "KV capacity is not told: not limited (--kv-tokens)" in run("profile", "import", folder, "--out", out)[1]
    assert "KV capacity" not in run("profile", "import", folder, "--out", out, "--kv-tokens", "99")[1]


def test_broken_yaml_and_json_are_one_line(tmp_path):
    folder = bundle(tmp_path / "b")
    (folder / "meta.yaml").write_text("a: [1\nb: }")
    with pytest.raises(SpecsimError, match=r"meta\.yaml: expected YAML: ") as error:
        load(folder)
    assert "\n" not in str(error.value)
    for text, says in (
        ("x: 2026-13-45", r"meta\.yaml: expected YAML: month must be in 1\.\.12"),
        ("[" * 3000, r"meta\.yaml: expected YAML, got lists or mappings nested too deep"),
        ("x: !!bool maybe", r"meta\.yaml: expected YAML: "),
    ):
        (folder / "meta.yaml").write_text(text)
        with pytest.raises(SpecsimError, match=says) as error:
            load(folder)
        assert "\n" not in str(error.value)
    (folder / "meta.yaml").unlink()
    (folder / "config.json").write_text("{")
    with pytest.raises(SpecsimError, match=r"config\.json: expected JSON: "):
        load(folder)


@pytest.mark.parametrize("format", ["auto", "bundle"])
def test_a_folder_that_is_no_bundle(tmp_path, format):
    with pytest.raises(SpecsimError, match=r"expected a bundle, a folder with dense\.csv or with tp1/"):
        load_profile_source(tmp_path, format)


def test_times_that_fall_are_kept_and_told(tmp_path):
    rows = [(n, b, u) for n in DENSE for b, u in ((1, 10), (2, 9), (4, 12))]
    p = load(bundle(tmp_path / "b", dense__csv=csv_text("layer,tokens,time_us", rows)))
    assert p.verify.tokens.seconds[1] < p.verify.tokens.seconds[0]
    notes = p.provenance.notes
    assert (
        "dense.csv: times fall with more tokens at 9 of 18 places, kept (act_fn, 1 to 2 tokens, line 24, -10%" in notes
    )
    assert len(notes) < 1500


# The command


def test_the_command_writes_a_profile_that_loads(tmp_path, run):
    folder = bundle(tmp_path / "b")
    out = tmp_path / "p.json"
    code, printed, said = run("profile", "import", folder, "--out", out, "--no-skew", "--json", tmp_path / "x.json")
    assert (code, said) == (0, "")
    assert "prefill" not in printed  # of 512 and 2,048 tokens: not measured here
    assert "1 × 1,024 KV tokens" not in printed
    assert f"Wrote {out}" in printed
    p = load_profile(out)
    assert p.verify == load(folder).verify
    assert p.provenance.command == f"specsim profile import {folder} --no-skew --out {out}"
    assert json.loads((tmp_path / "x.json").read_text())["type"] == "layered"


def test_the_command_fails_with_2_and_leaves_nothing(tmp_path, run):
    folder = bundle(tmp_path / "b", layers=DENSE | {"x": 1})
    code, printed, said = run("profile", "import", folder, "--out", tmp_path / "p.json")
    assert (code, printed) == (2, "")
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "p.json").exists()
