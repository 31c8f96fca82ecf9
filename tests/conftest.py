"""Small things that many tests build on: a tiny profile, a tiny drafter, a hand-made workload.

Prices are multiples of 1/64 s, so that sums of step durations are exact in floating point and a
scenario worked out by hand can be compared with ``==``.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from specsim.acceptance import Drafter
from specsim.blocktrace import Trace, TraceMeta, make_trace
from specsim.cli import main, show
from specsim.hardware import DraftCost, Profile
from specsim.types import Requests
from specsim.workload import Arrivals

# The same examples on every machine and in every run: a red test stays red.
hypothesis_settings.register_profile(
    "specsim", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("specsim")

# A shell starts what it runs in the background deaf to Ctrl-C, and so are the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TICK = 1 / 64


def make_profile(**fields: Any) -> Profile:
    """A profile whose step of B tokens lasts 1 + B/64 seconds and whose draft is free, unless said otherwise."""
    largest = 1 + 64 * 256
    given = {
        "schema": "specsim.profile/1",
        "name": "tiny",
        "kind": "analytic",
        "model": "none",
        "device": "none",
        "gpus": 1,
        "verify": {
            "type": "table1d",
            "tokens": [1, largest],
            "seconds": [1 + TICK, 1 + largest * TICK],
            "below": "linear",
        },
        "draft": {"type": "parallel", "num_seqs": [1, 2048], "seconds": [0.0, 0.0]},
        "provenance": {"source": "made up for a test"},
    }
    return Profile.model_validate(given | fields)


def staircase(tokens: list[int], seconds: list[float], **fields: Any) -> dict[str, Any]:
    """A table1d as it stands in a profile."""
    return {"type": "table1d", "tokens": tokens, "seconds": seconds} | fields


def draft_cost(seconds: float, kind: str = "parallel") -> DraftCost:
    """A draft cost that does not depend on the number of sequences."""
    return DraftCost.model_validate({"type": kind, "num_seqs": [1, 2048], "seconds": [seconds, seconds]})


def make_blocks(
    accepted: list[int],
    gamma: int,
    *,
    kind: str = "dense",
    confidence: Any = "distinct",
    proposed: list[int] | None = None,
    domain: list[str] | None = None,
    request_id: list[str] | None = None,
    position: list[int] | None = None,
    **meta: Any,
) -> Trace:
    """A block trace of one response a domain, unless told otherwise.

    ``confidence="distinct"`` gives every row a first confidence that no other row has, so that a
    scheduler's view tells which row it stands on: 1/2 + row/(2n).
    """
    n = len(accepted)
    domain = domain if domain is not None else ["text"] * n
    if isinstance(confidence, str):
        confidence = np.full((n, gamma), 0.75, dtype=np.float32)
        confidence[:, 0] = 0.5 + np.arange(n) / (2 * n)
    if position is None:
        seen: dict[str, int] = {}
        position = [seen.update({d: seen.get(d, -1) + 1}) or seen[d] for d in domain]  # type: ignore[func-returns-value]
    given = {"drafter": "d", "target": "t", "gamma": gamma, "kind": kind}
    if confidence is None:
        given["confidence_source"] = "none"
    columns = {
        "request_id": request_id if request_id is not None else [f"r-{d}" for d in domain],
        "domain": domain,
        "position": np.array(position),
        "confidence": confidence,
        "accepted": np.array(accepted),
        "proposed": np.full(n, gamma) if proposed is None else np.array(proposed),
    }
    return make_trace(TraceMeta.model_validate(given | meta), columns, "blocks")


def always(accepted: int, gamma: int, **fields: Any) -> Drafter:
    """A drafter whose every block of ``gamma`` has ``accepted`` tokens that survive."""
    return Drafter(make_blocks([accepted] * 40, gamma), gamma, name="always", **fields)


def make_arrivals(
    arrival: list[float],
    prompt: list[int] | int,
    output: list[int] | int,
    domain: list[int] | None = None,
    domains: tuple[str, ...] = ("",),
) -> Arrivals:
    """An open-loop workload, request by request; a single length is that of all."""
    n = len(arrival)
    return Arrivals(
        Requests(
            arrival_s=np.array(arrival, dtype=np.float64),
            prompt_tokens=np.broadcast_to(np.array(prompt, dtype=np.int64), n).copy(),
            output_tokens=np.broadcast_to(np.array(output, dtype=np.int64), n).copy(),
            domain=np.zeros(n, dtype=np.int64) if domain is None else np.array(domain, dtype=np.int64),
            domains=domains,
        )
    )


@pytest.fixture
def profile() -> Profile:
    """The tiny profile: a step of B tokens lasts 1 + B/64 seconds."""
    return make_profile()


@pytest.fixture
def drafter() -> Drafter:
    """Blocks of three tokens, 64 rows in two domains, acceptance and confidences of all sizes."""
    rng = np.random.default_rng(7)
    confidence = rng.uniform(0.2, 0.99, (64, 3)).astype(np.float32)
    accepted = (np.cumprod(confidence, axis=1) > rng.random((64, 1))).sum(axis=1)
    return Drafter(
        make_blocks(accepted.tolist(), 3, confidence=confidence, domain=["chat"] * 40 + ["code"] * 24), 3, name="mixed"
    )


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Call the command line: exit code, stdout, stderr, where no progress shows however busy the machine is."""
    monkeypatch.setattr(show, "PATIENCE", 1e9)

    def call(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a source: text as it is, anything else as JSON."""

    def call(content: Any, name: str = "source.txt") -> Path:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return call
