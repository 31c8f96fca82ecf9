"""Pages for the tests of the report: a small sweep with a recorded and a synthetic drafter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from conftest import make_blocks, make_profile

import specsim as ss
from specsim.acceptance import Drafter, synthetic
from specsim.report import make_report

FLOORS = [0.95, 1.3, 1.5]
EVIL = "</script><img src=x onerror=\"document.title='hit'\"><script>alert(1)</script>${1}&amp;'"


class Evil:
    """A scheduler with a name that wants to be markup </dd><img src=x onerror=alert(2)>."""

    def __repr__(self) -> str:
        return EVIL

    def __call__(self, view: Any) -> Any:
        return np.ones(view.num_seqs, dtype=np.int64)


def recorded() -> Drafter:
    """Blocks of three tokens in two domains, confidences that say the truth."""
    rng = np.random.default_rng(7)
    confidence = rng.uniform(0.2, 0.99, (64, 3)).astype(np.float32)
    accepted = (np.cumprod(confidence, axis=1) > rng.random((64, 1))).sum(axis=1)
    blocks = make_blocks(accepted.tolist(), 3, confidence=confidence, domain=["chat"] * 40 + ["code"] * 24)
    return Drafter(blocks, 3, name="mixed")


def small_sweep(*more: Any, workloads: Any = None, seeds: int = 3) -> dict[str, Any]:
    """A sweep of three schedulers and ``more`` with what it was made of."""
    workloads = workloads or [ss.ClosedLoop(c, 8, 12, measured=24) for c in (1, 4, 8)]
    other = ss.Policy(ss.StaticGamma(2), synthetic(0.7, 2, concentration=3.0, name="made"))
    policies = [ss.Policy(ss.NoSpec()), other, ss.Policy(ss.Threshold(0.5)), *(ss.Policy(m) for m in more)]
    base = ss.Scenario(make_profile(gpus=2), workloads[0], recorded(), ss.NoSpec())
    frame = ss.sweep(base, policies, workloads, range(seeds), jobs=1)
    return {"frame": frame, "scenario": base, "policies": policies, "workloads": workloads}


def made(swept: dict[str, Any], frame: pd.DataFrame | None = None, **more: Any) -> str:
    """The page of a sweep."""
    given: dict[str, Any] = {
        "floors": FLOORS,
        "command": "specsim report --of this",
        "versions": {"specsim": "0"},
        "demand": 50,
    }
    parts = (swept["scenario"], swept["policies"], swept["workloads"])
    return make_report(swept["frame"] if frame is None else frame, *parts, **(given | more))
