"""Small cost tables of SGLang and vLLM, and how they are read."""

from __future__ import annotations

from specsim.importers.profile_parts import Ask
from specsim.importers.profiles import load_profile_source

SPS = {"sample_batch_tokens": [1, 8, 64], "sample_steps_per_sec": [100.0, 80.0, 50.0], "max_batch_tokens": 128}
ADDITIVE = {
    "bias_seconds": 0.01, "bs_probes": [1, 4], "alpha_seconds": [0.0, 0.003],
    "m_probes": [2, 10], "theta_seconds": [0.0, 0.008],
}  # fmt: skip
TABLES = {"verify": {"1": 5.0, "8": 6.0, "16": 20.0}, "draft": {"1": 0.5, "4": 1.0}}


def load(path, format="auto", **answers):
    return load_profile_source(path, format, Ask(**answers))
