"""validate live against real engines, each in an environment of its own (make engines); skipped where it is absent.

Nothing here is timed: how well predictions hold is for experiments/live_*, on a quiet machine.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("httpx", reason="the extra live is not installed")
pytest.importorskip("transformers", reason="the extra drafters is not installed")

from cut_gguf import cut
from hf_model import save
from install import installed
from serving import llamacpp, vllm
from test_live_cli import check_counts, live

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.engine
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ENGINES = ("llamacpp", "vllm")
NEEDS = {"llamacpp": 2, "vllm": 8}
"""GiB of memory, tests beside it included."""
QUICK = ["--prompt-tokens", "24", "--output-tokens", "16", "--requests", "4", "--repeat", "1", "--max-seconds", "400"]
RATES = (0.8, 0.6, 0.4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and a draft model of its first layers for each engine."""
    if not MODEL.exists():
        pytest.skip(f"{MODEL}: make models")
    folder = tmp_path_factory.mktemp("models")
    (folder / "target.gguf").symlink_to(MODEL)
    cut(MODEL, 2, folder / "draft.gguf")
    save(str(MODEL), folder / "target", None)
    save(str(MODEL), folder / "draft", 2)
    return folder


def start(engine: str, models: Path, log: Path, *options: str, gamma: int = 0) -> AbstractContextManager[str]:
    """Serve the target, with drafts of ``gamma`` tokens by the draft model if there are any."""
    if installed(engine) is None:
        pytest.skip(f"{engine} is not installed: make engines")
    if (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30) < NEEDS[engine]:
        pytest.skip(f"{engine} needs {NEEDS[engine]} GiB of memory, here are {memory:.1f}")
    if engine == "llamacpp":
        drafts = ["--spec-type", "draft-simple", "-md", str(models / "draft.gguf"), "--spec-draft-n-max", str(gamma),
                  "--spec-synth-rates", ",".join(map(str, RATES))]  # fmt: skip
        return llamacpp(models / "target.gguf", log, *(drafts if gamma else ()), *options)
    told = {"method": "draft_model", "model": str(models / "draft"), "num_speculative_tokens": gamma}
    drafts = ["--speculative-config", json.dumps(told)]
    return vllm(models / "target", log, "--no-enable-prefix-caching", *(drafts if gamma else ()), *options)


@pytest.fixture(scope="module", params=ENGINES)
def learned(request: Any, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """An engine without speculation, calibrated and checked: its name, and the folder of the report."""
    out = tmp_path_factory.mktemp(request.param)
    with start(request.param, models, out / "server.log") as url:
        code = live("--url", url, *QUICK, "--calibrate", "1,3", "--check", "2", "--poisson", "2", "--out", out,
                    "--json", out / "report.json", "--record", out / "runs")  # fmt: skip
    assert code == 0
    return request.param, out


def test_an_engine_is_known_calibrated_and_measured(learned: tuple[str, Path]):
    name, out = learned
    report = json.loads((out / "report.json").read_text())
    assert report["engine"]["kind"] == name
    assert report["engine"]["version"]
    assert report["engine"]["kv_tokens"] > 1000
    assert (report["speculates"], report["faults"], report["stopped"]) == (False, [], None)
    check_counts(report["counts"])
    assert {row["load"] for row in report["rows"]} == {"closed 2", "poisson 2/s"}
    assert all(np.isfinite(row["error"]) for row in report["rows"])
    profile = json.loads((out / "profile.json").read_text())
    assert profile["kind"] == "measured"
    assert profile["verify"]["tokens"][0] == 1
    assert profile["verify"]["tokens"][-1] >= 96
    assert (out / "runs" / "closed-2-r1" / "requests.jsonl").exists()
    # What it answered is what was asked for.
    loads = [load for load in report["loads"] if load["role"] == "check"]
    assert [load["counts"]["answered"] >= load["measured_requests"] >= 4 for load in loads] == [True, True]


def test_acceptance_is_counted_by_position(learned: tuple[str, Path], models: Path, tmp_path: Path):
    name, out = learned
    gamma = len(RATES)
    with start(name, models, tmp_path / "server.log", gamma=gamma) as url:
        # Long answers, for the last block of each is cut short, and some 280 blocks, so that 0.15 is five deviations.
        code = live("--url", url, *QUICK, "--output-tokens", 96, "--requests", 8, "--calibrate", "4", "--check", "2",
                    "--profile", out / "profile.json", "--draft-ms", 5, "--json", tmp_path / "report.json")  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    assert (code, report["speculates"], report["faults"]) == (0, True, [])
    [survival] = report["acceptance"]
    assert len(survival) == gamma
    assert all(1 >= a >= b >= 0 for a, b in itertools.pairwise(survival))
    rows = {row["metric"]: row for row in report["rows"]}
    # The last block of an answer may be cut, and llama.cpp drafts no further than an answer may go.
    assert 1 + 0.8 * gamma < rows["verified_tokens"]["measured"] <= 1 + gamma
    if name == "llamacpp":  # acceptance is what it was told to draw
        assert survival == pytest.approx(RATES, abs=0.15)
        assert rows["tau"]["measured"] == pytest.approx(1 + sum(RATES), abs=0.4)
    assert 1 <= rows["tau"]["measured"] <= 1 + gamma


def test_vllm_drafts_with_n_grams(learned: tuple[str, Path], models: Path, tmp_path: Path):
    name, out = learned
    if name != "vllm":
        pytest.skip("llama.cpp drafts tens of tokens by n-gram, or none")
    told = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with start(name, models, tmp_path / "server.log", "--speculative-config", json.dumps(told)) as url:
        code = live("--url", url, *QUICK, "--output-tokens", 48, "--calibrate", "2", "--check", "1", "--profile",
                    out / "profile.json", "--draft-ms", 0, "--json", tmp_path / "report.json")  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    assert (code, report["speculates"], report["faults"]) == (0, True, [])
    assert len(report["acceptance"][0]) == 2


def test_a_server_that_is_killed_leaves_what_was_measured(models: Path, tmp_path: Path, capsys: Any):
    server = start("llamacpp", models, tmp_path / "server.log")
    url, path = server.__enter__(), tmp_path / "report.json"

    def kill() -> None:
        time.sleep(4)
        server.__exit__(None, None, None)

    killer = threading.Thread(target=kill)
    killer.start()
    code = live("--url", url, *QUICK, "--calibrate", "1,2", "--check", "2", "--requests", 64, "--repeat", 90,
                "--timeout", 5, "--json", path)  # fmt: skip
    killer.join()
    assert code == 1
    report = json.loads(path.read_text())
    check_counts(report["counts"])
    assert report["counts"]["answered"] > 0
    assert "failed one after the other" in report["stopped"]
    assert "fault: no connection: " in capsys.readouterr().err
