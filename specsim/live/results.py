"""Files of a benchmark: results of ``vllm bench serve``, GuideLLM and AIPerf read, and a load of ours written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from specsim.files import read_text, write_text
from specsim.lengths import Empirical, Fixed, Lengths
from specsim.live.engines import Engine
from specsim.live.load import Drive
from specsim.types import Requests, SpecsimError
from specsim.workload import Arrivals, ClosedLoop, Gamma, Workload

EVEN = "constant"
"""GuideLLM's word for arrivals at even gaps."""


@dataclass(frozen=True)
class Published:
    """One load of a benchmark's file: what was asked, and what it says was measured (units of METRICS)."""

    source: str
    load: str
    users: float
    workload: Workload
    numbers: Mapping[str, float]
    model: str | None


def read_results(path: Path) -> list[Published]:
    """The loads of a results file, told by its fields; SpecsimError names file and field."""
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise SpecsimError(f"{path}: expected JSON of vllm bench serve, GuideLLM or AIPerf: {error}") from error
    if isinstance(data, dict) and isinstance(data.get("benchmarks"), list):
        rows = data["benchmarks"]
        if not rows:
            raise SpecsimError(f"{path}: benchmarks: expected at least one")
        return [_guidellm(_Cells(path, row, f"benchmarks[{i}].")) for i, row in enumerate(rows)]
    if isinstance(data, dict) and "total_output_tokens" in data:
        return [_vllm(_Cells(path, data))]
    if isinstance(data, dict) and "input_config" in data:
        return [_aiperf(_Cells(path, data))]
    raise SpecsimError(
        f"{path}: expected a result of vllm bench serve (total_output_tokens), GuideLLM (benchmarks) or AIPerf "
        "(profile_export_aiperf.json: input_config)"
    )


class _Cells:
    """Fields of a JSON object by dotted path; what is missing or of the wrong type is told with file and path."""

    def __init__(self, path: Path, data: Any, prefix: str = "") -> None:
        self.path, self.data, self.prefix = path, data, prefix

    def get(self, where: str) -> Any:
        """What stands there, None where nothing does."""
        value = self.data
        for key in where.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def number(self, *places: str, least: float = 0.0) -> float:
        """The first number that stands at one of ``places``."""
        for where in places:
            value = self.get(where)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 2**53:
                raise SpecsimError(
                    f"{self.path}: {self.prefix}{where}: expected a number, {least:g} or more and below 2^53, "
                    f"got {value!r}"
                )
            return float(value)
        raise SpecsimError(f"{self.path}: {self.prefix}{' or '.join(places)}: expected a number, got none")

    def rate(self, where: str) -> float:
        """Requests a second; infinite where it is "inf" or nothing."""
        value = self.get(where)
        return math.inf if value is None or value in ("inf", math.inf) else self.number(where, least=1e-9)

    def whole(self, *places: str) -> int:
        """The first number that stands at one of ``places``, rounded."""
        return max(1, round(self.number(*places)))

    def lengths(self, where: str) -> Lengths | None:
        """The law of a list of tokens; None where there is none."""
        values = self.get(where)
        good = isinstance(values, list) and all(isinstance(v, int) and v >= 1 for v in values)
        return Empirical(tuple(values)) if good and values else None

    def workload(self, users: int | None, rate: float, cv: float, count: int, prompt: Lengths, output: Lengths) -> Any:
        """The load: a closed loop, arrivals at a rate, or all at once."""
        if users is not None and math.isfinite(rate):
            raise SpecsimError(f"{self.path}: {self.prefix}expected a concurrency or a request rate, got both")
        if users is not None:
            return ClosedLoop(users, prompt, output, measured=20 * users)
        if math.isfinite(rate):
            return Gamma(rate, cv, count, prompt, output)
        table = Gamma(1.0, 0.0, count, prompt, output).requests(0)
        at_once = Requests(np.zeros(count), table.prompt_tokens, table.output_tokens, table.domain, table.domains)
        return Arrivals(at_once, "all at once")


def _published(cells: _Cells, tool: str, workload: Workload, numbers: Mapping[str, float], model: Any) -> Published:
    users = workload.load if workload.closed else math.nan
    name = model if isinstance(model, str) else None
    return Published(f"{tool}, {cells.path.name}", workload.label, users, workload, numbers, name)


def _vllm(cells: _Cells) -> Published:
    count = round(cells.number("completed", least=1))
    if cells.get("duration") is not None:
        cells.number("duration", least=1e-9)
    users = None if cells.get("max_concurrency") is None else cells.whole("max_concurrency")
    burstiness = cells.number("burstiness", least=1e-6) if cells.get("burstiness") is not None else 1.0
    prompt = cells.lengths("input_lens") or Fixed(max(1, round(cells.number("total_input_tokens") / count)))
    output = cells.lengths("output_lens") or Fixed(round(cells.number("total_output_tokens", least=count) / count))
    workload = cells.workload(users, cells.rate("request_rate"), burstiness**-0.5, count, prompt, output)
    tpot = cells.number("mean_tpot_ms", least=1e-9) * 1e-3
    numbers = {
        "throughput": cells.number("output_throughput", least=1e-9),
        "tpot": tpot,
        "ttft": cells.number("mean_ttft_ms", least=1e-9) * 1e-3,
        "speed": 1 / tpot,
    }
    return _published(cells, "vllm bench serve", workload, numbers, cells.get("model_id"))


def _guidellm(cells: _Cells) -> Published:
    at = next(
        (p for p in ("config.strategy", "args.strategy", "scheduler.strategy") if cells.get(p)), "config.strategy"
    )
    kind = cells.get(f"{at}.type_")
    users, rate = None, math.inf
    if kind == "synchronous":
        users = 1
    elif kind in ("concurrent", "throughput"):
        places = (f"{at}.streams", f"{at}.max_concurrency")
        users = cells.whole(*places) if kind == "concurrent" else None
    elif kind in (EVEN, "poisson", "async"):
        rate = cells.number(f"{at}.rate", least=1e-9)
    else:
        raise SpecsimError(
            f"{cells.path}: {cells.prefix}{at}.type_: expected synchronous, concurrent, throughput, constant or "
            f"poisson, got {kind!r}"
        )
    mean = "metrics.{}.successful.mean".format
    count = cells.whole("metrics.request_totals.successful", "run_stats.requests_made.successful")
    workload = cells.workload(
        users,
        rate,
        1.0 if kind == "poisson" else 0.0,
        count,
        Fixed(cells.whole(mean("prompt_token_count"))),
        Fixed(cells.whole(mean("output_token_count"))),
    )
    # Its time_per_output_token counts the first token too; the inter-token latency is our tpot.
    tpot = cells.number(mean("inter_token_latency_ms"), least=1e-9) * 1e-3
    numbers = {
        "throughput": cells.number(mean("output_tokens_per_second"), least=1e-9),
        "tpot": tpot,
        "ttft": cells.number(mean("time_to_first_token_ms"), least=1e-9) * 1e-3,
        "speed": 1 / tpot,
    }
    return _published(cells, "GuideLLM", workload, numbers, cells.get("worker.backend_model"))


def _aiperf(cells: _Cells) -> Published:
    loadgen = "input_config.loadgen"
    rate = cells.rate(f"{loadgen}.request_rate")
    told = cells.get(f"{loadgen}.concurrency")
    users = cells.whole(f"{loadgen}.concurrency") if told is not None and not math.isfinite(rate) else None
    if users is None and not math.isfinite(rate):
        users = 1  # AIPerf's default load
    cv = 0.0 if cells.get(f"{loadgen}.request_rate_mode") == EVEN else 1.0
    workload = cells.workload(
        users,
        rate,
        cv,
        cells.whole("request_count.avg"),
        Fixed(cells.whole("input_sequence_length.avg")),
        Fixed(cells.whole("output_sequence_length.avg")),
    )
    numbers = {
        "throughput": cells.number("output_token_throughput.avg", least=1e-9),
        "tpot": _aiperf_seconds(cells, "inter_token_latency"),
        "ttft": _aiperf_seconds(cells, "time_to_first_token"),
    }
    numbers["speed"] = (
        cells.number("output_token_throughput_per_user.avg", least=1e-9)
        if cells.get("output_token_throughput_per_user.avg") is not None
        else 1 / numbers["tpot"]
    )
    names = cells.get("input_config.endpoint.model_names")
    return _published(cells, "AIPerf", workload, numbers, names[0] if isinstance(names, list) and names else None)


def _aiperf_seconds(cells: _Cells, name: str) -> float:
    scales = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9}
    unit = cells.get(f"{name}.unit")
    if unit not in scales:
        raise SpecsimError(f"{cells.path}: {name}.unit: expected {', '.join(scales)}, got {unit!r}")
    return cells.number(f"{name}.avg", least=1e-12) * float(scales[unit])


def write_recorded(folder: Path, drive: Drive, engine: Engine) -> Path:
    """Write the answered requests of a load as a recorded run, which ``specsim validate recorded`` replays.

    A client sees neither when a request was queued nor when it was scheduled: both are the moment it was sent, so a
    replay's ttft includes the wait for a step's boundary.
    """
    answers = [a for a in drive.answers if a.done]
    zero = drive.answers[0].sent
    lines = []
    for a in answers:
        # One clock for all: seconds since 1970 at the load's start, and the monotonic clock from there on.
        sent, first, last = (drive.started_at + t - zero for t in (a.sent, a.chunks[0], a.finish or a.chunks[-1]))
        row = {
            "request_id": f"{drive.name}-{a.index}",
            "input_toks": a.prompt_tokens or len(a.order.prompt),
            "output_toks": a.output_tokens,
            "arrival_time": min(sent, drive.started_at + a.arrival - zero),
            "queued_ts": sent,
            "scheduled_ts": sent,
            "first_token_ts": first,
            "last_token_ts": last,
        }
        lines.append(json.dumps(row))
    block = int(engine.settings.get("block_size") or 16)
    meta: dict[str, Any] = {
        "model": engine.model,
        "num_requests": len(answers),
        "started_at": datetime.fromtimestamp(drive.started_at, UTC).isoformat(),
        "engine": engine.name,
        "engine_kwargs": {
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "block_size": block,
            "speculative_config": engine.speculation,
        },
        "load": {"name": drive.name, "counts": drive.counts(), "stopped": drive.stopped},
        "clock": "the client's: queued_ts and scheduled_ts are when a request was sent",
    }
    if engine.kv_tokens is not None:
        meta["kv_cache"] = {"num_gpu_blocks": engine.kv_tokens // block + 1, "block_size": block}
    if engine.kind == "vllm":
        meta["vllm_version"] = engine.version
    write_text(folder / "requests.jsonl", "".join(f"{line}\n" for line in lines))
    return write_text(folder / "meta.json", json.dumps(meta, indent=1, ensure_ascii=False) + "\n").parent
