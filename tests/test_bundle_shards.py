"""Which model and which shard of it an LLMServingSim bundle is of: what tells, and what is refused."""

from __future__ import annotations

import json

import pytest
from bundles import CONFIG, DENSE, LINK, META, ONE_FORWARD, SKEW, bundle, load, microseconds

from specsim.hardware import load_profile
from specsim.importers.profile_parts import Ask
from specsim.importers.profiles import load_profile_source
from specsim.types import SpecsimError

# Tensor parallelism


@pytest.fixture
def shards(tmp_path):
    """tp1/ and tp2/ of one model, the second twice as fast, with meta.yaml and config.json above them."""
    root = tmp_path / "variant"
    for tp, scale in ((1, 1), (2, 0.5)):
        layers = {name: weight * scale for name, weight in DENSE.items()}
        bundle(root / f"tp{tp}", config=None, meta=None, layers=layers)
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "meta.yaml").write_text(json.dumps(META | {"tp_degrees": [1, 2]}))
    return root


def test_a_shard_of_two_pays_its_all_reduces(shards):
    p = load(shards, tp=2, **LINK)
    # Two a layer, of tokens × 64 × 2 bytes, of which a ring of two sends each half twice.
    for tokens in (1, 4):
        link = 6 * (5 + tokens * 64 * 2 * 1.0 / 1e9 * 1e6)
        expected = ONE_FORWARD / 2 * (1 + (tokens - 1) / 16) + link + tokens * 1536 + 3 * 10 * tokens
        assert microseconds(p, tokens, 10) == pytest.approx(expected)
    assert (p.tp, p.gpus, p.name) == (2, 2, "tiny-1b-x-tp2")
    assert "computed and not measured" in p.provenance.notes
    assert load(shards / "tp2", **LINK).verify == p.verify


@pytest.mark.parametrize(
    ("inside", "answers", "says"),
    [
        ("", {}, r"variant: expected --tp, one of 1, 2"),
        ("", {"tp": 4}, r"--tp: expected one of 1, 2, got 4"),
        ("", {"tp": 2}, r"tp2: expected --link-bandwidth .* and --link-latency .*, since tp 2 needs all-reduces"),
        ("", {"tp": 2, "link_latency": 1e-6}, "expected --link-bandwidth"),
        ("", {"tp": 1, "link_latency": 1e-6}, "have no meaning without tensor parallelism"),
        ("tp2", {"tp": 1}, "--tp: .* is the shard of 2, got 1"),
        ("", {"tp": 2, "link_latency": 1e-6, "link_bandwidth": 0.0}, "--link-bandwidth: expected 1 to 1,0.*, got 0"),
    ],
)
def test_what_a_shard_needs_to_be_told(shards, inside, answers, says):
    with pytest.raises(SpecsimError, match=says):
        load(shards / inside, **answers)


def test_the_command_to_make_it_again_holds_a_latency_of_zero(shards, tmp_path, run):
    out, link = tmp_path / "p.json", ("--link-bandwidth", "1e9", "--link-latency", "0")
    assert run("profile", "import", shards, "--tp", "2", *link, "--out", out)[0] == 0
    assert "--link-latency 0.0" in load_profile(out).provenance.command


def test_a_lone_folder_of_several_degrees_says_what_it_takes(tmp_path):
    folder = bundle(tmp_path / "b", meta=META | {"tp_degrees": [1, 2]})
    assert "Tensor parallelism was not told" in load(folder).provenance.notes
    assert "not told" not in load(folder, tp=1).provenance.notes
    with pytest.raises(SpecsimError, match=r"--tp: expected one of meta\.yaml's tp_degrees \[1, 2\], got 4"):
        load(folder, tp=4, **LINK)


SAMPLES = {"skew_fit": {"per_tp": {1: {"n_samples": 7}, 2: {"n_samples": 12}}}}
"""Of two degrees; SKEW holds 12."""


@pytest.mark.parametrize(
    ("name", "meta", "tp", "says"),
    [
        ("b", {"tp_degrees": [1, 2]}, None, 1),
        ("b", {"tp_degrees": [1, 2]}, 1, 1),
        ("b", {"tp_degrees": [1, 2]}, 2, 2),
        ("b", {"tp_degrees": [2, 4]}, None, r"expected one of meta\.yaml's tp_degrees \[2, 4\], got 1"),
        ("b", {"tp_degrees": [2]}, None, 2),
        ("b", {"tp_degrees": [2]}, 2, 2),
        ("tp2", {"tp_degrees": [1, 2]}, 2, 2),
        ("tp2", {}, None, 2),
        ("b", {"tp_degrees": [1, 2]} | SAMPLES, None, 2),
        ("b", {"tp_degrees": [1, 2]} | SAMPLES, 1, "--tp: .*b is the shard of 2, got 1"),
        (
            "tp1",
            {"tp_degrees": [1, 2]} | SAMPLES,
            None,
            r"the shard of 1, but by .* n_samples skew_fit\.csv is that of 2",
        ),
    ],
)
def test_tables_in_one_folder_are_of_the_degree_that_is_told(tmp_path, name, meta, tp, says):
    folder = bundle(tmp_path / name, meta=META | meta, skew_fit__csv=SKEW)
    link = LINK if says == 2 else {}
    if isinstance(says, int):
        assert load(folder, tp=tp, **link).tp == says
        return
    with pytest.raises(SpecsimError, match=says):
        load(folder, tp=tp, **link)


def test_a_degree_that_only_the_user_tells_gets_a_warning(tmp_path):
    """One GPU plays every shard in turn: what engine_effective says of all of them is 1."""
    for meta in ({"tp_degrees": [1, 2], "engine_effective": {"tensor_parallel_size": 1}}, {}):
        folder = bundle(tmp_path / "b", meta=META | meta)
        profile, warnings = load_profile_source(folder, ask=Ask(tp=2, **LINK))
        assert profile.tp == 2
        [warning] = warnings
        assert "does not say of which shard its tables are: those of tensor parallel 2, as told" in warning
        assert warning in profile.provenance.notes


def test_a_broken_table_that_is_left_out_is_no_trouble(tmp_path):
    folder = bundle(tmp_path / "b", meta=META | SAMPLES, skew_fit__csv="no\ntable\n")
    assert load(folder, no_skew=True).tp == 1


def test_a_folder_that_is_and_holds_shards_is_ambiguous(shards):
    (shards / "dense.csv").write_bytes((shards / "tp1" / "dense.csv").read_bytes())
    with pytest.raises(SpecsimError, match=r"with dense\.csv or with tp1/, tp2/, \.\., got both"):
        load(shards, tp=1)


# The model that was measured

SHARD = {
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64,
    "hidden_size": 64, "head_dim": 16,
}  # fmt: skip
"""Half of CONFIG, in one layer, as a profiler runs it."""


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_hidden_layers": 5}, None),
        ({"hidden_size": 128}, "hidden_size: expected 64, by the shard in meta.yaml, got 128: another model"),
        ({"head_dim": 32}, "head_dim: expected 16, by the shard"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: expected 1 or 2, by the shard in meta.yaml, got 4"),
        ({"intermediate_size": 256}, "intermediate_size: expected 64 or 128, by the shard"),
        ({"intermediate_size": 64}, None),  # a profiler need not split all
        ({"vocab_size": 1000}, "vocab_size: expected 499 or 998, by the shard in meta.yaml, got 1000"),
        ({"vocab_size": 998}, None),
    ],
)
def test_a_config_of_other_sizes_is_another_model(tmp_path, changed, says):
    shard = {"engine_effective": {"hf_overrides": SHARD | {"vocab_size": 499}}, "tp_degrees": [1, 2]}
    folder = bundle(tmp_path / "b", config=CONFIG | changed, meta=META | shard)
    if says is None:
        notes = load(folder).provenance.notes
        assert f"{changed.get('num_hidden_layers', 3)} layers, by {folder / 'config.json'}, of kernels" in notes
    else:
        with pytest.raises(SpecsimError, match=says):
            load(folder)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("num_hidden_layers", 99, 32), ("hidden_size", 8192, 4096), ("num_key_value_heads", 4, 8)],
)
def test_a_config_of_other_layers_than_a_known_model_is_refused(tmp_path, field, value, expected):
    config = CONFIG | {
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128,
    }  # fmt: skip
    meta = META | {"model": "meta-llama/Llama-3.1-8B"}
    load(bundle(tmp_path / "good", config=config, meta=meta))
    folder = bundle(tmp_path / "b", config=config | {field: value}, meta=meta)
    with pytest.raises(
        SpecsimError, match=f"{field}: expected {expected}, as meta-llama/Llama-3.1-8B has, got {value}"
    ):
        load(folder)


@pytest.mark.parametrize(("name", "warns"), [("org/Tiny-1B", 0), ("/models/tiny-1b/", 0), ("org/Tiny-2B", 1)])
def test_two_names_of_the_model_are_told(tmp_path, name, warns):
    folder = bundle(tmp_path / "b", config=CONFIG | {"_name_or_path": name})
    profile, warnings = load_profile_source(folder)
    assert len(warnings) == warns
    for warning in warnings:
        assert "config.json names the model org/Tiny-2B, meta.yaml org/Tiny-1B" in warning
        assert warning in profile.provenance.notes


@pytest.mark.parametrize(
    ("dtype", "variant", "warns"),
    [("float32", "bf16", 1), ("bfloat16", "bf16", 0), ("float32", "fp8-kvfp8", 0), ("float16", "bf16", 0)],
)
def test_numbers_of_another_width_than_those_measured_are_told(tmp_path, dtype, variant, warns):
    folder = bundle(tmp_path / "b", config=CONFIG | {"torch_dtype": dtype}, meta=META | {"variant": variant})
    profile, warnings = load_profile_source(folder)
    assert len(warnings) == warns
    for warning in warnings:
        assert "config.json has numbers of 4 bytes (torch_dtype), meta.yaml's variant is bf16: KV and all" in warning
        assert warning in profile.provenance.notes
