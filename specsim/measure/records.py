"""What a measurement writes: a hardware profile and a log (JSON lines), and how two logs compare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from specsim.files import read_text, write_text
from specsim.hardware import SCHEMA, ModelShape, Profile
from specsim.hardware.tables import UNBOUNDED
from specsim.measure import machine
from specsim.measure.fit import Sum, relative_error
from specsim.measure.grid import Grid, Point
from specsim.measure.session import Session, Settings
from specsim.measure.timing import Measured
from specsim.types import SpecsimError

LOG_SCHEMA = "specsim.measure/1"
MEMORY_SHARE = 0.9
"""Of a device's memory, what engines use."""


@dataclass(frozen=True)
class Run:
    """A measurement with all that is to be said about it. ``width`` is the bytes of a number."""

    shape: ModelShape
    grid: Grid
    settings: Settings
    session: Session
    device: str
    dtype: str
    width: int
    graphs: bool

    def of(self, *kinds: str) -> list[Measured]:
        """The measured points of these kinds."""
        return [m for m in self.session.measured if m.point.kind in kinds]

    @property
    def rounds(self) -> int:
        """Samples of each point."""
        return len(self.session.measured[0].seconds)


def kv_room(shape: ModelShape, width: int, device_memory: float) -> int:
    """KV tokens that fit into ``device_memory`` bytes beside the weights, engines using nine tenths of it.

    Raises SpecsimError where not even one does, or more than a profile can say.
    """
    left = MEMORY_SHARE * device_memory - shape.parameters * width
    tokens = int(left // shape.kv_bytes_per_token(width))
    if tokens < 1:
        raise SpecsimError(
            f"--device-memory: model {shape.name} takes {shape.parameters * width / 1e9:,.1f} GB, "
            f"expected more than {device_memory / 1e9:,.1f} GB (of which {MEMORY_SHARE:.0%} are used)"
        )
    if tokens > UNBOUNDED:
        raise SpecsimError(
            f"--device-memory: {device_memory / 1e9:,.6g} GB beside model {shape.name} hold more than {UNBOUNDED:,} "
            "tokens of KV cache, expected less memory, or --kv-tokens"
        )
    return tokens


def make_profile(
    run: Run, sum_: Sum, name: str, *, command: str | None = None, kv_tokens: int | None = None
) -> Profile:
    """The hardware profile of a measurement: verification as a sum, the drafter, and where it all comes from."""
    drafts = run.of("draft")
    sync = run.of("sync")
    steps = run.grid.gamma if run.settings.drafter == "autoregressive" else 1
    verify: dict[str, Any] = {
        "type": "additive",
        "tokens": sum_.tokens.tolist(),
        "seconds": _plain(sum_.seconds),
        "low": _plain(sum_.low),
        "high": _plain(sum_.high),
        "capture_limit": run.grid.capture[-1] if run.graphs else None,
        "below": "next_size" if run.graphs else "linear",
        "num_seqs": sum_.num_seqs.tolist(),
        "seqs_seconds": _plain(sum_.seqs_seconds),
        "kv_tokens": sum_.kv_tokens.tolist(),
        "kv_seconds": _plain(sum_.kv_seconds),
    }
    draft = {
        "type": run.settings.drafter,
        "num_seqs": [m.point.num_seqs for m in drafts],
        "seconds": _plain([m.quartiles[1] / steps for m in drafts]),
    }
    return Profile.model_validate(
        {
            "schema": SCHEMA,
            "name": name,
            "kind": "measured",
            "model": f"{run.shape.name}, {run.dtype}, random weights",
            "device": run.device,
            "gpus": 1,
            "engine": "specsim measure",
            "kv_tokens": kv_tokens,
            "kv_bytes_per_token": run.shape.kv_bytes_per_token(run.width),
            "verify": verify,
            "draft": draft if drafts else None,
            "sync_seconds": float(f"{sync[0].quartiles[1]:.4g}") if sync else 0.0,
            "provenance": {
                "source": f"measured with specsim measure on {run.device}",
                "command": command,
                "date": date.today().isoformat(),
                "versions": machine.versions() | {k: str(v) for k, v in run.session.before.items() if k == "driver"},
                "notes": notes(run, sum_),
            },
        }
    )


def notes(run: Run, sum_: Sum) -> str:
    """How it was measured, how well the sum holds, and what it leaves out: for the provenance."""
    s, grid, method = run.settings, run.grid, run.session.method
    lines = [
        f"{run.rounds} rounds in random order over {s.input_sets} input sets, medians; low and high are quartiles",
        f"γ = {grid.gamma}, contexts {', '.join(map(str, grid.contexts))} (± 25 % within a batch), seed {s.seed}",
        f"{method['graphs']}, {method['attention']}, {method['between']}",
        "verification ends with the argmax of every token's logits, a prefill chunk with that of its last",
        *residual_lines(run, sum_),
    ]
    if s.drafter == "parallel":
        lines.append(f"drafter: {s.draft_layers} layers over the block, Markov head of rank {s.rank}, greedy")
    elif s.drafter == "autoregressive":
        lines.append(f"drafter: one forward a token of {s.draft_layers} layers and the target's head, greedy")
    lines.append("no time of an engine's host is in it (host_seconds 0)")
    lines.append(machine.in_words(run.session.before, run.session.after))
    return "; ".join(lines)


def residual_lines(run: Run, sum_: Sum) -> list[str]:
    """How far the sum is from the medians: over the fitted points, and those only compared."""
    points = run.of("verify", "chunk")
    error = relative_error(points, sum_)
    size = np.abs(error)
    worst = int(np.argmax(np.where(sum_.fitted, size, -1)))
    own = size[sum_.fitted]
    found = [
        f"the sum of parts misses the {len(own)} fitted medians by {np.median(own):.1%} in the median and by at most "
        f"{own.max():.1%} ({named(points[worst].point)})"
    ]
    if not sum_.fitted.all():
        rest = error[~sum_.fitted]
        kinds = {m.point.kind for m, f in zip(points, sum_.fitted, strict=True) if not f}
        what = " and ".join({"chunk": "prefill chunks", "verify": "full blocks above the graphs"}[k] for k in kinds)
        found.append(f"{len(rest)} {what}, not fitted, are priced {rest.min():+.1%} to {rest.max():+.1%}")
    return found


def named(point: Point) -> str:
    """A point in words."""
    if point.kind == "chunk":
        return f"a chunk of {point.tokens}"
    what = f"{point.num_seqs} sequence{'s' * (point.num_seqs > 1)} at context {point.context}"
    return f"{point.tokens} tokens in {what}" if point.kind == "verify" else f"{point.kind} for {what}"


def write_log(run: Run, sum_: Sum, path: str | Path, command: str | None = None) -> Path:
    """Write the log: a line that says what ran where, then one a point with its samples in seconds."""
    header = {
        "schema": LOG_SCHEMA,
        "command": command,
        "model": dict(run.shape) | {"parameters": run.shape.parameters},
        "grid": asdict(run.grid),
        "settings": asdict(run.settings),
        "device": run.device,
        "dtype": run.dtype,
        "method": run.session.method,
        "versions": machine.versions(),
        "before": run.session.before,
        "after": run.session.after,
        "seconds": round(run.session.seconds, 3),
    }
    predicted = dict(zip([m.point for m in run.of("verify", "chunk")], sum_.predicted.tolist(), strict=True))
    lines = [json.dumps(header, ensure_ascii=False)]
    for m in run.session.measured:
        q1, median, q3 = (float(f"{q:.6g}") for q in m.quartiles)
        row: dict[str, Any] = asdict(m.point) | {"kv_tokens": m.point.kv_tokens}
        if run.graphs and m.point.kind == "verify":
            row["padded"] = run.grid.padded(m.point.tokens)
        row |= {"median_s": median, "q1_s": q1, "q3_s": q3, "n": len(m.seconds)}
        if m.point in predicted:
            row["priced_s"] = float(f"{predicted[m.point]:.6g}")
        lines.append(json.dumps(row | {"seconds": _plain(m.seconds)}))
    return write_text(path, "\n".join(lines) + "\n")


def read_log(path: str | Path) -> tuple[dict[str, Any], list[Measured]]:
    """A log's first line and its points; SpecsimError names the file and line that is not one."""
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            row = json.loads(line)
            if number > 1:
                point = Point(row["kind"], *(int(row[key]) for key in ("tokens", "num_seqs", "context")))
                rows.append(Measured(point, np.array(row["seconds"], dtype=np.float64)))
            elif row["schema"] != LOG_SCHEMA:
                raise ValueError
            else:
                header: dict[str, Any] = row
        except (ValueError, KeyError, TypeError) as error:
            raise SpecsimError(f"{path}: line {number}: expected a log of specsim measure ({LOG_SCHEMA})") from error
    if not rows:
        raise SpecsimError(f"{path}: expected a log of specsim measure ({LOG_SCHEMA}), got no points")
    return header, rows


def _plain(values: Sequence[float] | Any) -> list[float]:
    return [float(f"{v:.6g}") for v in np.asarray(values).tolist()]
