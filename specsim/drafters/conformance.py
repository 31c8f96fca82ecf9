"""Does this implementation compute what another did? ``python -m specsim.drafters.conformance DIR..``

DIR holds ``target/`` (a Hugging Face causal LM), ``draft/`` (a DeepSpec checkpoint) and ``expected.npz``:
``input_ids`` int[n], ``target_logits`` [n, V] and, of greedy blocks after the anchors input_ids[N],
``aN_base_logits`` and ``aN_draft_logits`` [γ, V], ``aN_draft_tokens`` int[γ], ``aN_confidence_logits`` [γ] and
``aN_accept_rate`` [γ], the overlap Σ min(p_d, p_t) with the target read along the drafted tokens. Any of them
may be left out. Prints the largest absolute error of each array, in float32 on the CPU. Exit code 1 if one is
beyond 1e-4, 2 if a folder cannot be read.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.drafters import check_installed
from specsim.types import SpecsimError

TOLERANCE = 1e-4
ARRAY = re.compile(r"a(\d+)_(base_logits|draft_logits|draft_tokens|confidence_logits|accept_rate)")

Arrays = dict[str, NDArray[Any]]


def errors(folder: Path) -> dict[str, float]:
    """The largest absolute error of each array of ``folder``/expected.npz; infinite where one is not a number.

    Raises SpecsimError naming the file and the array that cannot be compared.
    """
    path = folder / "expected.npz"
    expected = _read(path)
    ids = expected.pop("input_ids", None)
    if ids is None or ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or len(ids) < 2:
        raise SpecsimError(f"{path}: input_ids: expected a list of two or more token ids")
    anchors = set()
    for name in expected:
        match = ARRAY.fullmatch(name)
        if not match and name != "target_logits":
            raise SpecsimError(f"{path}: {name}: is not known, expected target_logits or aN_draft_logits and the like")
        if match and not 1 <= int(match[1]) < len(ids):
            raise SpecsimError(f"{path}: {name}: expected an anchor from 1 to {len(ids) - 1}")
        if match:
            anchors.add(int(match[1]))
    computed = compute(folder, ids, sorted(anchors))
    found = {}
    for name, theirs in expected.items():
        if name not in computed:
            raise SpecsimError(f"{path}: {name}: this drafter has none")
        ours = computed[name]
        if ours.shape != theirs.shape or not np.issubdtype(theirs.dtype, np.number):
            raise SpecsimError(f"{path}: {name}: expected {list(ours.shape)}, got {theirs.dtype} {list(theirs.shape)}")
        error = float(np.abs(ours.astype(np.float64) - theirs).max())
        found[name] = error if np.isfinite(error) else float("inf")
    return found


def compute(folder: Path, ids: NDArray[Any], anchors: Sequence[int]) -> Arrays:
    """The arrays of ``folder``'s target and drafter, by the names they have in expected.npz."""
    import torch

    from specsim.drafters.checkpoint import load_checkpoint
    from specsim.drafters.draft import over_target
    from specsim.drafters.target import load_target

    target = load_target(folder / "target", "float32", "cpu")
    drafter = load_checkpoint(folder / "draft", target)
    if ids.min() < 0 or ids.max() >= target.vocab_size:
        raise SpecsimError(f"{folder / 'expected.npz'}: input_ids: expected 0..{target.vocab_size - 1}")
    with torch.inference_mode():
        tokens = torch.tensor(ids, dtype=torch.long)[None]
        last, hidden = target.forward(tokens, None, drafter.target_layers)
        found = {"target_logits": (last @ target.head.T)[0].numpy()}
        for a in anchors:
            context = drafter.context(1, a)
            assert hidden is not None
            drafter.read(context, tokens[:, : a + 1], hidden[:, :a], torch.arange(a)[None])
            block = _greedy(drafter, context, tokens[:, a : a + 1], a)
            drafted = torch.tensor(block["draft_tokens"])[None]
            along, _ = target.forward(torch.cat((tokens[:, : a + 1], drafted), 1))
            p = (along[0, a:-1] @ target.head.T).softmax(-1)
            q = over_target(torch.tensor(block["draft_logits"]).softmax(-1), drafter.vocabulary, target.vocab_size)
            block["accept_rate"] = torch.minimum(p, q).sum(-1).numpy()
            found |= {f"a{a}_{name}": values for name, values in block.items()}
    return found


def _greedy(drafter: Any, context: Any, anchor: Any, position: int) -> Arrays:
    """A block of the drafter's likeliest tokens after ``anchor`` int[1, 1]: logits, tokens and what else it gives."""
    import torch

    blocks = drafter.block(context, anchor, torch.tensor([[position]]))
    before, logits, tokens, confidences = anchor, [], [], []
    for _ in range(drafter.gamma):
        out, confidence = blocks.next(before)
        best = out.argmax(-1)
        before = best if drafter.vocabulary is None else drafter.vocabulary[best]
        logits.append(out[0, 0])
        tokens.append(before[0, 0])
        confidences += [] if confidence is None else [confidence[0, 0]]
    found = {"draft_logits": torch.stack(logits), "draft_tokens": torch.stack(tokens)}
    if hasattr(blocks, "base"):
        found["base_logits"] = blocks.base[0, 0]
    if confidences:
        found["confidence_logits"] = torch.stack(confidences)
    return {name: values.numpy() for name, values in found.items()}


def _read(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except OSError as error:
        raise SpecsimError(f"{path}: cannot read: {error.strerror or error}") from error
    except (ValueError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise SpecsimError(f"{path}: expected a .npz file of arrays: {error}") from error


def main(folders: Sequence[str]) -> int:
    """Print the errors of every folder; return the exit code."""
    if not folders or any(folder.startswith("-") for folder in folders):
        print(__doc__)
        return 0 if "--help" in folders else 2
    code = 0
    for folder in folders:
        try:
            check_installed()
            found = errors(Path(folder))
        except SpecsimError as bad:
            print(f"error: {' '.join(str(bad).split())}", file=sys.stderr)
            code = 2
            continue
        print(folder)
        for name, error in found.items():
            beyond = error > TOLERANCE
            print(f"  {name:<24} {error:.2e}{f'  beyond {TOLERANCE:g}' if beyond else ''}")
            code = max(code, int(beyond))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
