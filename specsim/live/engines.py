"""What each engine calls itself, its settings and its counters: vLLM, SGLang, llama.cpp and the reference engine."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import httpx

from specsim.importers.counters import COUNTER, read_metrics
from specsim.importers.evidence import Ask, Evidence
from specsim.importers.rates import mean_only, read_llamacpp
from specsim.live.client import Answer
from specsim.types import SpecsimError

ENGINES = ("vllm", "sglang", "llamacpp", "specsim")
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "specsim": "specsim's reference engine"}
PATIENCE = 10.0
"""Seconds that a question about the engine itself may take."""


@dataclass(frozen=True)
class Engine:
    """What a server says of itself; None where it does not.

    ``kind``: one of ENGINES. ``speculation``: its speculative settings as it tells them. ``settings``: what else it
    tells and we record. ``notes``: what could not be asked.
    """

    kind: str
    model: str
    version: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    kv_tokens: int | None = None
    speculation: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name and version, for people."""
        return f"{NAMES[self.kind]} {self.version}" if self.version else NAMES[self.kind]


async def detect(client: httpx.AsyncClient, asked: str | None = None, model: str | None = None) -> Engine:
    """Ask the server what it is; ``asked`` and ``model`` go before what it says.

    Raises SpecsimError where nothing answers, where no model is served, or where what it is cannot be told.
    """
    models = await _json(client, "/v1/models", needed=True)
    rows = models.get("data")
    known = [r for r in rows if isinstance(r, dict) and isinstance(r.get("id"), str)] if isinstance(rows, list) else []
    if not known:
        raise SpecsimError(
            f"{client.base_url}: /v1/models: expected the models that are served, got {str(models)[:80]!r}"
        )
    row = known[0] if model is None else next((r for r in known if r["id"] == model), None)
    if row is None:
        names = ", ".join(r["id"] for r in known)
        raise SpecsimError(f"--model: {model!r} is not served at {client.base_url}, expected one of {names}")
    kind = asked or await _kind(client, str(row.get("owned_by", "")))
    plain = Engine(kind, row["id"], max_model_len=_count(row.get("max_model_len")))
    return await _READERS[kind](client, plain)


async def _kind(client: httpx.AsyncClient, owner: str) -> str:
    for kind in ENGINES:
        if kind in re.sub(r"[^a-z]", "", owner.lower()):
            return kind
    for path, field_name, kind in (
        ("/props", "total_slots", "llamacpp"),
        ("/server_info", "max_running_requests", "sglang"),
        ("/get_server_info", "max_running_requests", "sglang"),
        ("/version", "version", "vllm"),
    ):
        if field_name in await _json(client, path):
            return kind
    raise SpecsimError(f"{client.base_url}: cannot tell the engine, expected --engine {' or '.join(ENGINES)}")


async def _vllm(client: httpx.AsyncClient, engine: Engine) -> Engine:
    version = (await _json(client, "/version")).get("version")
    text = await scrape(client)
    cache = re.search(r"^vllm:cache_config_info\{(.*)\}", text or "", re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', cache[1])) if cache else {}
    blocks, size = _count(labels.get("num_gpu_blocks")), _count(labels.get("block_size"))
    kept = {
        k: labels[k] for k in ("block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype") if k in labels
    }
    return replace(
        engine, version=_text(version), kv_tokens=(blocks - 1) * size if blocks and size else None, settings=kept
    )


async def _sglang(client: httpx.AsyncClient, engine: Engine) -> Engine:
    info = await _json(client, "/server_info") or await _json(client, "/get_server_info")
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    told = {**state, **info}
    return replace(
        engine,
        version=_text(told.get("version")),
        max_num_seqs=_count(told.get("max_running_requests")),
        max_num_batched_tokens=_count(told.get("chunked_prefill_size")),
        kv_tokens=_count(told.get("max_total_num_tokens")),
        speculation=told.get("speculative_algorithm"),
        settings={k: v for k, v in told.items() if k.startswith("speculative_") or k in ("tp_size", "dp_size")},
    )


async def _llamacpp(client: httpx.AsyncClient, engine: Engine) -> Engine:
    props = await _json(client, "/props")
    defaults = props.get("default_generation_settings")
    told = defaults if isinstance(defaults, dict) else {}
    slots, context = _count(props.get("total_slots")), _count(told.get("n_ctx"))
    return replace(
        engine,
        version=_text(props.get("build_info")),
        max_num_seqs=slots,
        max_model_len=context or engine.max_model_len,
        kv_tokens=slots * context if slots and context else None,
        settings={"total_slots": slots, "n_ctx": context},
    )


async def _specsim(client: httpx.AsyncClient, engine: Engine) -> Engine:
    told = await _json(client, "/version")
    props = {**await _json(client, "/props"), **told}
    return replace(
        engine,
        version=_text(props.get("version")),
        max_num_seqs=_count(props.get("max_num_seqs")),
        max_num_batched_tokens=_count(props.get("max_num_batched_tokens")),
        kv_tokens=_count(props.get("kv_tokens")),
        speculation=props.get("scheduler"),
        settings={k: v for k, v in props.items() if isinstance(v, str | int | float | bool)},
    )


_READERS: dict[str, Callable[[httpx.AsyncClient, Engine], Awaitable[Engine]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llamacpp": _llamacpp,
    "specsim": _specsim,
}


async def scrape(client: httpx.AsyncClient) -> str | None:
    """The text of /metrics; None where the server has none."""
    response = await _get(client, "/metrics")
    return response.text if response is not None and response.status_code == 200 else None


def drafts_counted(text: str | None) -> float:
    """Drafts that a scrape has counted so far; 0 where it counts none."""
    return _counted(text, "spec_decode_num_drafts")


def draft_length(before: str, after: str) -> float | None:
    """Draft tokens verified a draft between two scrapes, on average; None without drafts."""
    drafts, tokens = (
        _counted(after, f"spec_decode_num_{name}") - _counted(before, f"spec_decode_num_{name}")
        for name in ("drafts", "draft_tokens")
    )
    return tokens / drafts if drafts > 0 and tokens > 0 else None


class Drafted(NamedTuple):
    """What decoding requests did in a load: ``cycles``, ``draft_tokens`` verified and those ``accepted``."""

    cycles: float
    draft_tokens: float
    accepted: float

    @property
    def tau(self) -> float:
        """Tokens a cycle."""
        return 1 + self.accepted / self.cycles

    @property
    def verified_tokens(self) -> float:
        """Tokens a request has in a step: its own and its drafts."""
        return 1 + self.draft_tokens / self.cycles


def drafted(before: str | None, after: str | None, answers: Sequence[Answer]) -> Drafted | None:
    """What counters tell of the cycles between two scrapes, or llama.cpp's ``timings`` of ``answers``; None of neither.

    The reference engine counts all cycles, others those with drafts: where some have none, as with n-grams, τ and
    tokens are those of the others.
    """
    cycles, drafts, tokens, accepted = (
        _counted(after, name) - _counted(before, name)
        for name in ("num_decodes", *(f"spec_decode_num_{n}" for n in ("drafts", "draft_tokens", "accepted_tokens")))
    )
    if drafts > 0:
        return Drafted(cycles if cycles > 0 else drafts, tokens, accepted)
    rows = _timed(answers)
    cycles = sum(row["predicted_n"] - 1 - row["draft_n_accepted"] for row in rows)
    if cycles < 1:
        return None
    return Drafted(cycles, *(sum(row[name] for row in rows) for name in ("draft_n", "draft_n_accepted")))


def _counted(text: str | None, name: str) -> float:
    """The sum of a counter over all its labels."""
    pattern = rf"^\w+:{name}(?:_total)?(?:\{{[^}}]*\}})? ([0-9.e+]+)"
    return sum(float(value) for value in re.findall(pattern, text or "", re.MULTILINE))


def has_counters(text: str | None) -> bool:
    """Whether a scrape counts drafts by position."""
    return COUNTER.search(text or "") is not None


def counted_acceptance(before: str, after: str, drafter: str | None = None) -> Evidence:
    """What counters tell of the drafts between two scrapes; SpecsimError where they contradict themselves."""
    return read_metrics("/metrics", after, Ask(drafter=drafter), earlier=before)


def timed_acceptance(answers: Sequence[Answer]) -> tuple[Evidence, int] | None:
    """What llama.cpp's ``timings`` of ``answers`` tell, and the length of their drafts; None without drafts.

    They hold one mean: acceptance is taken as the same at every position.
    """
    rows = _timed(answers)
    cycles = sum(r["predicted_n"] - 1 - r["draft_n_accepted"] for r in rows)
    if cycles < 1:
        return None
    gamma = max(1, round(sum(r["draft_n"] for r in rows) / cycles + 0.499))
    text = "\n".join(json.dumps({"timings": row}) for row in rows)
    return read_llamacpp("timings", text, Ask(gamma=gamma)), gamma


def _timed(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """llama.cpp's ``timings`` of the answers that had drafts."""
    return [dict(a.timings) for a in answers if a.done and a.timings and a.timings.get("draft_n")]


def gauged_acceptance(text: str | None, engine: Engine) -> Evidence | None:
    """What SGLang's one mean, ``sglang:spec_accept_length``, tells; None where it or the block's length is not told."""
    found = re.search(r"^sglang:spec_accept_length(?:\{[^}]*\})? ([0-9.e+-]+)$", text or "", re.MULTILINE)
    width = _count(engine.settings.get("speculative_num_draft_tokens"))
    if found is None or width is None or width < 2:
        return None
    return mean_only("accepted length of SGLang", min(max(float(found[1]), 1.0), float(width)), width - 1)


async def _get(client: httpx.AsyncClient, path: str) -> httpx.Response | None:
    try:
        return await client.get(path, timeout=PATIENCE)
    except httpx.HTTPError:
        return None


async def _json(client: httpx.AsyncClient, path: str, *, needed: bool = False) -> dict[str, Any]:
    """The object at ``path``; empty where there is none, a SpecsimError where it is ``needed``."""
    try:
        response = await client.get(path, timeout=PATIENCE)
        data = response.json() if response.status_code == 200 else None
        why = f"HTTP {response.status_code}"
    except httpx.HTTPError as error:
        data, why = None, f"{type(error).__name__}: {error}"
    except (ValueError, RecursionError):
        data, why = None, "not JSON"
    if needed and not isinstance(data, dict):
        raise SpecsimError(f"{client.base_url}: {path}: expected an OpenAI-compatible server, got {why}")
    return data if isinstance(data, dict) else {}


def _count(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError):
        return None
    return number if 1 <= number < 2**50 else None


def _text(value: Any) -> str | None:
    return value[:80] if isinstance(value, str) and value else None
