"""What GPUs are rated at, each with its source, and the share of it that kernels reach."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

from pydantic import Field

from specsim.files import read_json
from specsim.hardware.shape import Part
from specsim.types import SpecsimError

Rate = Annotated[float, Field(ge=1, le=1e18)]
"""No device is rated outside these; inside them every price is a finite number."""

PLAUSIBLE = {
    "bf16_flops": (1e10, 1e17, "FLOP/s"),
    "fp8_flops": (1e10, 1e17, "FLOP/s"),
    "bandwidth": (1e8, 1e15, "bytes/s"),
    "memory_bytes": (1e8, 1e15, "bytes"),
    "link_bandwidth": (1e7, 1e15, "bytes/s"),
    "link_seconds": (0, 0.1, "seconds"),
}
"""What ratings in a file are held to, with their units: datasheets tell TFLOP/s, GB and GB/s."""

FLOPS_EFFICIENCY = 0.8
"""Share of the rated FLOP/s that large GEMMs reach. Measured at 1,024 and 2,048 tokens: H200 0.74 to 0.87
(AIConfigurator 0.12's vLLM data for Qwen3-8B), RTX PRO 6000 0.59 to 0.83, RTX 4090 0.98 to 1.01 (LLMServingSim's
kernel times for Llama-3.1-8B, vLLM 0.19)."""

BANDWIDTH_EFFICIENCY = 0.8
"""Share of the rated memory bandwidth that kernels reach: AIConfigurator's empirical factor for every GPU
(``mem_bw_empirical_scaling_factor``, h200_sxm.yaml). LLMServingSim's GEMMs of one token reach 0.73 to 0.82 on an
RTX PRO 6000 and 0.87 to 0.94 on an RTX 4090."""

KERNEL_SECONDS = 3e-6
"""What any kernel costs besides, inside a CUDA graph: AIConfigurator's ``mem_empirical_constant_latency``;
LLMServingSim's norms, rotations and activations of one token take 1.9 to 2.8 µs on both GPUs."""

RESERVE_BYTES = 1.2 * 2**30
"""Memory that is neither weights nor KV: what vLLM 0.19 kept beside Llama-3.1-8B on an RTX 4090 at 2,048 tokens a
step (0.9 × 25.25 GB − 16.06 GB − 41,408 KV tokens of 131,072 bytes = 1.24 GB, LLMServingSim's run)."""

NVLINK_SECONDS, PCIE_SECONDS = 5e-6, 10e-6
"""An all-reduce of almost nothing: 4.6 to 5.1 µs on two to eight H200s (AIConfigurator 0.12's vLLM data); over PCIe
AIConfigurator's p2p_latency."""


class Device(Part):
    """A GPU's ratings: dense FLOP/s, bytes and bytes/s.

    ``link_bandwidth`` is what a GPU sends to the others of its replica, bytes/s in one direction,
    ``link_seconds`` what an all-reduce of almost nothing takes.
    """

    name: str = Field(min_length=1)
    bf16_flops: Rate
    fp8_flops: Rate | None = None
    bandwidth: Rate
    memory_bytes: Rate
    link_bandwidth: Rate
    link_seconds: Annotated[float, Field(ge=0, le=1)] = NVLINK_SECONDS
    source: str = Field(min_length=1)


# AIConfigurator 0.12 lists the same figures in its systems/*.yaml, except the RTX 4090, which it lacks.
DEVICES = {
    "a100": Device(
        name="NVIDIA A100 80GB SXM", bf16_flops=312e12, bandwidth=2.039e12, memory_bytes=80 * 2**30,
        link_bandwidth=300e9, source="NVIDIA A100 datasheet (SXM, 80 GB); NVLink 600 GB/s both ways",
    ),
    "h100": Device(
        name="NVIDIA H100 SXM", bf16_flops=989e12, fp8_flops=1978e12, bandwidth=3.35e12, memory_bytes=80 * 2**30,
        link_bandwidth=450e9, source="NVIDIA H100 datasheet (SXM), half of its FLOP/s with sparsity; NVLink 900 GB/s",
    ),
    "h200": Device(
        name="NVIDIA H200 SXM", bf16_flops=989e12, fp8_flops=1978e12, bandwidth=4.8e12, memory_bytes=141 * 2**30,
        link_bandwidth=450e9, source="NVIDIA H200 datasheet (SXM), half of its FLOP/s with sparsity; NVLink 900 GB/s",
    ),
    "b200": Device(
        name="NVIDIA B200", bf16_flops=2.25e15, fp8_flops=4.5e15, bandwidth=7.7e12, memory_bytes=180 * 2**30,
        link_bandwidth=900e9, source="NVIDIA HGX B200 (1,000 W), as in AIConfigurator's b200_sxm.yaml; NVLink 1.8 TB/s",
    ),
    "b300": Device(
        name="NVIDIA B300", bf16_flops=2.25e15, fp8_flops=4.5e15, bandwidth=7.75e12, memory_bytes=275040 * 2**20,
        link_bandwidth=900e9, source="NVIDIA HGX B300 (62 TB/s for eight), as in AIConfigurator's b300_sxm.yaml; "
        "NVLink 1.8 TB/s; memory as nvidia-smi reports it",
    ),
    "l40s": Device(
        name="NVIDIA L40S", bf16_flops=362.05e12, fp8_flops=733e12, bandwidth=864e9, memory_bytes=46068 * 2**20,
        link_bandwidth=32e9, link_seconds=PCIE_SECONDS, source="NVIDIA L40S datasheet; PCIe 4.0 x16; memory as "
        "nvidia-smi reports it",
    ),
    "rtx4090": Device(
        name="NVIDIA GeForce RTX 4090", bf16_flops=165.2e12, fp8_flops=330.3e12, bandwidth=1.008e12,
        memory_bytes=25250627584, link_bandwidth=32e9, link_seconds=PCIE_SECONDS, source="NVIDIA Ada GPU architecture "
        "whitepaper, FP32 accumulation; PCIe 4.0 x16; memory as PyTorch reports it (LLMServingSim's run)",
    ),
    "rtxpro6000": Device(
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition", bf16_flops=467.8e12, fp8_flops=935.6e12,
        bandwidth=1.792e12, memory_bytes=97887 * 2**20, link_bandwidth=64e9, link_seconds=PCIE_SECONDS,
        source="NVIDIA RTX Blackwell PRO figures at the 2,430 MHz observed, as in AIConfigurator's "
        "rtx_pro_6000_server.yaml; PCIe 5.0 x16; memory as nvidia-smi reports it",
    ),
}  # fmt: skip


def find_device(device: str) -> Device:
    """The device of this name, or the one that a JSON file of Device's fields describes.

    Raises SpecsimError for an unknown name, and a file whose ratings no device in these units has.
    """
    if found := DEVICES.get("".join(c for c in device.lower() if c not in " -_")):
        return found
    if Path(device).suffix == ".json" or Path(device).is_file():
        found = read_json(device, Device)
        for field, (low, high, unit) in PLAUSIBLE.items():
            value = getattr(found, field)
            if value is not None and not low <= value <= high:
                raise SpecsimError(f"{device}: {field}: expected {low:g} to {high:g} {unit}, got {value:g}")
        return found
    near = difflib.get_close_matches(device.lower(), DEVICES, 1)
    hint = f", did you mean {near[0]}?" if near else ""
    raise SpecsimError(f"--device: {device!r}: expected one of {', '.join(DEVICES)} or a JSON file of a GPU{hint}")
