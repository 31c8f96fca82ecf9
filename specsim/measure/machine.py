"""The machine a measurement ran on: device, versions, clocks and temperature, as far as it tells them."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from specsim.types import SpecsimError

ASKED = {
    "name": "name", "driver_version": "driver", "clocks.sm": "sm_clock_mhz", "clocks.mem": "memory_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz", "temperature.gpu": "temperature_c", "power.draw": "power_w",
    "power.limit": "power_limit_w",
}  # fmt: skip
"""What nvidia-smi is asked, and what it is called here."""


def find_device(name: str) -> torch.device:
    """The device: auto takes CUDA where there is one. Raises SpecsimError where it is not there."""
    if name not in ("auto", "cpu", "cuda"):
        raise SpecsimError(f"--device: expected auto, cpu or cuda, got {name!r}")
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds none"
        raise SpecsimError(f"--device: no CUDA device: {built} (torch {torch.__version__}); expected cpu")
    return torch.device("cpu")


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """The numbers' type; auto: bfloat16 on CUDA, float32 on a CPU."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in known:
        raise SpecsimError(f"--dtype: expected auto, {', '.join(known)}, got {name!r}")
    return known[name]


def device_name(device: torch.device) -> str:
    """What the device is called."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{_cpu_field('model name') or platform.processor() or platform.machine()}, {threads()}"


def threads() -> str:
    """The threads that torch computes with, in words."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"specsim": version("specsim"), "torch": str(torch.__version__), "python": platform.python_version()}
    if torch.version.cuda is not None:
        found["cuda"] = str(torch.version.cuda)
    return found


def condition(device: torch.device) -> dict[str, Any]:
    """Clocks, temperature and power at this moment; what cannot be read is left out."""
    if device.type == "cuda":
        return _nvidia(device)
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    if clock := _cpu_field("cpu MHz"):
        found["clock_mhz"] = float(clock)
    zones = (_text(path) for path in sorted(Path("/sys/class/thermal").glob("thermal_zone*/temp")))
    if warm := [int(text) / 1000 for text in zones if text.lstrip("-").isdigit()]:
        found["temperature_c"] = max(warm)
    load = _text(Path("/proc/loadavg")).split()
    if load:
        found["load_average"] = float(load[0])
    return found


def in_words(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The conditions before and after a run, for a note."""
    parts = []
    for key, name, unit in (
        ("sm_clock_mhz", "SM clock", "MHz"), ("memory_clock_mhz", "memory clock", "MHz"), ("clock_mhz", "clock", "MHz"),
        ("temperature_c", "temperature", "°C"), ("power_w", "power", "W"), ("load_average", "load average", ""),
    ):  # fmt: skip
        if key in before and key in after:
            parts.append(f"{name} {before[key]:g} and {after[key]:g} {unit}".rstrip())
    if not any("temperature" in part for part in parts):
        parts.append("temperature not readable")
    return "before and after: " + ", ".join(parts)


def free_bytes(device: torch.device) -> int | None:
    """Memory that can be had on the device; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _nvidia(device: torch.device) -> dict[str, Any]:
    """What nvidia-smi says of the device, found by its UUID: its numbering need not be torch's."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    which = f"GPU-{uuid}" if uuid and not uuid.startswith("GPU-") else uuid or str(device.index or 0)
    command = ["nvidia-smi", "-i", which, f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_query(line)


def parse_query(line: str) -> dict[str, Any]:
    """One line of nvidia-smi's CSV as a dictionary; numbers as numbers, what is not available left out."""
    found: dict[str, Any] = {}
    for key, text in zip(ASKED.values(), line.strip().split(","), strict=False):
        value = text.strip()
        if key in ("name", "driver"):
            found[key] = value
            continue
        try:
            found[key] = float(value)
        except ValueError:  # "[N/A]"
            continue
    return found


def _cpu_field(name: str) -> str:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
