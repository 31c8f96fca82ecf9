"""What a client may ask of the reference engine: OpenAI's completions and chat completions, checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from specsim.drafters.prompts import Prompt, prompt_tokens
from specsim.drafters.target import Target
from specsim.live.wire import HttpError
from specsim.types import SpecsimError

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "repetition_penalty": (1,), "logprobs": (False,), "top_logprobs": (0,), "echo": (False,),
    "stop": ([], ""), "stop_token_ids": ([],), "min_tokens": (0,), "logit_bias": ({},), "suffix": ("",),
    "use_beam_search": (False,), "tools": ([],), "response_format": ({"type": "text"},),
}  # fmt: skip
"""What would change an answer and is not to be had, with the values that change nothing (null never does)."""


@dataclass(frozen=True)
class Asked:
    """A request as the engine takes it, and how its answer is to be sent.

    ``chat``: as chat completions; ``usage``: a last event with the token counts; ``ids``: token ids beside the text.
    """

    prompt: list[int]
    max_tokens: int | None
    temperature: float | None
    ignore_eos: bool
    chat: bool
    stream: bool
    usage: bool
    ids: bool


def read_asked(body: bytes, target: Target, name: str, chat: bool) -> Asked:
    """Check the body of a request to the model served as ``name``; HttpError, 400 or 404, names the field."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"expected a JSON object: {error}") from error
    if not isinstance(data, dict):
        raise HttpError(400, f"expected a JSON object, got {type(data).__name__}")
    model = data.get("model")
    if model is not None and model != name:
        raise HttpError(404, f"model: expected {name!r}, got {model!r}")
    for field, neutral in NEUTRAL.items():
        value = data.get(field)
        if value is not None and value not in neutral:
            raise HttpError(400, f"{field}: expected {json.dumps(neutral[0])} or nothing, got {_short(value)}")
    limit = "max_completion_tokens" if chat and data.get("max_completion_tokens") is not None else "max_tokens"
    most = _whole(data, limit, None if chat else 16)
    options = data.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise HttpError(400, f"stream_options: expected an object, got {_short(options)}")
    return Asked(
        prompt=_chat_prompt(data, target) if chat else _text_prompt(data, target),
        max_tokens=most,
        temperature=_temperature(data),
        ignore_eos=_flag(data, "ignore_eos"),
        chat=chat,
        stream=_flag(data, "stream"),
        usage=_flag(options or {}, "include_usage"),
        ids=_flag(data, "return_token_ids"),
    )


def _text_prompt(data: dict[str, Any], target: Target) -> list[int]:
    prompt = data.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise HttpError(400, f"prompt: expected one text or one list of token ids, got {_short(prompt)}")
    if target.tokenizer is None:
        raise HttpError(400, "prompt: expected token ids: the target has no tokenizer")
    try:
        return list(target.tokenizer(prompt).input_ids)
    except Exception as error:  # a tokenizer raises what it likes
        raise HttpError(400, f"prompt: the target's tokenizer refuses it: {error}") from error


def _chat_prompt(data: dict[str, Any], target: Target) -> list[int]:
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise HttpError(400, f"messages: expected a list with a message at least, got {_short(messages)}")
    if target.tokenizer is None:
        raise HttpError(400, "messages: the target has no tokenizer, expected /v1/completions and token ids")
    told = []
    for i, message in enumerate(messages):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(part["text"] for part in content)
        if not (isinstance(role, str) and isinstance(content, str)):
            raise HttpError(400, f'messages[{i}]: expected {{"role": "..", "content": ".."}}, got {_short(message)}')
        told.append({"role": role, "content": content})
    try:
        return prompt_tokens(target.tokenizer, Prompt("request", "chat", tuple(told)))
    except SpecsimError as error:
        raise HttpError(400, str(error)) from error
    except Exception as error:
        raise HttpError(400, f"messages: the target's tokenizer refuses them: {error}") from error


def _temperature(data: dict[str, Any]) -> float | None:
    value = data.get("temperature")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
        raise HttpError(400, f"temperature: expected a number within 0..100, got {_short(value)}")
    return float(value)


def _whole(data: dict[str, Any], field: str, default: int | None) -> int | None:
    value = data.get(field)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise HttpError(400, f"{field}: expected a whole number of 1 or more, got {_short(value)}")
    return value


def _flag(data: dict[str, Any], field: str) -> bool:
    value = data.get(field)
    if value is not None and not isinstance(value, bool):
        raise HttpError(400, f"{field}: expected true or false, got {_short(value)}")
    return bool(value)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
