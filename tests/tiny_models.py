"""Tiny random targets and drafters, and plain answers to compare with. A module that imports this is skipped
where torch or transformers is missing; it takes ``torch`` from here, so that this import comes first.

Weights are drawn large, so that a next token depends on the whole text and distributions are neither flat nor sure.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specsim.drafters.checkpoint import build  # noqa: E402
from specsim.drafters.config import DSPARK, EAGLE3, DraftConfig  # noqa: E402
from specsim.drafters.dspark import DSpark  # noqa: E402
from specsim.drafters.eagle3 import Eagle3  # noqa: E402
from specsim.drafters.lookup import PromptLookup  # noqa: E402
from specsim.drafters.prompts import Prompt  # noqa: E402
from specsim.drafters.responses import Recipe, Response, load_responses, respond  # noqa: E402
from specsim.drafters.target import ATTENTION, Target  # noqa: E402

torch.set_num_threads(1)  # more of them only wait for each other on matrices this small

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONFIGS = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
KINDS = ("dspark", "dspark-gated", "dspark-rnn", "dflash", "eagle3", "mtp")


class Letters:
    """A tokenizer: a is 0, b is 1 and so on."""

    def __call__(self, text: str, **_: Any) -> Any:
        @dataclass
        class Encoding:
            input_ids: list[int]

        return Encoding([LETTERS.index(letter) for letter in text])

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(LETTERS[token] for token in tokens)


def tiny_target(
    kind: str = "llama", vocab: int = 12, *, ends: int | None = None, scale: float = 0.3, seed: int = 0, layers: int = 3
) -> Target:
    """A random causal LM with grouped heads (4 over 2 groups), float32."""
    config = CONFIGS[kind](
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=512, bos_token_id=None, eos_token_id=ends,
        pad_token_id=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    draw_weights(model, scale, seed)
    return Target(model.eval().requires_grad_(False), Letters(), f"tiny-{kind}")


def plain_model(target: Target) -> Any:
    """The same model with transformers' own attention."""
    config = copy.deepcopy(target.model.config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.load_state_dict(target.model.state_dict())
    return model.eval().requires_grad_(False)


def draw_weights(model: Any, scale: float, seed: int) -> None:
    """Normal weights of this deviation; embeddings of deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data.normal_(std=scale, generator=generator)
            if module.bias is not None:
                module.bias.data.normal_(std=scale, generator=generator)
        elif isinstance(module, torch.nn.Embedding):
            module.weight.data.normal_(generator=generator)


def tiny_config(
    kind: str = "dspark", vocab: int = 12, *, gamma: int = 3, layers: int = 3, **fields: Any
) -> DraftConfig:
    """A drafter's config for a tiny target of ``layers`` layers."""
    eagle, mtp = kind in ("eagle3", "mtp"), kind == "mtp"
    given = {
        "architectures": (EAGLE3,) if eagle else (DSPARK,),
        "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "num_hidden_layers": 1 if eagle else 2,
        "vocab_size": vocab, "num_target_layers": layers,
        "target_layer_ids": (layers - 1,) if mtp else (0, 1),
        "block_size": gamma,
        "ttt_length": 1 if mtp else gamma,
        "mask_token_id": 1,
        "markov_rank": 5 if kind.startswith("dspark") else 0,
        "markov_head_type": {"dspark-gated": "gated", "dspark-rnn": "rnn"}.get(kind, "vanilla"),
        "enable_confidence_head": kind.startswith("dspark"),
    }  # fmt: skip
    return DraftConfig.model_validate(given | fields)


def tiny_drafter(
    kind: str = "dspark", vocab: int = 12, *, vocabulary: Sequence[int] | None = None, scale: float = 0.3,
    seed: int = 1, **fields: Any,
) -> DSpark | Eagle3:  # fmt: skip
    """A random drafter, of a reduced draft ``vocabulary`` if given."""
    if vocabulary is not None:
        fields["draft_vocab_size"] = len(vocabulary)
    model = build(tiny_config(kind, vocab, **fields))
    draw_weights(model, scale, seed)
    model.vocabulary = None if vocabulary is None else torch.tensor(vocabulary)
    return model.eval().requires_grad_(False)


def any_drafter(kind: str, vocab: int = 12, **fields: Any) -> Any:
    """A drafter of :data:`KINDS`, or "lookup"."""
    return (
        PromptLookup(vocab, fields.get("gamma", 3), 3, 1) if kind == "lookup" else tiny_drafter(kind, vocab, **fields)
    )


def prompts(texts: Sequence[str], domain: str = "text") -> list[Prompt]:
    """Prompts of letters, with ids p0, p1, ..."""
    return [Prompt(f"p{i}", domain, ({"role": "user", "content": text},)) for i, text in enumerate(texts)]


def answers(folder: Any, target: Target, texts: Sequence[str], **fields: Any) -> tuple[Recipe, list[Response]]:
    """Responses to ``texts`` with the states after all layers."""
    layers = tuple(range(target.num_layers))
    recipe = Recipe.model_validate(
        {"target": target.name, "temperature": 1.0, "max_tokens": 12, "layers": layers, "extra": 3} | fields
    )
    return load_responses(respond(target, prompts(texts), folder, recipe))


@torch.inference_mode()
def plain_states(model: Any, tokens: Any) -> tuple[Any, Any]:
    """Logits [R, n, V] and the states after every layer [R, n, layers, d] of a plain forward, without a cache."""
    out = model(tokens, output_hidden_states=True, use_cache=False)
    return out.logits, torch.stack(out.hidden_states[1:], 2)


def all_texts(vocab: int, length: int) -> Any:
    """Every text of ``length`` tokens, int[V^length, length], the last token changing fastest."""
    return torch.cartesian_prod(*[torch.arange(vocab)] * length).view(-1, length)


def joint(model: Any, prompt: Sequence[int], length: int, temperature: float) -> Any:
    """The model's probability of each of ``all_texts`` after ``prompt``, float64 [V^length]."""
    texts = all_texts(model.config.vocab_size, length)
    whole = torch.cat((torch.tensor(prompt).expand(len(texts), -1), texts), 1)
    logits = plain_states(model, whole)[0][:, len(prompt) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1).gather(-1, texts[..., None])[..., 0].sum(-1).exp()


def chi_square(counts: Any, chances: Any) -> float:
    """The p-value of ``counts`` under ``chances``, all cells where fewer than five are expected taken as one."""
    counts, expected = np.asarray(counts, dtype=float), np.asarray(chances, dtype=float)
    expected = expected * counts.sum()
    rare = expected < 5
    if rare.any():
        counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    return float(chisquare(counts, expected * (counts.sum() / expected.sum())).pvalue)


class Forced:
    """Chooses given draft tokens int[.., γ] of the target's vocabulary, and keeps the distributions it was shown."""

    def __init__(self, tokens: Any, vocabulary: Any = None) -> None:
        self.tokens, self.vocabulary, self.shown = tokens, vocabulary, []

    def __call__(self, k: int, q: Any) -> Any:
        self.shown.append(q)
        token = self.tokens[..., k].contiguous()
        return (
            token if self.vocabulary is None else torch.searchsorted(self.vocabulary, token).clamp(max=q.shape[-1] - 1)
        )


@contextmanager
def one_line(*parts: str) -> Iterator[None]:
    """Expect a SpecsimError of one line that has all of ``parts``."""
    from specsim.types import SpecsimError

    with pytest.raises(SpecsimError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message
