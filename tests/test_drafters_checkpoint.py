"""Checkpoints: what a folder keeps, and what is said about one that is wrong."""

from __future__ import annotations

import json

import pytest
from tiny_models import KINDS, one_line, tiny_drafter, tiny_target, torch

from specsim.drafters import checkpoint
from specsim.drafters.checkpoint import load_checkpoint, save_checkpoint

safetensors = pytest.importorskip("safetensors.torch")

VOCABULARY = (7, 0, 3, 11, 8)  # "sorted by no rule"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def folder(tmp_path):
    """A drafter of a reduced vocabulary that leaves nothing to the target."""
    return save_checkpoint(tiny_drafter("dspark", vocabulary=VOCABULARY), tmp_path / "drafter")


def edit(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def rewrite(folder, change):
    """Change the tensors of a folder with one shard, by a function of the dict of them."""
    (path,) = folder.glob("*.safetensors")
    tensors = safetensors.load_file(path)
    change(tensors)
    safetensors.save_file(tensors, path)


# What comes back


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_everything_comes_back_in_bfloat16(tmp_path, kind, vocabulary):
    model = tiny_drafter(kind, vocabulary=vocabulary)
    again = load_checkpoint(save_checkpoint(model, tmp_path, {"trained_by": "a test"}))
    assert again.config == model.config
    assert again.vocabulary is None if vocabulary is None else again.vocabulary.tolist() == list(vocabulary)
    want, got = model.state_dict(), again.state_dict()
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert got[name].dtype == torch.float32
        assert torch.equal(got[name], value.bfloat16().float()), name
    assert json.loads((tmp_path / "config.json").read_text())["trained_by"] == "a test"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model-00001-of-00001.safetensors"]


def test_shards_stay_below_their_size_and_an_older_drafter_leaves_none(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 2000)
    model = tiny_drafter("dspark")
    save_checkpoint(model, tmp_path)
    many = sorted(tmp_path.glob("*.safetensors"))
    assert len(many) > 2
    for path in many:
        tensors = safetensors.load_file(path).values()
        assert sum(t.nbytes for t in tensors) <= 2000 or len(tensors) == 1
    assert torch.equal(load_checkpoint(tmp_path).fc.weight, model.fc.weight.bfloat16().float())
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 9_000_000)
    save_checkpoint(tiny_drafter("eagle3"), tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert load_checkpoint(tmp_path).config.architectures == ("Qwen3Eagle3Model",)


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_what_is_left_to_the_target_is_filled_in_from_it(tmp_path, target, vocabulary):
    model = tiny_drafter(vocabulary=vocabulary, from_target=("embed_tokens", "lm_head"))
    save_checkpoint(model, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(safetensors.load_file(path))
    again = load_checkpoint(tmp_path, target)
    rows = torch.tensor(vocabulary or range(12))
    assert torch.equal(again.embed_tokens.weight, target.embedding)
    assert torch.equal(again.lm_head.weight, target.head[rows])
    assert not any(p.requires_grad for p in again.parameters())
    with one_line(tmp_path, "embed_tokens", "target"):
        load_checkpoint(tmp_path)


def test_an_older_rope_and_keys_that_are_the_targets_are_read(folder):
    edit(folder, rope_theta=5.0, rope_parameters={"rope_type": "default", "rope_theta": 77.0}, hidden_act="silu")
    assert load_checkpoint(folder).config.rope_theta == 77.0


def test_a_save_that_fails_leaves_no_half_file(tmp_path, monkeypatch):
    def fail(tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with one_line("No space left"):
        save_checkpoint(tiny_drafter(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_drafter_that_was_there(folder, monkeypatch):
    def fail(tensors, path):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tiny_drafter(seed=9), folder)
    old = tiny_drafter(vocabulary=VOCABULARY)
    assert torch.equal(load_checkpoint(folder).fc.weight, old.fc.weight.bfloat16().float())


# What is refused, each in one line that names the folder or file, and the key or tensor


def test_other_architectures(folder):
    for name in ("Qwen3ForCausalLM", "LlamaForCausalLMEagle3"):
        edit(folder, architectures=[name])
        with one_line(folder / "config.json", "architectures", name, "Qwen3DSparkModel", "Qwen3Eagle3Model"):
            load_checkpoint(folder)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"markov_head_type": "transformer"}, "markov_head_type"),
        ({"target_layer_ids": [0, 3]}, "target_layer_ids"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"mask_token_id": 12}, "mask_token_id"),
        ({"from_target": ["norm"]}, "from_target"),
        ({"block_size": 99}, "block_size"),
        ({"intermediate_size": 2**61}, "intermediate_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
    ],
)
def test_keys_of_the_config(folder, keys, named):
    edit(folder, **keys)
    with one_line(folder / "config.json", named):
        load_checkpoint(folder)


def test_a_key_that_is_missing_and_a_config_that_is_no_json(folder):
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in whole.items() if k != "head_dim"}))
    with one_line(path, "head_dim", "missing"):
        load_checkpoint(folder)
    for text in ("{", "[1]", "[" * 100_000, f'{{"hidden_size": {"1" * 5000}}}'):
        path.write_text(text)
        with one_line(path):
            load_checkpoint(folder)
    path.unlink()
    with one_line(path, "cannot read"):
        load_checkpoint(folder)


def swap(name, value):
    def change(tensors):
        tensors.pop(name)
        if value is not None:
            tensors[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (swap("layers.1.mlp.up_proj.weight", None), ["layers.1.mlp.up_proj.weight", "missing", "[24, 16]"]),
        (swap("confidence_head.proj.bias", torch.zeros(2)), ["confidence_head.proj.bias", "[1]", "[2]"]),
        (lambda t: t.update(extra=torch.zeros(1)), ["extra", "not known"]),
        (swap("norm.weight", torch.full((16,), torch.nan)), ["norm.weight", "NaN"]),
        (swap("draft_vocabulary", None), ["draft_vocabulary", "[5]", "none"]),
        (swap("draft_vocabulary", torch.arange(4)), ["draft_vocabulary", "[5]", "[4]"]),
        (swap("draft_vocabulary", torch.tensor([0, 1, 1, 2, 3])), ["draft_vocabulary", "different"]),
        (swap("draft_vocabulary", torch.tensor([0, 1, 2, 3, 12])), ["draft_vocabulary", "11"]),
        (swap("draft_vocabulary", torch.tensor([0, 1, 2, 3, -1])), ["draft_vocabulary", "11"]),
    ],
)
def test_tensors(folder, change, parts):
    rewrite(folder, change)
    with one_line(folder, *parts):
        load_checkpoint(folder)


def test_a_file_cut_short_and_none_at_all(folder):
    (path,) = folder.glob("*.safetensors")
    whole = path.read_bytes()
    for size in (len(whole) - 10, 100, 4, 0):
        path.write_bytes(whole[:size])
        with one_line(path):
            load_checkpoint(folder)
    path.unlink()
    with one_line(folder, "*.safetensors"):
        load_checkpoint(folder)


def test_another_targets_drafter(folder, target):
    load_checkpoint(folder, target)
    with one_line(folder / "config.json", "vocab_size", "expected 9", "got 12"):
        load_checkpoint(folder, tiny_target(vocab=9))
    with one_line(folder / "config.json", "num_target_layers", "expected 2", "got 3"):
        load_checkpoint(folder, tiny_target(layers=2))
    edit(folder, hidden_size=32)
    with one_line(folder / "config.json", "hidden_size", "expected 16", "got 32"):
        load_checkpoint(folder, target)
