"""The target: a Hugging Face causal language model with a KV cache that speculation can roll back.

Any ``transformers`` causal LM works: a model folder, or a GGUF file (or a folder with one in it).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from specsim.drafters.config import DSPARK, EAGLE3
from specsim.drafters.packed import Piece
from specsim.types import SpecsimError

ATTENTION = "specsim"


@dataclass(frozen=True)
class Target:
    """A causal LM: ``model`` (transformers, in eval mode), ``tokenizer`` (None if the folder has none), ``name``."""

    model: Any
    tokenizer: Any
    name: str

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def max_positions(self) -> int | None:
        """Tokens of the longest text that it was made for, where its config tells."""
        most = getattr(self.model.config, "max_position_embeddings", None)
        return None if most is None else int(most)

    @property
    def embedding(self) -> Tensor:
        """Token embeddings [V, d]."""
        return self.model.get_input_embeddings().weight.detach()

    @property
    def head(self) -> Tensor:
        """The LM head [V, d]."""
        return self.model.get_output_embeddings().weight.detach()

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        ends = self.model.generation_config.eos_token_id
        if ends is None:
            ends = self.model.config.eos_token_id
        return tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)

    @cached_property
    def identity(self) -> str:
        """Its name and a hash of a sample of every weight, which tells models of one name apart in any precision."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.model.named_parameters()):
            sample = weight.detach().flatten()[:1024].bfloat16().float().cpu()
            digest.update(name.encode() + sample.numpy().tobytes())
        return f"{self.name} sha256:{digest.hexdigest()[:16]}"

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        layers: Sequence[int] = (),
        *,
        positions: Tensor | None = None,
        slots: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run ``tokens`` int[R, n] after what ``cache`` holds of each row.

        Returns the final hidden states [R, n, d] (normed: times ``head`` they are logits) and those
        after each of ``layers`` [R, n, m, d] (0-based; the last layer's are the final ones), None
        without layers. Which of the n tokens count is up to the caller: ``cache.keep``. By default
        tokens follow one another; ``positions`` [R, n], cache ``slots`` [R, n] and ``mask`` bool[R, n,
        slots up to the highest] may say otherwise.
        """
        if cache is None:
            cache = KVCache(self, len(tokens), tokens.shape[1])
        if slots is None:
            slots = cache.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        cache.open(slots)
        if mask is None:
            mask = torch.arange(cache.top, device=tokens.device) <= slots[..., None]
        out = self.model.base_model(
            input_ids=tokens,
            position_ids=slots if positions is None else positions,
            attention_mask=mask[:, None],
            cache=cache,
            use_cache=True,
            output_hidden_states=bool(layers),
        )
        return out.last_hidden_state, _states(out, layers)

    @torch.inference_mode()
    def forward_packed(
        self, pieces: Sequence[Piece], cache: KVCache, layers: Sequence[int] = ()
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Run ``pieces`` of text in one forward, each behind what ``cache`` holds of its rows; no padding is run.

        Returns :meth:`forward`'s two results for each piece, zero where nothing was run; ``cache.lengths`` are up to
        the caller.
        """
        for piece in pieces:
            piece.place(cache.lengths[piece.first : piece.first + len(piece.tokens)])
        tokens, rows, slots = (
            torch.cat([piece.pack(getattr(piece, name)) for piece in pieces])[None]
            for name in ("tokens", "rows", "slots")
        )
        cache.open(slots, rows)
        out = self.model.base_model(
            input_ids=tokens,
            position_ids=slots,
            attention_mask=tokens.new_ones(1, 1, 1, 1, dtype=torch.bool),  # each piece has a mask of its own
            cache=cache,
            use_cache=True,
            output_hidden_states=bool(layers),
            pieces=pieces,
        )
        last, states = out.last_hidden_state[0], _states(out, layers)
        counts = [piece.size for piece in pieces]
        hidden = [None] * len(pieces) if states is None else states[0].split(counts)
        return [
            (piece.unpack(mine), None if of_layers is None else piece.unpack(of_layers))
            for piece, mine, of_layers in zip(pieces, last.split(counts), hidden, strict=True)
        ]


def _states(out: Any, layers: Sequence[int]) -> Tensor | None:
    """The states [R, n, m, d] after each of ``layers``."""
    return torch.stack([out.hidden_states[i + 1] for i in layers], dim=2) if layers else None


class KVCache:
    """Keys and values of R sequences, each with its own length: what is rejected is overwritten.

    A forward of n tokens writes row r's slots lengths[r] .. lengths[r] + n - 1; ``keep`` then says how
    many of them count. This is the interface that transformers asks of a cache (``update``).
    """

    def __init__(self, target: Target, rows: int, size: int) -> None:
        config = target.model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (2, target.num_layers, rows, heads, size, width)
        self.store = torch.zeros(shape, dtype=target.embedding.dtype, device=target.device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=target.device)
        self.top = 0

    def open(self, slots: Tensor, rows: Tensor | None = None) -> None:
        """Aim the next forward's writes at ``slots`` [R, n]; with ``rows`` [1, n], at these rows' slots [1, n]."""
        self.top = int(slots.max()) + 1
        every, heads = (torch.arange(self.store.shape[i], device=slots.device) for i in (2, 3))
        rows = every[:, None] if rows is None else rows
        self.where = (rows[:, None, :], heads[None, :, None], slots[:, None, :])

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write one layer's keys and values [R, heads, n, width]; return all up to the longest row."""
        both = self.store[:, layer]
        both[0][self.where] = keys
        both[1][self.where] = values
        return both[0, :, :, : self.top], both[1, :, :, : self.top]

    def get_seq_length(self, layer: int = 0) -> int:
        """Slots in use by the longest row."""
        return int(self.lengths.max())

    def keep(self, counts: Tensor) -> None:
        """Let ``counts`` [R] of the tokens last written count; the next ones overwrite the rest."""
        self.lengths = self.lengths + counts

    def widened(self, slots: int) -> KVCache:
        """A copy with ``slots`` more behind the last."""
        copy = object.__new__(KVCache)
        copy.lengths, copy.top = self.lengths.clone(), self.top
        copy.store = torch.nn.functional.pad(self.store, (0, 0, 0, slots))
        return copy

    def part(self, first: int, last: int, size: int) -> KVCache:
        """Rows ``first`` to ``last`` - 1 and their first ``size`` slots; shares the storage."""
        part = object.__new__(KVCache)
        part.store, part.lengths, part.top = self.store[:, :, first:last, :, :size], self.lengths[first:last], 0
        return part

    def move(self, rows: Tensor, first: int, size: int) -> None:
        """Move ``rows`` to the rows from ``first`` on, with their first ``size`` slots."""
        self.store[:, :, first : first + len(rows), :, :size] = self.store[:, :, rows, :, :size]
        self.lengths[first : first + len(rows)] = self.lengths[rows]

    def select(self, rows: Tensor) -> None:
        """Keep only ``rows``."""
        self.store = self.store[:, :, rows]
        self.lengths = self.lengths[rows]


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend with grouped heads without repeating keys and values, as transformers' attention interface asks.

    ``query`` [R, heads, n, width], ``key`` and ``value`` [R, groups, S, width], ``attention_mask``
    bool [R, 1, n, S]. With ``pieces`` the query is one row of all of them, and each has its own mask.
    """
    if pieces := kwargs.pop("pieces", None):
        outs, packed = [], query[0].transpose(0, 1)  # [tokens, heads, width]
        for piece, mine in zip(pieces, packed.split([piece.size for piece in pieces]), strict=True):
            rows = slice(piece.first, piece.first + len(piece.tokens))
            own = (piece.unpack(mine).transpose(1, 2), key[rows, :, : piece.top], value[rows, :, : piece.top])
            outs.append(piece.pack(grouped_attention(module, *own, piece.mask[:, None], **kwargs)[0]))
        return torch.cat(outs)[None], None
    rows, heads, n, width = query.shape
    groups = key.shape[1]
    packed = query.reshape(rows, groups, heads // groups * n, width)
    mask = None if attention_mask is None else attention_mask.repeat(1, 1, heads // groups, 1)
    out = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=kwargs.get("scaling"))
    return out.view(rows, heads, n, width).transpose(1, 2), None


AttentionInterface.register(ATTENTION, grouped_attention)


def load_target(path: str | Path, dtype: str = "auto", device: str = "auto") -> Target:
    """Load a causal LM from a Hugging Face folder or a GGUF file.

    ``dtype`` float32, bfloat16 or auto: bfloat16 where the device multiplies it natively. Raises
    SpecsimError naming the path if there is no such model or it cannot be read.
    """
    path = Path(path)
    folder, gguf = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
    if gguf is None and (name := _drafter_of(path)):
        raise SpecsimError(f"{path}: is a drafter ({name}), expected the model it drafts for")
    if gguf is None and path.is_dir() and not (path / "config.json").exists():
        found = sorted(path.rglob("*.gguf"))
        if len(found) == 1:
            folder, gguf = found[0].parent, found[0].name
    if not (path.exists() and (gguf or (folder / "config.json").is_file())):
        raise SpecsimError(f"{path}: expected a Hugging Face model folder (config.json) or one GGUF file")
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": gguf} if gguf else {}
    try:
        with redirect_stderr(StringIO()):  # a GGUF draws a progress bar of its own, whatever it is told
            model, found = AutoModelForCausalLM.from_pretrained(
                folder, dtype=kind, attn_implementation=ATTENTION, local_files_only=True, output_loading_info=True,
                ignore_mismatched_sizes=True, **source,
            )  # fmt: skip
        tokenizer = None
        if gguf or (folder / "tokenizer_config.json").exists() or (folder / "tokenizer.json").exists():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **source)
    except Exception as error:  # transformers raises of every kind for a broken file
        why = " ".join(str(error).split())
        raise SpecsimError(f"{path}: cannot load the target: {why[:300]}") from error
    # What transformers did not find it would draw at random.
    for name, *shapes in sorted(found["mismatched_keys"]):
        got, wanted = (list(shape) for shape in shapes)
        raise SpecsimError(f"{path}: tensor {name}: expected {wanted}, got {got}")
    if missing := sorted(found["missing_keys"]):
        raise SpecsimError(f"{path}: tensor {missing[0]} is missing")
    name = gguf.removesuffix(".gguf") if gguf else (path.resolve().name)
    target = Target(model.eval().requires_grad_(False).to(where), tokenizer, name)
    check_head(target)
    return target


def _drafter_of(folder: Path) -> str | None:
    """The architecture of the drafter in ``folder``; None for whatever else is there."""
    try:
        names = json.loads((folder / "config.json").read_bytes())["architectures"]
        return str(names[0]) if names[0] in (DSPARK, EAGLE3) else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, IndexError):
        return None  # loading it says more


@torch.inference_mode()
def check_head(target: Target) -> None:
    """Raise SpecsimError unless the logits are the final states times the head: no bias, no scale, no cap."""
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    theirs = target.model(input_ids=token, use_cache=False).logits.float()
    ours = (target.forward(token)[0] @ target.head.T).float()
    if not theirs.isfinite().all():
        raise SpecsimError(f"target {target.name}: its logits are not numbers: is a weight NaN?")
    if ours.shape != theirs.shape or (ours - theirs).abs().max() > 0.03 * theirs.abs().max():
        raise SpecsimError(
            f"target {target.name}: its logits are not its final states times the head: "
            "expected a model like Llama or Qwen3, without a bias, scale or cap on them"
        )


def pick_device(device: str = "auto") -> torch.device:
    """CUDA where there is one, for auto."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        probe = torch.zeros(1, device=device)
        probe.item()  # not every device holds numbers
        return probe.device
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without it
        raise SpecsimError(f"device: {device!r}, expected auto, cpu, or cuda where there is one") from error


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """float32, bfloat16, or for auto bfloat16 where the device has instructions for it."""
    if dtype == "auto":
        native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
        dtype = "bfloat16" if native else "float32"
    if dtype not in ("float32", "bfloat16"):
        raise SpecsimError(f"dtype: {dtype!r}, expected auto, float32 or bfloat16")
    return torch.float32 if dtype == "float32" else torch.bfloat16
