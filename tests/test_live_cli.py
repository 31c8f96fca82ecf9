"""specsim validate live from the command line, against a fake server on a real loopback port."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx", reason="the extra live is not installed")

from conftest import make_profile
from fake_engine import FakeEngine, serve

from specsim.acceptance import Drafter, synthetic
from specsim.cli import main
from specsim.cli.living import _draft_len
from specsim.hardware import load_profile, save_profile
from specsim.importers.recorded import read_run
from specsim.request_table import write_requests
from specsim.schedulers import DSparkAsync, StaticGamma
from specsim.workload import Poisson

QUICK = ["--calibrate", "1,2", "--check", "2", "--prompt-tokens", "16", "--output-tokens", "12", "--requests", "4",
         "--repeat", "1"]  # fmt: skip


def step(decodes: int, prompt: int) -> float:
    return 0.002 + 0.0005 * (decodes + prompt)


def live(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as end:
        main(["validate", "live", *map(str, arguments)])
    return int(end.value.code or 0)


def check_counts(counts: dict[str, int]) -> None:
    assert counts["sent"] == sum(count for name, count in counts.items() if name != "sent")


def test_a_run_from_calibration_to_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SPECSIM_API_KEY", "very-secret")
    engine = FakeEngine(step)
    out, record, path = tmp_path / "out", tmp_path / "runs", tmp_path / "live.json"
    with serve(engine) as server:
        code = live("--url", server.url, *QUICK, "--repeat", 2, "--poisson", 20, "--out", out, "--record", record,
                    "--json", path, "--max-tpot-error", "90%")  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0
    assert "vLLM 0.99, tiny" in printed.out
    assert "step ms by running requests: 1: " in printed.out
    assert "closed 2" in printed.out
    assert "poisson 20/s" in printed.out
    data = json.loads(path.read_text())
    check_counts(data["counts"])
    assert data["engine"] | {"settings": None} == {
        "kind": "vllm", "version": "0.99", "model": "tiny", "max_num_seqs": None, "max_num_batched_tokens": None,
        "kv_tokens": 16000, "speculation": None, "settings": None,
    }  # fmt: skip
    assert {row["metric"] for row in data["rows"]} == {"throughput", "tpot", "ttft", "speed"}
    assert all(len(row["measured_each"]) == 2 and row["measured_ci"] is not None for row in data["rows"])
    assert (data["faults"], data["stopped"]) == ([], None)
    assert load_profile(out / "profile.json").verify.range == (1, 64)
    assert (out / "live.png").stat().st_size > 10_000
    # Loads are kept as recorded runs.
    assert sorted(p.name for p in record.iterdir()) == ["closed-2-r1", "closed-2-r2", "poisson-20-s-r1",
                                                        "poisson-20-s-r2"]  # fmt: skip
    run = read_run(record / "closed-2-r1")
    assert 9 <= run.requests.output_tokens.min() <= run.requests.output_tokens.max() <= 15
    assert set(run.requests.prompt_tokens.tolist()) == {16}
    assert run.settings.num_blocks == 1001
    # The key was sent, and is nowhere else.
    assert engine.headers[0]["authorization"] == "Bearer very-secret"
    texts = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()]
    assert not any(b"very-secret" in text for text in [*texts, printed.out.encode(), printed.err.encode()])


@pytest.mark.parametrize(
    ("faults", "line"),
    [
        ({"refuse": lambda i: 429 if i == 12 else None}, "fault: HTTP 429: 1 of "),
        ({"refuse": lambda i: 500 if i == 12 else None}, "fault: HTTP 500: 1 of "),
        ({"break_at": lambda i, t: "stall" if (i, t) == (12, 2) else None}, "fault: stalled stream: 1 of "),
        ({"break_at": lambda i, t: "garbage" if (i, t) == (12, 2) else None}, "fault: malformed stream: 1 of "),
        ({"break_at": lambda i, t: "cut" if (i, t) == (12, 2) else None}, "fault: connection lost: 1 of "),
        ({"short_by": 2}, "fault: fewer tokens than asked: "),
        ({"metrics": False}, "fault: metrics: the server has no /metrics"),
    ],
)
def test_each_fault_is_a_line_and_exit_code_1(tmp_path, capsys, faults: dict[str, Any], line: str):
    path = tmp_path / "live.json"
    with serve(FakeEngine(step, **faults)) as server:
        code = live("--url", server.url, *QUICK, "--timeout", 0.5, "--json", path)
    assert code == 1
    printed = capsys.readouterr()
    assert line in printed.err
    data = json.loads(path.read_text())
    check_counts(data["counts"])
    assert len(data["rows"]) == 4  # what was measured is kept
    assert any(line.removeprefix("fault: ") in fault for fault in data["faults"])


def test_a_known_lack_of_metrics_is_no_fault(capsys):
    with serve(FakeEngine(step, metrics=False)) as server:
        assert live("--url", server.url, *QUICK, "--no-metrics") == 0
    assert "fault" not in capsys.readouterr().err


def test_a_step_of_the_wall_clock_is_a_line_and_exit_code_1(capsys, monkeypatch):
    real, calls = time.time, iter(range(10**9))
    monkeypatch.setattr("specsim.live.experiment.WALL", lambda: real() + (600 if next(calls) > 2 else 0))
    with serve(FakeEngine(step)) as server:
        assert live("--url", server.url, *QUICK) == 1
    assert "fault: clock: the wall clock moved by +600" in capsys.readouterr().err


def test_a_server_killed_in_the_middle_leaves_a_partial_report(tmp_path, capsys):
    path = tmp_path / "live.json"
    engine = FakeEngine(step)
    with serve(engine) as server:
        engine.refuse = lambda i: server.kill() if i == 80 else None  # in the third repetition
        code = live("--url", server.url, *QUICK, "--repeat", 50, "--json", path, "--record", tmp_path / "runs")
    printed = capsys.readouterr()
    assert code == 1
    assert "requests failed one after the other; what was measured until then is kept" in printed.err
    data = json.loads(path.read_text())
    check_counts(data["counts"])
    assert data["counts"]["no connection"] + data["counts"].get("connection lost", 0) >= 5
    assert data["rows"]
    assert len(data["rows"][0]["measured_each"]) >= 1


def test_ctrl_c_leaves_a_complete_partial_report(tmp_path):
    path = tmp_path / "live.json"
    with serve(FakeEngine(step)) as server:
        command = [sys.executable, "-m", "specsim", "validate", "live", "--url", server.url, *QUICK, "--repeat", "90"]
        process = subprocess.Popen([*command, "--json", str(path)], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(b"repetition 2 of 90, closed"):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"stopped: closed 2: interrupted; what was measured until then is kept" in err
    assert b"Traceback" not in err
    data = json.loads(path.read_text())
    check_counts(data["counts"])
    assert len(data["rows"]) == 4
    assert b"closed 2" in out


def test_ctrl_c_while_it_predicts_keeps_what_was_measured(tmp_path, capsys, monkeypatch):
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specsim.live.comparing.compare", interrupted)
    path = tmp_path / "live.json"
    with serve(FakeEngine(step)) as server:
        assert live("--url", server.url, *QUICK, "--json", path, "--out", tmp_path / "out") == 130
    assert "stopped: the predictions: interrupted" in capsys.readouterr().err
    data = json.loads(path.read_text())
    check_counts(data["counts"])
    assert data["rows"] == []
    assert [load["name"] for load in data["loads"]][-1] == "closed 2"
    assert data["loads"][-1]["measured"]["throughput"] > 0
    assert load_profile(tmp_path / "out" / "profile.json").verify.range == (1, 64)


def test_time_is_bounded(tmp_path, capsys):
    path = tmp_path / "live.json"
    with serve(FakeEngine(step)) as server:
        begun = time.monotonic()
        assert live("--url", server.url, *QUICK, "--repeat", 90, "--max-seconds", 1.5, "--json", path) == 1
    assert time.monotonic() - begun < 20
    assert "out of time" in capsys.readouterr().err
    check_counts(json.loads(path.read_text())["counts"])


def test_a_broken_gate_is_exit_code_1(tmp_path, capsys):
    profile = tmp_path / "wrong.json"
    save_profile(make_profile(), profile)  # steps of a second
    with serve(FakeEngine(step)) as server:
        code = live("--url", server.url, *QUICK, "--profile", profile, "--max-throughput-error", "50%")
    assert code == 1
    printed = capsys.readouterr()
    assert "gate broken: closed 2 throughput: -9" in printed.err
    assert "is analytic" in printed.out


def test_an_engine_that_speculates_is_predicted_from_its_counters(tmp_path, capsys):
    profile = tmp_path / "steps.json"
    verify = {"type": "table1d", "tokens": [1, 64], "seconds": [0.0025, 0.034], "below": "linear"}
    save_profile(make_profile(verify=verify, draft=None, kind="measured"), profile)
    engine = FakeEngine(step, "llamacpp", gamma=2, accept=lambda cycle: (2, 1, 0)[cycle % 3])
    with serve(engine) as server:
        code = live("--url", server.url, *QUICK, "--profile", profile, "--draft-ms", 0)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "acceptance by position: 0." in printed.out
    assert "verification: StaticGamma(2)" in printed.out
    with serve(engine) as server:
        assert live("--url", server.url, *QUICK, "--profile", profile) == 2
        assert "error: llama.cpp b1 speculates: expected what drafting costs" in capsys.readouterr().err
        assert live("--url", server.url, *QUICK) == 2
        assert "error: llama.cpp b1 speculates: its steps are learned without" in capsys.readouterr().err


def test_a_trace_says_how_it_speculates_and_arrivals_are_replayed(tmp_path, capsys):
    profile, arrivals, path = (tmp_path / name for name in ("steps.json", "arrivals.parquet", "live.json"))
    verify = {"type": "table1d", "tokens": [1, 64], "seconds": [0.0025, 0.034], "below": "linear"}
    save_profile(make_profile(verify=verify, draft=None, kind="measured"), profile)
    write_requests(arrivals, Poisson(30, 30, 16, 12).requests(0))
    engine = FakeEngine(step, gamma=1, accept=lambda cycle: cycle % 10 < 8)
    with serve(engine) as server:
        code = live("--url", server.url, *QUICK, "--profile", profile, "--draft-ms", 0, "--trace", "traces/mtp1.json",
                    "--scheduler", "MTP1", "--arrivals", arrivals, "--requests", 25, "--json", path)  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "verification: MTP1()" in printed.out
    data = json.loads(path.read_text())
    assert [load["name"] for load in data["loads"]] == ["warm-up", "closed 2", "arrivals"]  # nothing to learn
    assert data["loads"][-1]["counts"] == {"sent": 25, "answered": 25}
    assert {row["load"] for row in data["rows"]} == {"closed 2", "arrivals"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--url: expected the server"),
        (["--url", "http://10.1.2.3"], "only with --allow-remote"),
        (["--url", "http://127.0.0.1:9", "--engine", "tgi"], "--engine: expected vllm, sglang, llamacpp or specsim"),
        (["--url", "http://127.0.0.1:9"], "expected an OpenAI-compatible server, got ConnectError"),
        (
            [
                "--url",
                "http://127.0.0.1:9",
                "--profile",
                "hw_profiles/cpu-2core-smollm2-135m.json",
                "--plain-url",
                "http://127.0.0.1:9",
            ],
            "--plain-url: has no meaning beside a profile or a time that tells the same",
        ),
        (
            ["--url", "http://127.0.0.1:9", "--draft-ms", "0", "--draft-url", "http://127.0.0.1:9"],
            "--draft-url: has no meaning beside a profile or a time",
        ),
        (
            ["--url", "http://127.0.0.1:9", "--plain-url", "http://example.com"],
            "--plain-url: example.com is not this machine",
        ),
        (["--url", "http://127.0.0.1:9", "--calibrate", "2,4"], "--calibrate: expected 1 among the users"),
        (["--url", "http://127.0.0.1:9", "--prompt-tokens", "8"], "--prompt-tokens: expected more than 8"),
        (["--url", "http://127.0.0.1:9", "--repeat", "0"], "--repeat: expected 1 to 100, got 0"),
        (["--url", "http://127.0.0.1:9", "--timeout", "0"], "--timeout: expected seconds above 0"),
        (["--url", "http://127.0.0.1:9", "--max-tpot-error", "8"], "--max-tpot-error: expected a share"),
        (["--url", "http://127.0.0.1:9", "--scheduler", "MTP1"], "--scheduler: expected --trace too"),
        (["--trace", "traces/mtp1.json"], "--profile: expected the engine's step cost"),
        (["--url", "http://127.0.0.1:9", "--draft-ms", "-1"], "--draft-ms: expected milliseconds, 0 to 1e6"),
        (["--url", "http://127.0.0.1:9", "--max-num-seqs", "0"], "--max-num-seqs: expected 1 to 16,777,216, got 0"),
        (["--url", "http://127.0.0.1:9", "--max-num-batched-tokens", "-1"], "--max-num-batched-tokens: expected 1 to"),
        (
            ["--url", "http://127.0.0.1:9", "--plain-url", "http://127.0.0.1:9/"],
            "--plain-url: expected another server than --url",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments: list[str], expected: str):
    assert live(*arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert expected in err


def test_an_output_may_not_be_an_input(tmp_path: Path, capsys):
    profile = tmp_path / "profile.json"
    save_profile(make_profile(), profile)
    assert live("--url", "http://127.0.0.1:9", "--profile", profile, "--out", tmp_path) == 2
    assert "is the input --profile" in capsys.readouterr().err


def test_how_much_of_a_block_a_step_verifies_is_told_by_scheduler_and_trace():
    drafter = synthetic((0.8,) * 7, 7).acceptance
    told = [_draft_len(verify, None if verify is None else Drafter(drafter, 7)) for verify in
            (None, StaticGamma(3), StaticGamma(9), DSparkAsync())]  # fmt: skip
    assert told == [0, 3, 7, 7]
