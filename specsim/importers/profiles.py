"""Others' measurements of what a step costs as hardware profiles of ours: the formats and how they are told apart.

The modules beside this one tell each format's fields: ``cost_tables`` those of SGLang and vLLM and plain
columns, ``bundle`` per-layer kernel times, ``silicon`` what AIConfigurator measured of a model's operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from datetime import date
from math import isfinite
from pathlib import Path

from specsim.files import parse_json, read_text
from specsim.hardware import Profile, Shape, step_cost
from specsim.importers.bundle import read_bundle
from specsim.importers.cost_tables import read_additive, read_columns, read_draft, read_sps, read_vllm, with_draft
from specsim.importers.engine_steps import is_step_log, read_steps
from specsim.importers.profile_parts import COMMON, Ask, Found, build_profile, check_bounds, json_kind, option, shown
from specsim.importers.silicon import read_silicon
from specsim.types import SpecsimError

# What reads each format (given its path, its text where it is a file, and the answers), and the answers it takes
# besides COMMON. A format that is not a file of its own is chosen by --format alone: it goes in here too.
_READERS: dict[str, tuple[Callable[[Path, str, Ask], Found], tuple[str, ...]]] = {
    "sglang": (read_sps, ("as_engine", "monotone")),
    "sglang-additive": (read_additive, ("as_engine", "monotone")),
    "vllm": (read_vllm, ("capture_limit", "monotone", "unit")),
    "csv": (read_columns, ("capture_limit", "monotone", "unit")),
    "steps": (read_steps, ()),
    "bundle": (
        lambda path, text, ask: read_bundle(path, ask),
        ("config", "no_skew", "kv_reads", "expert_parallel", "link_bandwidth", "link_latency"),
    ),
    "aiconfigurator": (
        read_silicon,
        (
            "system",
            "backend",
            "engine_version",
            "kv_reads",
            "utilisation",
            "max_context",
            "draft_layers",
            "draft_gamma",
        ),
    ),
}
LONG_DRAFT = 20
"""Verify steps beyond which a drafter's time is rather one in another unit: it is there to be shorter than one."""
LONG_HOST = 0.1
"""Seconds of host time a step beyond which they are rather milliseconds."""
_BY_NAME = ("aiconfigurator",)
"""Formats whose source is a name, not a path."""
FORMATS = tuple(_READERS)
"""SGLang's steps per second and additive times (JSON); vLLM's cost tables (JSON, or rows with a part); columns of
tokens and time; the steps that serve-reference logs; LLMServingSim's bundle of per-layer kernel times (a folder);
AIConfigurator's data of a model."""


def load_profile_source(path: str | Path, format: str = "auto", ask: Ask | None = None) -> tuple[Profile, list[str]]:
    """Read others' step times from ``path``, a file or a bundle's folder, as a profile and warnings to show.

    ``format``: one of FORMATS, or "auto" to tell by content. ``ask`` is what the user says:

    - of any source: name, model, device, gpus, tp, engine, kv_tokens, max_num_tokens, host_seconds (s a step),
      date and command, for the profile; they go before what the source says; ``draft`` (a second file: time by
      sequences), where the source holds no draft cost;
    - of SGLang's tables: ``as_engine`` reads them as the engine does (the probe below, the last price beyond);
    - of tables: ``capture_limit`` (tokens of the largest CUDA graph), ``monotone`` (running maximum, as vLLM),
      ``unit`` (ms, us, s) where no name tells it, also of ``draft``;
    - of bundles: ``config`` (Hugging Face config.json), ``no_skew``, ``kv_reads``, ``expert_parallel`` (ranks that
      share the experts), ``link_bandwidth`` (bytes/s) and ``link_latency`` (s) of all-reduces;
    - of AIConfigurator (``path`` names the model): the arguments of ``specsim.importers.silicon.load_silicon``.

    Raises SpecsimError, in one line: file, field or row, what was expected; also for an answer that the format
    has no use for.
    """
    path, ask = Path(path), ask or Ask()
    _check(ask)
    text = "" if path.is_dir() or format in _BY_NAME else read_text(path)
    name = _format(path, text) if format == "auto" else format
    if name not in _READERS:
        raise SpecsimError(f"--format: expected auto or one of {', '.join(FORMATS)}, got {format!r}")
    if name not in _BY_NAME and path.is_dir() != (name == "bundle"):
        raise SpecsimError(f"{path}: expected {'a folder' if name == 'bundle' else 'a file'} for the format {name}")
    read, uses = _READERS[name]
    if ask.draft is not None:
        uses = (*uses, "unit")
    for field in fields(Ask):
        given = getattr(ask, field.name)
        if not (given is None or given is False or field.name in (*COMMON, *uses)):
            users = ", ".join(other for other, (_, known) in _READERS.items() if field.name in known)
            raise SpecsimError(f"{path}: {option(field.name)}: has no meaning for the format {name}, only for {users}")
    if ask.draft is not None and path.exists() and ask.draft.exists() and path.samefile(ask.draft):
        raise SpecsimError(f"--draft: {ask.draft}: is the source itself, expected another file")
    draft = read_draft(ask)
    found = with_draft(path, read(path, text, ask), draft)
    profile = build_profile(path, found, ask)
    if doubts := _doubts(profile):
        found = replace(found, warnings=(*found.warnings, *doubts))
        profile = build_profile(path, found, ask)
    return profile, list(found.warnings)


def _doubts(profile: Profile) -> list[str]:
    """Warnings of times that may be in another unit than they were taken for, beside the rest of the ``profile``."""
    doubts = []
    if profile.host_seconds > LONG_HOST:
        doubts.append(f"The host takes {profile.host_seconds:g} s a step (--host-seconds): are these seconds, not ms?")
    low, high = profile.verify.range
    for seqs, seconds in zip(
        *((profile.draft.num_seqs, profile.draft.seconds) if profile.draft else ((), ())), strict=True
    ):
        if not seconds or seqs > high:
            continue
        # Where the table starts above so few tokens, its first size; KV as little as the prices know.
        extra = max(0, low - seqs)
        cost = step_cost(profile, seqs + extra, seqs, 0)
        steps = [float(cost.curve(Shape(seqs, seqs * kv), extra)[extra]) for kv in (1024.0, 1.0, 0.0)]
        step = next((s for s in steps if isfinite(s)), None)
        if step is not None and seconds > LONG_DRAFT * step:
            doubts.append(
                f"Drafting for {seqs} sequence{'s' * (seqs != 1)} lasts {seconds:.4g} s, "
                f"{seconds / step:,.0f} verify steps of them ({step:.4g} s each): is the drafting in the same unit?"
            )
            break
    return doubts


def _check(ask: Ask) -> None:
    """Say in the words of the command line what is out of range, before anything is read."""
    for name, value in vars(ask).items():
        if isinstance(value, str) and not value.strip():
            raise SpecsimError(f"{option(name)}: expected a text, got an empty one")
    if ask.date is not None and not _is_date(ask.date):
        raise SpecsimError(f"--date: expected a day as 2026-08-14, got {shown(ask.date)}")
    if ask.draft is not None and ask.draft_layers is not None:
        raise SpecsimError("--draft, --draft-layers: expected one of them, since both give a draft cost")
    check_bounds(vars(ask), option)


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _format(path: Path, text: str) -> str:
    """Tell a format by content."""
    if path.is_dir():
        return "bundle"
    start = text.lstrip()
    if is_step_log(start):
        return "steps"
    if start.startswith(("{", "[")):
        try:
            data = parse_json(text)
        except ValueError as error:
            raise SpecsimError(f"{path}: expected JSON: {error}") from error
        if not isinstance(data, dict):
            raise SpecsimError(f"{path}: expected one of the formats {', '.join(FORMATS)}, got {json_kind(data)}")
        keys = set(data)
        if "bias_seconds" in keys:
            return "sglang-additive"
        if "sample_batch_tokens" in keys or "sample_steps_per_sec" in keys:
            return "sglang"
        if "schema" in keys:
            raise SpecsimError(f"{path}: schema: expected another's file, got {data['schema']!r}: it needs no import")
        if any(key.startswith(("verify", "draft")) for key in keys):
            return "vllm"
        raise SpecsimError(f"{path}: expected one of the formats {', '.join(FORMATS)}, got fields {sorted(keys)!r:.60}")
    if not start:
        raise SpecsimError(f"{path}: expected one of the formats {', '.join(FORMATS)}, got an empty file")
    heads = [cell.strip().lower() for cell in start.splitlines()[0].replace(";", ",").replace("\t", ",").split(",")]
    return "vllm" if "part" in heads else "csv"
