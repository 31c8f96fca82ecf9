"""Whether step prices were measured of what a recorded run ran: its model, its GPU, its number formats."""

from __future__ import annotations

import re
from pathlib import Path

from specsim.hardware import Profile
from specsim.hardware.model_shape import Dtype
from specsim.importers.bundle import bundle_meta
from specsim.importers.engine_meta import Settings

FORMATS: dict[str, Dtype] = {"auto": "bf16", "bfloat16": "bf16", "float16": "bf16", "half": "bf16"}
"""Formats by the engine's names of those that are as wide: all that the room they take depends on."""
SAYS_LITTLE = re.compile("meta|instruct|chat|base|it|hf|fp8|bf16|fp16|awq|gptq|int4|int8|[0-9]{4}")
"""Parts of a model's name that change no shape: who made it, how it was trained, the format of its weights."""


def unlike(settings: Settings, source: Path, profile: Profile, own: bool) -> tuple[str, ...]:
    """In words, where the ``profile`` read from ``source`` and a run's ``settings`` differ.

    ``own``: the profile lies in the run's folder, which is its own word that the model is the same, whatever it is
    called. Names are compared loosely; one that is not told differs from none.
    """
    name, found = profile.name, []
    if not own and profile.model and plain_model(profile.model) != plain_model(settings.model):
        found.append(f"profile {name} is of the model {profile.model}, the run is of {settings.model}")
    if settings.device and profile.device and not same_gpu(settings.device, profile.device):
        found.append(f"profile {name} is of the device {profile.device}, the run is of {settings.device}")
    variant = _variant(source, settings.tp) if source.is_dir() else ""
    by = f"was measured as {variant}" if variant else "does not say that it was measured so"
    weights, _, kv = variant.lower().partition("-kv")
    for field, value, measured in (
        ("kv_cache_dtype", settings.kv_dtype, kv),
        ("quantization", settings.quantization or "auto", weights),
        ("dtype", settings.dtype, weights),
    ):
        if value not in FORMATS and not (measured and value.lower().startswith(measured)):
            found.append(f"the run's {field} is {value}, profile {name} {by}")
    return tuple(found)


def plain_gpu(name: str) -> str:
    """A GPU's name without what some leave out: the maker's, and how it is mounted."""
    return re.sub(r"nvidia|geforce|sxm\d?|[\s_-]", "", name.lower())


def same_gpu(one: str, other: str) -> bool:
    """Whether one name is the other or its beginning: RTX PRO 6000 and RTX PRO 6000 Blackwell Server Edition."""
    short, long = sorted((plain_gpu(one), plain_gpu(other)), key=len)
    return re.search(rf"(?<!\d){re.escape(short)}(?!\d)", long) is not None


def plain_model(name: str) -> str:
    """A model's name without its maker's, and without what says little."""
    parts = re.split(r"[\s_-]+", name.rstrip("/").rpartition("/")[2].lower())
    return "".join(part for part in parts if not SAYS_LITTLE.fullmatch(part)).replace(".", "")


def _variant(source: Path, tp: int) -> str:
    """A bundle's own word on its formats, such as bf16 or fp8-kvfp8; empty without one."""
    return str(bundle_meta(source / f"tp{tp}", source, source.parent).get("variant") or "")
