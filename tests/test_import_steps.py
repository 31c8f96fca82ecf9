"""The steps that an engine logged, as a profile: the prices behind them are found again, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.hardware import Profile, Shape, step_cost
from specsim.importers.profile_parts import Ask
from specsim.importers.profiles import load_profile_source
from specsim.types import SpecsimError


def price(tokens: Any, seqs: Any, kv: Any) -> Any:
    """A law with a bend: cheap up to 16 tokens, dear beyond."""
    return 0.020 + 0.0002 * tokens + 0.003 * np.maximum(tokens - 16, 0) + 0.0005 * (seqs - 1) + 2e-6 * kv


def steps(count: int = 3000, seed: int = 0, noise: float = 0.0, drafts: bool = True) -> list[dict[str, float]]:
    rng = np.random.default_rng(seed)
    now, rows = 0.0, []
    for _ in range(count):
        n, m = int(rng.integers(0, 9)), int(rng.integers(0, 2))
        n, k = n + (n + m == 0), int(rng.integers(0, 4)) if drafts else 0
        prompt, kv = m * int(rng.integers(20, 60)), n * int(rng.integers(20, 300))
        verify = float(price(n * (1 + k) + prompt, n + m, kv)) * float(np.exp(noise * rng.normal()))
        draft = (0.004 + 0.001 * n) * (n > 0) * drafts
        rows.append({"start": now, "seconds": verify + draft, "draft_seconds": draft, "num_seqs": n, "kv_tokens": kv,
                     "draft_tokens": n * k, "prefills": m, "prefill_tokens": prompt})  # fmt: skip
        now += verify + draft + 0.0015
    return rows


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def seconds(profile: Profile, n: int, draft_tokens: int, kv: int, chunks: tuple[int, ...] = ()) -> float:
    cost = step_cost(profile, 128, 16, 3 if profile.draft else 0, extrapolate=True)
    curve = cost.curve(Shape(n, kv, list(chunks), [0] * len(chunks)), draft_tokens)
    return float(curve[draft_tokens]) - profile.host_seconds


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
def test_mean_prices_by_tokens_sequences_and_kv_are_found_again(tmp_path, noise):
    profile, warnings = load_profile_source(write(tmp_path / "steps.jsonl", steps(noise=noise)), ask=Ask(model="M"))
    assert (profile.kind, profile.model, warnings) == ("imported", "M", [])
    off = 0.02 if noise == 0 else 0.04 if noise == 0.1 else 0.08
    for n, k, kv, chunks in ((1, 0, 100, ()), (4, 4, 600, ()), (8, 24, 1600, ()), (3, 3, 300, (40,)), (0, 0, 0, (30,))):
        expected = price(n + k + sum(chunks), n + len(chunks), kv) * np.exp(noise**2 / 2)
        assert seconds(profile, n, k, kv, chunks) == pytest.approx(expected, rel=off)
    assert profile.draft is not None
    drafting = dict(zip(profile.draft.num_seqs, profile.draft.seconds, strict=True))
    assert drafting == pytest.approx({n: 0.004 + 0.001 * n for n in range(1, 9)})
    assert profile.host_seconds == pytest.approx(0.0015)


def test_without_drafts_there_is_no_draft_cost_and_one_size_apart_is_enough(tmp_path):
    profile, _ = load_profile_source(write(tmp_path / "steps.jsonl", steps(drafts=False)))
    assert profile.draft is None
    assert seconds(profile, 8, 0, 800) == pytest.approx(price(8, 8, 800), rel=0.02)


def test_a_pause_of_the_machine_is_left_out_and_told(tmp_path):
    rows = steps()
    rows[70]["seconds"] += 30.0
    rows[300]["start"] += 20.0  # between two steps
    found, _ = load_profile_source(write(tmp_path / "steps.jsonl", rows))
    assert seconds(found, 4, 4, 600) == pytest.approx(price(8, 4, 600), rel=0.02)
    assert found.host_seconds == pytest.approx(0.0015)
    assert found.provenance.notes is not None
    assert "1 steps of more than ten times the usual were left out" in found.provenance.notes


def test_what_the_user_tells_goes_before_what_was_logged(tmp_path):
    path = write(tmp_path / "steps.jsonl", steps())
    assert load_profile_source(path, ask=Ask(host_seconds=0.0))[0].host_seconds == 0


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 2: expected a line of JSON"),
        ("[]", "line 2: expected a JSON object"),
        ({"seconds": None}, "line 2: seconds: expected a number, got None"),
        ({"draft_seconds": -1.0}, "line 2: draft_seconds: expected seconds, 0 or more"),
        ({"num_seqs": 1.5}, "line 2: num_seqs: expected a whole number of at least 0"),
        ({"draft_seconds": 9.0}, "line 2: expected a step of some tokens that lasted longer than its drafting"),
        ({"num_seqs": 0, "draft_tokens": 0, "prefill_tokens": 0}, "line 2: expected a step of some tokens"),
        (None, "line 2: kv_tokens: is missing"),
    ],
)
def test_what_is_no_step_is_refused_in_one_line(tmp_path, row, words):
    good = steps(20)
    path = write(tmp_path / "steps.jsonl", good)
    lines = path.read_text().splitlines()
    bad = {k: v for k, v in good[1].items() if k != "kv_tokens"} if row is None else row
    lines[1] = bad if isinstance(bad, str) else json.dumps(bad if row is None else good[1] | bad)
    path.write_text("\n".join(lines))
    with pytest.raises(SpecsimError) as error:
        load_profile_source(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_too_few_steps_are_refused(tmp_path):
    path = write(tmp_path / "steps.jsonl", steps(1))
    with pytest.raises(SpecsimError, match="expected steps of several sizes, 8 or more of each, got 1 steps"):
        load_profile_source(path)
    assert load_profile_source(write(path, steps(500)))[0].engine == "specsim serve-reference"
    with pytest.raises(SpecsimError, match=r"steps\.jsonl: expected at least one step, got none"):
        load_profile_source(write(path, []), "steps")
