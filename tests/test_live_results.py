"""Files of other benchmarks, predicted from a profile and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("httpx", reason="the extra live is not installed")

from conftest import make_profile, staircase

from specsim.cli import main
from specsim.engine import Scenario, simulate
from specsim.hardware import save_profile
from specsim.live.results import read_results
from specsim.metrics import summarize
from specsim.types import SpecsimError
from specsim.workload import Arrivals, ClosedLoop, Gamma

VLLM: dict[str, Any] = {
    "model_id": "m", "num_prompts": 3, "completed": 3, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 4,
    "total_input_tokens": 30, "total_output_tokens": 24, "output_throughput": 80.0, "mean_ttft_ms": 50.0,
    "mean_tpot_ms": 20.0,
}  # fmt: skip


def mean(value: float) -> dict[str, Any]:
    return {"successful": {"mean": value, "median": 0.0}}


def guidellm(strategy: dict[str, Any]) -> dict[str, Any]:
    metrics = {
        "request_totals": {"successful": 30, "errored": 0},
        "output_tokens_per_second": mean(80.0),
        "inter_token_latency_ms": mean(20.0),
        "time_per_output_token_ms": mean(21.0),
        "time_to_first_token_ms": mean(50.0),
        "prompt_token_count": mean(10.2),
        "output_token_count": mean(8.0),
    }
    return {"config": {"strategy": strategy}, "metrics": metrics}


AIPERF: dict[str, Any] = {
    "request_count": {"unit": "requests", "avg": 30.0},
    "input_sequence_length": {"unit": "tokens", "avg": 10.0},
    "output_sequence_length": {"unit": "tokens", "avg": 8.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 80.0},
    "output_token_throughput_per_user": {"unit": "tokens/sec/user", "avg": 51.0},
    "inter_token_latency": {"unit": "ms", "avg": 20.0},
    "time_to_first_token": {"unit": "ms", "avg": 50.0},
    "input_config": {"endpoint": {"model_names": ["m"]}, "loadgen": {"concurrency": 4}},
}


def write(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("data", "source", "speed"),
    [
        (VLLM, "vllm bench serve", 50.0),
        ({"benchmarks": [guidellm({"type_": "concurrent", "streams": 4})]}, "GuideLLM", 50.0),
        (AIPERF, "AIPerf", 51.0),
    ],
)
def test_a_closed_loop_of_each_tool(tmp_path, data: Any, source: str, speed: float):
    [found] = read_results(write(tmp_path, data))
    assert found.source == f"{source}, result.json"
    assert isinstance(found.workload, ClosedLoop)
    assert (found.load, found.users) == ("closed 4", 4)
    assert found.numbers == pytest.approx({"throughput": 80.0, "tpot": 0.02, "ttft": 0.05, "speed": speed})
    prompt, output = next(found.workload.lengths(0))
    assert (set(prompt.tolist()), set(output.tolist())) == ({10}, {8})


def test_open_loads(tmp_path):
    [found] = read_results(write(tmp_path, VLLM | {"request_rate": 5.0, "burstiness": 4.0, "max_concurrency": None}))
    assert isinstance(found.workload, Gamma)
    assert (found.workload.rate, found.workload.cv) == (5.0, 0.5)
    kinds = [{"type_": "poisson", "rate": 3}, {"type_": "constant", "rate": 3}, {"type_": "synchronous"}]
    found_kinds = read_results(write(tmp_path, {"benchmarks": [guidellm(kind) for kind in kinds]}))
    assert [p.load for p in found_kinds] == ["gamma 3/s cv 1", "gamma 3/s cv 0", "closed 1"]
    [found] = read_results(write(tmp_path, AIPERF | {"input_config": {"loadgen": {"request_rate": 2.5}}}))
    assert (found.load, found.model) == ("gamma 2.5/s cv 1", None)


def test_all_at_once_and_lengths_one_by_one(tmp_path):
    data = VLLM | {"max_concurrency": None, "input_lens": [5, 10, 15], "output_lens": [4, 8, 12]}
    [found] = read_results(write(tmp_path, data))
    assert isinstance(found.workload, Arrivals)
    table = found.workload.table
    assert not table.arrival_s.any()
    assert set(np.unique(table.output_tokens)) <= {4, 8, 12}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([], "expected a result of vllm bench serve"),
        ({"benchmarks": []}, "benchmarks: expected at least one"),
        (VLLM | {"mean_tpot_ms": "fast"}, "mean_tpot_ms: expected a number, 1e-09 or more and below 2.53, got 'fast'"),
        (VLLM | {"completed": 0}, "completed: expected a number, 1 or more"),
        (VLLM | {"total_output_tokens": 0}, "total_output_tokens: expected a number, 3 or more"),
        (VLLM | {"duration": float("nan")}, "duration: expected a number"),
        (VLLM | {"request_rate": 3.0}, "expected a concurrency or a request rate, got both"),
        (
            {"benchmarks": [guidellm({"type_": "sweep"})]},
            r"benchmarks\[0\].config.strategy.type_: expected synchronous",
        ),
        (
            {"benchmarks": [{"config": {"strategy": {"type_": "synchronous"}}}]},
            "successful: expected a number, got none",
        ),
        (AIPERF | {"time_to_first_token": {"unit": "fortnights", "avg": 1}}, "time_to_first_token.unit: expected ms"),
    ],
)
def test_bad_files_are_told_with_file_and_field(tmp_path, data: Any, expected: str):
    with pytest.raises(SpecsimError, match=expected) as error:
        read_results(write(tmp_path, data))
    assert "result.json: " in str(error.value)


def test_from_results_compares_what_a_profile_predicts(tmp_path, capsys):
    profile = make_profile(kind="measured", verify=staircase([1, 64], [0.010, 0.073], below="linear"))
    path = tmp_path / "profile.json"
    save_profile(profile, path)
    truth = summarize(simulate(Scenario(profile, ClosedLoop(4, 10, 8, measured=80)))).iloc[0]
    files = []
    for i, off in enumerate((0.99, 1.01)):  # two files of one load are its repetitions
        numbers = {"output_throughput": off * truth["throughput"], "mean_tpot_ms": 1e3 * truth["tpot_mean"],
                   "mean_ttft_ms": 1e3 * truth["ttft_mean"]}  # fmt: skip
        files.append(tmp_path / f"{i}.json")
        files[-1].write_text(json.dumps(VLLM | numbers))
    report = tmp_path / "report.json"
    arguments = ["validate", "live", "--profile", str(path), "--max-throughput-error", "2%", "--json", str(report)]
    for file in files:
        arguments += ["--from-results", str(file)]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--out", str(tmp_path / "out")])
    assert end.value.code == 0, capsys.readouterr().err
    rows = {row["metric"]: row for row in json.loads(report.read_text())["rows"]}
    assert rows["throughput"]["error"] == pytest.approx(0.0, abs=1e-6)
    assert rows["throughput"]["spread"] == pytest.approx(0.01414, rel=0.01)
    assert rows["tpot"]["error"] == pytest.approx(0.0, abs=1e-6)
    assert (tmp_path / "out" / "live.png").exists()
    assert not (tmp_path / "out" / "profile.json").exists()  # none was learned
    files[0].write_text(json.dumps(VLLM | {"output_throughput": 2 * truth["throughput"]}))
    with pytest.raises(SystemExit) as end:
        main(arguments[:-2])
    assert end.value.code == 1
    assert "gate broken: closed 4 throughput" in capsys.readouterr().err
