"""Profiles composed from AIConfigurator's data: against a handle of known prices, and against the package itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specsim as ss
from specsim.cli import main
from specsim.hardware import Layered, Shape, step_cost
from specsim.importers import composed, silicon
from specsim.importers.composed import Deployment, compose, verification_bounds
from specsim.importers.profile_parts import Ask
from specsim.importers.profiles import load_profile_source
from specsim.importers.silicon import load_silicon
from specsim.importers.tabulate import steps, thin, thin_rows
from specsim.types import SpecsimError

ROOT = Path(__file__).parents[1]


Value = tuple[str, float, float, str]


class Handle:
    """A compiled engine with prices that can be written down (ms), jagged as real ones are."""

    names = ("embedding", "qkv_gemm", "attention", "logits_gemm")

    def __init__(self, **prefill_extra: float) -> None:
        self.prefill_extra = prefill_extra

    @staticmethod
    def gemm(tokens: int) -> float:
        return max(2.0, tokens / 100) + 0.05 * (tokens % 16 == 1)

    @staticmethod
    def attention(num_seqs: int, kv: int) -> float:
        return 0.1 + 4e-6 * num_seqs * kv

    @staticmethod
    def prefill(num_seqs: int, chunk: int, history: int) -> float:
        return num_seqs * (0.2 + 1e-6 * chunk * (history + chunk / 2))

    def evaluate_generation_ops(self, indices: list[int], *, batch_size: int, s: int) -> list[Value]:
        prices = (0.003, self.gemm(batch_size), self.attention(batch_size, s), 0.3 + 0.002 * batch_size)
        return self._chosen("generation", prices, indices)

    def evaluate_context_ops(self, indices: list[int], *, batch_size: int, s: int, prefix: int) -> list[Value]:
        attention = self.prefill(batch_size, s, prefix)
        gemm = self.gemm(batch_size * s) * (1 + self.prefill_extra.get("gemm", 0.0))
        return self._chosen("context", (0.003, gemm, attention, 0.3 + 0.002 * batch_size), indices)

    def _chosen(self, phase: str, prices: tuple[float, ...], indices: list[int]) -> list[Value]:
        if max(indices) >= len(prices):
            raise ValueError(f"index {max(indices)} out of range")
        return [(f"{phase}_{self.names[i]}", prices[i], 0.0, "silicon") for i in indices]


def deployment(**changes: Any) -> Deployment:
    facts: dict[str, Any] = {
        "model": "Any/Model-1B", "system": "g1_sxm", "backend": "vllm", "tp": 2, "layers": 20, "context": 4096,
        "dtype": "bfloat16", "kv_tokens": 100_000, "kv_bytes_per_token": 1000.0, "memory": "KV tokens as given.",
        "database": "0.1", "package": "0.12.0",
    }  # fmt: skip
    return Deployment(**(facts | changes))


def fake(**options: Any) -> ss.Profile:
    return compose(Handle(), deployment(), **({"max_num_tokens": 1024} | options))


def tokenwise(tokens: int) -> float:
    return 0.003 + Handle.gemm(tokens)


def rows(count: int) -> float:
    return 0.3 + 0.002 * count


# --- the composition, against known prices ---------------------------------------------------------------------


def test_a_plain_decode_step_is_the_sum_of_its_operations() -> None:
    profile, random = fake(), np.random.default_rng(1)
    for n, context in [(1, 16), (17, 1023), (1024, 4096), *random.integers((1, 16), (1024, 4096), (50, 2)).tolist()]:
        expected = (tokenwise(n) + rows(n) + Handle.attention(n, context + 1)) / 1e3
        assert profile.step_seconds(n, n, kv_tokens=n * context) == pytest.approx(expected, rel=0.01)


def test_verification_reads_kv_once_or_per_query() -> None:
    """64 sequences of 8 tokens at a context of 1000: token-wise work at 512, attention at 64 or at 512."""
    low, high = verification_bounds(fake(), 64, 8, 1000)
    rest = tokenwise(512) + rows(512)
    assert low == pytest.approx((rest + Handle.attention(64, 1001)) / 1e3, rel=0.01)
    assert high == pytest.approx((rest + Handle.attention(512, 1001)) / 1e3, rel=0.01)


@pytest.mark.parametrize(("seqs", "tokens", "context"), [(2, 2, 20), (8, 8, 100), (64, 8, 1024), (100, 3, 4000)])
def test_the_bounds_lie_between_one_read_and_independent_sequences(seqs: int, tokens: int, context: int) -> None:
    profile = fake()
    low, high = verification_bounds(profile, seqs, tokens, context)
    one_token = profile.step_seconds(seqs, seqs, kv_tokens=seqs * context)
    # As sequences of their own, each of the queries would hold the tokens drafted before it too.
    independent = seqs * tokens
    apart = profile.step_seconds(independent, independent, kv_tokens=independent * (context + tokens - 1))
    assert one_token < low < high <= apart * 1.001


def test_kv_reads_chooses_the_bound_and_changes_nothing_else() -> None:
    once, per_query = fake(kv_reads="once"), fake(kv_reads="per_query")
    for profile, bound in ((once, 0), (per_query, 1)):
        shape = Shape(32, 32 * 500)
        seconds = step_cost(profile, 256, 32, 0).seconds(shape, 7 * 32)
        assert seconds == verification_bounds(once, 32, 8, 500)[bound]
    assert isinstance(once.verify, Layered)
    assert isinstance(per_query.verify, Layered)
    assert once.verify.tokens == per_query.verify.tokens
    assert once.verify.attention == per_query.verify.attention


def test_a_prefill_beside_decodes_adds_its_own_attention() -> None:
    cost = step_cost(fake(), 1024, 64, 0)
    seconds = cost.seconds(Shape(10, 10 * 300, (500,), (700,)))
    attention = Handle.attention(10, 301) + Handle.prefill(1, 500, 700)
    assert seconds == pytest.approx((tokenwise(510) + rows(11) + attention) / 1e3, rel=0.02)


def test_every_token_count_is_within_the_tolerance_of_its_own_price() -> None:
    verify = fake().verify
    assert isinstance(verify, Layered)
    count = np.arange(1, 1025)
    table = np.interp(count, verify.tokens.at, verify.tokens.seconds)
    exact = np.array([tokenwise(int(n)) for n in count]) / 1e3
    assert np.abs(table / exact - 1).max() < composed.CURVE_TOLERANCE + 1e-5
    assert len(verify.tokens.at) < 1024 / 2


def test_the_draft_is_a_share_of_the_layers_and_a_whole_head() -> None:
    """5 of 20 layers over 7 tokens a sequence, the embedding and the head in full."""
    draft = fake(draft_layers=5, draft_gamma=7).draft
    assert draft is not None
    assert draft.type == "parallel"
    price = dict(zip(draft.num_seqs, draft.seconds, strict=True))
    for n in (1, 1024):
        layers = Handle.gemm(7 * n) + Handle.attention(n, composed.DRAFT_CONTEXT + 1)
        assert price[n] == pytest.approx((layers / 4 + 0.003 + rows(7 * n)) / 1e3, rel=1e-4)
    assert fake().draft is None


def test_the_notes_state_the_bounds_and_where_the_prices_come_from() -> None:
    profile = fake(draft_layers=5, draft_gamma=7, command="made by hand")
    low, high = verification_bounds(profile)
    notes = profile.provenance.notes or ""
    for words in (
        f"64 sequences of 8 tokens at a context of 1024 take {low * 1e3:.4g} ms",
        f"{high * 1e3:.4g} ms if each query reads it",
        "silicon: embedding, qkv_gemm, logits_gemm, attention, prefill attention",
        "The draft cost is composed, not measured: 5 layers",
        "KV tokens as given.",
    ):
        assert words in notes
    assert profile.provenance.versions == {"aiconfigurator-core": "0.12.0", "vllm": "0.1"}
    assert profile.provenance.command == "made by hand"
    assert (profile.name, profile.device, profile.gpus, profile.kind) == (
        "g1-model-1b-tp2-vllm",
        "G1 SXM",
        2,
        "imported",
    )


def test_small_tables_have_an_example_of_their_own() -> None:
    notes = fake(max_num_tokens=64, max_context=100).provenance.notes or ""
    assert "8 sequences of 8 tokens at a context of 100 take" in notes


def test_a_model_whose_prefill_is_other_work_is_refused() -> None:
    with pytest.raises(SpecsimError, match=r"cannot be composed: .* a prefill of 16 tokens at 2\.6.* ms"):
        compose(Handle(gemm=0.3), deployment(), max_num_tokens=1024)


def test_a_model_without_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handle, "attention", staticmethod(lambda num_seqs, kv: 0.1))
    with pytest.raises(SpecsimError, match="no attention whose cost grows"):
        fake()


def test_an_error_of_the_handle_is_not_taken_for_the_end_of_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Handle, indices: list[int], **shape: int) -> list[Value]:
        raise ValueError("no such table")

    monkeypatch.setattr(Handle, "evaluate_generation_ops", broken)
    with pytest.raises(ValueError, match="no such table"):
        fake()


# --- the command line ------------------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package replaced by the handle above, whatever is asked for."""
    monkeypatch.setattr(silicon, "_open", lambda *answers: (Handle(), deployment()))


@pytest.mark.usefixtures("opened")
def test_profile_import_composes_the_model_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.json"
    words = "profile import Any/Model-1B --format aiconfigurator --system g1_sxm --tp 2 --kv-reads per_query"
    words += " --max-num-tokens 1024 --draft-layers 5 --draft-gamma 7 --name mine --host-seconds 0.001"
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--out", str(out)])
    assert end.value.code == 0
    profile = ss.load_profile(out)
    expected = fake(kv_reads="per_query", draft_layers=5, draft_gamma=7)
    for field in ("verify", "draft", "model", "device", "gpus", "tp", "kv_tokens", "kv_bytes_per_token", "engine"):
        assert getattr(profile, field) == getattr(expected, field), field
    assert (profile.name, profile.host_seconds, profile.max_num_tokens) == ("mine", 0.001, 1024)
    assert profile.provenance.notes == expected.provenance.notes
    assert profile.provenance.versions == expected.provenance.versions
    assert (profile.provenance.command or "").startswith("specsim profile import Any/Model-1B --format aiconfigurator")
    assert "64 × 1,024 KV tokens, 3 drafts each" in capsys.readouterr().out


@pytest.mark.usefixtures("opened")
def test_a_measured_draft_cost_may_come_with_a_composed_step(tmp_path: Path) -> None:
    draft = tmp_path / "d.csv"
    draft.write_text("num_seqs,ms\n1,1\n4,2\n")
    profile, _ = load_profile_source("Any/Model-1B", "aiconfigurator", Ask(system="g1", draft=draft))
    assert profile.draft is not None
    assert profile.draft.seconds == (0.001, 0.002)


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"model": "Any/Model-1B", "device": "G1"}, []),
        ({"model": "model-1b", "device": "Vendor G1 SXM 80GB"}, []),
        (
            {"model": "M-7B"},
            ["The model's name was told (--model M-7B): the prices are those of Any/Model-1B."],
        ),
        ({"device": "G10"}, ["The GPU's name was told (--device G10): the prices are those of G1 SXM."]),
    ],
)
def test_names_told_that_are_not_those_of_the_prices_get_a_warning(answers: dict[str, Any], said: list[str]) -> None:
    profile, warnings = load_profile_source("Any/Model-1B", "aiconfigurator", Ask(system="g1", **answers))
    assert warnings == said
    assert all(warning in (profile.provenance.notes or "") for warning in said)


@pytest.mark.parametrize(
    ("dtype", "width", "noted", "warned"),
    [("fp8", 1.0, True, True), ("fp8", 2.0, True, False), ("bfloat16", 2.0, False, False), ("fp8", None, False, False)],
)
def test_the_format_of_kv_is_told_beside_weights_of_8_bits(
    dtype: str, width: float | None, noted: bool, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = deployment(dtype=dtype, kv_number_bytes=width)
    monkeypatch.setattr(silicon, "_open", lambda *answers: (Handle(), facts))
    profile, warnings = load_profile_source("Any/Model-1B", "aiconfigurator", Ask(system="g1"))
    assert (f"(bytes per number: {width or 0:g})." in (profile.provenance.notes or "")) == noted
    assert [w.startswith("KV numbers of 1 byte were not asked for") for w in warnings] == [True] * warned


def test_bytes_of_a_kv_number_are_those_of_the_heads_on_a_gpu() -> None:
    config = {"n_kv": 8, "d": 128, "layers": 64}
    assert silicon._number_bytes(config, 131072, 1) == 1
    assert silicon._number_bytes(config, 32768 * 2, 4) == 2
    assert silicon._number_bytes(config, 2 * 64 * 128 * 2, 16) == 2  # a whole head on each of more GPUs than heads
    assert silicon._number_bytes({"layers": 64}, 1, 1) is None


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "error: Any/Model-1B: expected --system, the GPUs as AIConfigurator names them, such as h200_sxm"),
        ("--system g1 --capture-limit 8", "--capture-limit: has no meaning for the format aiconfigurator"),
        ("--system g1 --draft-layers 5", "--draft-layers, --draft-gamma: expected both or neither"),
        ("--system g1 --utilisation 0", "--utilisation: expected a share of the GPU's memory in 0..1, got 0.0"),
        ("--system g1 --max-context 0", "--max-context: expected 1 to 1,000,000,000, got 0"),
        ("--system g1 --utilisation nan", "--utilisation: expected a share of the GPU's memory in 0..1, got nan"),
        (
            "--system g1 --max-context 10000000",
            "--max-context: expected at most the 4096 tokens of the model's longest sequence, got 10000000",
        ),
        (
            "--system g1 --draft-layers 500 --draft-gamma 7",
            "--draft-layers: expected at most the 20 layers of the model, got 500",
        ),
        (
            "--system g1 --tp 2 --gpus 8",
            "--gpus: expected 2, --tp: the prices are those of so many GPUs, got 8",
        ),
        ("--system g1 --backend llama", "--backend: expected one of vllm, sglang, trtllm, got 'llama'"),
    ],
)
def test_profile_import_tells_bad_options_in_one_line(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"profile import Any/Model-1B --format aiconfigurator {options}".split()
    with pytest.raises(SystemExit) as end:
        main([*words, "--out", str(tmp_path / "out.json")])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_options_of_the_data_mean_nothing_for_a_table(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("tokens,ms\n1,1.0\n8,2.0\n")
    with pytest.raises(SpecsimError, match="--system: has no meaning for the format csv"):
        load_profile_source(table, "auto", Ask(system="h200_sxm"))


# --- tables ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40), st.floats(0, 0.3))
def test_a_thinned_curve_stays_within_its_slack(values: list[float], tolerance: float) -> None:
    at, value = np.cumsum(1 + np.arange(len(values)) % 3), np.array(values)
    places = thin(at, value, tolerance * value)
    assert places[0] == 0
    assert places[-1] == len(values) - 1
    error = np.abs(np.interp(at, at[places], value[places]) - value)
    assert (error <= tolerance * value + 1e-9).all()


def test_a_straight_line_needs_two_places_and_a_kink_a_third() -> None:
    at = np.arange(1, 101)
    line = 3.0 + at
    assert thin(at, line, 1e-6 * line) == [0, 99]
    kink = np.maximum(50.0, at)
    assert thin(at, kink, 1e-6 * kink) == [0, 49, 99]


def test_a_thinned_grid_says_how_far_off_it_is() -> None:
    rows_, columns = steps(1, 512, 4), steps(16, 4096, 4)
    values = 1 + 0.01 * np.sqrt(rows_)[:, None] * columns[None, :]
    pairs, worst = thin_rows(rows_, columns, values, 0.02 * values)
    assert {(0, 0), (0, len(columns) - 1), (len(rows_) - 1, 0), (len(rows_) - 1, len(columns) - 1)} <= set(pairs)
    assert 0 < worst <= 1
    assert len(pairs) < values.size / 4


def test_steps_hold_their_ends_and_what_is_asked_for() -> None:
    assert steps(1, 8, 1).tolist() == [1, 2, 4, 8]
    assert steps(16, 100, 1, [8, 63, 127]).tolist() == [16, 29, 54, 63, 100]


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "llama"}, "--backend: expected one of vllm, sglang, trtllm, got 'llama'"),
        ({"tp": 0}, "--tp: expected 1 to 10,000, got 0"),
        ({"kv_reads": "twice"}, "--kv-reads: expected once or per_query, got 'twice'"),
        ({"max_num_tokens": 8}, "--max-num-tokens: expected at least 64, got 8"),
        ({"max_context": 8}, "--max-context: expected at least 64, got 8"),
        ({"kv_tokens": 0}, "--kv-tokens: expected 1 to 1,000,000,000, got 0"),
        ({"utilisation": 1.5}, "--utilisation: expected a share of the GPU's memory in 0..1, got 1.5"),
        ({"draft_layers": 5}, "--draft-layers, --draft-gamma: expected both or neither"),
        ({"draft_layers": 0, "draft_gamma": 7}, "--draft-layers: expected 1 to 1,000, got 0"),
    ],
)
def test_bad_options_are_told_before_anything_is_loaded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecsimError) as error:
        load_silicon("Qwen/Qwen3-8B", "h200_sxm", **options)
    assert str(error.value) == message


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("aiconfigurator_core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(SpecsimError, match=r"need aiconfigurator-core: pip install 'specsim\[silicon\]'"):
        load_silicon("Qwen/Qwen3-8B", "h200_sxm")


def test_importing_the_module_does_not_load_the_package() -> None:
    code = "import sys, specsim.importers.silicon; print('aiconfigurator_core' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert out.strip() == "False"
