"""Long work that the same command takes up again: answers in a folder, and the training that reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from specsim.drafters.prompts import Prompt
from specsim.drafters.responses import MANIFEST, Manifest, Recipe, Response, load_responses, respond
from specsim.drafters.target import Target
from specsim.drafters.train import STATE, Training
from specsim.files import read_json, write_json
from specsim.types import SpecsimError

RUN = "training.json"
FREE = ("states", "batch", "max_prompt_tokens")
"""Of a recipe, what a folder that is taken up decides by itself."""


class Run(BaseModel):
    """``training.json``: all that a training depends on; ``target`` is ``Target.identity``, ``prompts`` and
    ``start`` are names, layers count from 0."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    training: Training
    target: str
    layers: tuple[int, ...]
    prompts: str
    temperature: Annotated[float, Field(ge=0)]
    max_tokens: Annotated[int, Field(ge=1)]
    start: str | None = None
    limit: int | None = None


def open_run(folder: Path, run: Run) -> None:
    """Claim ``folder`` for a training, or find the same one begun there; before the work, not after it.

    Raises SpecsimError naming the file and what differs if another drafter or another training is there.
    """
    path = folder / RUN
    learnt = any((folder / name).exists() for name in (STATE, "config.json"))
    if learnt and not path.exists():
        raise SpecsimError(f"{folder}: holds a drafter already, expected another folder")
    if not learnt:
        write_json(path, run)
        return
    old = read_json(path, Run)
    if old != run:
        before, now = ({**r.model_dump(exclude={"training"}), **r.training.model_dump()} for r in (old, run))
        field = next(name for name in before if before[name] != now[name])
        raise SpecsimError(
            f"{path}: {field}: {before[field]!r} in the training begun there, got {now[field]!r}: "
            "expected the same options, or another folder"
        )


def answer(
    target: Target,
    prompts: Sequence[Prompt],
    folder: Path,
    wanted: Recipe,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Recipe, list[Response]]:
    """Answer ``prompts`` in ``folder`` as ``wanted`` says, or go on with what is there if it is at least that.

    Raises SpecsimError if the target has no tokenizer for its vocabulary or no room for the answers,
    or the folder holds answers that were made otherwise.
    """
    if target.tokenizer is None:
        raise SpecsimError(f"target {target.name}: tokenizer: expected one in its folder, found none")
    if len(target.tokenizer) > target.vocab_size:
        raise SpecsimError(
            f"target {target.name}: tokenizer: expected at most vocab_size = {target.vocab_size} tokens, "
            f"got {len(target.tokenizer)}"
        )
    recipe = take_up(folder, fitted(target, wanted))
    respond(target, prompts, folder, recipe, progress)
    return load_responses(folder)


def fitted(target: Target, recipe: Recipe) -> Recipe:
    """``recipe`` with prompts no longer than the target's context leaves room for."""
    most = getattr(target.model.config, "max_position_embeddings", None)
    if most is None:
        return recipe
    room = most - recipe.max_tokens - recipe.extra
    if room < 1:
        raise SpecsimError(f"max_tokens: {recipe.max_tokens}: target {target.name} has a context of {most} tokens")
    return recipe.model_copy(update={"max_prompt_tokens": min(recipe.max_prompt_tokens, room)})


def take_up(folder: Path, wanted: Recipe) -> Recipe:
    """The recipe of the answers in ``folder`` if they are what is ``wanted`` or more (layers, extra tokens).

    ``wanted`` itself where nothing is there. Raises SpecsimError naming the file and the field that differs.
    """
    path = folder / MANIFEST
    if not path.exists():
        return wanted
    made = read_json(path, Manifest).recipe
    for name in Recipe.model_fields:
        before, now = getattr(made, name), getattr(wanted, name)
        if name == "layers":
            good = set(now) <= set(before)
        elif name == "extra":
            good = now <= before
        else:
            good = now == before or name in FREE
        if not good:
            raise SpecsimError(f"{path}: {name}: {before!r} in the answers there, expected {now!r}, or no folder")
    return made
