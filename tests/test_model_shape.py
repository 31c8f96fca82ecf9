"""Models and devices as they are given: presets, config.json files, a JSON file of ratings; and what is refused."""

from __future__ import annotations

import json
import re

import pytest

from specsim.hardware import DEVICES, ModelShape, find_device, find_model
from specsim.hardware.model_shape import PRESETS
from specsim.types import SpecsimError

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
QWEN_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip


def read(tmp_path, config, **changes):
    folder = tmp_path / "some-model"
    folder.mkdir(exist_ok=True)
    data = {k: v for k, v in (config | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(data))
    return find_model(str(folder))


def test_a_dense_config(tmp_path):
    shape = read(tmp_path, LLAMA)
    assert shape == PRESETS["llama-3.1-8b"].model_copy(update={"name": "some-model"})
    assert shape.parameters == pytest.approx(8.03e9, rel=0.001)
    assert shape.kv_bytes_per_token() == 131_072
    assert read(tmp_path, LLAMA, num_key_value_heads=None).kv_heads == 32


def test_a_config_of_experts(tmp_path):
    shape = read(tmp_path, QWEN_MOE)
    assert shape == PRESETS["qwen3-30b-a3b"].model_copy(update={"name": "some-model"})
    assert shape.parameters == pytest.approx(30.5e9, rel=0.002)
    some = read(tmp_path, QWEN_MOE, decoder_sparse_step=2, mlp_only_layers=[1, 3, 4])
    assert (some.moe_layers, some.intermediate) == (22, 6144)
    mixtral = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
    assert read(tmp_path, LLAMA, **mixtral).experts_per_token == 2
    assert read(tmp_path, LLAMA, **mixtral).parameters == PRESETS["mixtral-8x7b"].parameters
    glm = {"model_type": "glm4_moe", "num_experts": None, "n_routed_experts": 16, "n_shared_experts": 2}
    found = read(tmp_path, QWEN_MOE, **glm, first_k_dense_replace=3)
    assert (found.moe_layers, found.experts, found.shared_intermediate) == (45, 16, 2 * 768)
    qwen2 = read(tmp_path, QWEN_MOE, model_type="qwen2_moe", shared_expert_intermediate_size=5632)
    assert qwen2.shared_intermediate == 5632


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": 512}, r"kv_lora_rank: latent attention \(MLA\) is not described"),
        ({"text_config": {"hidden_size": 1}}, "text_config: a multimodal model"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: expected full_attention .* linear_att"),
        ({"layer_types": 5}, "layer_types: expected a list of each layer's attention, got 5"),
        ({"layer_types": "abc"}, "layer_types: expected a list of each layer's attention, got 'abc'"),
        ({"sliding_window": 4096}, "sliding_window: expected none .* got 4096"),
        ({"model_type": "mamba2"}, "model_type: expected one of llama"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"hidden_size": "4096"}, "hidden_size: expected"),
        ({"num_attention_heads": 33}, "num_attention_heads: expected a divisor of 4096, got 33"),
        ({"model_type": "qwen3", "num_experts": 64}, "num_experts: expected none with model_type 'qwen3', got 64"),
        ({"model_type": "qwen3_moe"}, "num_experts: is missing, expected it with model_type 'qwen3_moe'"),
        ({"num_key_value_heads": 5}, "heads: expected a multiple of the 5 kv_heads, got 32"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_experts_per_tok: is missing"),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9},
            "experts_per_token: expected 1 to the 8 experts, got 9",
        ),
    ],
)
def test_configs_that_it_does_not_describe_are_refused(tmp_path, changes, words):
    with pytest.raises(SpecsimError, match=rf"config\.json: {words}"):
        read(tmp_path, LLAMA, **changes)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FP8_GROUP = {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}
INT4_GROUP = {"weights": {"num_bits": 4, "type": "int"}, "targets": ["Linear"]}


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (FP8, None),
        ({"quant_method": "fbgemm_fp8"}, None),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": FP8_GROUP}}, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, None),
        ({"quant_method": "awq", "bits": 4}, r"awq \(4 bits\) is not described"),
        ({"quant_method": "gptq", "bits": 8}, r"gptq \(8 bits\) is not described"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"bitsandbytes \(4 bits\) is not described"),
        ({"quant_method": "mxfp4"}, "mxfp4 is not described"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"modelopt \(NVFP4\) is not described"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": FP8_GROUP, "group_1": INT4_GROUP}},
            r"compressed-tensors \(4 bits, int; 8 bits, float\) is not described",
        ),
        ("awq", "quantized is not described"),
        ({"config_groups": {"group_0": {"weights": 4}, "group_1": 3}, "bits": [4]}, "quantized .* is not described"),
    ],
    ids=str,
)  # fmt: skip
def test_quantized_weights_are_refused_unless_they_are_fp8_and_said_to_be(run, tmp_path, field, given, words):
    read(tmp_path, LLAMA, **{field: given})  # the shape alone: nothing is priced
    path, out = tmp_path / "some-model", tmp_path / "p.json"
    command = ("profile", "roofline", "--model", path, "--device", "h200", "--out", out)
    code, text, err = run(*command)
    assert (code, text) == (2, "")
    assert err.count("\n") == 1
    assert re.search(rf"config\.json: {field}: {words or 'its weights are fp8, expected --dtype fp8, got bf16'}", err)
    code, _, err = run(*command, "--dtype", "fp8")
    assert (code == 0) == (words is None)
    if words:
        assert re.search(words, err)


def test_a_shape_is_written_without_what_only_a_measurement_needs():
    """So that a profile of before has the same bytes; what is not as usual is kept."""
    tiny = ModelShape(name="t", hidden=8, layers=2, heads=4, kv_heads=2, head_dim=4, intermediate=16, vocab=32)
    assert not {"qk_norm", "max_position"} & set(tiny.model_dump())
    for shape in PRESETS.values():
        assert ModelShape.model_validate_json(shape.model_dump_json()) == shape
    assert PRESETS["qwen3-8b"].model_dump()["max_position"] == 40960


def test_a_window_that_is_off_is_none(tmp_path):
    assert read(tmp_path, LLAMA, sliding_window=4096, use_sliding_window=False).layers == 32


def test_unknown_names_are_told_what_there_is():
    with pytest.raises(SpecsimError, match=r"expected one of qwen3-4b.*, did you mean qwen3-8b"):
        find_model("qwen3_8b")
    with pytest.raises(SpecsimError, match=r"expected one of a100.*, did you mean h200"):
        find_device("h20")
    assert find_device("RTX 4090") is DEVICES["rtx4090"]


def test_a_device_of_ones_own(tmp_path):
    path = tmp_path / "gpu.json"
    own = DEVICES["h200"].model_copy(update={"name": "mine", "bandwidth": 5e12})
    path.write_text(own.model_dump_json())
    assert find_device(str(path)) == own
    path.write_text(json.dumps({"name": "x", "bandwidth": -1}))
    with pytest.raises(SpecsimError, match=r"gpu\.json: bf16_flops: is missing"):
        find_device(str(path))
    for field, value, words in (
        ("bf16_flops", 989, r"1e\+10 to 1e\+17 FLOP/s, got 989"),
        ("fp8_flops", 1978, r"1e\+10 to 1e\+17 FLOP/s, got 1978"),
        ("bandwidth", 5000, r"1e\+08 to 1e\+15 bytes/s, got 5000"),
        ("memory_bytes", 141, r"1e\+08 to 1e\+15 bytes, got 141"),
        ("link_bandwidth", 450, r"1e\+07 to 1e\+15 bytes/s, got 450"),
        ("link_seconds", 0.5, r"0 to 0\.1 seconds, got 0\.5"),
    ):  # as datasheets tell them
        path.write_text(json.dumps(own.model_dump() | {field: value}))
        with pytest.raises(SpecsimError, match=rf"gpu\.json: {field}: expected {words}"):
            find_device(str(path))
    for field, value in (("memory_bytes", 1e300), ("bandwidth", 1e-300), ("bf16_flops", 1e-300), ("link_seconds", 1e9)):
        path.write_text(json.dumps(own.model_dump() | {field: value}))
        with pytest.raises(SpecsimError, match=rf"gpu\.json: {field}: expected (less|greater) than or equal to 1"):
            find_device(str(path))
