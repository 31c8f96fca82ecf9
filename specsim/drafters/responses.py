"""What the target answers, with the hidden states that drafters read: made once, kept in shards on disk.

A folder of ``shard-00000.safetensors`` and so on, one a batch, beside ``responses.json`` that says
how they were made. A shard that is there is not made again, so an interrupted run goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specsim.drafters.draft import pick
from specsim.drafters.prompts import Prompt, prompt_tokens
from specsim.drafters.store import write_tensors
from specsim.drafters.target import KVCache, Target
from specsim.files import read_json, write_json
from specsim.types import SpecsimError

MANIFEST = "responses.json"
TENSORS = ("tokens", "hidden", "log_normalizer", "prompt_tokens", "lengths", "output_tokens")


class Recipe(BaseModel):
    """How responses are made: all that must agree for a folder of them to be taken up again.

    ``target``: ``Target.identity``, which knows the model by its weights and not just by its name.
    ``extra`` target tokens follow a response that was cut at ``max_tokens``, so that blocks at its
    end can be told; ``layers`` are the target layers whose hidden states are kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    temperature: Annotated[float, Field(ge=0)]
    max_tokens: Annotated[int, Field(ge=1)]
    layers: Annotated[tuple[int, ...], Field(min_length=1)]
    seed: int = 0
    extra: Annotated[int, Field(ge=1)] = 7
    batch: Annotated[int, Field(ge=1)] = 128
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 512
    states: Literal["float32", "float16", "bfloat16"] = "float32"


class Manifest(BaseModel):
    """``responses.json``: the recipe, the ids of the prompts and a hash of their domains and tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: Recipe
    prompts: tuple[str, ...]
    sha256: str


@dataclass(frozen=True)
class Response:
    """One response: ``tokens`` int64[n] of prompt, answer and extra; ``hidden`` [n, m, d] after the recipe's layers.

    ``log_normalizer`` float32[n]: log Σ exp(logit / T) after each token (NaN inside the prompt; at
    T = 0 of T = 1). ``output_tokens`` counts the answer without the extra; an end token is not among
    the tokens. Behind the last token no hidden state is kept.
    """

    id: str
    domain: str
    tokens: Tensor
    hidden: Tensor
    log_normalizer: Tensor
    prompt_tokens: int
    output_tokens: int


def respond(
    target: Target,
    prompts: Sequence[Prompt],
    folder: str | Path,
    recipe: Recipe,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Answer every prompt and keep responses and hidden states in ``folder``; shards that are there are left.

    Prompts of more than ``max_prompt_tokens`` are left out. Deterministic in (recipe, prompts): each
    batch draws from its own stream. ``progress`` is told the tokens drawn of each answer, batch after batch,
    and how many those can be. Raises SpecsimError if the folder was made by another recipe.
    """
    folder = Path(folder)
    manifest = folder / MANIFEST
    tokens = [(p, prompt_tokens(target.tokenizer, p)) for p in prompts]
    tokens = [(p, ids) for p, ids in tokens if len(ids) <= recipe.max_prompt_tokens]
    if not tokens:
        raise SpecsimError(f"prompts: none has at most {recipe.max_prompt_tokens} tokens")
    # Prompts of like length share a batch: less padding. Equal lengths stay in the order given.
    tokens.sort(key=lambda item: len(item[1]))
    batches = [tokens[i : i + recipe.batch] for i in range(0, len(tokens), recipe.batch)]
    content = json.dumps([(p.id, p.domain, ids) for p, ids in tokens]).encode()
    made = Manifest(recipe=recipe, prompts=tuple(p.id for p, _ in tokens), sha256=hashlib.sha256(content).hexdigest())
    if manifest.exists():
        old = read_json(manifest, Manifest)
        if old.recipe != made.recipe:
            raise SpecsimError(f"{manifest}: made by another recipe, expected the same or no folder")
        if old != made:
            raise SpecsimError(f"{manifest}: made from other prompts, expected the same or no folder")
    elif any(folder.glob("shard-*")):
        raise SpecsimError(f"{folder}: answers without {MANIFEST}, which says how they were made: expected no folder")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(manifest, made)
    # Batches in a fixed shuffled order, so that the first shards are a fair sample of all.
    order = np.random.default_rng(0).permutation(len(batches))
    most = recipe.max_tokens + recipe.extra
    for done, index in enumerate(order):
        path = folder / f"shard-{index:05d}.safetensors"

        def tick(steps: int, before: int = done * most) -> None:
            if progress:
                progress(before + steps, len(batches) * most)

        if not path.exists():
            _answer(target, batches[index], recipe, int(index), path, tick)
        tick(most)
    return folder


def _answer(
    target: Target,
    batch: list[tuple[Prompt, list[int]]],
    recipe: Recipe,
    index: int,
    path: Path,
    tick: Callable[[int], None],
) -> None:
    """Answer one batch of (prompt, its tokens) and write it as a shard; ``tick`` is told the tokens drawn of each."""
    rows, most = len(batch), recipe.max_tokens + recipe.extra
    prompt_lengths = torch.tensor([len(ids) for _, ids in batch])
    longest = int(prompt_lengths.max())
    cache, before, final = _read_prompts(target, batch, longest + most, recipe.layers)
    generator = torch.Generator(device=target.device).manual_seed(stream_seed(recipe.seed, index))
    ends = torch.tensor(target.end_tokens, device=target.device)

    tokens = torch.zeros(rows, most, dtype=torch.long)
    hidden = torch.zeros(rows, most, len(recipe.layers), target.hidden_size)
    normalizer = torch.full((rows, most), float("nan"))
    lengths = torch.full((rows,), most)
    alive = torch.arange(rows)
    for step in range(most):
        tick(step)
        token, log_sum = sample(final @ target.head.T, recipe.temperature, generator)
        tokens[alive, step], normalizer[alive, step] = token.cpu(), log_sum.cpu()
        over = torch.isin(token, ends).cpu() & (lengths[alive] == most)
        lengths[alive[over]] = step
        going = lengths[alive] == most
        if not going.any() or step == most - 1:
            break
        if going.float().mean() < 0.9:  # dropping rows copies the cache: not for every one
            cache.select(going.nonzero()[:, 0].to(target.device))
            alive, token = alive[going], token[going.to(target.device)]
        last, states = target.forward(token[:, None], cache, recipe.layers)
        cache.keep(torch.ones_like(token))
        assert states is not None
        final, hidden[alive, step] = last[:, 0], states[:, 0].float().cpu()

    kept = [row for row in range(rows) if lengths[row]]  # maybe none

    def flat(prompts: Sequence[Tensor], answers: Tensor) -> Tensor:
        """Prompt and answer of every kept row, end to end."""
        return torch.cat([answers[0, :0], *(t for r in kept for t in (prompts[r], answers[r, : lengths[r]]))])

    # A normalizer stands at the token before: the first answer token's at the prompt's last.
    early = [torch.cat((torch.full((len(ids) - 1,), torch.nan), normalizer[r, :1])) for r, (_, ids) in enumerate(batch)]
    late = torch.cat((normalizer[:, 1:], normalizer.new_zeros(rows, 1)), 1)
    tensors = {
        "tokens": flat([torch.tensor(ids) for _, ids in batch], tokens),
        "hidden": flat(before, hidden).to(getattr(torch, recipe.states)),
        "log_normalizer": flat(early, late),
        "prompt_tokens": prompt_lengths[kept],
        "lengths": prompt_lengths[kept] + lengths[kept],
        "output_tokens": lengths[kept].clamp(max=recipe.max_tokens),
    }
    names = {"ids": [batch[r][0].id for r in kept], "domains": [batch[r][0].domain for r in kept]}
    write_tensors(path, lambda p: save_file(tensors, p, metadata={"names": json.dumps(names)}))


def _read_prompts(
    target: Target, batch: list[tuple[Prompt, list[int]]], size: int, layers: Sequence[int]
) -> tuple[KVCache, list[Tensor], Tensor]:
    """Prefill: the cache, of each prompt the hidden states after ``layers`` [n, m, d], and all final states [R, d]."""
    lengths = torch.tensor([len(ids) for _, ids in batch])
    longest = int(lengths.max())
    padded = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, (_, ids) in enumerate(batch):
        padded[row, : len(ids)] = torch.tensor(ids)
    cache = KVCache(target, len(batch), size)
    states: list[Tensor] = []
    final = []
    # A few rows at a time: the states of all layers are alive at once.
    for rows in torch.arange(len(batch)).split(max(1, 4096 // longest)):
        part = KVCache(target, len(rows), longest)
        last, hidden = target.forward(padded[rows].to(target.device), part, layers)
        cache.store[:, :, rows, :, :longest] = part.store
        final.append(last[torch.arange(len(rows)), lengths[rows] - 1])
        assert hidden is not None
        states += [hidden[i, : lengths[r]].float().cpu() for i, r in enumerate(rows)]
    cache.lengths = lengths.to(target.device)
    return cache, states, torch.cat(final)


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a token of each row of ``logits`` [n, V] at ``temperature`` (0: the largest).

    Returns the tokens [n] and log Σ exp(logit / T) float32[n] (at T = 0 that of T = 1).
    """
    scaled = logits.float() / (temperature or 1.0)
    normalizer = scaled.logsumexp(-1)
    if temperature == 0:
        return scaled.argmax(-1), normalizer
    return pick((scaled - normalizer[:, None]).exp(), generator), normalizer


def stream_seed(seed: int, *key: int) -> int:
    """A seed for torch from the NumPy stream (seed, key)."""
    return int(np.random.SeedSequence([seed, *key]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def load_responses(folder: str | Path) -> tuple[Recipe, list[Response]]:
    """Load every response of ``folder``, tensors mapped from disk; order by shard, then row.

    Raises SpecsimError naming the file that is missing, cut short or not ours.
    """
    folder = Path(folder)
    recipe = read_json(folder / MANIFEST, Manifest).recipe
    paths = sorted(folder.glob("shard-*.safetensors"))
    if not paths:
        raise SpecsimError(f"{folder}: expected shard-*.safetensors, found none")
    return recipe, [response for path in paths for response in _read_shard(path)]


def _read_shard(path: Path) -> Iterator[Response]:
    try:
        with safe_open(path, "pt") as file:
            names = json.loads(file.metadata()["names"])
            tensors = {name: file.get_tensor(name) for name in TENSORS}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise SpecsimError(
            f"{path}: expected a shard of answers, delete it and they are made again: {error}"
        ) from error
    start = 0
    for row, length in enumerate(tensors["lengths"].tolist()):
        part = slice(start, start + length)
        start += length
        prompt, output = int(tensors["prompt_tokens"][row]), int(tensors["output_tokens"][row])
        yield Response(
            id=names["ids"][row],
            domain=names["domains"][row],
            tokens=tensors["tokens"][part],
            hidden=tensors["hidden"][part],
            log_normalizer=tensors["log_normalizer"][part],
            prompt_tokens=prompt,
            output_tokens=output,
        )
