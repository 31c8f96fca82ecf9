"""Prompts: a JSONL file, one conversation a line, and their tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specsim.blocktrace import TOTAL
from specsim.files import read_text
from specsim.types import SpecsimError


@dataclass(frozen=True)
class Prompt:
    """A conversation up to the answer: ``messages`` as chat templates take them, its ``domain`` and ``id``."""

    id: str
    domain: str
    messages: tuple[dict[str, str], ...]


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read prompts from JSONL: {"messages": [{"role", "content"}..]}, {"turns": [text..]} or {"prompt": text}.

    Of ``turns`` the first is asked (the second would need an answer to the first). ``domain`` and
    ``id`` are optional: the file's name and the line's number take their place. Raises SpecsimError
    naming the file and the line.
    """
    path = Path(path)
    prompts = []
    # Not splitlines, which also cuts at what JSON allows within a text (U+2028).
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SpecsimError(f"{where}: expected a JSON object: {getattr(error, 'msg', error)}") from error
        if not isinstance(row, dict):
            raise SpecsimError(f"{where}: expected a JSON object, got {type(row).__name__}")
        messages = _messages(where, row)
        domain, name = row.get("domain", path.stem), row.get("id", f"{path.stem}-{number}")
        if not (isinstance(domain, str) and domain):
            raise SpecsimError(f"{where}: domain: expected text, got {domain!r}")
        if domain == TOTAL:
            raise SpecsimError(f"{where}: domain: {TOTAL!r} is the name of the total, expected another")
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise SpecsimError(f"{where}: id: expected text or a number, got {name!r}")
        prompt = Prompt(str(name), domain, messages)
        try:
            "".join((prompt.id, domain, *(text for m in messages for text in m.values()))).encode()
        except UnicodeEncodeError as error:
            raise SpecsimError(f"{where}: expected Unicode text, got half a surrogate pair") from error
        prompts.append(prompt)
    if not prompts:
        raise SpecsimError(f"{path}: expected at least one prompt")
    ids = [prompt.id for prompt in prompts]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise SpecsimError(f"{path}: id: expected each once, got {twice!r} twice")
    return prompts


def _messages(where: str, row: dict[str, Any]) -> tuple[dict[str, str], ...]:
    if "messages" in row:
        messages = row["messages"]
        good = isinstance(messages, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        )
        if not good or not messages:
            raise SpecsimError(f'{where}: messages: expected a list of {{"role": .., "content": ..}}')
        if not any(m["content"].strip() for m in messages):
            raise SpecsimError(f"{where}: messages: expected one with text")
        return tuple({"role": m["role"], "content": m["content"]} for m in messages)
    turns = row.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else row.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise SpecsimError(f"{where}: expected messages, turns or prompt with text")
    return ({"role": "user", "content": text},)


def prompt_tokens(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of ``prompt`` with the opening of the answer, by the tokenizer's chat template if it has one.

    Raises SpecsimError naming the prompt if the template refuses it, or nothing is left of it.
    """
    special = {}
    text = "\n".join(message["content"] for message in prompt.messages)
    if getattr(tokenizer, "chat_template", None):
        try:
            text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes
            raise SpecsimError(f"prompt {prompt.id}: the target's chat template refuses it: {error}") from error
        special = {"add_special_tokens": False}
    ids = list(tokenizer(text, **special).input_ids)
    if not ids:
        raise SpecsimError(f"prompt {prompt.id}: expected text that the target's tokenizer knows, got no token")
    return ids
