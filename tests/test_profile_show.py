"""When one more draft token pays: the thresholds against the schedulers themselves, and profile show's tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import TICK, make_profile, staircase
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.hardware import load_profile, save_profile, sps
from specsim.marginal import (
    choices,
    decode_seconds,
    draft_curve,
    expected_tokens,
    look_ahead_threshold,
    next_threshold,
)
from specsim.schedulers import DSparkGreedy, GlobalArgmax
from specsim.views import StepView

ROOT = Path(__file__).parents[1]
B300 = ROOT / "hw_profiles/dsv4-flash-b300-tp4.json"
SMALL_CACHE = ROOT / "hw_profiles/h100-qwen3-32b-tp1-vllm.json"
TRACE = ROOT / "traces/qwen3-4b-dspark.json"
EPSILON = 1e-6


def view_of(survival, seconds):
    return StepView(np.arange(len(survival)), np.asarray(survival, dtype=float), seconds.take)


# The next token: Algorithm 1


@settings(max_examples=200)
@given(data=st.data())
def test_greedy_admits_a_token_just_above_the_next_threshold_and_none_just_below(data):
    """R requests whose first K tokens all survive: the token after them, at the threshold that is shown."""
    requests, gamma = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    most = requests * gamma
    # Steps so flat that the first K tokens, of survival 1, are admitted one by one.
    rises = data.draw(st.lists(st.floats(0.001, 0.9), min_size=most, max_size=most))
    k = data.draw(st.integers(0, most - 1))
    seconds = np.empty(most + 1)
    seconds[0] = 1.0
    for i in range(most):
        # Θ rises with a survival of 1 if T grows by less than the factor (R + i + 1)/(R + i).
        seconds[i + 1] = seconds[i] * (1 + rises[i] / (requests + i))
    threshold = next_threshold(seconds, expected_tokens(requests, gamma))[k]
    assert threshold == pytest.approx(rises[k])  # so 0 < threshold < 1

    def admitted(last):
        survival = np.zeros((requests, gamma))
        survival.T.flat[:k] = 1.0  # position by position: blocks' survivals do not increase
        survival.T.flat[k] = last
        return int(DSparkGreedy()(view_of(survival, seconds)).sum())

    assert admitted(threshold + EPSILON) == k + 1
    assert admitted(threshold - EPSILON) == k


def test_the_next_threshold_by_hand():
    # Two sequences: 2 tokens in 1 s; a step half as long again must bring one token more, one a tenth longer 0.2.
    seconds = np.array([1.0, 1.1, 1.65, 1.65, 1.5])
    assert next_threshold(seconds, np.array([2.0, 2.5, 3, 3, 3])) == pytest.approx([0.2, 1.25, 0, -3 * 0.15 / 1.65])


# Looking ahead: the unconstrained argmax


@settings(max_examples=200)
@given(data=st.data())
def test_the_argmax_moves_on_just_above_the_look_ahead_threshold_and_stays_just_below(data):
    requests, gamma = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    most = requests * gamma
    seconds = np.array(data.draw(st.lists(st.floats(0.5, 4.0), min_size=most + 1, max_size=most + 1)))
    threshold = look_ahead_threshold(seconds, expected_tokens(requests, gamma))[0]

    def admitted(each):
        survival = np.full((requests, gamma), np.clip(each, 0, 1))
        return int(GlobalArgmax()(view_of(survival, seconds)).sum())

    if threshold < 1 - EPSILON:
        assert admitted(threshold + EPSILON) > 0
    if threshold > EPSILON:
        assert admitted(threshold - EPSILON) == 0


@given(data=st.data())
def test_looking_ahead_never_asks_for_more_than_the_next_token_does(data):
    n = data.draw(st.integers(1, 12))
    seconds = np.array(data.draw(st.lists(st.floats(0.1, 9), min_size=n + 1, max_size=n + 1)))
    expected = np.arange(1.0, n + 2)
    one, ahead = next_threshold(seconds, expected), look_ahead_threshold(seconds, expected)
    assert (ahead <= one + 1e-9).all()
    assert ahead[-1] == pytest.approx(one[-1])


@given(data=st.data())
def test_looking_ahead_is_the_least_slope_over_all_further_tokens(data):
    n = data.draw(st.integers(2, 12))
    price = st.one_of(st.floats(0.1, 9), st.sampled_from([1.0, 2.0, np.inf]))
    seconds = np.array(data.draw(st.lists(price, min_size=n, max_size=n)))
    found = look_ahead_threshold(seconds, np.ones(n))
    for k in range(n - 1):
        rises = (seconds[k + 1 :] - seconds[k]) / np.arange(1, n - k) if np.isfinite(seconds[k]) else [np.nan]
        assert found[k] == pytest.approx(np.min(rises) / seconds[k], nan_ok=True)


def test_looking_ahead_over_a_million_tokens_is_quick():
    """What --num-seqs 16384 --gamma 64 asks for: all pairs would take hours."""
    seconds = 1 + np.sqrt(np.arange(1_000_001))
    assert len(look_ahead_threshold(seconds, np.ones(len(seconds)))) == 1_000_000


@given(rises=st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_on_a_convex_curve_both_are_the_same(rises):
    seconds = 1.0 + np.cumsum([0.0, *sorted(rises)])
    expected = np.arange(1.0, len(seconds) + 1)
    np.testing.assert_allclose(next_threshold(seconds, expected), look_ahead_threshold(seconds, expected), atol=1e-9)


def test_a_staircase_is_free_on_a_stair_and_dear_at_its_edge():
    # Sizes 4, 8, 12 of 1, 1.5 and 3 s; four sequences.
    profile = make_profile(verify=staircase([4, 8, 12], [1.0, 1.5, 3.0]), draft=None)
    seconds, expected = draft_curve(profile, 4, 2, 0), expected_tokens(4, 2)
    assert seconds.tolist() == [1, 1.5, 1.5, 1.5, 1.5, 3, 3, 3, 3]
    assert next_threshold(seconds, expected) == pytest.approx([2, 0, 0, 0, 8 * 1.5 / 1.5, 0, 0, 0])
    # Half of four tokens for all four on the stair; on it nothing, then as much as eight for four.
    assert look_ahead_threshold(seconds, expected) == pytest.approx([0.5, 0, 0, 0, 2, 0, 0, 0])
    greedy, argmax = (s(view_of(np.full((4, 2), 0.6), seconds)).sum() for s in (DSparkGreedy(), GlobalArgmax()))
    assert (greedy, argmax) == (0, 4)  # 0.6 is below 2 and above 0.5


def test_outside_the_range_there_is_no_threshold():
    profile = make_profile(verify=staircase([2, 4], [1.0, 1.5]), draft=None)
    assert next_threshold(draft_curve(profile, 2, 2, 0), expected_tokens(2, 2)).tolist()[:3] == [1.0, 0.0, np.inf]
    assert np.isnan(next_threshold(draft_curve(profile, 2, 2, 0), expected_tokens(2, 2))[3])


# The numerator and the steps


def test_sequences_that_do_not_fit_in_the_kv_cache_have_no_price():
    profile = make_profile(kv_tokens=400)
    assert decode_seconds(profile, [1, 4, 5, 8], 100).tolist() == [1 + TICK, 1 + 4 * TICK, np.inf, np.inf]
    assert np.isfinite(decode_seconds(profile, [5, 8], 100, 4)).all()  # drafts of four sequences
    assert np.isfinite(draft_curve(profile, 4, 2, 100)).all()
    assert draft_curve(profile, 5, 2, 100).tolist() == [np.inf] * 11
    assert len(choices(profile, np.ones((4, 2)), 4, 100)) == 4
    assert choices(profile, np.ones((4, 2)), 5, 100) == []
    # Nor does extrapolation make room.
    assert decode_seconds(profile, [5], 100, extrapolate=True).tolist() == [np.inf]


def test_expected_tokens():
    assert expected_tokens(2, 2).tolist() == [2, 3, 4, 5, 6]
    assert expected_tokens(2, 2, tau=2.25).tolist() == [2, 3, 4, 4.5, 4.5]
    assert expected_tokens(2, 2, survival=[0.5, 0.25]).tolist() == [2, 2.5, 3, 3.25, 3.5]


def test_a_draft_curve_holds_host_and_drafting():
    profile = make_profile(
        draft={"type": "autoregressive", "num_seqs": [1, 8], "seconds": [0.25, 0.25]}, host_seconds=2
    )
    assert draft_curve(profile, 3, 2, 0) == pytest.approx(3 + 2 * 0.25 + TICK * np.arange(3, 10))
    assert decode_seconds(profile, [3, 9], 0) == pytest.approx([3 + 3 * TICK, 3 + 9 * TICK])


def test_sequences_hold_their_context():
    verify = {
        "type": "table2d", "tokens": [1, 8], "kv_tokens": [0, 800], "seconds": [[1, 9], [1, 9]], "below": "linear",
    }  # fmt: skip
    profile = make_profile(verify=verify)
    assert decode_seconds(profile, [1, 4, 8], 100).tolist() == [2, 5, 9]
    assert decode_seconds(profile, [1, 4, 8], 100, 2).tolist() == [2, 3, 3]  # two sequences at most
    assert decode_seconds(profile, [8], 101).tolist() == [np.inf]


def test_choices_are_what_the_schedulers_do():
    survival = np.full((10, 2), 0.6)
    profile = make_profile(verify=staircase([4, 8, 12], [1.0, 1.5, 3.0]), draft=None)
    none, static, greedy, dspark = choices(profile, survival, 4, 0)
    assert [c.scheduler for c in (none, static, greedy)] == ["NoSpec()", "StaticGamma(2)", "DSparkGreedy()"]
    assert [c.draft_tokens for c in (none, static, greedy, dspark)] == [0, 2, 0, 1]
    assert [c.throughput for c in (none, static, greedy, dspark)] == pytest.approx([4, 8.8 / 3, 4, 6.4 / 1.5])


def test_who_waits_for_confidences_pays_for_it_and_who_drafts_not_pays_no_draft():
    profile = make_profile(
        verify=staircase([16], [1.0]), sync_seconds=1.0, draft={"type": "parallel", "num_seqs": [1], "seconds": [2.0]}
    )
    none, static, greedy, _ = choices(profile, np.ones((4, 3)), 1, 0)
    assert [none.throughput, static.throughput, greedy.throughput] == pytest.approx([1, 4 / 3, 4 / 4])


# On the command line


def test_one_profile_shows_facts_steps_and_thresholds(run):
    code, text, err = run("profile", "show", B300)
    assert (code, err) == (0, "")
    for words in ("CUDA graphs up to 1024", "vLLM blog, 2026-08-14", "SPS(B)", "20.6", "R = 128: next", "ahead"):
        assert words in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.split()[:1] in (["1,024"], ["1,025"])}
    assert float(rows["1,024"][2]) == pytest.approx(float(sps(load_profile(B300), 1024)), rel=1e-3)
    assert float(rows["1,024"][2]) > 4 * float(rows["1,025"][2])


def shown(run, tmp_path, *arguments):
    path = tmp_path / "shown.json"
    code, text, err = run("profile", "show", *arguments, "--json", path)
    assert (code, err) == (0, "")
    return text, json.loads(path.read_text())


def test_what_does_not_fit_in_the_kv_cache_is_a_dash_and_in_no_average(run, tmp_path):
    """Room for 16 sequences of 1,024: at 32 and 128 neither prices nor survivals nor what schedulers do."""

    def profile(name, slower, kv_tokens):
        verify = {
            "type": "table2d", "tokens": [1, 4096], "kv_tokens": [0, 1 << 24], "below": "linear",
            "seconds": [[slower, slower], [2.0, 2.0]],
        }  # fmt: skip
        return save_profile(make_profile(name=name, verify=verify, kv_tokens=kv_tokens), tmp_path / f"{name}.json")

    small, large = profile("small", 1.0, 16384), profile("large", 1.25, None)
    text, data = shown(run, tmp_path, small, "--trace", TRACE, "--gamma", 2)
    found = data["profiles"][0]
    assert [s["tokens"] for s in found["steps"] if s["seconds"] is not None] == [1, 2, 4, 8, 16]
    assert {c["num_seqs"] for c in found["choices"]} == {1, 8}
    assert all((s["next"] is None) == (s["num_seqs"] > 16) for s in found["survival_that_pays"])
    assert "small: the KV cache of 16,384 tokens holds 16 sequences of 1,024; – where more would be needed" in text
    assert "R = 32, 128 left out: the KV cache of 16,384 tokens holds 16 sequences of 1,024" in text
    assert ["32", "–", "–", "–"] in [line.split() for line in text.splitlines()]
    text, data = shown(run, tmp_path, large, small)
    there = [d for d in data["profiles"][1]["difference"] if d is not None]
    assert len(there) == 5
    assert f"SPS(B) {100 * np.mean(np.abs(there)):.1f} % apart on average" in text
    # None fits: a note instead of the schedulers' table.
    text, _ = shown(run, tmp_path, small, "--trace", TRACE, "--gamma", 2, "--num-seqs", 17)
    assert "StaticGamma" not in text
    assert "R = 17 left out" in text


def test_a_curve_by_tokens_alone_has_no_kv_in_its_title(run, tmp_path):
    alone, _ = shown(run, tmp_path, B300)
    assert "(each its own sequence, whatever KV they hold)" in alone
    assert "R sequences, whatever KV they hold, each with" in alone
    assert "1,024" not in alone.split("dsv4-flash-b300-tp4: survival")[1]
    other, _ = shown(run, tmp_path, SMALL_CACHE)
    assert "(each its own sequence, 1,024 KV tokens a sequence)" in other
    both, _ = shown(run, tmp_path, B300, SMALL_CACHE)
    assert "dsv4-flash-b300-tp4: a curve by tokens alone, whatever KV they hold" in both


def test_the_thresholds_shown_are_those_of_the_schedulers(run, tmp_path):
    profile = make_profile(verify=staircase([4, 8, 12], [1.0, 1.5, 2.0]), draft=None)
    text, data = shown(run, tmp_path, save_profile(profile, tmp_path / "p.json"), "--num-seqs", 4, "--gamma", 2)
    rows = data["profiles"][0]["survival_that_pays"]
    assert [r["tokens"] for r in rows] == list(range(4, 12))
    assert [r["next"] for r in rows] == pytest.approx([2, 0, 0, 0, 8 / 3, 0, 0, 0])
    assert [r["ahead"] for r in rows] == pytest.approx([0.5, 0, 0, 0, 2 / 3, 0, 0, 0])
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "never", "0.500"] in lines
    assert ["1", "never", "0.667"] in lines


def test_tau_bounds_the_numerator(run, tmp_path):
    profile = save_profile(make_profile(), tmp_path / "p.json")
    seconds = {}
    for tau in (1, 2):
        _, data = shown(run, tmp_path, profile, "--num-seqs", 8, "--gamma", 3, "--tau", tau)
        seconds[tau] = [row["next"] for row in data["profiles"][0]["survival_that_pays"]]
    assert seconds[1][0] == seconds[2][0] == pytest.approx(8 * TICK / (1 + 8 * TICK))
    assert seconds[2][20] == pytest.approx(2 * seconds[1][20])


def test_profiles_of_one_gpu_are_compared_in_per_cent(run, tmp_path):
    def profile(name, slower, **fields):
        verify = staircase([1, 8], [slower, 2 * slower], below="linear")
        given = {"model": "org/Some-8B", "device": "NVIDIA H200 SXM"} | fields
        return save_profile(make_profile(name=name, verify=verify, **given), tmp_path / f"{name}.json")

    paths = [profile("one", 1.0), profile("two", 1.25, model="some-8b", device="H200 141GB")]
    paths += [profile("other-gpu", 1.0, device="H100"), profile("other-tp", 1.0, gpus=2, tp=2)]
    text, data = shown(run, tmp_path, *paths)
    assert text.count("vs first") == 1
    assert text.count("-20.0 %") >= 4
    assert "two against one: SPS(B) 20.0 % apart on average, -20.0 % at worst (B = " in text
    assert "other-gpu is of another model or other GPUs than one: not compared" in text
    assert "other-tp is of another" in text
    found = [p["difference"] for p in data["profiles"]]
    assert found[1] == pytest.approx([-0.2] * len(found[1]))
    assert [found[i] for i in (0, 2, 3)] == [None] * 3


@pytest.mark.parametrize(
    ("one", "other", "compared"),
    [
        ("RTX 6000 Ada", "RTX PRO 6000", False),
        ("H100 PCIe", "H100 SXM", False),
        ("H200 NVL", "NVIDIA H200", False),
        ("A100 40GB SXM", "A100-SXM4-80GB", False),
        ("unknown", "unknown", False),
        ("H200 SXM", "NVIDIA H200", True),
        ("B200 SXM", "NVIDIA B200", True),
        ("NVIDIA A100 80GB SXM", "A100", True),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5", True),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", True),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server Edition", True),
    ],
)
def test_gpus_of_other_names_are_not_compared(run, tmp_path, one, other, compared):
    paths = [
        save_profile(make_profile(name=f"p{i}", model="M-8B", device=device), tmp_path / f"{i}.json")
        for i, device in enumerate((one, other))
    ]
    text, _ = shown(run, tmp_path, *paths)
    assert ("vs first" in text, "not compared" in text) == (compared, not compared)
    assert ("p1 and p0: the model or the GPU is not told: not compared" in text) == (one == "unknown")


def test_a_trace_says_what_schedulers_would_do(run, tmp_path):
    text, data = shown(run, tmp_path, B300, "--trace", TRACE, "--gamma", 5, "--num-seqs", 16)
    assert "what schedulers do with blocks of γ = 5" in text
    chosen = {c["scheduler"]: c for c in data["profiles"][0]["choices"]}
    # At 16 sequences the next token moves the step to the next CUDA graph: Algorithm 1 stops there, an argmax does not.
    assert chosen["DSparkGreedy()"]["draft_tokens"] == 0
    assert chosen["DSparkAsync()"]["draft_tokens"] > 1
    first = data["profiles"][0]["survival_that_pays"][0]
    assert first["next"] > 1
    assert first["ahead"] < 0.5


def test_a_trace_without_confidences_gives_the_numerator_alone(run, tmp_path):
    trace = tmp_path / "t.json"
    data = json.loads((ROOT / "traces/mtp1.json").read_text()) | {"confidence_source": "none"}
    trace.write_text(json.dumps(data))
    text, _ = shown(run, tmp_path, B300, "--trace", trace)
    assert "survivals of t" in text
    assert "what schedulers do" not in text


def test_a_picture_is_drawn(run, tmp_path):
    code, text, _ = run("profile", "show", B300, "--num-seqs", "8", "--picture", tmp_path / "p.png")
    assert code == 0
    assert f"Wrote {tmp_path / 'p.png'}" in text
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_names_of_any_signs_are_shown_and_drawn(run, tmp_path, suffix):
    """Signs without a glyph, formulas and line ends: no warning, one line each."""
    name = "fast \N{ROCKET} $\\frac{$ 模型\nsecond\tline"
    path = save_profile(make_profile(name=name, model="a\nb", kind="analytic"), tmp_path / "p.json")
    code, text, err = run("profile", "show", path, "--picture", tmp_path / f"p.{suffix}")
    assert (code, err) == (0, "")
    assert "fast \N{ROCKET} $\\frac{$ 模型 second line: survival" in text
    assert "model  a b\n" in text
    assert (tmp_path / f"p.{suffix}").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((B300, "none.json"), "none.json: cannot read"),
        ((B300, "--tau", "0.5"), "--tau: expected 1 to 65 tokens (the bonus token counts), got 0.5"),
        ((B300, "--tau", "inf"), "--tau: expected 1 to 65 tokens (the bonus token counts), got inf"),
        ((B300, "--tau", "nan"), "--tau: expected 1 to 65 tokens (the bonus token counts), got nan"),
        ((B300, "--gamma", "65"), "'--gamma': expected a number, at most 64"),
        ((B300, "--context", 10**12), "'--context': expected a number, at most 10000000"),
        ((B300, B300.parent / ".." / "hw_profiles" / B300.name), "dsv4-flash-b300-tp4.json: is given twice"),
        ((SMALL_CACHE, "--context", 30000, "--picture", "p.png"), "--picture: nothing to draw at --context 30000"),
        ((B300, "--tau", "2", "--trace", TRACE), "--tau: has no meaning with --trace"),
        ((B300, "--picture", "p.gif"), "--picture: expected a .png or .svg file, got p.gif"),
        ((B300, "--picture", B300), "--picture: "),
        ((B300, "--num-seqs", "20000"), "--num-seqs: expected at most 16384"),
        ((B300, "--trace", TRACE, "--gamma", "9"), "gamma: expected 1..7"),
    ],
    ids=lambda v: " ".join(map(str, v[1:])) if isinstance(v, tuple) else "",
)
def test_mistakes_are_one_line(run, arguments, words):
    code, out, err = run("profile", "show", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err
