"""The conformance command: against DeepSpec's own goldens, and against a plain numpy reading of the formulas."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from specsim.drafters import conformance  # noqa: E402
from specsim.drafters.checkpoint import build  # noqa: E402
from specsim.drafters.config import DSPARK, EAGLE3, DraftConfig  # noqa: E402

GOLDENS = Path(__file__).parents[2] / "shared/data/deepspec_goldens"
WIDTH, VOCABULARY, GAMMA, ANCHORS = 8, 23, 4, (1, 9)
KINDS = ("vanilla", "gated", "rnn", "dflash", "eagle3")


@pytest.mark.parametrize("kind", ["vanilla", "dflash", "eagle3"])
def test_deepspec_goldens(kind, capsys):
    if not (GOLDENS / kind).is_dir():
        pytest.skip(f"{GOLDENS / kind} is not there")
    assert conformance.main([str(GOLDENS / kind)]) == 0
    assert "target_logits" in capsys.readouterr().out


# The formulas, written down again: one anchor, no cache, float64.


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def rotary(x, positions, theta=10_000.0):
    half = x.shape[-1] // 2
    angle = np.asarray(positions)[:, None, None] * theta ** (-np.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return np.concatenate(
        [left * np.cos(angle) - right * np.sin(angle), right * np.cos(angle) + left * np.sin(angle)], -1
    )


class Plain:
    """One drafter, by its tensors ``w`` and config ``c``."""

    def __init__(self, w, c):
        self.w, self.c = {name: value.double().numpy() for name, value in w.items()}, c

    def heads(self, x, layer, name, positions=None):
        w, width = self.w, self.c.head_dim
        x = (x @ w[f"layers.{layer}.self_attn.{name}_proj.weight"].T).reshape(len(x), -1, width)
        return x if name == "v" else rotary(norm(x, w[f"layers.{layer}.self_attn.{name}_norm.weight"]), positions)

    def attend(self, q, k, v, layer):
        share = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, share, 1), np.repeat(v, share, 1)
        weights = softmax(np.einsum("qhd,khd->hqk", q, k) / np.sqrt(self.c.head_dim))
        out = np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)
        return out @ self.w[f"layers.{layer}.self_attn.o_proj.weight"].T

    def mlp(self, x, layer):
        gate, up, down = (self.w[f"layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = norm(x, self.w[f"layers.{layer}.post_attention_layernorm.weight"])
        return ((x @ gate.T) * sigmoid(x @ gate.T) * (x @ up.T)) @ down.T

    def dspark(self, states, ids, a):
        w, c = self.w, self.c
        context = norm(states[:a] @ w["fc.weight"].T, w["hidden_norm.weight"])
        x = w["embed_tokens.weight"][[ids[a]] + [c.mask_token_id] * (c.gamma - 1)]
        before, own = np.arange(a), np.arange(a, a + c.gamma)
        for i in range(c.num_hidden_layers):
            n = norm(x, w[f"layers.{i}.input_layernorm.weight"])
            k = np.concatenate([self.heads(context, i, "k", before), self.heads(n, i, "k", own)])
            v = np.concatenate([self.heads(context, i, "v"), self.heads(n, i, "v")])
            x = x + self.attend(self.heads(n, i, "q", own), k, v, i)
            x = x + self.mlp(x, i)
        hidden = norm(x, w["norm.weight"])
        base = hidden @ w["lm_head.weight"].T
        logits, tokens, confidence = [], [], []
        token, state = ids[a], np.zeros(c.markov_rank)
        for k in range(c.gamma):
            bias = 0
            if c.markov_rank:
                bias, state, known = self.markov(token, hidden[k], state)
                confidence.append(known @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"][0])
            logits.append(base[k] + bias)
            token = int(logits[-1].argmax())
            tokens.append(token)
        found = {"base_logits": base, "draft_logits": np.array(logits), "draft_tokens": np.array(tokens)}
        return found | ({"confidence_logits": np.array(confidence)} if confidence else {})

    def markov(self, token, hidden, state):
        w, kind = self.w, self.c.markov_head_type
        e = w["markov_head.markov_w1.weight"][token]
        use = e
        if kind == "gated":
            gate = w["markov_head.gate_proj.weight"] @ np.concatenate([hidden, e]) + w["markov_head.gate_proj.bias"]
            use = sigmoid(gate) * e
        if kind == "rnn":
            joint = w["markov_head.joint_proj.weight"] @ np.concatenate([state, e, hidden])
            gate, candidate, output = np.split(joint + w["markov_head.joint_proj.bias"], 3)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
            use = np.tanh(output)
        return w["markov_head.markov_w2.weight"] @ use, state, np.concatenate([hidden, e])

    def eagle3(self, states, ids, a):
        w, c = self.w, self.c
        hidden = list(states[:a] @ w["fc.weight"].T)  # of positions 0..a-1; each meets the token after it
        tokens, logits = list(ids[: a + 1]), []
        for step in range(c.gamma):
            last = a - 1 + step
            x = np.concatenate(
                [
                    norm(w["embed_tokens.weight"][tokens[1 : last + 2]], w["layers.0.input_layernorm.weight"]),
                    norm(np.array(hidden[: last + 1]), w["layers.0.hidden_norm.weight"]),
                ],
                -1,
            )
            positions = np.arange(last + 1)
            k, v = self.heads(x, 0, "k", positions), self.heads(x, 0, "v")
            q = self.heads(x[-1:], 0, "q", positions[-1:])
            out = hidden[last] + self.attend(q, k, v, 0)[0]
            out = out + self.mlp(out[None], 0)[0]
            logits.append(norm(out, w["norm.weight"]) @ w["lm_head.weight"].T)
            hidden.append(out)
            tokens.append(int(logits[-1].argmax()))
        return {"draft_logits": np.array(logits), "draft_tokens": np.array(tokens[a + 1 :])}


def draft_config(kind):
    head = kind in ("vanilla", "gated", "rnn")
    return DraftConfig(
        architectures=(EAGLE3,) if kind == "eagle3" else (DSPARK,),
        hidden_size=WIDTH, intermediate_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
        num_hidden_layers=1 if kind == "eagle3" else 2, vocab_size=VOCABULARY, num_target_layers=3,
        target_layer_ids=(0, 1), block_size=GAMMA, ttt_length=GAMMA, mask_token_id=VOCABULARY - 1,
        markov_rank=3 if head else 0, markov_head_type=kind if head else "vanilla", enable_confidence_head=head,
    )  # fmt: skip


def make_case(folder, kind):
    """A folder of random target and drafter, with what the formulas above give for them."""
    torch.manual_seed(KINDS.index(kind))
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=12, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, tie_word_embeddings=False, initializer_range=0.4, max_position_embeddings=64,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder / "target")
    c = draft_config(kind)
    drafter = build(c)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)  # norms too: none stays at one
    (folder / "draft").mkdir()
    (folder / "draft/config.json").write_text(json.dumps(c.model_dump(mode="json")))
    save_file({k: v.contiguous() for k, v in drafter.state_dict().items()}, folder / "draft/model.safetensors")

    def ask(tokens):
        with torch.no_grad():
            out = model(torch.tensor([tokens]), output_hidden_states=True)
        return out.logits[0].numpy(), np.concatenate([out.hidden_states[i + 1][0].numpy() for i in (0, 1)], -1)

    ids = np.random.default_rng(1).integers(VOCABULARY, size=12).tolist()
    logits, states = ask(ids)
    arrays = {"input_ids": np.array(ids), "target_logits": logits}
    plain = Plain(drafter.state_dict(), c)
    for a in ANCHORS:
        block = (plain.eagle3 if kind == "eagle3" else plain.dspark)(states, ids, a)
        p = softmax(ask([*ids[: a + 1], *block["draft_tokens"].tolist()])[0][a : a + GAMMA])
        block["accept_rate"] = np.minimum(p, softmax(block["draft_logits"])).sum(-1)
        arrays |= {f"a{a}_{name}": values for name, values in block.items()}
    np.savez(folder / "expected.npz", **arrays)
    return arrays


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_formulas_and_sees_what_does_not(kind, tmp_path, capsys):
    arrays = make_case(tmp_path, kind)
    found = conformance.errors(tmp_path)
    assert set(found) == set(arrays) - {"input_ids"}
    assert max(found.values()) < 1e-5
    assert conformance.main([str(tmp_path)]) == 0
    broken = arrays["a9_draft_logits"].copy()
    broken[1, 2] += 2e-4
    np.savez(tmp_path / "expected.npz", **arrays | {"a9_draft_logits": broken})
    capsys.readouterr()
    assert conformance.main([str(tmp_path)]) == 1
    beyond = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "beyond" in line]
    assert beyond == ["a9_draft_logits"]


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys):
    arrays = make_case(tmp_path, "dflash")
    path = tmp_path / "expected.npz"
    for changes, words in [
        ({"a9_draft_logits": np.zeros((2, 2))}, "a9_draft_logits: expected [4, 23]"),
        ({"a9_confidence_logits": np.zeros(GAMMA)}, "a9_confidence_logits: this drafter has none"),
        ({"a99_draft_logits": np.zeros(GAMMA)}, "expected an anchor from 1 to 11"),
        ({"a9_drafts": np.zeros(GAMMA)}, "a9_drafts: is not known"),
        ({"input_ids": np.array([0, 99])}, "input_ids: expected 0..22"),
        ({"input_ids": np.zeros((2, 2))}, "input_ids: expected a list"),
    ]:
        kept = arrays if "input_ids" not in changes else {}
        np.savez(path, **kept | changes)
        assert conformance.main([str(tmp_path)]) == 2
        err = capsys.readouterr().err
        assert str(path) in err
        assert words in err
        assert err.count("\n") == 1
    path.write_bytes(b"no archive")
    assert conformance.main([str(tmp_path)]) == 2
    path.unlink()
    assert conformance.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("error: ") == 2
    assert conformance.main([]) == 2
    np.savez(path, **arrays | {"target_logits": np.full_like(arrays["target_logits"], np.nan)})
    assert conformance.main([str(tmp_path)]) == 1
