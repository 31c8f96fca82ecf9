"""specsim audit on the command line: what it prints, its exit codes, its JSON, and one line for each mistake."""

from __future__ import annotations

import json
import re

import pytest

import specsim as ss
from specsim.cli import show

FEW = ("--instances", "120", "--histories", "4")

MINE = """
import numpy as np

class Cut:
    def __init__(self, level=0.5):
        self.level = level

    def __call__(self, view):
        return np.logical_and.accumulate(view.confidence >= self.level, axis=1).sum(axis=1)

def broken(view):
    return view.nothing

def halves(view):
    return np.full(view.num_seqs, 0.5)

def inside(view):
    return view.survival.sum(axis=5)

def no_view():
    return 0

def ragged(view):
    return [[0], [0, 0]]

class Forgets:
    def start(self):
        pass

class Shy:
    def __repr__(self):
        return self.level

class NoCall:
    pass

number = 5
"""


@pytest.fixture
def mine(write):
    return write(MINE, "mine.py")


def test_a_lossless_scheduler(run):
    code, out, err = run("audit", "DSparkGreedy", *FEW)
    assert (code, err) == (0, "")
    assert out.startswith("DSparkGreedy() is lossless in ")
    assert re.search(r"one step and \d+ of 3, blocks of 1–3: total variation at most ", out.splitlines()[0])
    assert "1 step: vocabulary 2–3, blocks of 1–3, requests 1–2; 3 steps: vocabulary 2, blocks of 1–2" in out
    assert "no proof" in out
    assert "--confidence draft_prob" in out


def test_a_scheduler_that_looks_at_no_confidence(run):
    code, out, _ = run("audit", "StaticGamma(2)", *FEW, "--steps", "1")
    assert code == 0
    assert (
        "In no instance did it look at a confidence: if it ever should, the case that matters was not reached." in out
    )
    assert ". Not looked at: memory from step to step (steps are 1)" in out.splitlines()[0]
    assert "draft_prob" not in out
    assert "3 steps" not in out


@pytest.mark.parametrize("scheduler", [ss.schedulers.DSparkGreedy(), ss.DCut(), ss.TETRIS(64), ss.StaticGamma(2)])
@pytest.mark.parametrize("confidence", ["head", "draft_prob"])
def test_python_prints_what_the_command_prints(run, scheduler, confidence):
    found = ss.audit(scheduler, instances=120, histories=4, confidence=confidence)
    code, out, _ = run("audit", repr(scheduler), *FEW, "--confidence", confidence)
    assert code == (0 if found.lossless else 1)
    assert out == f"{found}\n"


@pytest.mark.parametrize(
    ("scheduler", "verified", "words"),
    [
        ("TETRIS(64)", "all", "In every instance it verified all drafts: what it does when it verifies fewer was not"),
        ("TETRIS(0)", "none", "In no instance did it verify a draft: what it does when it verifies some was not met."),
        ("DSparkGreedy", "some", None),
        ("StaticGamma(2)", "all", None),
        ("StaticGamma(0)", "none", None),
    ],
)
def test_a_rule_that_was_never_met_is_told(run, tmp_path, scheduler, verified, words):
    code, out, _ = run("audit", scheduler, *FEW, "--steps", "1", "--json", tmp_path / "a.json")
    assert code == 0
    assert ("In every instance" in out or "In no instance did it verify" in out) == (words is not None)
    assert (words or "") in out
    assert json.loads((tmp_path / "a.json").read_text())["verified"] == verified


def test_of_long_blocks_it_says_what_it_did_not_look_at(run):
    code, out, _ = run("audit", "StaticGamma(7)", "--instances", "64", "--histories", "32", "--steps", "4")
    assert code == 0
    first, *_ = out.splitlines()
    assert ", blocks of 7–8: total variation at most " in first
    assert first.endswith(
        "Not looked at: a vocabulary of 3, one request in more than 3 steps, two requests in several steps "
        "(γ = 7 is too long to enumerate)"
    )
    assert (
        "Sizes: 1 step: vocabulary 2, blocks of 7, requests 1–2, and blocks of 8 of one request in vocabulary 2; "
        "3 steps: vocabulary 2, blocks of 7, requests 1." in out
    )
    assert "Of blocks of 7, one drawn for each 16, of blocks of 8, one drawn for each 32 asked for." in out


def test_the_help_names_the_limits(run):
    _, out, _ = run("audit", "--help")
    said = " ".join(out.split())
    for words in (
        "Not looked at, and so never found",
        "three requests or more",
        "with a gamma of 3 to 8, others than those and, of one request in one step, one longer",
        "remembered outside start()",
    ):
        assert words in said


def test_the_appendix_of_the_paper(run, tmp_path):
    code, out, err = run("audit", "GlobalArgmax", *FEW, "--json", tmp_path / "deep/audit.json")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[0].startswith("GlobalArgmax() is not lossless: total variation up to 0.")
    for line in (
        "vocabulary 2, blocks of 2, 1 request, 1 step; first 3 tokens: total variation 0.15",
        "  target: a 0.7, b 0.3 always",
        "  aa     0.25    0.8 0.9      2",
        "  ba     0.25    0.8 0        0",
        "  a            0.7     0.85",
        "  b            0.3     0.15",
    ):
        assert line in lines
    data = json.loads((tmp_path / "deep/audit.json").read_text())
    assert data["scheduler"] == "GlobalArgmax()"
    assert data["lossless"] is False
    case = data["counterexample"]
    assert case["tv"] == pytest.approx(0.15)
    assert [law["output"] for law in case["next"]["laws"]] == pytest.approx([0.85, 0.15])
    assert [row["verified"] for row in case["drafted"]] == [[2], [2], [0], [0]]
    assert case["decoders"][0]["confidence"] == [[[0.8, 0.8]], [[0.9, 0.9, 0.0, 0.0]]]


def test_why_is_told_of_the_request_whose_law_is_shown(run):
    code, out, _ = run("audit", "TETRIS(2)", *FEW, "--confidence", "draft_prob")
    assert code == 1
    assert "first token of request 1  target  output" in out
    assert "Why: whether request 1's draft token 1 is verified depends on what it is, or on what follows it" in out
    assert "it is verified in aa and not in ba, beside aa." in out


def test_the_same_call_writes_the_same_bytes(run, tmp_path):
    paths = [tmp_path / name for name in ("one.json", "two.json")]
    printed = [run("audit", "Threshold(0.5)", *FEW, "--seed", "3", "--json", path)[1] for path in paths]
    assert printed[0] == printed[1]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert json.loads(paths[0].read_text())["counterexample"] is None


def test_ones_own_scheduler_and_both_confidences(run, mine):
    assert run("audit", f"{mine}:Cut(0.6)", *FEW)[0] == 0
    code, out, _ = run("audit", f"{mine}:Cut(0.6)", *FEW, "--confidence", "draft_prob")
    assert code == 1
    assert out.startswith("Cut is not lossless")
    assert "blocks of 1, 1 request, 1 step" in out
    assert "Confidences: the drafter's own probability of each draft token." in out


def test_progress_shows_after_two_seconds(run, monkeypatch):
    monkeypatch.setattr(show, "PATIENCE", 0.0)
    code, _, err = run("audit", "NoSpec", *FEW)
    assert code == 0
    assert err.startswith("instances audited: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Oracle",), "scheduler Oracle(): knows what will be accepted: an upper bound"),
        (("StaticGamma(9)",), "gamma: expected blocks of at most 8 tokens, which can be enumerated, got 9"),
        (("None",), "scheduler 'None': expected Name"),
        (("Nobody",), "scheduler 'Nobody': not known, expected one of BatchSizeTable"),
        (
            ("NoSpec@trace.json",),
            "'NoSpec@trace.json': an audit takes no @TRACE, as it makes drafters of its own: expected 'NoSpec'",
        ),
        (
            ("StaticGamma(3)@trace.json:3",),
            "an audit takes no @TRACE, as it makes drafters of its own: expected 'Static",
        ),
        (("{mine}:Cut(0.5)@trace.json:3",), "mine.py:Cut(0.5)'"),
        (
            ("{mine}:broken",),
            "scheduler broken: AttributeError: a StepView has no 'nothing'; it has confidence, finishing_prefills, "
            "gamma, num_seqs, prefill_tokens, prefilled, previous, request_ids, step_curve, step_seconds, survival "
            "(in mine.py, line 12",
        ),
        (("{mine}:inside",), "(in mine.py, line 18, inside)"),
        (
            ("{mine}:no_view",),
            "scheduler no_view: expected something that can be called with a StepView alone: TypeError",
        ),
        (("{mine}:ragged",), "scheduler ragged: expected 1 whole draft lengths within 0..1, got list"),
        (("{mine}:Forgets",), "scheduler Forgets: start: expected it to return something that can be called with a "),
        (("{mine}:Shy",), "scheduler Shy: its __repr__, which makes its label, fails: AttributeError: 'Shy' object"),
        (("{mine}:NoCall",), "scheduler NoCall: expected something that can be called with a StepView"),
        (("{mine}:number",), "mine.py: 'number' is no scheduler but of type int, expected one of Cut, broken, halves"),
        (("{mine}",), "mine.py:NAME, NAME one of Cut, broken, halves, inside, no_view, ragged, Forgets, Shy, NoCall"),
        (("{mine}:",), "mine.py:NAME, NAME one of Cut, broken"),
        (("{mine}:halves",), "scheduler halves: expected 1 whole draft lengths within 0..1, got float64 (1,): [0.5]"),
        (("NoSpec", "--confidence", "softmax"), "--confidence: expected head or draft_prob, got 'softmax'"),
        (("NoSpec", "--steps", "7"), "'--steps': expected a number, at most 6"),
        (("NoSpec", "--instances", "-1"), "'--instances': expected a number, at least 0"),
        (("NoSpec", "--seed", "x"), "'--seed': expected a whole number"),
        (("{mine}:Cut", "--json", "{mine}"), "is the input SCHEDULER, expected another path"),
        ((), "Missing argument 'SCHEDULER'"),
    ],
)
def test_mistakes_are_told_in_one_line(run, mine, arguments, words):
    code, out, err = run("audit", *(a.format(mine=mine) for a in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
