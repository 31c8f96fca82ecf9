"""Training: the target is frozen, its answers are the text, and many anchors of an answer go in one forward.

Source of the losses: DSpark (arXiv 2607.05147) for DSpark and DFlash, Eagle-3 (arXiv 2503.01840).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from specsim.drafters.batches import Batch, anchor_range, draft_ids, draw_batch, target_probabilities
from specsim.drafters.checkpoint import build, save_checkpoint
from specsim.drafters.config import DSPARK, EAGLE3, DraftConfig
from specsim.drafters.dspark import DSpark
from specsim.drafters.eagle3 import Eagle3
from specsim.drafters.responses import Recipe, Response, stream_seed
from specsim.drafters.store import write_tensors
from specsim.drafters.target import Target
from specsim.types import SpecsimError

Kind = Literal["dspark", "dspark-gated", "dspark-rnn", "dflash", "eagle3", "mtp"]


STATE = "training.pt"
"""What a training that was interrupted goes on from."""


class Training(BaseModel):
    """How a drafter is trained; defaults are for a target of some hundred million weights on a CPU.

    ``blocks`` in all, ``rows`` answers of ``anchors`` blocks a step. ``vocabulary``: how many of the
    most frequent tokens of the answers the drafter can propose (0: all). ``rank`` of the Markov
    head. The loss of position k weighs exp(-(k-1)/decay), of an Eagle3 step 0.8^(k-1).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind = "dspark"
    gamma: Annotated[int, Field(ge=1)] = 7
    num_layers: Annotated[int, Field(ge=1)] = 2
    intermediate_size: Annotated[int, Field(ge=1)] | None = None
    rank: Annotated[int, Field(ge=1)] = 32
    vocabulary: Annotated[int, Field(ge=0)] = 0
    blocks: Annotated[int, Field(ge=1)] = 300_000
    rows: Annotated[int, Field(ge=1)] = 4
    anchors: Annotated[int, Field(ge=1)] = 64
    learning_rate: Annotated[float, Field(gt=0)] = 1.5e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    decay: Annotated[float, Field(gt=0)] = 4.0
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05
    seed: int = 0

    @property
    def steps(self) -> int:
        return math.ceil(self.blocks / (self.rows * self.anchors))


def check_shape(target: Target) -> None:
    """Raise SpecsimError unless the target's config tells what a drafter's layers are shaped by."""
    c = target.model.config
    needed = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_parameters")
    missing = [name for name in needed if getattr(c, name, None) is None]
    if not missing and "rope_theta" not in c.rope_parameters:
        missing = ["rope_theta"]
    if missing:
        raise SpecsimError(
            f"target {target.name}: {missing[0]}: not in its config: expected a model like Llama or Qwen3"
        )


def new_drafter(
    training: Training, target: Target, layers: Sequence[int], responses: Sequence[Response]
) -> DSpark | Eagle3:
    """A drafter of ``training.kind`` to be trained, with the target's embedding, head and final norm.

    ``layers`` are the target layers it reads (the final one alone for mtp).
    """
    c = target.model.config
    dspark = training.kind.startswith("dspark")
    eagle = training.kind in ("eagle3", "mtp")
    mtp = training.kind == "mtp"
    config = DraftConfig(
        architectures=(EAGLE3,) if eagle else (DSPARK,),
        hidden_size=target.hidden_size,
        intermediate_size=training.intermediate_size or c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or target.hidden_size // c.num_attention_heads,
        num_hidden_layers=1 if eagle else training.num_layers,
        vocab_size=target.vocab_size,
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope_parameters["rope_theta"],
        num_target_layers=target.num_layers,
        target_layer_ids=(target.num_layers - 1,) if mtp else tuple(layers),
        block_size=training.gamma,
        ttt_length=1 if mtp else training.gamma,
        mask_token_id=0,
        markov_rank=training.rank if dspark else 0,
        markov_head_type={"dspark-rnn": "rnn", "dspark-gated": "gated"}.get(training.kind, "vanilla"),
        enable_confidence_head=dspark,
        draft_vocab_size=training.vocabulary or None,
        from_target=("embed_tokens", "lm_head"),
    )
    torch.manual_seed(stream_seed(training.seed, 0))
    model = build(config)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    if isinstance(model, DSpark) and model.markov_head is not None:
        nn.init.zeros_(model.markov_head.markov_w2.weight)  # the head starts as no bias at all
    model.vocabulary = frequent_tokens(responses, training.vocabulary) if training.vocabulary else None
    head = target.head if model.vocabulary is None else target.head[model.vocabulary]
    model.embed_tokens.weight = nn.Parameter(target.embedding.float(), requires_grad=False)
    model.lm_head.weight = nn.Parameter(head.float(), requires_grad=False)
    model.norm.weight.data = target.model.base_model.norm.weight.detach().float().clone()
    return model.to(target.device)


def frequent_tokens(responses: Sequence[Response], count: int) -> Tensor:
    """The ``count`` tokens the answers use most, in order of id; among equally frequent ones the lower id."""
    answers = torch.cat([r.tokens[r.prompt_tokens :] for r in responses])
    uses = torch.bincount(answers, minlength=count)
    return uses.argsort(descending=True, stable=True)[:count].sort().values


def forward(model: DSpark | Eagle3, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Logits [S, A, γ, V'] along the batch's own blocks, and confidence logits [S, A, γ]."""
    device = model.fc.weight.device
    block, positions = batch.block.to(device), batch.positions.to(device)
    size = batch.hidden.shape[1]
    context = model.context(len(block), size)
    slots = torch.arange(size, device=device).expand(len(block), -1)
    model.read(context, batch.tokens.to(device), batch.hidden.to(device), slots)
    blocks = model.block(context, block[..., 0], positions)
    logits, confidences = zip(*(blocks.next(block[..., k]) for k in range(model.gamma)), strict=True)
    return torch.stack(logits, 2), None if confidences[0] is None else torch.stack(confidences, 2)


def losses(
    kind: str, logits: Tensor, confidence: Tensor | None, p: Tensor, block: Tensor, ids: Tensor, decay: float
) -> dict[str, Tensor]:
    """Loss parts, each already weighted over positions; their sum is what is minimised.

    ``p`` [S, A, γ, V'] are the target's probabilities, ``ids`` int[V] maps tokens to the draft
    vocabulary (-1: not in it).
    """
    gamma = logits.shape[2]
    steps = torch.arange(gamma, device=logits.device)
    weight = 0.8**steps if kind in ("eagle3", "mtp") else torch.exp(-steps / decay)
    weight = weight / weight.sum()
    log_q = logits.float().log_softmax(-1)
    drafted = ids[block[..., 1:]]
    if kind in ("eagle3", "mtp"):
        return {"ce": ((-(p * log_q).sum(-1)).mean((0, 1)) * weight).sum()}
    inside = drafted >= 0
    ce = -log_q.gather(-1, drafted.clamp(min=0)[..., None])[..., 0] * inside
    parts = {"ce": (ce.mean((0, 1)) * weight).sum()}
    if kind.startswith("dspark"):
        overlap = torch.minimum(log_q.exp(), p).sum(-1)
        assert confidence is not None
        bce = nn.functional.binary_cross_entropy_with_logits(
            confidence.float(), overlap.detach().clamp(0, 1), reduction="none"
        )
        parts["ce"] = 0.1 * parts["ce"]
        parts["l1"] = 0.9 * ((2 - 2 * overlap).mean((0, 1)) * weight).sum()
        parts["bce"] = (bce.mean((0, 1)) * weight).sum()
    return parts


@torch.inference_mode()
def held_out_acceptance(
    model: DSpark | Eagle3, target: Target, batches: Sequence[Batch], temperature: float, ids: Tensor
) -> list[float]:
    """Survival [γ] on ``batches``: the mean of Π min(1, p_d(y)/p_t(y)), which is what rejection sampling keeps."""
    total, count = torch.zeros(model.gamma), 0
    for batch in batches:
        logits, _ = forward(model, batch)
        drafted = ids[batch.block[..., 1:].to(logits.device)]
        q = (logits.float() / (temperature or 1.0)).softmax(-1).gather(-1, drafted.clamp(min=0)[..., None])[..., 0] * (
            drafted >= 0
        )
        p = target_probabilities(target, batch.final, batch.log_normalizer, temperature, model.vocabulary)
        p = p.gather(-1, drafted.clamp(min=0)[..., None])[..., 0]
        total += (q / p.clamp(min=1e-30)).clamp(max=1).cumprod(-1).sum((0, 1)).cpu()
        count += batch.block.shape[0] * batch.block.shape[1]
    return (total / count).tolist()


def train(
    training: Training,
    target: Target,
    recipe: Recipe,
    responses: Sequence[Response],
    layers: Sequence[int],
    folder: str | Path,
    log: Callable[[dict[str, Any]], None] = lambda row: None,
    start: DSpark | Eagle3 | None = None,
    every: int = 100,
    notes: dict[str, Any] | None = None,
) -> DSpark | Eagle3:
    """Train a drafter and save it in ``folder``; a run that was interrupted goes on from its last checkpoint.

    ``every`` so many steps the state is kept (``training.pt``), and a row with the losses and the
    held-out τ goes to ``log`` and to ``log.jsonl``. ``start``: weights to begin with where names and
    shapes agree. Deterministic in its arguments on one device and thread count. Raises SpecsimError
    where the folder holds another training, or the responses lack a layer.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    usable = [r for r in responses if np.diff(anchor_range(r, training.gamma))[0] > 0]
    if len(usable) < 2:
        raise SpecsimError(
            f"responses: {len(usable)} answers of more than {training.gamma} tokens, expected two or more"
        )
    held = max(1, int(len(usable) * training.held_out))
    order = np.random.default_rng(stream_seed(training.seed, 1)).permutation(len(usable))
    testing, learning = ([usable[i] for i in part] for part in (order[:held], order[held:]))

    model = new_drafter(training, target, layers, learning)
    if start is not None:
        _begin_from(model, start)
    ids = draft_ids(model.vocabulary, target.vocab_size).to(target.device)
    missing = [i for i in (*model.target_layers, target.num_layers - 1) if i not in recipe.layers]
    if missing:
        raise SpecsimError(f"responses: layers: expected states after layer {missing[0]}, got {list(recipe.layers)}")
    columns = [recipe.layers.index(i) for i in model.target_layers]
    final = recipe.layers.index(target.num_layers - 1)
    rng = np.random.default_rng(stream_seed(training.seed, 2))
    tests = [
        draw_batch(
            [r],
            1,
            training.anchors,
            columns,
            final,
            model.gamma,
            np.random.default_rng(stream_seed(training.seed, 3, i)),
        )
        for i, r in enumerate(testing)
    ]

    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        weights, lr=training.learning_rate, weight_decay=training.weight_decay, betas=(0.9, 0.95)
    )
    warmup = max(1, training.steps // 25)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min(
            (s + 1) / warmup, 0.5 * (1 + math.cos(math.pi * max(0, s - warmup) / max(1, training.steps - warmup)))
        ),
    )
    state = folder / STATE
    step = 0
    if state.exists():
        step = _resume(state, training, model, optimizer, schedule, rng)
    sums: dict[str, float] = {}
    since = 0
    while step < training.steps:
        batch = draw_batch(learning, training.rows, training.anchors, columns, final, model.gamma, rng)
        with torch.no_grad():
            p = target_probabilities(target, batch.final, batch.log_normalizer, recipe.temperature, model.vocabulary)
        logits, confidence = forward(model, batch)
        # The drafter will draft at this temperature, so that is where it must be right.
        logits = logits if recipe.temperature in (0, 1) else logits / recipe.temperature
        parts = losses(training.kind, logits, confidence, p, batch.block.to(target.device), ids, training.decay)
        optimizer.zero_grad(set_to_none=True)
        torch.stack(list(parts.values())).sum().backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        step += 1
        since += 1
        for name, value in parts.items():
            sums[name] = sums.get(name, 0.0) + float(value.detach())
        if not math.isfinite(sum(sums.values())):
            raise SpecsimError(f"training: the loss of step {step} is not a number: expected a smaller learning rate")
        if step % every == 0 or step == training.steps:
            survival = held_out_acceptance(model, target, tests, recipe.temperature, ids)
            row: dict[str, Any] = {
                "step": step,
                "steps": training.steps,
                "blocks": step * training.rows * training.anchors,
            }
            row |= {name: round(value / since, 4) for name, value in sums.items()}
            row |= {"tau": round(1 + sum(survival), 4), "survival": [round(s, 4) for s in survival]}
            sums, since = {}, 0
            _keep(state, training, model, optimizer, schedule, rng, step)
            _append(folder / "log.jsonl", json.dumps(row) + "\n")
            log(row)
    save_checkpoint(model.eval(), folder, {"specsim_training": training.model_dump(mode="json") | (notes or {})})
    return model


def _begin_from(model: DSpark | Eagle3, start: DSpark | Eagle3) -> None:
    """Take over the weights of ``start`` where names and shapes agree; the Markov head's by token."""
    mine, theirs = model.state_dict(), start.state_dict()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        theirs.pop(name, None)  # the target's own
    bias = theirs.pop("markov_head.markov_w2.weight", None)
    same = {k: v.to(mine[k].dtype) for k, v in theirs.items() if k in mine and v.shape == mine[k].shape}
    wanted = mine.get("markov_head.markov_w2.weight")
    if bias is not None and wanted is not None and bias.shape[1] == wanted.shape[1]:
        every = bias.new_zeros(start.config.vocab_size, bias.shape[1])
        every[slice(None) if start.vocabulary is None else start.vocabulary] = bias
        same["markov_head.markov_w2.weight"] = every if model.vocabulary is None else every[model.vocabulary]
    model.load_state_dict(same, strict=False)


def _append(path: Path, line: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise SpecsimError(f"{path}: cannot write: {error.strerror or error}") from error


def _keep(
    path: Path,
    training: Training,
    model: DSpark | Eagle3,
    optimizer: Any,
    schedule: Any,
    rng: np.random.Generator,
    step: int,
) -> None:
    state = {
        "training": training.model_dump_json(),
        "layers": list(model.target_layers),
        "model": {k: v for k, v in model.state_dict().items() if k not in ("embed_tokens.weight", "lm_head.weight")},
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "rng": json.dumps(rng.bit_generator.state),
        "step": step,
    }
    write_tensors(path, lambda p: torch.save(state, p))


def _resume(
    path: Path, training: Training, model: DSpark | Eagle3, optimizer: Any, schedule: Any, rng: np.random.Generator
) -> int:
    try:
        state = torch.load(path, weights_only=True)
        layers = list(model.target_layers)
        same = state["training"] == training.model_dump_json() and state.get("layers", layers) == layers
    except Exception as error:  # torch raises of every kind for a broken file
        raise SpecsimError(f"{path}: cannot read the interrupted training: delete it to start anew: {error}") from error
    if not same:
        raise SpecsimError(f"{path}: left by another training: expected the same options, or another folder")
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    rng.bit_generator.state = json.loads(state["rng"])
    return int(state["step"])
