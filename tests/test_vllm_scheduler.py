"""Whole runs against vLLM's scheduler told block by block: times, blocks, preemptions and what the cache finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import always, make_arrivals, make_profile
from vllm_scheduler import Pool, Request, serve

from specsim.engine import Scenario, simulate
from specsim.rules import Rules
from specsim.schedulers import NoSpec, StaticGamma

KINDS = ("private", "speculation", "prefixes", "sessions", "overlapping sessions")


def compare(seed, kind):
    """A random run both ways; counts of what there was to see."""
    rng = np.random.default_rng([KINDS.index(kind), seed])
    block = int(rng.choice([1, 4, 16]) if kind != "prefixes" else rng.choice([16, 64, 100, 128]))
    n, scale = int(rng.integers(3, 40)), 1500 if kind == "prefixes" else 60
    prompt, output = rng.integers(1, scale, n), rng.integers(1, 60, n)
    arrival = np.sort(np.round(rng.uniform(0, n * rng.choice([0.1, 3, 30]), n) * 64) / 64 + rng.choice([0, 1 / 128]))
    gamma, accepted, columns = 0, 0, {}
    names = [lambda j, i=i: (i, j) for i in range(n)]
    if kind == "speculation":
        gamma = int(rng.integers(1, 5))
        accepted = int(rng.integers(0, gamma + 1))
    elif kind == "prefixes":
        hashes = []
        for i in range(n):
            units, start = -(-prompt[i] // 512), []
            if i and rng.random() < 0.7:
                other = int(rng.integers(0, i))
                start = hashes[other][
                    : min(int(rng.integers(0, len(hashes[other]) + 1)), units - 1, prompt[other] // 512)
                ]
            hashes.append([*start, *range(1000 * i + 1000, 1000 * i + 1000 + units - len(start))])
        columns["prefix_hashes"] = tuple(map(tuple, hashes))

        def named(i):
            def name(j):
                end = (j + 1) * block
                return (tuple(hashes[i][: -(-end // 512)]), end) if end <= prompt[i] else (i, j)

            return name

        names = [named(i) for i in range(n)]
    elif kind.endswith("sessions"):
        session, said = rng.integers(0, max(2, n // 4), n), {}
        for i, s in enumerate(session.tolist()):
            prompt[i], output[i] = said.get(s, 0) + int(rng.integers(1, 30)), int(rng.integers(1, 30))
            said[s] = prompt[i] + output[i]
        if kind == "sessions":  # each turn after the one before it
            turn = {}
            for i, s in enumerate(session.tolist()):
                turn[s] = turn.get(s, -1) + 1
                arrival[i] = turn[s] * 300.0 + s * 7 / 64
            order = np.argsort(arrival, kind="stable")
            arrival, prompt, output, session = arrival[order], prompt[order], output[order], session[order]
        columns["session_id"] = session
        names = [lambda j, s=s: (s, j) for s in session.tolist()]
    width = 1 + gamma
    blocks = -(-int((prompt + output).max() + width) // block)
    blocks += int(rng.integers(0, 1 + 3 * blocks))
    seqs = int(rng.integers(1, 20))
    budget = int(rng.integers(width, width * seqs + 2 * scale))
    rules = Rules(prefix_caching=bool(rng.random() < 0.8), whole_prompt=bool(rng.random() < 0.8))
    arrivals = make_arrivals(arrival.tolist(), prompt.tolist(), output.tolist())
    scenario = Scenario(
        make_profile(), replace(arrivals, table=replace(arrivals.table, **columns)),
        always(accepted, gamma) if gamma else None, StaticGamma(gamma) if gamma else NoSpec(),
        max_num_seqs=seqs, max_num_batched_tokens=budget, kv_tokens=blocks * block, block_size=block, rules=rules,
    )  # fmt: skip
    run = simulate(scenario, steps=True)
    theirs = [Request(*row) for row in zip(arrival.tolist(), prompt.tolist(), output.tolist(), names, strict=True)]
    steps = serve(
        theirs, Pool(blocks, block, rules.prefix_caching), budget=budget, max_num_seqs=seqs,
        seconds=lambda tokens: 1 + tokens / 64, whole_prompt=rules.whole_prompt, gamma=gamma, accepted=accepted,
    )  # fmt: skip
    return run, theirs, steps


@pytest.mark.parametrize("kind", KINDS[:4])
def test_runs_are_those_of_vllms_scheduler(kind):
    seen = {"preemptions": 0, "cached": 0, "waiting": 0}
    for seed in range(60):
        run, theirs, steps = compare(seed, kind)
        table = run.requests
        where = f"{kind}, seed {seed}"
        for column in ("queued", "scheduled", "first", "finish"):
            ours = table["first_token" if column == "first" else column].to_numpy()
            np.testing.assert_allclose(ours, [getattr(r, column) for r in theirs], err_msg=f"{where}: {column}")
        for column in ("preemptions", "cached"):
            assert table[column].tolist() == [getattr(r, column) for r in theirs], f"{where}: {column}"
        mine = run.steps[["start", "num_seqs", "prefill_tokens", "kv_blocks", "waiting"]].to_numpy()
        np.testing.assert_allclose(mine, steps, err_msg=where)
        seen["preemptions"] += table["preemptions"].sum()
        seen["cached"] += table["cached"].sum()
        seen["waiting"] += run.steps["waiting"].sum()
    assert all(count > 15 for count in seen.values()), seen


def test_turns_that_overlap_find_less_than_vllm_finds_and_never_more():
    """A turn that comes while the one before it runs finds what that has said, and keeps a copy of the rest."""
    ours = theirs = 0
    for seed in range(60):
        run, reference, _ = compare(seed, "overlapping sessions")
        ours += run.requests["cached"].sum()
        theirs += sum(r.cached for r in reference)
    assert 0.65 * theirs < ours <= theirs
