"""Acceptance that changes along the way: by tokens of context, or by position in the answer."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import make_arrivals, make_blocks, make_profile

from specsim.acceptance import Drafter, load_drafter
from specsim.blocktrace import write_trace
from specsim.engine import Scenario, simulate
from specsim.schedulers import StaticGamma
from specsim.synthesis import Domain, Synthetic
from specsim.types import SpecsimError
from specsim.workload import ClosedLoop


def recorded(prompts, accepted, gamma=3, **fields):
    """A trace of one response for each of ``prompts``; every response accepts by position as told."""
    n = len(prompts)
    trace = make_blocks(
        accepted * n, gamma, confidence=None, position=list(range(len(accepted))) * n,
        request_id=[f"r{i}" for i in range(n) for _ in accepted],
    )  # fmt: skip
    return Drafter(replace(trace, prompt_tokens=np.repeat(prompts, len(accepted))), gamma, name="recorded", **fields)


def means(**fields):
    """A synthetic drafter of γ = 2 whose blocks are all kept before the edges, half kept after."""
    domain = Domain(conditional_acceptance=(1.0, 1.0), later=((1.0, 0.0), (0.0, 0.0)))
    given = {"drafter": "d", "target": "t", "gamma": 2, "edges": (64, 128), "domains": {"*": domain}}
    trace = Synthetic.model_validate(given | {"provenance": {"source": "made up"}} | fields)
    return Drafter(trace, 2, name="far")


def emitted(drafter, prompt, output, seqs=1):
    """Tokens by step of a decode alone."""
    arrivals = make_arrivals([0.0] * seqs, prompt, output)
    scenario = Scenario(make_profile(), arrivals, drafter, StaticGamma(drafter.gamma), prefill="free")
    return simulate(scenario, steps=True).steps["emitted"].tolist()


def test_a_request_reads_blocks_of_its_own_context():
    # Three tokens a step up to 64 of context, two up to 128, one from there on: the prompt holds 55.
    made = emitted(means(), 55, 100)
    context = 55 + np.concatenate([[0], np.cumsum(made)[:-1]])  # before each step: prompt and answer, less the anchor
    assert made[:-1] == np.where(context < 64, 3, np.where(context < 128, 2, 1)).tolist()[:-1]
    assert {1, 2, 3} <= set(made[:-1])
    assert set(emitted(means(), 200, 20)) == {1}
    assert set(emitted(means(), 4, 30)[:-1]) == {3}


def test_by_position_the_prompt_does_not_count():
    assert set(emitted(means(by="position"), 200, 60)[:-1]) == {3}
    made = emitted(means(by="position"), 200, 100)
    position = np.concatenate([[0], np.cumsum(made)[:-1]])
    assert made[:-1] == np.where(position < 64, 3, 2).tolist()[:-1]


def test_a_recorded_trace_serves_by_how_far_a_request_has_come():
    # Answers of 40 tokens: all is kept in the first ten, nothing afterwards.
    drafter = recorded([8, 8, 8], [3] * 10 + [0] * 30, by="position", edges=(10,))
    made = emitted(drafter, 20, 60)
    position = np.concatenate([[0], np.cumsum(made)[:-1]])
    assert made[:-1] == np.where(position < 10, 4, 1).tolist()[:-1]
    # From anywhere, as without edges, a request meets both kinds all the time.
    assert set(emitted(replace(drafter, edges=()), 20, 200)[:-1]) == {1, 4}


def test_a_sequential_trace_is_left_at_its_edge_too():
    """Whose rows are cycles, not tokens: four are kept before position 64, none after."""
    trace = make_blocks([4] * 13 + [0] * 60, 4, kind="sequential", confidence=None,
                        position=[5 * k for k in range(13)] + list(range(65, 125)))  # fmt: skip
    made = emitted(Drafter(trace, 4, by="position", edges=(64,)), 10, 300)
    position = np.concatenate([[0], np.cumsum(made)[:-1]])
    assert made[:-1] == np.where(position < 64, 5, 1).tolist()[:-1]


def test_prompts_of_a_length_that_was_not_recorded_read_the_nearest():
    short, long = [3] * 20, [1] * 20
    trace = make_blocks(
        short + long, 3, confidence=None, position=list(range(20)) * 2, request_id=["s"] * 20 + ["l"] * 20
    )
    trace = replace(trace, prompt_tokens=np.repeat([10, 5000], 20))
    drafter = Drafter(trace, 3, edges=(100, 1000, 10_000))
    tape = drafter.tape()
    assert tape.size.tolist() == [20, 20, 20, 20]  # none at 100..1000 (the nearer is the first), none past 10,000
    assert tape.first.tolist() == [0, 0, 20, 20]
    assert set(emitted(drafter, 50, 30)[:-1]) == {4}
    assert set(emitted(drafter, 400, 30)[:-1]) == {4}
    assert set(emitted(drafter, 20_000, 30)[:-1]) == {2}


def test_each_domain_has_parts_of_its_own():
    trace = make_blocks([3] * 6 + [1] * 6, 3, confidence=None, domain=["a"] * 6 + ["b"] * 6, position=[*range(6)] * 2)
    drafter = Drafter(trace, 3, by="position", edges=(4,))
    tape = drafter.tape()
    assert tape.parts == ["a", "a from 4 tokens of answer", "b", "b from 4 tokens of answer"]
    assert (tape.first.tolist(), tape.size.tolist()) == ([0, 4, 6, 10], [4, 2, 4, 2])


def test_without_edges_nothing_changes():
    drafter = recorded([8] * 3, [3, 0, 2, 1] * 5)
    base = Scenario(make_profile(), ClosedLoop(3, 5, 30, measured=20), drafter, StaticGamma(3))
    far = replace(base, drafter=replace(drafter, by="position", edges=(10**6,)))
    assert simulate(base).requests.equals(simulate(far).requests)


def test_preempted_requests_go_on_where_they_were():
    arrivals = make_arrivals([0.0] * 4, 40, 60)
    scenario = Scenario(make_profile(), arrivals, means(), StaticGamma(2), kv_tokens=240)
    run = simulate(scenario, steps=True)
    assert run.requests["preemptions"].sum() > 0
    free = simulate(replace(scenario, kv_tokens=None)).requests
    assert (run.requests["accepted"] - free["accepted"]).abs().max() <= 2 * run.requests["preemptions"].max()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"edges": (5, 3)}, "edges: expected increasing tokens"),
        ({"edges": (0,)}, "edges: expected increasing tokens"),
        ({"by": "age", "edges": (5,)}, "by: expected context or position, got 'age'"),
    ],
)
def test_edges_that_make_no_sense(fields, says):
    with pytest.raises(SpecsimError, match=says):
        recorded([8], [1, 2], **fields)


def test_what_a_trace_cannot_tell():
    with pytest.raises(SpecsimError, match="expected a trace that has prompt_tokens"):
        Drafter(make_blocks([1, 2], 3), 3, edges=(5,))
    with pytest.raises(SpecsimError, match="a synthetic trace has its own"):
        replace(means(), edges=(5,))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"edges": [128, 64]}, "edges: expected increasing numbers of tokens"),
        ({"edges": [64]}, r"domains.\*.later: expected 1 lists, one for each of edges, got 2"),
        ({"gamma": 3}, "later: expected gamma = 3 numbers|conditional_acceptance: expected gamma = 3"),
    ],
)
def test_a_synthetic_file_says_what_is_wrong(tmp_path, change, says):
    data = json.loads(means().acceptance.model_dump_json(by_alias=True)) | change
    (tmp_path / "far.json").write_text(json.dumps(data))
    with pytest.raises(SpecsimError, match=says):
        load_drafter(tmp_path / "far.json")


def test_synthetic_files_tell_of_edges_only_where_there_are_some():
    plain = Synthetic.model_validate(
        {"drafter": "d", "target": "t", "gamma": 1, "domains": {"*": {"conditional_acceptance": [0.5]}},
         "provenance": {"source": "made up"}}
    )  # fmt: skip
    assert not {"edges", "by", "later"} & set(plain.model_dump_json())
    assert '"edges"' not in plain.model_dump_json()
    assert '"later"' not in plain.model_dump_json()
    far = means().acceptance
    assert Synthetic.model_validate_json(far.model_dump_json(by_alias=True)) == far


def test_the_command_line_takes_both(tmp_path, run):
    from specsim.hardware import save_profile

    write_trace(recorded([8] * 3, [3] * 10 + [0] * 30).acceptance, tmp_path / "t.parquet")
    (tmp_path / "far.json").write_text(means().acceptance.model_dump_json(by_alias=True))
    save_profile(make_profile(), tmp_path / "p.json")
    call = (
        "simulate",
        "--profile",
        tmp_path / "p.json",
        "-s",
        "StaticGamma(2)",
        "--closed",
        "2",
        "--num-requests",
        "20",
    )
    call += ("--prompt-tokens", "30", "--output-tokens", "20", "--prefill", "free")

    def tau(*more):
        code, _, err = run(*call, *more, "--json", tmp_path / "j.json")
        assert (code, err) == (0, "")
        return json.loads((tmp_path / "j.json").read_text())

    early = tau("--trace", tmp_path / "t.parquet", "--acceptance-by", "position:10")
    anywhere = tau("--trace", tmp_path / "t.parquet")
    assert early != anywhere
    assert run("trace", "inspect", tmp_path / "far.json")[1].count("tokens of context") == 2
    for text, says in (
        ("age:3", "--acceptance-by: expected context:TOKENS"),
        ("position:x", "--acceptance-by: expected whole numbers"),
        ("position:9,3", "--acceptance-by: expected increasing tokens, got 9,3"),
        ("context:4096", "its blocks lie at 8 to 47 tokens of context, expected edges among them, got 4096"),
    ):
        code, _, err = run(*call, "--trace", tmp_path / "t.parquet", "--acceptance-by", text)
        assert code == 2
        assert says in err
    for option, value in (("--turns", "0"), ("--turns", "abc"), ("--prompt-tokens", "many")):
        code, _, err = run(*call, "--trace", tmp_path / "t.parquet", option, value)
        assert code == 2
        assert err.startswith(f"error: {option}: ")
    code, _, err = run(*call, "--trace", tmp_path / "t.parquet", "--without", "nope")
    assert code == 2
    assert err.startswith("error: --without: expected one of prefix_caching")
    for option in (("--lockstep",), ("--router", "vllm")):
        code, _, err = run(*call, "--trace", tmp_path / "t.parquet", *option)
        assert code == 2
        assert "has no meaning with one replica" in err
    code, _, err = run(*call, "--trace", tmp_path / "far.json", "--acceptance-by", "position:3")
    assert code == 2
    assert "--acceptance-by: expected a recorded trace" in err
