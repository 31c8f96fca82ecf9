"""A drafter by the words that a user gives for it: a checkpoint, prompt lookup, or a small language model."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specsim.drafters.checkpoint import load_checkpoint, read_config
from specsim.drafters.dspark import DSpark
from specsim.drafters.eagle3 import Eagle3
from specsim.drafters.lookup import PromptLookup, SmallModel, check_vocabulary
from specsim.drafters.target import Target, load_target
from specsim.files import read_text
from specsim.types import SpecsimError

GAMMA = 7
"""Block length of drafters that have none of their own."""
LOOKUP = {"longest": PromptLookup.longest, "shortest": PromptLookup.shortest}
MOST = 64
"""The longest block that a trace can hold."""


@dataclass(frozen=True)
class Spec:
    """What was asked for: ``text`` as given, its ``kind``, and ``options`` of a prompt lookup."""

    text: str
    kind: Literal["checkpoint", "lookup", "model"]
    options: dict[str, int]

    @property
    def name(self) -> str:
        """What a trace calls the drafter."""
        if self.kind == "lookup":
            return self.text.strip()
        path = Path(self.text).resolve()
        return path.stem if path.suffix == ".gguf" else path.name


def parse_spec(text: str) -> Spec:
    """Tell what kind of drafter ``text`` names, and see that it is there, before anything large is loaded.

    ``ngram`` or ``ngram(longest=4, shortest=2)``: prompt lookup. A folder whose config.json names a
    causal LM, or a GGUF file: a small model. Any other folder: a checkpoint in DeepSpec's format.
    Raises SpecsimError naming the file and the field.
    """
    if re.match(r"\s*ngram\s*(\(|$)", text):
        return Spec(text, "lookup", _lookup_options(text))
    path = Path(text)
    if not path.exists():
        raise SpecsimError(f"{text}: cannot read: expected a drafter's folder, a GGUF file or ngram")
    if path.suffix == ".gguf" or _is_model(path):
        return Spec(text, "model", {})
    read_config(path)
    return Spec(text, "checkpoint", {})


def load_drafter_model(
    spec: str | Spec, target: Target, gamma: int | None = None
) -> DSpark | Eagle3 | PromptLookup | SmallModel:
    """Load the drafter of ``spec`` for ``target``, to propose ``gamma`` tokens (its own number if None).

    A DSpark or DFlash block is drafted at the length it was trained for and cut to a smaller
    ``gamma``; a longer one is refused. Eagle3, a lookup and a small model step as often as asked.
    Raises SpecsimError for a drafter that cannot be loaded or does not fit the target.
    """
    spec = parse_spec(spec) if isinstance(spec, str) else spec
    if gamma is not None and not 1 <= gamma <= MOST:
        raise SpecsimError(f"gamma: expected 1..{MOST}, got {gamma}")
    if spec.kind == "lookup":
        longest, shortest = (spec.options[name] for name in LOOKUP)
        return PromptLookup(target.vocab_size, gamma or GAMMA, longest, shortest)
    if spec.kind == "model":
        model = load_target(spec.text, str(target.embedding.dtype).removeprefix("torch."), str(target.device))
        check_vocabulary(target, model)
        return SmallModel(model, gamma or GAMMA)
    drafter = load_checkpoint(spec.text, target)
    if isinstance(drafter, DSpark) and gamma is not None and gamma > drafter.gamma:
        raise SpecsimError(f"gamma: {gamma}, expected at most {drafter.gamma}: {spec.text} was trained for such blocks")
    drafter.gamma = gamma or drafter.gamma
    return drafter


def has_confidence(drafter: Any) -> bool:
    """Whether ``drafter`` has a confidence head."""
    return getattr(drafter, "confidence_head", None) is not None


def _lookup_options(text: str) -> dict[str, int]:
    wrong = SpecsimError(f"drafter {text!r}: expected ngram or ngram(longest=4, shortest=2), longest >= shortest >= 1")
    try:
        node = ast.parse(text.strip(), mode="eval").body
        keywords = node.keywords if isinstance(node, ast.Call) and not node.args else None
        if keywords is None and not isinstance(node, ast.Name):
            raise wrong
        options = {str(k.arg): ast.literal_eval(k.value) for k in keywords or []}
    except (SyntaxError, ValueError) as error:
        raise wrong from error
    sizes: dict[str, int] = LOOKUP | options
    if len(sizes) > len(LOOKUP) or not all(type(n) is int for n in sizes.values()):
        raise wrong
    if not sizes["longest"] >= sizes["shortest"] >= 1:
        raise wrong
    return sizes


def _is_model(folder: Path) -> bool:
    """Whether ``folder`` holds a causal language model rather than a drafter's checkpoint."""
    config = folder / "config.json"
    if not config.exists():
        return folder.is_dir() and any(folder.glob("*.gguf"))
    try:
        data = json.loads(read_text(config))
    except (ValueError, RecursionError) as error:
        raise SpecsimError(f"{config}: expected JSON: {error}") from error
    names = data.get("architectures") if isinstance(data, dict) else None
    return isinstance(names, list) and any(str(name).endswith("ForCausalLM") for name in names)
