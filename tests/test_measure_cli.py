"""The measure verb from its flags to its files, and the scripts beside it."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import always

import specsim as ss
from specsim.hardware import Shape, load_profile, step_cost
from specsim.types import SpecsimError

torch = pytest.importorskip("torch")

from measure_inputs import FLAGS, SIZES, made_up  # noqa: E402

from specsim.measure.curves import curves  # noqa: E402
from specsim.measure.grid import Grid  # noqa: E402
from specsim.measure.records import read_log  # noqa: E402
from specsim.measure.timing import Measured  # noqa: E402

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


# The verb


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The tiny model measured once by the command line: the folder, and what was printed."""
    from typer.testing import CliRunner

    from specsim.cli import app

    folder = tmp_path_factory.mktemp("measure")
    arguments = ["measure", *FLAGS, "--out", folder / "tiny.json", "--device-memory", 1]
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return folder, result.stdout


def test_the_verb_writes_a_profile_a_log_and_a_picture(measured):
    folder, printed = measured
    assert sorted(p.name for p in folder.iterdir()) == ["tiny.json", "tiny.log.jsonl", "tiny.png"]
    profile = load_profile(folder / "tiny.json")
    assert profile.kind == "measured"
    assert profile.verify.type == "additive"
    assert profile.verify.tokens == (1, 2, 4, 8, 16)
    assert profile.verify.range == (1, 16)
    assert profile.verify.num_seqs[-1] == 8
    assert profile.verify.kv_tokens[-1] == 8 * 64
    assert profile.draft.type == "parallel"
    assert profile.draft.num_seqs == (1, 2, 4, 8)
    assert profile.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert profile.kv_tokens == int((0.9e9 - 4 * (2 * 32 * 96 + 2 * 3 * 32 * 48 + 2 * 64 * 32)) // 256)
    notes = profile.provenance.notes
    assert "scaled_dot_product_attention" in notes
    assert "misses the" in notes
    assert profile.provenance.command.startswith("specsim measure --out")
    assert "--threads 1" in profile.provenance.command
    assert (folder / "tiny.png").read_bytes().startswith(b"\x89PNG")
    assert "Verification at context 16, 3 rounds" in printed
    assert "Verified tokens are free" in printed


def test_the_log_holds_every_sample_and_the_profile_is_near_them(measured):
    folder, _ = measured
    header, points = read_log(folder / "tiny.log.jsonl")
    assert header["model"]["hidden"] == 32
    assert header["device"].endswith("1 thread")
    assert {"torch", "specsim"} <= set(header["versions"])
    assert all(len(m.seconds) == 3 and (m.seconds > 0).all() for m in points)
    assert {m.point.kind for m in points} == {"verify", "chunk", "draft"}
    rows = [json.loads(line) for line in (folder / "tiny.log.jsonl").read_text().splitlines()[1:]]
    profile = load_profile(folder / "tiny.json")
    cost = step_cost(profile, 16, 16, 0)
    ratios = []
    for row, m in zip(rows, points, strict=True):
        assert row["q1_s"] <= row["median_s"] <= row["q3_s"]
        if row["kind"] == "verify":
            p = m.point
            priced = cost.seconds(Shape(p.num_seqs, p.kv_tokens), p.tokens - p.num_seqs)
            assert priced == pytest.approx(row["priced_s"], rel=1e-4)
            ratios.append(priced / row["median_s"])
    assert 0.5 < np.median(ratios) < 2  # one sample of three may be far off on a busy machine


def test_the_profile_serves_simulations(measured):
    folder, _ = measured
    profile = load_profile(folder / "tiny.json")
    base = ss.Scenario(
        profile=profile,
        workload=ss.ClosedLoop(2, measured=4, prompt_tokens=8, output_tokens=12),
        drafter=always(2, 3),
        max_num_batched_tokens=16,
    )
    for scheduler, cycles in ((ss.NoSpec(), 11), (ss.StaticGamma(3), 4)):
        result = ss.simulate(base.with_policy(scheduler), seed=0)
        assert result.extrapolated_steps == 0
        assert (result.requests["cycles"].dropna() == cycles).all()  # 12 tokens: the prefill's, then by 1 or by 3
        assert (result.requests["finish"] > result.requests["first_token"]).all()


def test_where_tokens_stop_being_free_is_found(measured):
    folder, _ = measured
    profile = load_profile(folder / "tiny.json")
    verify = profile.verify.model_copy(
        update={"tokens": (1, 2, 4, 8), "seconds": (1.0, 1.05, 1.09, 1.5), "low": None, "high": None,
                "num_seqs": (1, 8), "seqs_seconds": (0.0, 0.0), "kv_tokens": (0, 64), "kv_seconds": (0.0, 0.0)}
    )  # fmt: skip
    found = curves(profile.model_copy(update={"verify": verify}), gamma=3, context=8)
    assert found.free_until == 4
    assert found.marginal == pytest.approx([0.05, 0.02, 0.1025])
    assert found.block_seconds[[0, 1, 3, 7]] == pytest.approx([1.0, 1.05, 1.09, 1.5])
    flat = verify.model_copy(update={"seconds": (1.0, 1.0, 1.0, 1.1)})
    assert curves(profile.model_copy(update={"verify": flat}), 3, 8).free_until is None


def test_a_narrow_range_of_step_times_has_some_ticks(tmp_path):
    from specsim.measure import machine
    from specsim.measure.fit import decompose
    from specsim.measure.picture import plot_measured
    from specsim.measure.records import Run, make_profile
    from specsim.measure.session import Session, Settings
    from specsim.measure.shape import find_shape
    from specsim.plots import save_figure

    grid, condition = Grid((1, 2, 4, 8), (16, 64), (), gamma=3, max_seqs=4), machine.condition(torch.device("cpu"))
    drafts = [Measured(p, np.full(3, 1e-3)) for p in grid.points() if p.kind == "draft"]
    session = Session(
        [*made_up(grid), *drafts], {"attention": "", "between": "", "graphs": ""}, condition, condition, 1.0
    )
    run = Run(find_shape("smollm2-135m"), grid, Settings(), session, "cpu", "float32", 4, graphs=False)
    profile = make_profile(run, decompose(run.of("verify", "chunk"), grid), "p", command="", kv_tokens=None)
    figure = plot_measured(run, profile)
    save_figure(figure, tmp_path / "p.png")
    time = figure.axes[1]  # 10.1 to 10.9 ms
    low, high = time.get_ylim()
    shown = [t.get_text() for t in time.get_yticklabels() if low <= t.get_position()[1] <= high]
    assert len(set(shown)) == len(shown) >= 3


def test_the_same_seed_runs_the_same_inputs_in_the_same_order(monkeypatch, run, tmp_path):
    from specsim.measure import session

    seen: list[list[Any]] = []
    plain = session._Bench._batch

    def watched(self: Any, *given: Any) -> Any:
        batch = plain(self, *given)
        seen[-1].append((batch.tokens.tolist(), batch.positions.tolist(), float(self.target.embed.sum())))
        return batch

    monkeypatch.setattr(session._Bench, "_batch", watched)
    for seed in (0, 0, 1):
        seen.append([])
        assert run("measure", *FLAGS, "--out", tmp_path / "x.json", "--seed", seed)[0] == 0
    assert seen[0] == seen[1] != seen[2]


def test_an_autoregressive_drafter_is_priced_by_the_forward(run, tmp_path):
    code, printed, _ = run("measure", *FLAGS, "--drafter", "autoregressive", "--out", tmp_path / "x.json")
    assert code == 0
    assert "Drafting 3 tokens, autoregressive" in printed
    profile = load_profile(tmp_path / "x.json")
    assert profile.draft.type == "autoregressive"
    _, points = read_log(tmp_path / "x.log.jsonl")
    drafts = [m.quartiles[1] / 3 for m in points if m.point.kind == "draft"]
    assert profile.draft.seconds == pytest.approx(drafts, rel=1e-4)


def test_without_a_drafter_there_is_no_draft_cost(run, tmp_path):
    assert run("measure", *FLAGS, "--drafter", "none", "--out", tmp_path / "x.json")[0] == 0
    assert load_profile(tmp_path / "x.json").draft is None


BAD = [
    (["--model", "qwen9"], "--model: 'qwen9': expected one of qwen3-4b"),
    (["--model", "smollm2-135m", "--kv-heads", "2"], "heads: expected a multiple of the 2 kv_heads, got 9"),
    (["--hidden", "0"], "hidden: expected greater than or equal to 1, got 0"),
    (["--tokens", "1,0"], "--tokens: expected different sizes of 1 to"),
    (["--tokens", "4,4"], "--tokens: expected different sizes"),
    (["--contexts", "x"], "--contexts: expected different sizes"),
    (["--contexts", "99999999"], "sizes of 1 to 16,777,216, separated by commas, got '99999999'"),
    (["--contexts", "8," + "9" * 60], "sizes of 1 to 16,777,216, separated by commas, got '99999999999999999999...'"),
    (["--contexts", "4,04"], "--contexts: expected different sizes of 1 to 16,777,216, separated by commas, got"),
    (["--contexts", "500", "--max-position", "512"], "--contexts: a context of 500 tokens (up to 629 with"),
    (["--tokens", "1,1024", "--max-position", "512"], "--tokens: a chunk of 1024 tokens is beyond the 512"),
    (["--gamma", "0"], "--gamma: expected 1 to 64"),
    (["--max-seqs", "0"], "--max-seqs: expected 1"),
    (["--draft-layers", "0"], "Invalid value for '--draft-layers'"),
    (["--rank", "0"], "Invalid value for '--rank'"),
    (["--rounds", "2"], "--rounds, --input-sets: expected at least 3 and 1, got 2 and 3"),
    (["--minutes", "0"], "--minutes: expected a number above 0"),
    (["--drafter", "none", "--draft-layers", "2"], "--draft-layers: has no meaning with --drafter none"),
    (["--drafter", "none", "--rank", "5"], "--rank: has no meaning with --drafter none"),
    (["--drafter", "autoregressive", "--rank", "5"], "--rank: has no meaning with --drafter autoregressive"),
    (["--draft-layers", "10000"], "--draft-layers: expected at most the 2 layers of custom, got 10000"),
    (["--model", "mixtral-8x7b"], "a mixture of experts cannot be measured"),
    (["--capture", "1,2"], "--capture: CUDA graphs need --device cuda"),
    (["--attention", "paged"], "--attention: paged needs --device cuda"),
    (["--drafter", "ngram"], "--drafter: expected parallel, autoregressive or none"),
    (["--dtype", "int8"], "--dtype: expected auto, float32"),
    (["--device", "tpu"], "--device: expected auto, cpu or cuda"),
    (["--picture", "x.pdf"], "suffix '.pdf', expected .png or .svg"),
    (["--kv-tokens", "5", "--device-memory", "5"], "--kv-tokens, --device-memory: expected one of them"),
    (["--name", ""], "--name: expected a text, got an empty one"),
    (["--kv-tokens", "9999999999"], "Invalid value for '--kv-tokens'"),
    (["--device-memory", "1e300"], "--device-memory: expected a number above 0, up to a million, got 1e+300"),
    (["--device-memory", "1e6"], "1e+06 GB beside model custom hold more than 2,147,483,648 tokens of KV cache"),
    (["--device-memory", "0.00001"], "--device-memory: model custom takes"),
    (["--model", "qwen3-32b", "--layers", "9999"], "its weights and the drafter's take"),
    (["--max-seqs", "65536", "--tokens", "1,65536", "--contexts", "300000", "--max-position", "500000"],
     "expected a lower --max-seqs or shorter --contexts"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), BAD, ids=[" ".join(c) for c, _ in BAD])
def test_bad_input_is_one_line(run, tmp_path, change, said):
    flags = SIZES if "--model" in change else FLAGS
    code, printed, errors = run("measure", *flags, "--out", tmp_path / "x.json", *change)
    assert code == 2
    assert printed == ""
    assert said in errors
    assert len(errors.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_one_list_of_what_can_be_measured(run, tmp_path):
    """Told the same by the help, without a model, and for an unknown one: no mixture of experts among them."""
    from specsim.hardware.model_shape import PRESETS

    known = ", ".join(name for name, shape in PRESETS.items() if not shape.moe_layers)
    code, text, _ = run("measure", "--help")
    assert code == 0
    assert known.replace(" ", "") in re.sub(r"[\s│]", "", text)
    for given in ((), ("--model", "qwen9")):
        code, _, errors = run("measure", *SIZES, *given, "--out", tmp_path / "x.json")
        assert code == 2
        assert known in errors
        assert "mixtral" not in errors


def test_the_drafter_has_no_more_layers_than_the_model(run, tmp_path):
    out = tmp_path / "x.json"
    assert run("measure", *FLAGS, "--layers", 1, "--out", out)[0] == 0
    header, _ = read_log(tmp_path / "x.log.jsonl")
    assert header["settings"]["draft_layers"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device_is_one_line(run, tmp_path):
    code, _, errors = run("measure", *FLAGS, "--out", tmp_path / "x.json", "--device", "cuda")
    assert code == 2
    assert errors.startswith("error: --device: no CUDA device")


def test_out_of_memory_is_one_line(run, tmp_path, monkeypatch):
    from specsim.measure import session

    def burst(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(session, "make_weights", burst)
    code, _, errors = run("measure", *FLAGS, "--out", tmp_path / "x.json")
    assert code == 2
    assert "model custom: out of memory on cpu" in errors


def test_outputs_are_told_apart_before_anything_is_measured(run, tmp_path):
    code, _, errors = run("measure", *FLAGS, "--out", tmp_path / "x.json", "--log", tmp_path / "x.json")
    assert code == 2
    assert "is also written by --out" in errors


def test_a_log_that_is_none_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"schema": "other"}\n')
    with pytest.raises(SpecsimError, match="line 1: expected a log of specsim measure"):
        read_log(path)


# On a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("attention", ["padded", None])
def test_graphs_are_measured_on_a_gpu(run, tmp_path, attention):
    more = ["--attention", attention] if attention else []
    flags = [f if f != "cpu" else "cuda" for f in FLAGS]
    code, printed, errors = run(
        "measure", *flags, "--head-dim", 64, "--capture", "1,4,8", *more, "--out", tmp_path / "x.json"
    )
    assert code == 0, errors
    profile = load_profile(tmp_path / "x.json")
    assert profile.verify.below == "next_size"
    assert profile.verify.capture_limit == 8
    assert profile.verify.tokens == (1, 4, 8, 16)
    assert profile.sync_seconds > 0
    assert "CUDA graphs of 3 sizes up to 8" in printed


# The scripts beside it

EXPERIMENT = Path(__file__).parents[1] / "experiments" / "measure"


def write_points(path: Path, factor: float, spread: float = 0.02, model: str = "tiny") -> None:
    grid = Grid((1, 2, 4, 8), (16, 64), (), gamma=3, max_seqs=4)
    rows: list[dict[str, Any]] = [{"schema": "specsim.measure/1", "model": {"name": model}, "device": "d"}]
    for m in made_up(grid):
        point = {"kind": m.point.kind, "tokens": m.point.tokens, "num_seqs": m.point.num_seqs}
        middle = factor * m.quartiles[1]
        seconds = [middle * (1 - spread), middle, middle * (1 + spread)]
        rows.append(point | {"context": m.point.context, "seconds": seconds})
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")


@pytest.mark.parametrize(
    ("factor", "model", "code", "said"),
    [
        (1.015, "tiny", 0, r"overlap at (\d+) of \1 \(100%\)\neach median lies within the other's quartiles at 0 of"),
        (1.005, "tiny", 0, r"each median lies within the other's quartiles at (\d+) of \1 \(100%\)"),
        (1.30, "tiny", 1, r"overlap at 0 of .*\n.*\nmedians differ by 30.0% in the median, 30.0% at most, \+30.0%"),
        (1.00, "other", 2, "expected the same model"),
    ],
)  # fmt: skip
def test_two_logs_are_compared(tmp_path, capsys, factor, model, code, said):
    write_points(tmp_path / "a.jsonl", 1.0)
    write_points(tmp_path / "b.jsonl", factor, model=model)
    agree = runpy.run_path(str(EXPERIMENT / "agree.py"))["main"]
    assert agree([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == code
    assert re.search(said, "".join(capsys.readouterr()))


@pytest.mark.slow
def test_the_prepared_script_runs_dry(tmp_path):
    env = ENVIRONMENT | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    command = ["bash", EXPERIMENT / "h200.sh", "--dry-run", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dry-run.json", "dry-run.log.jsonl", "dry-run.png"]
    assert "--seed 5" in load_profile(tmp_path / "dry-run.json").provenance.command


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_prepared_script_says_that_there_is_no_gpu(tmp_path):
    env = ENVIRONMENT | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    done = subprocess.run(["bash", EXPERIMENT / "h200.sh"], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
