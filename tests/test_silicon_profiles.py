"""AIConfigurator's data itself, where the package is there, and the profiles shipped from it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import specsim as ss
from specsim.hardware import Layered, Shape, step_cost
from specsim.importers import silicon
from specsim.importers.composed import verification_bounds
from specsim.importers.silicon import load_silicon
from specsim.types import SpecsimError

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "experiments/silicon_profiles/make.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("silicon_profiles_make", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SHIPPED = sorted(script().NAMES)

# --- the package itself ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Any:
    pytest.importorskip("aiconfigurator_core")
    with silicon._quiet():
        from aiconfigurator_core.sdk.engine import EngineHandle

        return EngineHandle.compile("Qwen/Qwen3-8B", "h200_sxm", "vllm", tp_size=2, backend_version="0.24.0")


@pytest.fixture(scope="module")
def real() -> ss.Profile:
    pytest.importorskip("aiconfigurator_core")
    return load_silicon("Qwen/Qwen3-8B", "h200_sxm", "vllm", 2)


def decode_seconds(engine: Any, num_seqs: int, context: int) -> float:
    """AIConfigurator's own price of a decode step; one output token: attention over the context and the new token."""
    return float(engine.decode_step_latency(num_seqs, context, 1)) / 1e3


def test_at_the_datas_sizes_a_decode_step_has_aiconfigurators_price(real: ss.Profile, engine: Any) -> None:
    assert isinstance(real.verify, Layered)
    attention, checked = real.verify.attention, 0
    cost, sizes = step_cost(real, 8192, 8192, 0), set(real.verify.tokens.at) & set(real.verify.rows.at)
    for n, context in zip(attention.n_decode, attention.kv_decode, strict=True):
        if n in sizes:
            assert cost.seconds(Shape(n, n * context)) == pytest.approx(decode_seconds(engine, n, context), rel=0.005)
            checked += 1
    assert checked > 50


def test_between_them_it_is_within_two_per_cent(real: ss.Profile, engine: Any) -> None:
    random, cost = np.random.default_rng(7), step_cost(real, 8192, 8192, 0)
    seqs = np.exp(random.uniform(0, np.log(8192), 2000)).astype(int)
    contexts = np.exp(random.uniform(np.log(16), np.log(40960), 2000)).astype(int)
    for n, context in zip(seqs.tolist(), contexts.tolist(), strict=True):
        assert cost.seconds(Shape(n, n * context)) == pytest.approx(decode_seconds(engine, n, context), rel=0.02)


def test_a_mixed_step_has_aiconfigurators_price(real: ss.Profile, engine: Any) -> None:
    """A whole prompt beside decodes, as its own composition of a mixed step has it."""
    cost = step_cost(real, 8192, 1024, 0)
    for chunk, seqs in ((256, 16), (512, 64), (2048, 200)):
        total, shared, prefill, _ = engine.mixed_step_breakdown(chunk, seqs, chunk, 1)
        decode = sum(value[1] for value in engine.evaluate_generation_ops([3], batch_size=seqs, s=chunk + 1))
        assert total == pytest.approx(shared + prefill + decode, rel=0.01)  # what its four numbers mean
        seconds = cost.seconds(Shape(seqs, seqs * chunk, (chunk,), (0,)))
        assert seconds == pytest.approx(total / 1e3, rel=0.03)


def test_the_bounds_hold_with_real_prices(real: ss.Profile, engine: Any) -> None:
    for seqs, tokens, context in ((1, 8, 1000), (8, 4, 500), (64, 8, 1024), (256, 8, 2000)):
        low, high = verification_bounds(real, seqs, tokens, context)
        independent = decode_seconds(engine, seqs * tokens, context + tokens - 1)
        assert low < high <= independent * 1.03


def test_chatter_is_held_back_and_the_logger_left_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("aiconfigurator_core")
    before = logging.getLogger("aiconfigurator_core").level
    load_silicon("Qwen/Qwen3-8B", "h100_sxm", "vllm", 4, max_num_tokens=64, max_context=64)
    assert logging.getLogger("aiconfigurator_core").level == before
    assert capfd.readouterr() == ("", "")


def test_kv_tokens_may_be_given() -> None:
    pytest.importorskip("aiconfigurator_core")
    profile = load_silicon("Qwen/Qwen3-32B", "h100_sxm", tp=1, max_num_tokens=64, max_context=64, kv_tokens=1000)
    assert profile.kv_tokens == 1000
    assert profile.kv_bytes_per_token == 2 * 64 * 8 * 128 * 2  # K and V, layers, heads, width, bfloat16
    assert "KV tokens as given." in (profile.provenance.notes or "")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            "Qwen/Qwn3-8B",
            {},
            "Qwen/Qwn3-8B: expected a model that AIConfigurator has a config of .close to it are Qwen/Qwen3-8B, ",
        ),
        ("zzzzzz", {}, r"zzzzzz: expected a model .* has a config of \(such as MiniMaxAI/MiniMax-M2\.5, "),
        ("aaaaaa/aaaaaa", {}, r"aaaaaa: expected a model .* has a config of \(such as MiniMaxAI/MiniMax-M2\.5, "),
        (
            "Qwen/Qwen3-8B",
            {"system": "h20"},
            r"--system: expected one that has data of vllm \(.*h200_sxm.*\), got 'h20'",
        ),
        ("Qwen/Qwen3-8B", {"version": "0.1"}, r"--engine-version: expected one of current \(.*\), got '0\.1'"),
        ("Qwen/Qwen3-8B", {"tp": 3}, "tp 3: num_heads 32 should be divisible by tp_size 3"),
        ("Qwen/Qwen3-235B-A22B", {}, "no KV budget"),
        ("deepseek-ai/DeepSeek-V3", {"tp": 8}, "cannot be composed"),
        ("deepseek-ai/DeepSeek-V4-Flash", {"tp": 8}, "data missing"),
    ],
)
def test_what_the_data_lacks_is_one_line(model: str, options: dict[str, Any], message: str) -> None:
    pytest.importorskip("aiconfigurator_core")
    with pytest.raises(SpecsimError, match=message):
        load_silicon(model, **({"system": "h200_sxm"} | options))


@pytest.mark.parametrize("name", ["h200-qwen3-8b-tp1-vllm", "b200-qwen3-32b-tp4-vllm"])
def test_remaking_a_shipped_profile_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("aiconfigurator_core")
    shipped = ss.load_profile(ROOT / f"hw_profiles/{name}.json")
    if importlib.metadata.version("aiconfigurator-core") != shipped.provenance.versions["aiconfigurator-core"]:
        pytest.skip("another version of AIConfigurator's data is installed")
    made = script().make(name, tmp_path)
    assert made.read_bytes() == (ROOT / f"hw_profiles/{name}.json").read_bytes()


# --- what is shipped -------------------------------------------------------------------------------------------


def test_all_eighteen_are_shipped() -> None:
    there = {path.stem for path in (ROOT / "hw_profiles").glob("*-qwen3-*-vllm.json")}
    assert there == set(SHIPPED)
    assert len(SHIPPED) == 18


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_says_what_it_is_and_simulates(name: str) -> None:
    path = ROOT / f"hw_profiles/{name}.json"
    assert path.stat().st_size < 25_000
    profile = ss.load_profile(path)
    assert profile.kind == "imported"
    assert profile.gpus == profile.tp == int(name.partition("-tp")[2][0])
    assert "silicon_profiles/make.py" in (profile.provenance.command or "")
    low, high = verification_bounds(profile)
    notes = profile.provenance.notes or ""
    assert f"{low * 1e3:.4g} ms if the KV of a sequence is read once" in notes
    assert f"{high * 1e3:.4g} ms if each query reads it" in notes
    assert "The draft cost is composed, not measured: 5 layers" in notes
    drafter = ss.load_drafter(ROOT / "traces/qwen3-4b-dspark.json")
    for scheduler in (ss.NoSpec(), ss.StaticGamma(7)):
        result = ss.simulate(ss.Scenario(profile, ss.ClosedLoop(8, 256, 32), drafter, scheduler), seed=0)
        assert ss.summarize(result)["throughput"].iloc[0] > 0


def test_more_gpus_and_newer_ones_are_faster() -> None:
    """The same model on more GPUs, or on newer ones, takes shorter steps."""

    def seconds(name: str) -> float:
        profile = ss.load_profile(ROOT / f"hw_profiles/{name}-vllm.json")
        return float(profile.step_seconds(64, 64, kv_tokens=64 * 300).item())

    for model in ("8b", "32b"):
        for system in ("h100", "h200", "b200"):
            assert seconds(f"{system}-qwen3-{model}-tp1") > seconds(f"{system}-qwen3-{model}-tp2")
            assert seconds(f"{system}-qwen3-{model}-tp2") > seconds(f"{system}-qwen3-{model}-tp4")
        for tp in (1, 2, 4):
            assert seconds(f"h100-qwen3-{model}-tp{tp}") > seconds(f"h200-qwen3-{model}-tp{tp}")
            assert seconds(f"h200-qwen3-{model}-tp{tp}") > seconds(f"b200-qwen3-{model}-tp{tp}")


def test_the_script_prints_a_row_for_each_profile(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["make.py", "--table", str(ROOT / "hw_profiles")])
    assert script().main() == 0
    table = {row.split(" | ")[0].removeprefix("| "): row for row in capsys.readouterr().out.splitlines()[2:]}
    assert set(table) == set(SHIPPED)
    assert "| 24,994 |" in table["h100-qwen3-32b-tp1-vllm"]
    assert table["h100-qwen3-32b-tp1-vllm"].count("—") == 4  # 64 sequences of 1024 tokens do not fit


def test_the_script_says_that_it_skips_without_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    module = script()
    monkeypatch.setattr(sys, "argv", ["make.py", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert module.main() == 0
    assert capsys.readouterr().out == "skipped: aiconfigurator-core is not installed: pip install 'specsim[silicon]'\n"
    assert not (tmp_path / "out").exists()
