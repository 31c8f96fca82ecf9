"""The analytic roofline: prices by hand for a tiny model, the laws that any such price obeys, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from specsim.engine import Scenario, simulate
from specsim.hardware import DEVICES, Device, ModelShape, Roofline, Shape, load_profile
from specsim.hardware.analytic import kv_capacity, make_roofline, parallel_draft, roofline_profile
from specsim.hardware.model_shape import PRESETS
from specsim.hardware.roofline import LIMIT, SAMPLER_KERNELS
from specsim.schedulers import NoSpec
from specsim.types import SpecsimError
from specsim.workload import ClosedLoop

SHIPPED = Path(__file__).parents[1] / "hw_profiles" / "h200-qwen3-8b-tp1-vllm.json"
TINY = ModelShape(name="tiny", hidden=8, layers=2, heads=4, kv_heads=2, head_dim=4, intermediate=16, vocab=32)
MOE = ModelShape(
    name="moe", hidden=8, layers=3, heads=4, kv_heads=2, head_dim=4, intermediate=16, vocab=32,
    moe_layers=2, experts=8, experts_per_token=2, expert_intermediate=4, shared_intermediate=6,
)  # fmt: skip
# 1000 FLOP/s and 100 bytes/s: ten FLOPs a byte where both bind.
TOY = Device(
    name="Toy 1", bf16_flops=1000, fp8_flops=2000, bandwidth=100, memory_bytes=1e6, link_bandwidth=50,
    link_seconds=0.25, source="made up",
)  # fmt: skip


def toy(model=TINY, device=TOY, **fields):
    given = {"flops_efficiency": 1, "bandwidth_efficiency": 1, "kernel_seconds": 0}
    return make_roofline(model, device, **given | fields)


def at(roofline, count):
    """Each kind of token-wise kernel at one token count."""
    return {name: float(seconds[0]) for name, seconds in roofline.by_tokens(np.array([float(count)])).items()}


def price(roofline, shape, drafts=0):
    tokens = shape.num_seqs + sum(shape.chunks) + drafts
    return float(roofline.surface(tokens, shape.num_seqs, False).curve(shape, drafts)[drafts])


# By hand


def test_a_gemm_is_bound_by_memory_at_one_token_and_by_flops_at_many():
    # gate and up: 8 → 2·16, two layers. One token: 8·32 weights + 40 activations of two bytes, against 2·8·32 FLOPs.
    assert at(toy(), 1)["gate and up"] == pytest.approx(2 * 2 * (256 + 40) / 100)
    # A thousand: 512,000 FLOPs a layer take 512 s, 2·(256 + 40,000) bytes 805 s; a hundred times the bandwidth: 8 s.
    assert at(toy(), 1000)["gate and up"] == pytest.approx(2 * 2 * (256 + 40_000) / 100)
    fast = TOY.model_copy(update={"bandwidth": 10_000})
    assert at(toy(device=fast), 1000)["gate and up"] == pytest.approx(2 * 512)


def test_each_kernel_by_hand_at_three_tokens():
    heads = {"qkv": (8, 16 + 2 * 8), "attention output": (16, 8), "gate and up": (8, 32), "down": (16, 8)}
    expected = {name: 2 * max(6 * k * n / 1000, 2 * (k * n + 3 * (k + n)) / 100) for name, (k, n) in heads.items()}
    expected |= {
        "embedding": 3 * 2 * 8 * 2 / 100,
        "norms": 2 * 3 * 8 * 8 * 2 / 100,
        "rotary": 2 * 3 * 2 * (16 + 8) * 2 / 100,
        "cache write": 2 * 3 * 4 * 8 * 2 / 100,
        "attention kernels": 0.0,
        "activation": 2 * 3 * 3 * 16 * 2 / 100,
    }
    assert at(toy(), 3) == pytest.approx(expected)


def test_head_and_sampler_go_by_rows_of_logits():
    rows = toy().by_rows(np.array([5.0]))
    assert rows["head"][0] == pytest.approx(2 * (8 * 32 + 5 * 40) / 100)
    assert rows["sampler"][0] == pytest.approx(5 * 32 * 8 / 100)
    # A prefill of 7 tokens has seven tokens' kernels and one row of logits.
    alone = price(toy(), Shape(0, 0, [7], [0]))
    kv, pairs = 2 * 2 * 2 * 4 * 2 * 7 / 100, 4 * 4 * 4 * 2 * (7 * 8 / 2) / 1000
    expected = sum(at(toy(), 7).values()) + sum(float(v[0]) for v in toy().by_rows(np.array([1.0])).values())
    assert alone == pytest.approx(expected + max(kv, pairs))


def test_kernels_cost_a_constant_each():
    # A layer: two norms, qkv, rotary, cache write, attention and combining, output, gate and up, activation, down.
    constant = price(toy(kernel_seconds=1.0), Shape(1, 1)) - price(toy(), Shape(1, 1))
    assert constant == pytest.approx(2 * 11 + 1 + 2 + SAMPLER_KERNELS)
    moe = price(toy(MOE, kernel_seconds=1.0), Shape(1, 1)) - price(toy(MOE), Shape(1, 1))
    # With experts: eight as above, router, choice, sort, gate and up, activation, down, sum, and three shared ones.
    assert moe == pytest.approx(11 + 2 * (8 + 7 + 3) + 1 + 2 + SAMPLER_KERNELS)


def test_efficiencies_scale_the_ratings():
    count = np.array([1.0, 64.0])
    slow = toy(bandwidth_efficiency=0.5, flops_efficiency=0.5)
    for one, other in zip(toy().by_tokens(count).values(), slow.by_tokens(count).values(), strict=True):
        np.testing.assert_allclose(2 * one, other)


def test_attention_reads_kv_once_and_counts_flops_by_query():
    none = price(toy(), Shape(4, 0))
    # 60 KV tokens: 2 layers · 2 (k, v) · 2 heads · 4 · 2 bytes = 64 bytes a token.
    assert price(toy(), Shape(4, 60)) - none == pytest.approx(60 * 64 / 100)
    # 4 + 28 queries on 15 tokens each: 4·4·4·2 FLOPs a pair, 61 s, more than the 38 s of the bytes.
    with_drafts = price(toy(), Shape(4, 60), 28) - price(toy(), Shape(4, 0), 28)
    assert with_drafts == pytest.approx(32 * 15 * 128 / 1000)
    few = price(toy(), Shape(4, 60), 4) - price(toy(), Shape(4, 0), 4)
    assert few == pytest.approx(60 * 64 / 100)  # drafts share the read


def test_a_chunk_attends_to_its_history_and_causally_to_itself():
    def attention(chunk, history, **fields):
        shape = Shape(0, 0, [chunk], [history])
        roofline = toy(**fields)
        rest = sum(at(roofline, chunk).values()) + sum(float(v[0]) for v in roofline.by_rows(np.array([1.0])).values())
        return price(roofline, shape) - rest

    assert attention(10, 0) == pytest.approx(max(10 * 64 / 100, 55 * 128 / 1000))
    assert attention(10, 40) == pytest.approx(max(50 * 64 / 100, (400 + 55) * 128 / 1000))
    assert attention(1, 99) == pytest.approx(100 * 64 / 100)  # one query: a decode, by its bytes


def test_fp8_halves_weights_and_doubles_the_flops_but_not_of_the_head():
    one, other = at(toy(), 1), at(toy(weights="fp8"), 1)
    assert other["qkv"] == pytest.approx(2 * (8 * 32 + 2 * 40) / 100)
    assert other["norms"] == one["norms"]
    heads = [toy(weights=w).by_rows(np.array([1.0]))["head"] for w in ("bf16", "fp8")]
    assert heads[0] == heads[1]
    fast = TOY.model_copy(update={"bandwidth": 1e6})
    many = [at(toy(device=fast, weights=w), 1000)["down"] for w in ("bf16", "fp8")]
    assert many[0] == pytest.approx(2 * many[1])


def test_fp8_kv_halves_what_attention_reads():
    reads = [price(toy(kv=kv), Shape(1, 100)) - price(toy(kv=kv), Shape(1, 0)) for kv in ("bf16", "fp8")]
    assert reads == pytest.approx([64.0, 32.0])


# Experts


def test_one_token_reads_its_experts_and_a_full_batch_reads_all():
    def weights(count):
        """Bytes of expert weights read by the first GEMM, activations and flops left out."""
        fast = TOY.model_copy(update={"bf16_flops": 1e12})
        seconds = at(toy(MOE, fast), count)["experts' gate and up"] / 2
        return seconds * 100 - 2 * count * 2 * (8 + 8)

    each = 2 * 8 * 8
    assert weights(1) == pytest.approx(2 * each)
    assert weights(2) == pytest.approx(8 * (1 - 0.75**2) * each)
    assert weights(500) == pytest.approx(8 * each)


def test_experts_compute_each_token_as_often_as_it_is_routed():
    fast = TOY.model_copy(update={"bandwidth": 1e12})
    assert at(toy(MOE, fast), 1000)["experts' gate and up"] == pytest.approx(2 * 2 * 1000 * 2 * 8 * 8 / 1000)


def test_experts_of_which_all_are_taken_are_a_dense_layer():
    """E = k = 1: the same GEMMs as a dense feed-forward of that width."""
    fields = {"moe_layers": 2, "experts": 1, "experts_per_token": 1, "expert_intermediate": 16, "intermediate": 0}
    one = at(toy(TINY.model_copy(update=fields)), 5)
    for name in ("gate and up", "activation", "down"):
        assert one[f"experts' {name}"] == pytest.approx(at(toy(), 5)[name])


# Tensor parallelism


def test_two_gpus_split_gemms_heads_and_kv_and_pay_all_reduces():
    one, two = at(toy(), 3), at(toy(tp=2), 3)
    assert two["qkv"] == pytest.approx(2 * 2 * (8 * 16 + 3 * (8 + 16)) / 100)
    assert two["norms"] == one["norms"]
    # Two a layer, two layers: 0.25 s and 2·½·3·8·2 bytes at 50 bytes/s.
    assert two["all-reduce"] == pytest.approx(4 * (0.25 + 48 / 50))
    assert "all-reduce" not in one
    reads = [price(toy(tp=tp), Shape(1, 100)) - price(toy(tp=tp), Shape(1, 0)) for tp in (1, 2, 4)]
    assert reads == pytest.approx([64, 32, 32])  # two KV heads: four GPUs hold each twice


def test_the_logits_are_gathered():
    gather = toy(tp=2).by_rows(np.array([3.0]))["logits gather"]
    assert gather == pytest.approx(0.25 + 3 * 32 * 2 / 2 / 50)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 3}, "tp: expected a divisor of the 4 heads, got 3"),
        ({"model": TINY.model_copy(update={"heads": 12, "kv_heads": 6}), "tp": 4}, "multiple of the 6 kv_heads, got 4"),
        ({"weights": "fp8", "device": DEVICES["a100"]}, "weights: NVIDIA A100 80GB SXM has no rating for fp8"),
        ({"weights": "int4"}, "weights"),
        ({"flops_efficiency": 1.5}, "flops_efficiency"),
        ({"kernel_seconds": -1}, "kernel_seconds"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(fields, words):
    model, device = fields.pop("model", TINY), fields.pop("device", TOY)
    with pytest.raises(SpecsimError, match=words):
        make_roofline(model, device, **fields)


# Laws


@given(
    model=st.sampled_from([TINY, MOE, *PRESETS.values()]),
    device=st.sampled_from([TOY, *DEVICES.values()]),
    tp=st.sampled_from([1, 2]),
    n=st.integers(1, 300),
    context=st.integers(0, 10_000),
    drafts=st.integers(0, 300),
)
def test_more_of_anything_costs_no_less(model, device, tp, n, context, drafts):
    assume(model.heads % tp == 0)
    surface = make_roofline(model, device, tp=tp).surface(4096, 512, False)
    curve = surface.curve(Shape(n, n * context), drafts)
    assert len(curve) == drafts + 1
    assert (curve > 0).all()
    assert (np.diff(curve) >= 0).all()
    longer = surface.curve(Shape(n, n * context + 1), drafts)
    assert (longer >= curve).all()
    wider = surface.curve(Shape(n + 1, (n + 1) * context), drafts)
    assert (wider >= curve).all()
    beside = surface.curve(Shape(n, n * context, [64], [128]), drafts)
    assert (beside > curve).all()
    assert (surface.curve(Shape(n, n * context, [64], [129]), drafts) >= beside).all()


@given(n=st.integers(1, 100), context=st.integers(0, 3000), drafts=st.integers(0, 200), size=st.integers(400, 900))
def test_a_price_does_not_depend_on_how_far_prices_were_spread(n, context, drafts, size):
    roofline, shape = make_roofline(PRESETS["qwen3-8b"], DEVICES["h200"]), Shape(n, n * context, [16, 32], [0, 64])
    curves = [roofline.surface(room, 128, False).curve(shape, drafts) for room in (size, 2048)]
    np.testing.assert_array_equal(*curves)


def test_a_step_is_the_sum_of_tokens_rows_and_attention():
    """As a layered profile's is: attention of the decodes and of each prefill, and kernels by tokens and by rows."""
    roofline = make_roofline(PRESETS["llama-3.1-8b"], DEVICES["h100"])
    surface = roofline.surface(4096, 128, False)
    n, context, chunks, histories, drafts = 24, 900, [100, 40], [0, 700], 36
    tokens = float(sum(v[0] for v in roofline.by_tokens(np.array([24.0 + 140 + 36])).values()))
    rows = float(sum(v[0] for v in roofline.by_rows(np.array([24.0 + 2 + 36])).values()))

    def attention(shape):
        base = shape.num_seqs + sum(shape.chunks)
        left_out = surface.tokens[base] + surface.rows[shape.num_seqs + len(shape.chunks)]
        return float(surface.curve(shape, 0)[0] - left_out)

    parts = attention(Shape(n, n * context))
    parts += sum(attention(Shape(0, 0, [c], [h])) for c, h in zip(chunks, histories, strict=True))
    whole = surface.curve(Shape(n, n * context, chunks, histories), drafts)[drafts]
    assert whole == pytest.approx(tokens + rows + parts)


def test_there_is_no_measured_range_but_an_end():
    profile = roofline_profile(PRESETS["qwen3-4b"], DEVICES["h200"])
    assert profile.verify.range == (1, LIMIT)
    assert np.isfinite(profile.step_seconds(100_000))
    with pytest.raises(SpecsimError, match=rf"a step of {LIMIT + 1} tokens .* 1\.\.{LIMIT}"):
        profile.step_seconds(LIMIT + 1)


# Whole profiles


def test_a_profile_is_read_back_the_same_and_says_that_it_is_analytic(tmp_path):
    from specsim.hardware import save_profile

    profile = roofline_profile(PRESETS["qwen3-30b-a3b"], DEVICES["b200"], tp=2, weights="fp8", draft_layers=5, gamma=7)
    path = save_profile(profile, tmp_path / "p.json")
    assert load_profile(path) == profile
    assert isinstance(profile.verify, Roofline)
    assert (profile.kind, profile.gpus, profile.tp) == ("analytic", 2, 2)
    assert profile.caveat == f"profile {profile.name} is analytic: no measurement behind these step times"
    for words in ("No measurement", "8 of 128 experts", "0.8 of the bandwidth", "450|900 GB/s", "γ = 7", "5 of the"):
        assert any(word in profile.provenance.notes for word in words.split("|")), words
    assert profile.model_copy(update={"kind": "measured"}).caveat is None


def test_the_kv_cache_is_what_the_weights_leave():
    # 0.5 of a million bytes, less 1000 reserved and the weights, by 64 bytes a token.
    weights = TINY.weight_bytes()
    assert weights == 2 * (2 * (8 * 4 * 12 + 3 * 8 * 16) + 2 * 32 * 8)
    assert kv_capacity(TINY, TOY, 1, "bf16", "bf16", 0.5, 1000) == (500_000 - 1000 - weights) // 64
    # Four GPUs for two KV heads: each holds half of the KV, and a quarter of the weights.
    assert kv_capacity(TINY, TOY, 4, "bf16", "bf16", 0.5, 1000) == int((500_000 - 1000 - weights / 4) // 32)
    with pytest.raises(SpecsimError, match=r"memory: 1[0-9.]+ GiB a GPU .* leave no room .* expected a larger tp"):
        kv_capacity(PRESETS["llama-3.1-70b"], DEVICES["h100"], 1, "bf16", "bf16", 0.9, 0)
    # A model so small that a profile cannot tell how many fit.
    assert roofline_profile(TINY, DEVICES["b300"]).kv_tokens == 1 << 31


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"host_seconds": np.inf}, "host_seconds: expected 0 to 10 s, got inf"),
        ({"host_seconds": np.nan}, "host_seconds: expected 0 to 10 s, got nan"),
        ({"reserve_bytes": np.inf}, "memory: inf GiB"),
        ({"reserve_bytes": np.nan}, "memory: nan GiB"),
        ({"context": 10**9}, "context: expected 0 to 10,000,000 KV tokens a sequence, got 1000000000"),
        ({"draft_layers": 37}, "draft_layers: expected 0 to the 36 layers of qwen3-8b, got 37"),
        ({"draft_layers": 5, "gamma": 0}, "gamma: expected 1 to 64 draft tokens in a block, got 0"),
        ({"draft_layers": 5, "gamma": 2000}, "gamma: expected 1 to 64 draft tokens in a block, got 2000"),
    ],
)
def test_numbers_out_of_their_range_are_named(fields, words):
    with pytest.raises(SpecsimError, match=words):
        roofline_profile(PRESETS["qwen3-8b"], DEVICES["h200"], **fields)


def test_vllm_had_as_many_kv_tokens_on_a_4090():
    """41,408 KV tokens in the run that the reserve is from (LLMServingSim's RTX 4090, Llama-3.1-8B)."""
    profile = roofline_profile(PRESETS["llama-3.1-8b"], DEVICES["rtx4090"])
    assert profile.kv_tokens == pytest.approx(41_408, rel=0.01)
    assert profile.kv_bytes_per_token == 131_072


def test_a_parallel_draft_is_one_forward_of_gamma_tokens_a_sequence():
    target = make_roofline(PRESETS["qwen3-8b"], DEVICES["h200"])
    draft = parallel_draft(target, 5, 7, 1024)
    five = target.model_copy(update={"model": PRESETS["qwen3-8b"].cut(5)}).surface(8192, 1024, False)
    for n, seconds in zip(draft.num_seqs, draft.seconds, strict=True):
        assert seconds == pytest.approx(five.curve(Shape(n, n * 1024), 6 * n)[-1])
    assert draft.seconds[0] < price(target, Shape(1, 1024)) / 3


def test_drafting_contexts_beyond_the_kv_cache_are_refused():
    model, device = PRESETS["llama-3.1-8b"], DEVICES["rtx4090"]
    room = roofline_profile(model, device).kv_tokens
    assert roofline_profile(model, device, draft_layers=1, context=room).draft is not None
    with pytest.raises(SpecsimError, match=f"context: expected at most the {room:,} tokens that the KV cache holds"):
        roofline_profile(model, device, draft_layers=1, context=room + 1)


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-30b-a3b", "mixed"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_notes_tell_every_kernel(model, tp):
    shape = PRESETS.get(model, MOE)
    notes = roofline_profile(shape, DEVICES["h200"], tp=tp, kernel_seconds=5e-6).provenance.notes
    surfaces = [make_roofline(shape, DEVICES["h200"], tp=tp, kernel_seconds=k).surface(1, 1, False) for k in (1.0, 0.0)]
    kernels = round(float(np.subtract(*(s.curve(Shape(1, 1), 0)[0] for s in surfaces))))
    assert f"A step launches {kernels} kernels, {kernels * 5e-3:.3g} ms: a layer has 2 norms, 2 of attention" in notes
    assert ("activation and down, or, with experts, router, 2 of routing" in notes) == (model == "mixed")
    assert ("3 of shared experts" in notes) == (model == "mixed")
    assert ("router" in notes) == (model != "qwen3-8b")
    assert f"the head and {SAMPLER_KERNELS} of the sampler" in notes
    assert ("logits are gathered" in notes) == (tp > 1)


def test_an_autoregressive_draft_is_one_token_a_sequence():
    model, device = PRESETS["qwen3-8b"], DEVICES["h200"]
    profile = roofline_profile(model, device, draft_layers=1, gamma=3, draft_type="autoregressive", context=512)
    assert profile.draft.type == "autoregressive"
    one = make_roofline(model.cut(1), device)
    assert profile.draft.seconds[3] == pytest.approx(price(one, Shape(8, 8 * 512)))


def test_the_same_profile_simulates_to_the_same_numbers():
    results = []
    for _ in range(2):
        profile = roofline_profile(PRESETS["qwen3-8b"], DEVICES["h200"])
        results.append(simulate(Scenario(profile, ClosedLoop(4, 64, 16), None, NoSpec()), 0).requests)
    assert results[0].equals(results[1])
    assert len(results[0]) > 0


def test_ratings_name_their_source_and_have_their_datasheets_proportions():
    for device in DEVICES.values():
        assert "NVIDIA" in device.source
        if device.fp8_flops:
            assert device.fp8_flops == pytest.approx(2 * device.bf16_flops, rel=0.02)
    assert DEVICES["h200"].bandwidth / DEVICES["h100"].bandwidth == pytest.approx(1.43, abs=0.01)


@pytest.mark.skipif(not SHIPPED.exists(), reason="the imported H200 profile is not there")
@pytest.mark.parametrize("context", [512, 4096])
def test_decoding_on_an_h200_is_near_what_was_measured(context):
    """Step times within 12 % at 1 to 512 sequences, 6 % on average (experiments/roofline_check prints them)."""
    measured = load_profile(SHIPPED)
    analytic = roofline_profile(PRESETS["qwen3-8b"], DEVICES["h200"])
    count = [1 << i for i in range(10)]
    ratio = [float(analytic.step_seconds(b, kv_tokens=b * context) / measured.step_seconds(b, kv_tokens=b * context))
             for b in count]  # fmt: skip
    difference = np.abs(np.array(ratio) - 1)
    assert difference.max() < 0.12
    assert difference.mean() < 0.06


# On the command line


def test_help_has_an_example(run):
    code, text, _ = run("profile", "roofline", "--help")
    assert code == 0
    assert "Example: specsim" in text


def test_profile_roofline_writes_a_profile_that_says_what_it_is(run, tmp_path):
    out, data = tmp_path / "p.json", tmp_path / "d.json"
    code, text, err = run(
        "profile", "roofline", "--model", "qwen3-8b", "--device", "h200", "--draft-layers", 5, "--gamma", 7,
        "--efficiency", "0.7,0.9", "--kernel-us", 5, "--out", out, "--json", data,
    )  # fmt: skip
    assert (code, err) == (0, "")
    profile = load_profile(out)
    assert (profile.name, profile.kind) == ("h200-qwen3-8b-tp1-roofline", "analytic")
    assert (profile.verify.flops_efficiency, profile.verify.bandwidth_efficiency) == (0.7, 0.9)
    assert profile.verify.kernel_seconds == pytest.approx(5e-6)
    assert profile.draft is not None
    assert profile.caveat in " ".join(text.split())
    assert profile.provenance.command == (
        f"specsim profile roofline --model qwen3-8b --device h200 --out {out} --efficiency 0.7,0.9 --kernel-us 5.0 "
        f"--draft-layers 5 --gamma 7 --json {data}"
    )
    assert "0.7 of the FLOP/s and 0.9 of the bandwidth" in text
    steps = json.loads(data.read_text())["steps"]
    assert steps[1]["seconds"] == pytest.approx(float(profile.step_seconds(8, kv_tokens=8 * 1024)))


def test_what_does_not_fit_in_the_kv_cache_is_not_printed(run, tmp_path):
    data, out = tmp_path / "d.json", tmp_path / "p.json"
    command = ("profile", "roofline", "--model", "qwen3-8b", "--device", "h200", "--context", 5000)
    code, text, _ = run(*command, "--out", out, "--json", data)
    assert code == 0
    found = {s["tokens"]: s["seconds"] for s in json.loads(data.read_text())["steps"]}
    assert [b for b, seconds in found.items() if seconds is None] == [512, 2048]
    profile = load_profile(tmp_path / "p.json")
    assert found[128] == pytest.approx(float(profile.step_seconds(128, kv_tokens=128 * 5000)))
    assert ["512", "–", "–", "–"] in [line.split() for line in text.splitlines()]
    assert f"KV cache: {profile.kv_tokens:,} tokens, {profile.kv_tokens // 5000} sequences of 5,000; – where" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "nothing", "--device", "h200"), "--model: 'nothing': expected one of"),
        (("--model", "qwen3-8b", "--device", "tpu"), "--device: 'tpu': expected one of"),
        (("--model", "qwen3-8b", "--device", "h200", "--efficiency", "0.8,1.1"), "--efficiency: expected"),
        (("--model", "qwen3-8b", "--device", "h200", "--dtype", "int4"), "--dtype: expected bf16 or fp8, got 'int4'"),
        (("--model", "qwen3-8b", "--device", "a100", "--dtype", "fp8"), "no rating for fp8"),
        (("--model", "qwen3-8b", "--device", "h200", "--tp", "3"), "tp: expected a divisor of the 32 heads, got 3"),
        (("--model", "llama-3.1-70b", "--device", "h100"), "leave no room for KV"),
        (("--model", "qwen3-8b", "--device", "h200", "--draft-type", "tree"), "--draft-type: expected parallel or"),
        (("--model", "{here}", "--device", "h200"), "--model: the folder '{here}' holds no config.json"),
        (("--model", "qwen3-8b", "--device", "{here}"), "--device: '{here}': expected one of a100"),
        (("--model", "qwen3-8b", "--device", "h200", "--name", ""), "--name: expected a text, got ''"),
        (
            ("--model", "qwen3-8b", "--device", "h200", "--gamma", "7"),
            "--gamma: has no meaning without --draft-layers",
        ),
        (
            ("--model", "qwen3-8b", "--device", "h200", "--draft-type", "parallel"),
            "--draft-type: has no meaning without --draft-layers",
        ),
        (
            ("--model", "qwen3-8b", "--device", "h200", "--draft-layers=1", "--draft-type=autoregressive", "--gamma=2"),
            "--gamma: has no meaning with --draft-type autoregressive",
        ),
        *(
            (("--model", "qwen3-8b", "--device", "h200", "--draft-layers=5", option, value), words)
            for option, value, words in (
                ("--host-ms", "inf", "'--host-ms': expected a number, at most 10000"),
                ("--host-ms", "nan", "'--host-ms': expected a number, at most 10000"),
                ("--host-ms", "1e300", "'--host-ms': expected a number, at most 10000"),
                ("--reserve-gib", "inf", "'--reserve-gib': expected a number, at most 1024"),
                ("--reserve-gib", "nan", "'--reserve-gib': expected a number, at most 1024"),
                ("--kernel-us", "1e12", "'--kernel-us': expected a number, at most 10000"),
                ("--gamma", "65", "'--gamma': expected a number, at most 64"),
                ("--tp", "9" * 400, "'--tp': expected a number, at most 1024"),
                ("--context", "999999999999", "'--context': expected a number, at most 10000000"),
                ("--draft-layers", "37", "draft_layers: expected 0 to the 36 layers of qwen3-8b, got 37"),
                ("--draft-layers", "9" * 400, "of qwen3-8b, got 99999999999999999999..."),
                ("--efficiency", "1e-320", "--efficiency: expected one or two shares, 0.001 to 1"),
            )
        ),
    ],
    ids=lambda v: " ".join(v[3:])[:50] if isinstance(v, tuple) else "",
)
def test_mistakes_are_one_line(run, tmp_path, arguments, words):
    arguments, words = [a.replace("{here}", str(tmp_path)) for a in arguments], words.replace("{here}", str(tmp_path))
    code, out, err = run("profile", "roofline", *arguments, "--out", tmp_path / "p.json")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err
    assert len(err) < 250 + len(str(tmp_path))
    assert not (tmp_path / "p.json").exists()


def test_results_of_an_analytic_profile_say_so(run, tmp_path):
    """In simulate, sweep and pareto: printed, in JSON and parquet, and when an earlier sweep is drawn."""
    import pandas as pd

    profile, out = tmp_path / "p.json", tmp_path / "out"
    run("profile", "roofline", "--model", "qwen3-8b", "--device", "h200", "--out", profile)
    line = "profile h200-qwen3-8b-tp1-roofline is analytic: no measurement behind these step times"
    base = ("--profile", profile, "--closed", "2", "--num-requests", "4", "--output-tokens", "8")
    for verb, more in {"simulate": (), "sweep": ("--seeds", 1, "--jobs", 1, "--out", out)}.items():
        code, text, _ = run(verb, *base, *more, "--json", tmp_path / "r.json")
        assert code == 0
        assert f"note: {line}" in text
        assert json.loads((tmp_path / "r.json").read_text())["caveats"] == [line]
    assert set(pd.read_parquet(out / "results.parquet")["profile_kind"]) == {"analytic"}
    code, text, _ = run("pareto", "--results", out / "results.parquet", "--out", out, "--format", "svg", "--sla", "50")
    assert code == 0
    assert f"note: {line}" in text
