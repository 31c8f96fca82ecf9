"""Runs that specsim made, recorded as an engine would have, and ways to spoil them."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import numpy as np
from conftest import make_arrivals

from specsim.engine import Scenario, simulate
from specsim.validate import simulated_load, simulated_timings

BOOT, EPOCH = 4096.0, 1_700_000_000.0  # where the engine's clock and the client's stand at the first arrival
ENGINE = {"tensor_parallel_size": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64}
BLOCKS = 13


def replayed(profile, **fields):
    """A small run under pressure: six requests for four places and twelve blocks of KV."""
    # Steps last whole 64ths of a second, so that none of these arrives just as one ends.
    load = make_arrivals([0, 0.5, 1, 2 + 1 / 128, 2.5, 30], [64, 20, 33, 16, 90, 10], [40, 9, 50, 1, 12, 40])
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_tokens": 16 * (BLOCKS - 1)}
    return simulate(Scenario(profile=profile, workload=load, **given | fields), 0, steps=True)


def meta_of(**changes):
    start = datetime.fromtimestamp(EPOCH - 2, UTC).isoformat().replace("+00:00", "Z")
    return {
        "model": "org/tiny", "vllm_version": "0.1", "engine_kwargs": ENGINE, "num_requests": 6, "started_at": start,
        "kv_cache": {"num_gpu_blocks": BLOCKS, "block_size": 16, "enable_prefix_caching": True},
    } | changes  # fmt: skip


def write_run(folder, result, *, meta=None, kv=True, slower=1.0):
    """``result`` as an engine would have recorded it; ``slower`` stretches what comes after the queue."""
    folder.mkdir(parents=True, exist_ok=True)
    timings = simulated_timings(result)
    names = ("scheduled_ts", "first_token_ts", "last_token_ts")
    rows = [
        {
            "request_id": f"r{i}",
            "input_toks": int(timings.prompt_tokens[i]),
            "output_toks": int(timings.output_tokens[i]),
            "arrival_time": EPOCH + timings.arrival_s[i],
            "queued_ts": BOOT + timings.queued_s[i],
        }
        | {
            name: BOOT + timings.queued_s[i] + slower * (column[i] - timings.queued_s[i])
            for name, column in zip(names, (timings.scheduled_s, timings.first_token_s, timings.finish_s), strict=True)
        }
        for i in range(len(timings))
    ]
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    ticks = np.arange(3.0, 90.0)  # the client starts two seconds before its first request
    load = simulated_load(result, BLOCKS - 1, ticks - 2)
    share = load.kv_share if kv else np.zeros(len(ticks))
    lines = ["t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct"]
    lines += [
        f"{t},0,0,{r:.0f},{w:.0f},{100 * s!r}"
        for t, r, w, s in zip(ticks.tolist(), load.running, load.waiting, share.tolist(), strict=True)
    ]
    (folder / "timeseries.csv").write_text("\n".join(lines) + "\n")
    (folder / "meta.json").write_text(json.dumps(meta_of() if meta is None else meta))
    return folder


def edit(name, change):
    def apply(folder):
        path = folder / name
        path.write_text(change(path.read_text()))

    return apply


def row(number, **changes):
    """Change fields of a line of requests.jsonl; None drops the field."""

    def change(text):
        lines = text.splitlines()
        data = json.loads(lines[number - 1])
        data = {k: v for k, v in (data | changes).items() if v is not ...}
        lines[number - 1] = json.dumps(data)
        return "\n".join(lines)

    return edit("requests.jsonl", change)


def meta(**changes):
    return edit("meta.json", lambda _: json.dumps(meta_of(**changes)))


def engine(**changes):
    return meta(engine_kwargs=ENGINE | changes)


def rows(**changes):
    """Change fields of all lines of requests.jsonl, each by a function of its value and the line's number."""

    def change(text):
        table = [json.loads(line) for line in text.splitlines()]
        found = [data | {name: f(data[name], i) for name, f in changes.items()} for i, data in enumerate(table)]
        return "\n".join(json.dumps(data) for data in found)

    return edit("requests.jsonl", change)
