"""The step and its order, on scenarios worked out by hand. A step of B tokens lasts 1 + B/64 seconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import TICK, always, draft_cost, make_arrivals, make_blocks, make_profile, staircase

from specsim.acceptance import Drafter, synthetic
from specsim.engine import Policy, Scenario, simulate
from specsim.rules import Rules
from specsim.schedulers import (
    MTP1,
    BatchSizeTable,
    DSparkAsync,
    DSparkGreedy,
    GlobalArgmax,
    NoSpec,
    Oracle,
    StaticGamma,
    Threshold,
)
from specsim.types import SpecsimError
from specsim.workload import ClosedLoop, Empirical, Poisson

STEP = ["num_seqs", "num_tokens", "prefill_tokens", "draft_tokens", "kv_tokens", "waiting", "emitted"]


def run(arrivals, drafter=None, scheduler=None, *, profile=None, seed=0, **fields):
    """Simulate with the step table kept."""
    scenario = Scenario(profile or make_profile(), arrivals, drafter, scheduler or NoSpec(), **fields)
    return simulate(scenario, seed, steps=True)


def rows(result, columns=STEP):
    return [tuple(row) for row in result.steps[list(columns)].to_numpy().tolist()]


def column(result, name):
    return result.requests[name].tolist()


def ends(result):
    return (result.steps["start"] + result.steps["duration"]).tolist()


# Prefill


def test_chunked_prefill_by_hand():
    result = run(make_arrivals([0.0, 0.0], [10, 5], [3, 2]), max_num_batched_tokens=8)
    assert rows(result) == [
        # seqs, tokens, prefill, draft, kv, waiting, emitted
        (0, 8, 8, 0, 0, 1, 0),  # eight of the first prompt's ten tokens
        (0, 7, 7, 0, 8, 0, 2),  # its last two and all of the second: a first token each
        (2, 2, 0, 0, 15, 0, 2),  # the second has its two tokens
        (1, 1, 0, 0, 11, 0, 1),
    ]
    assert result.steps["duration"].tolist() == [1 + 8 * TICK, 1 + 7 * TICK, 1 + 2 * TICK, 1 + TICK]
    assert result.steps["start"].tolist() == [0.0, *ends(result)[:-1]]
    end = ends(result)
    assert column(result, "scheduled") == [0.0, end[0]]
    assert column(result, "first_token") == [end[1], end[1]]
    assert column(result, "finish") == [end[3], end[2]]
    assert column(result, "cycles") == [2, 1]
    assert column(result, "emitted") == [3, 2]
    assert column(result, "verified") == [0, 0]


def test_a_request_is_seen_at_the_next_step_boundary():
    result = run(make_arrivals([0.0, 0.5, 20.0], 4, 3))
    end = ends(result)
    assert column(result, "scheduled") == [0.0, end[0], 20.0]
    assert rows(result, ["num_seqs", "prefill_tokens"])[:3] == [(0, 4), (1, 4), (2, 0)]


def test_a_decode_reserves_its_whole_block_before_prefill_and_what_is_trimmed_is_not_refilled():
    arrivals = make_arrivals([0.0, 0.5], [4, 20], [4, 2])
    result = run(arrivals, always(0, 3), StaticGamma(0), max_num_batched_tokens=10)
    assert rows(result, ["num_seqs", "num_tokens", "prefill_tokens", "draft_tokens", "emitted"]) == [
        (0, 4, 4, 0, 1),
        (1, 7, 6, 0, 1),  # 10 less the 4 that the decode reserves: 6, though it uses but 1
        (1, 7, 6, 0, 1),
        (1, 7, 6, 0, 1),
        (0, 2, 2, 0, 1),
        (1, 1, 0, 0, 1),
    ]
    plain = run(arrivals, scheduler=NoSpec(), max_num_batched_tokens=10)
    assert rows(plain, ["num_seqs", "prefill_tokens"])[1] == (1, 9)  # without a drafter it reserves one


def test_decodes_beyond_the_budget_wait_their_turn_in_running_order():
    # 9 tokens hold two blocks of 1 + 3; the third decode gets the token that is left, and no drafts.
    arrivals = make_arrivals([0.0] * 3, 3, [5, 9, 5])
    result = run(arrivals, always(3, 3), StaticGamma(3), max_num_batched_tokens=9)
    assert rows(result, ["num_seqs", "num_tokens", "draft_tokens", "emitted"]) == [
        (0, 9, 0, 3),
        (3, 9, 6, 9),
        (2, 8, 6, 7),
    ]
    assert column(result, "cycles") == [1, 2, 2]
    assert column(result, "finish") == [ends(result)[1], ends(result)[2], ends(result)[2]]
    # Of 8 nothing is left for it.
    wait = run(arrivals, always(3, 3), StaticGamma(3), max_num_batched_tokens=8)
    assert rows(wait, ["num_seqs", "draft_tokens"])[1] == (2, 6)


def test_several_prompts_share_a_step_while_the_budget_lasts():
    result = run(make_arrivals([0.0] * 4, [3, 3, 3, 3], 2), max_num_batched_tokens=10)
    assert rows(result, ["num_seqs", "prefill_tokens", "emitted"]) == [(0, 10, 3), (3, 2, 4), (1, 0, 1)]


def test_admission_is_first_come_first_served():
    # Five blocks. The first request holds three; the second needs three; the third would fit, but waits behind.
    result = run(make_arrivals([0.0, 0.1, 0.2], [40, 40, 4], [5, 2, 2]), kv_tokens=80)
    first_done = column(result, "finish")[0]
    assert column(result, "scheduled") == [0.0, first_done, first_done]
    assert rows(result, ["num_seqs", "prefill_tokens", "waiting"]) == [
        (0, 40, 0), (1, 0, 2), (1, 0, 2), (1, 0, 2), (1, 0, 2), (0, 44, 0), (2, 0, 0),
    ]  # fmt: skip


def test_max_num_seqs_bounds_running_requests():
    result = run(make_arrivals([0.0] * 3, 4, [3, 5, 2]), max_num_seqs=2)
    assert rows(result, ["num_seqs", "prefill_tokens", "waiting"]) == [
        (0, 8, 1),
        (2, 0, 1),
        (2, 0, 1),  # the first is done after this one
        (1, 4, 0),
        (2, 0, 0),
    ]
    assert column(result, "scheduled")[2] == column(result, "finish")[0]


def test_a_prompt_of_many_chunks_leaves_room_for_no_other():
    result = run(make_arrivals([0.0, 0.0], [100, 4], 2), max_num_batched_tokens=32)
    assert rows(result, ["prefill_tokens", "waiting", "kv_tokens"])[:4] == [
        (32, 1, 0),
        (32, 1, 32),
        (32, 1, 64),
        (8, 0, 96),
    ]


def test_one_output_token_is_the_first_token():
    result = run(make_arrivals([0.0, 5.0], 4, 1), always(3, 3), StaticGamma(3))
    assert len(result.steps) == 2
    assert column(result, "finish") == column(result, "first_token") == ends(result)
    assert column(result, "cycles") == [0, 0]
    assert column(result, "emitted") == [1, 1]


# Free prefill


def test_free_prefill_takes_kv_but_no_budget_tokens_or_step():
    result = run(make_arrivals([2.0], 100, 3), prefill="free", max_num_batched_tokens=8)
    assert column(result, "scheduled") == column(result, "first_token") == [2.0]
    assert rows(result) == [(1, 1, 0, 0, 100, 0, 1), (1, 1, 0, 0, 101, 0, 1)]
    assert column(result, "finish") == [2.0 + 2 * (1 + TICK)]


def test_free_prefill_still_waits_for_kv_and_seats():
    # Eight blocks; the first prompt and its next token take seven, the second needs two.
    result = run(make_arrivals([0.0, 0.0], [100, 20], [4, 2]), prefill="free", kv_tokens=128)
    assert column(result, "scheduled") == column(result, "first_token") == [0.0, column(result, "finish")[0]]
    seats = run(make_arrivals([0.0, 0.0], 4, 4), prefill="free", max_num_seqs=1)
    assert column(seats, "scheduled")[1] == column(seats, "finish")[0]


def test_free_prefill_of_one_output_token_takes_no_time():
    result = run(make_arrivals([1.0, 2.0], 4, 1), prefill="free")
    assert len(result.steps) == 0
    assert column(result, "finish") == [1.0, 2.0]
    assert column(result, "emitted") == [1, 1]


# KV and preemption


PLAIN = Rules().without("prefix_caching", "whole_prompt")


def test_preemption_by_hand():
    """Three blocks, ten tokens a step. The sixth step needs four blocks: the tail goes back to the queue."""
    result = run(make_arrivals([0.0, 0.0], 15, [6, 4]), kv_tokens=48, max_num_batched_tokens=10, rules=PLAIN)
    assert rows(result) == [
        (0, 10, 10, 0, 0, 1, 0),
        (0, 10, 10, 0, 10, 0, 1),
        (1, 10, 9, 0, 20, 0, 1),
        (1, 2, 1, 0, 30, 0, 2),
        (2, 2, 0, 0, 32, 0, 2),
        # A chunk of nine tokens would fit the free block, but nothing is admitted in a step that preempted.
        (1, 1, 0, 0, 18, 1, 1),
        (1, 10, 9, 0, 19, 0, 1),  # recomputed: 15 prompt tokens and the 2 generated, nine of them here
        (0, 8, 8, 0, 9, 0, 1),  # the other eight, and a token at their end
        (1, 1, 0, 0, 17, 0, 1),
    ]
    end = ends(result)
    assert column(result, "preemptions") == [0, 1]
    assert column(result, "scheduled") == [0.0, end[0]]  # the first time counts
    assert column(result, "first_token") == [end[1], end[3]]
    assert column(result, "finish") == [end[6], end[8]]
    assert column(result, "cycles") == [5, 2]
    assert column(result, "emitted") == [6, 4]


def test_without_the_pause_a_request_comes_in_as_another_goes_out():
    both = make_arrivals([0.0, 0.0], 15, [6, 4])
    result = run(both, kv_tokens=48, max_num_batched_tokens=10, rules=PLAIN.without("pause"))
    assert rows(result)[5] == (1, 10, 9, 0, 18, 0, 1)


def test_a_preempted_request_finds_its_full_blocks_again():
    """As above, but the second request, of 17 known tokens, waits for the two blocks that it needs in all."""
    result = run(make_arrivals([0.0, 0.0], 15, [6, 4]), kv_tokens=48, max_num_batched_tokens=10)
    assert rows(result)[4:] == [
        (2, 2, 0, 0, 32, 0, 2),
        (1, 1, 0, 0, 18, 1, 1),
        (1, 1, 0, 0, 19, 1, 1),  # one block is free, and it holds the request's first sixteen tokens
        (0, 1, 1, 0, 16, 0, 1),  # the first request has gone: of 17 tokens 16 are found
        (1, 1, 0, 0, 17, 0, 1),
    ]
    assert column(result, "cached") == [0, 16]
    lost = run(
        make_arrivals([0.0, 0.0], 15, [6, 4]), kv_tokens=48, max_num_batched_tokens=10,
        rules=Rules(prefix_caching=False),
    )  # fmt: skip
    assert rows(lost, ["prefill_tokens"])[-3:-1] == [(10,), (7,)]
    assert column(lost, "cached") == [0, 0]


def test_found_blocks_that_were_taken_meanwhile_are_computed_again():
    """Six blocks; the second request is put out with three full ones, and the first goes on to take two of them."""
    result = run(make_arrivals([0.0, 0.0], [30, 45], [40, 8]), kv_tokens=96)
    # 30 + 45 tokens are two and three blocks; at 33 and 49 tokens they are three and four.
    assert column(result, "preemptions") == [0, 1]
    assert column(result, "cached") == [0, 16]
    assert rows(run(make_arrivals([0.0, 0.0], [30, 45], [4, 8]), kv_tokens=96), ["prefill_tokens"])[0] == (75,)


def test_an_unfinished_prefill_is_the_first_to_go():
    # The first request holds one block of three. The second's prompt, 11 or 12 tokens a step, comes to need three.
    arrivals = make_arrivals([0.0, 0.0], [10, 40], [8, 2])
    result = run(arrivals, kv_tokens=48, max_num_batched_tokens=12, rules=PLAIN)
    assert rows(result, ["num_seqs", "prefill_tokens", "waiting"]) == [
        (0, 12, 0), (1, 11, 0), (1, 11, 0),
        (1, 0, 1),  # 35 tokens would take a fourth block: what was computed is lost
        (1, 11, 0), (1, 11, 0),
        (1, 0, 1),
        (1, 11, 0),  # the first request's last step
        (0, 12, 0), (0, 12, 0), (0, 5, 0), (1, 0, 0),
    ]  # fmt: skip
    assert column(result, "preemptions") == [0, 2]
    assert column(result, "emitted") == [8, 2]
    # Where the whole prompt must fit, it waits from the start.
    waits = run(arrivals, kv_tokens=48, max_num_batched_tokens=12)
    assert column(waits, "preemptions") == [0, 0]
    assert column(waits, "scheduled")[1] == column(waits, "finish")[0]


def test_the_block_size_is_what_kv_is_counted_in():
    arrivals = make_arrivals([0.0, 0.0], 15, [6, 4])  # at most 20 + 18 tokens at a time
    assert column(run(arrivals, kv_tokens=38, block_size=1), "preemptions") == [0, 0]
    assert column(run(arrivals, kv_tokens=38, block_size=16), "preemptions") != [0, 0]
    with pytest.raises(SpecsimError, match="scenario: block_size: expected a whole number, 1 or more"):
        Scenario(make_profile(), arrivals, block_size=0)


# Prefix caching


def alike(times, prompts, outputs, **columns):
    """Arrivals with prefix hashes or session ids."""
    arrivals = make_arrivals(times, prompts, outputs)
    return replace(arrivals, table=replace(arrivals.table, **columns))


def test_prompts_that_start_alike_compute_the_start_once():
    arrivals = alike([0.0, 50.0], [600, 700], 2, prefix_hashes=((7, 8), (7, 9)))
    result = run(arrivals)
    assert rows(result, ["prefill_tokens", "kv_tokens"]) == [(600, 0), (0, 600), (700 - 512, 512), (0, 700)]
    assert column(result, "cached") == [0, 512]
    assert column(run(arrivals, rules=Rules(prefix_caching=False)), "cached") == [0, 0]


def test_a_start_that_is_being_computed_is_found_as_far_as_it_is():
    """vLLM names blocks as it schedules them: a prompt in the same step finds those of one before it."""
    arrivals = alike([0.0, 0.0], [600, 700], 2, prefix_hashes=((7, 8), (7, 9)))
    assert rows(run(arrivals), ["prefill_tokens"])[0] == (600 + 700 - 512,)
    half = run(arrivals, max_num_batched_tokens=256)
    assert column(half, "cached") == [0, 512]  # by the time it is admitted


def test_shared_blocks_are_held_once():
    """40 blocks hold two requests of 600 tokens where 512 of them are the same: 38 + 6."""
    arrivals = alike([0.0, 0.5], 600, 20, prefix_hashes=((7, 8), (7, 9)))
    together = run(arrivals, kv_tokens=48 * 16)
    assert column(together, "scheduled")[1] < column(together, "finish")[0]
    apart = run(make_arrivals([0.0, 0.5], 600, 20), kv_tokens=48 * 16)
    assert column(apart, "scheduled")[1] == column(apart, "finish")[0]


def test_the_next_turn_of_a_session_finds_the_last_ones_prompt_and_answer():
    arrivals = alike([0.0, 50.0, 50.0], [100, 150, 150], 20, session_id=np.array([4, 4, 5]))
    result = run(arrivals)
    assert column(result, "cached") == [0, 112, 0]  # 119 tokens of KV: seven full blocks


def test_the_least_recently_used_content_goes_first():
    """Ten blocks: two sessions leave three each; a request of seven takes the free ones and the older session's."""
    times, sessions = [0.0, 20.0, 40.0, 60.0, 60.0], np.array([1, 2, 3, 2, 1])
    arrivals = alike(times, [40, 40, 100, 70, 70], 9, session_id=sessions)
    result = run(arrivals, kv_tokens=160)
    assert column(result, "cached") == [0, 0, 0, 48, 0]


def test_users_hold_conversations():
    """Two users, three turns each, 40 tokens said and 9 answered: each prompt is all before it and 40 more."""
    loop = ClosedLoop(2, 40, 9, measured=20, turns=3)
    result = run(loop)
    table = result.requests
    assert set(table["prompt_tokens"]) == {40, 89, 138}
    assert table["prompt_tokens"].iloc[:2].tolist() == [40, 40]
    # All but what is said anew is found, in whole blocks, and the last token of an answer is not in the cache.
    found = {40: 0, 89: 48, 138: 96}
    assert table["cached"].tolist() == [found[p] for p in table["prompt_tokens"]]
    cold = run(loop, rules=Rules(prefix_caching=False)).requests
    assert (cold["cached"] == 0).all()
    # A cache that holds no more than what is running finds less.
    tight = run(ClosedLoop(8, 40, 9, measured=60, turns=3, think_s=1.0), kv_tokens=480).requests
    assert 0 < tight["cached"].sum() < tight["prompt_tokens"].map(found).sum()


def test_turns_may_be_a_law_and_one_turn_is_no_conversation():
    laws = run(ClosedLoop(3, 40, 9, measured=60, turns=Empirical((1, 4))), seed=3).requests
    starts = (laws["prompt_tokens"] == 40).sum()
    assert 0.25 * len(laws) < starts < 0.6 * len(laws)
    assert run(ClosedLoop(3, 40, 9, measured=30)).requests.equals(
        run(ClosedLoop(3, 40, 9, measured=30, turns=1)).requests
    )
    with pytest.raises(SpecsimError, match=r"ClosedLoop\.turns"):
        ClosedLoop(3, 40, 9, turns=0)


# Rules that other engines do not have


def test_without_splitting_a_prompt_waits_for_a_step_that_holds_it():
    arrivals = make_arrivals([0.0, 0.0, 0.0], [6, 7, 25], 1)
    whole = Rules(split=False)
    assert rows(run(arrivals, max_num_batched_tokens=10, rules=whole), ["prefill_tokens"]) == [
        (6,), (7,), (10,), (10,), (5,)  # the last is longer than any step: it is cut where it is the first
    ]  # fmt: skip
    assert rows(run(arrivals, max_num_batched_tokens=10), ["prefill_tokens"]) == [(10,), (10,), (10,), (8,)]


def test_without_mixing_decodes_stand_still_while_prompts_are_computed():
    result = run(make_arrivals([0.0, 0.5], [4, 15], [3, 2]), max_num_batched_tokens=10, rules=Rules(mixed=False))
    assert rows(result, ["num_seqs", "prefill_tokens"]) == [(0, 4), (0, 10), (0, 5), (2, 0), (1, 0)]


def test_a_prompt_that_never_fits_does_not_hold_up_the_decodes():
    """Without these three rules it would be put out and admitted again in every step, and no decode would run."""
    rules = Rules().without("mixed", "pause", "whole_prompt")
    arrivals = make_arrivals([0.0] * 6, [119, 78, 102, 111, 26, 118], [39, 27, 16, 33, 37, 22])
    result = run(arrivals, kv_tokens=160, max_num_batched_tokens=14, max_num_seqs=8, rules=rules)
    assert result.requests["finish"].notna().all()


def test_scheduling_ahead_hides_the_host_and_admits_a_step_later():
    profile = make_profile(host_seconds=0.25)
    arrivals = make_arrivals([0.0, 0.5], 4, [4, 2])
    plain, ahead = (run(arrivals, profile=profile, async_scheduling=flag) for flag in (False, True))
    assert plain.steps["duration"].tolist()[0] == 1.25 + 4 * TICK
    assert ahead.steps["duration"].tolist()[0] == 1 + 4 * TICK
    assert rows(plain, ["num_seqs", "prefill_tokens"]) == [(0, 4), (1, 4), (2, 0), (1, 0)]
    assert rows(ahead, ["num_seqs", "prefill_tokens"]) == [(0, 4), (1, 0), (1, 4), (2, 0)]
    assert column(ahead, "queued")[1] == ends(ahead)[0]
    slow = run(arrivals, profile=make_profile(host_seconds=3.0), async_scheduling=True)
    assert set(slow.steps["duration"]) == {3.0}


def test_in_lockstep_the_slowest_rank_decides():
    arrivals = make_arrivals([0.0, 0.0, 5.0], [4, 60, 8], [3, 2, 1])
    result = run(arrivals, replicas=2, lockstep=True)
    steps = result.steps.sort_values(["start", "replica"])
    assert steps[["replica", "num_tokens"]].to_numpy().tolist() == [[0, 4], [1, 60], [0, 1], [1, 1], [0, 1], [0, 8]]
    assert steps["duration"].tolist()[:5] == [1 + 60 * TICK] * 2 + [1 + TICK] * 3
    assert column(result, "replica") == [0, 1, 0]
    alone = run(arrivals, replicas=2)
    assert alone.steps["duration"].tolist()[0] == 1 + 4 * TICK


def test_rules_that_are_none():
    with pytest.raises(SpecsimError, match=r"rules: expected one of prefix_caching, .*, got 'mixxed'"):
        Rules().without("mixxed")


def test_the_reserved_block_counts_for_kv_though_nothing_is_verified():
    # 13 tokens and the next one fit a block of 16; with 1 + 3 reserved each needs a second one: four of three.
    arrivals = make_arrivals([0.0, 0.0], 13, 3)
    drafting = run(arrivals, always(0, 3), StaticGamma(0), kv_tokens=48)
    assert column(drafting, "preemptions") == [0, 1]
    assert column(run(arrivals, kv_tokens=48), "preemptions") == [0, 0]


def test_rejected_slots_are_freed():
    # All is verified and nothing accepted: KV grows by one token a step, not by four.
    result = run(make_arrivals([0.0], 8, 6), always(0, 3), StaticGamma(3))
    assert result.steps["kv_tokens"].tolist() == [0, 8, 9, 10, 11, 12]


def test_preempted_requests_come_back_before_those_who_waited_and_in_their_order():
    result = run(make_arrivals([0.0] * 5, 12, 30), always(1, 1), StaticGamma(1), kv_tokens=6 * 16)
    assert result.requests["preemptions"].sum() > 0
    finish = column(result, "finish")
    assert finish == sorted(finish)
    assert column(result, "emitted") == [30] * 5


def test_drafter_memory_comes_out_of_the_kv_pool():
    """1000 tokens of 8 bytes, less 800 bytes of weights, at 8 + 2 bytes a token: 720 tokens."""
    profile = make_profile(kv_tokens=1000, kv_bytes_per_token=8.0)
    drafter = always(1, 3, weight_bytes=800.0, kv_bytes_per_token=2.0)
    run(make_arrivals([0.0], 700, 17), drafter, StaticGamma(3), profile=profile)  # 700 + 17 + γ 3
    with pytest.raises(SpecsimError, match=r"700 prompt \+ 18 output \+ γ 3 tokens can never fit .* of 720 tokens"):
        run(make_arrivals([0.0], 700, 18), drafter, StaticGamma(3), profile=profile)
    run(make_arrivals([0.0], 700, 292), scheduler=NoSpec(), profile=profile)  # 62 blocks of 16 without it
    with pytest.raises(SpecsimError, match="can never fit in the KV cache of 992 tokens"):
        run(make_arrivals([0.0], 700, 293), scheduler=NoSpec(), profile=profile)
    unknown = make_profile(kv_tokens=1000)
    with pytest.raises(SpecsimError, match="profile tiny: kv_bytes_per_token: expected a number"):
        run(make_arrivals([0.0], 4, 4), drafter, StaticGamma(3), profile=unknown)


def test_a_scenarios_kv_tokens_rule_over_the_profiles():
    profile = make_profile(kv_tokens=64)
    with pytest.raises(SpecsimError, match=r"request 1: 60 prompt .* can never fit in the KV cache of 64 tokens"):
        run(make_arrivals([0.0, 1.0], [4, 60], 8), profile=profile)
    run(make_arrivals([0.0, 1.0], [4, 60], 8), profile=profile, kv_tokens=80)


# What a step costs


@pytest.mark.parametrize(
    ("scheduler", "pays"),
    [
        (Threshold(0.5), True), (DSparkGreedy(), True), (GlobalArgmax(), True),
        (StaticGamma(2), False), (DSparkAsync(), False), (Oracle(), False), (BatchSizeTable(((1, 9, 2),)), False),
        (NoSpec(), False),
    ],
    ids=repr,
)  # fmt: skip
def test_only_synchronous_schedulers_pay_the_sync(scheduler, pays):
    arrivals = make_arrivals([0.0, 0.0], 4, 9)
    without = run(arrivals, always(1, 2), scheduler)
    with_it = run(arrivals, always(1, 2), scheduler, profile=make_profile(sync_seconds=0.5))
    extra = with_it.steps["duration"] - without.steps["duration"]
    decoding = with_it.steps["num_seqs"] > 0
    assert extra[~decoding].tolist() == [0.0]
    assert set(extra[decoding]) == {0.5 if pays else 0.0}


def test_drafting_is_paid_for_though_nothing_is_verified_and_not_without_a_drafter():
    arrivals = make_arrivals([0.0], 4, 3)
    plain = run(arrivals)
    drafter = always(1, 3, cost=draft_cost(0.25, "parallel"))
    drafting = run(arrivals, drafter, StaticGamma(0))
    assert (drafting.steps["duration"] - plain.steps["duration"]).tolist() == [0, 0.25, 0.25]
    one_by_one = always(1, 3, cost=draft_cost(0.25, "autoregressive"))
    assert (run(arrivals, one_by_one, StaticGamma(0)).steps["duration"] - plain.steps["duration"]).tolist() == [
        0,
        0.75,
        0.75,
    ]
    assert run(arrivals, drafter, NoSpec()).steps.equals(plain.steps)


def test_a_drafter_without_a_cost_of_its_own_takes_the_profiles():
    profile = make_profile(draft={"type": "parallel", "num_seqs": [1, 9], "seconds": [0.5, 0.5]})
    arrivals = make_arrivals([0.0], 4, 3)
    assert run(arrivals, always(1, 3), StaticGamma(0), profile=profile).steps["duration"][1] == 1 + TICK + 0.5
    own = always(1, 3, cost=draft_cost(0.125))
    assert run(arrivals, own, StaticGamma(0), profile=profile).steps["duration"][1] == 1 + TICK + 0.125
    with pytest.raises(SpecsimError, match="draft: expected a draft cost"):
        run(arrivals, always(1, 3), StaticGamma(0), profile=make_profile(draft=None))
    assert run(arrivals, profile=make_profile(draft=None)).num_steps == 3


def test_draft_cost_goes_by_the_sequences_that_draft():
    profile = make_profile(draft={"type": "parallel", "num_seqs": [1, 2, 4], "seconds": [0.125, 0.5, 1.0]})
    result = run(make_arrivals([0.0, 0.0], 4, [2, 3]), always(0, 3), StaticGamma(0), profile=profile)
    assert result.steps["duration"].tolist() == [1 + 8 * TICK, 1 + 2 * TICK + 0.5, 1 + TICK + 0.125]


def test_verified_tokens_are_in_the_forward():
    result = run(make_arrivals([0.0, 0.0], 4, 9), always(3, 3), StaticGamma(3))
    assert rows(result, ["num_seqs", "num_tokens", "draft_tokens", "emitted"])[1:] == [(2, 8, 6, 8), (2, 8, 6, 8)]
    assert result.steps["duration"].tolist()[1:] == [1 + 8 * TICK] * 2


def test_progress_is_clipped_at_the_output_length_but_acceptance_is_not():
    result = run(make_arrivals([0.0], 4, 7), always(3, 3), StaticGamma(3))
    # First token, then cycles of four: the second emits but the two that are left.
    assert result.steps["emitted"].tolist() == [1, 4, 2]
    assert (column(result, "emitted"), column(result, "accepted"), column(result, "verified")) == ([7], [6], [6])


def test_kv_tokens_price_a_two_dimensional_profile():
    verify = {
        "type": "table2d", "tokens": [1, 65], "kv_tokens": [0, 64],
        "seconds": [[1 + TICK, 2 + TICK], [2 + TICK, 3 + TICK]], "below": "linear",
    }  # fmt: skip
    result = run(make_arrivals([0.0], 4, 4), profile=make_profile(verify=verify))
    kv = [0, 4, 5, 6]
    expected = [1 + b * TICK + k / 64 for b, k in zip([4, 1, 1, 1], kv, strict=True)]
    assert result.steps["kv_tokens"].tolist() == kv
    assert result.steps["duration"].tolist() == pytest.approx(expected, rel=1e-12)


def test_a_step_beyond_the_profile_names_the_range():
    profile = make_profile(verify=staircase([1, 32], [1.0, 2.0]))
    with pytest.raises(SpecsimError, match=r"profile tiny: a step of 33 tokens is outside the measured range 1\.\.32"):
        run(make_arrivals([0.0], 33, 2), profile=profile)
    with pytest.raises(SpecsimError, match=r"a step of 9 drafting sequences is outside the measured range 0\.\.8"):
        run(
            make_arrivals([0.0] * 9, 1, 3), always(0, 1), StaticGamma(1),
            profile=make_profile(draft={"type": "parallel", "num_seqs": [8], "seconds": [0.5]}),
        )  # fmt: skip


# Workloads, replicas, routers


def test_closed_loop_with_a_constant_think_time():
    result = run(ClosedLoop(1, 4, 3, think_s=10.0, think_cv=0))
    finish, arrival = np.array(column(result, "finish")), np.array(column(result, "arrival"))
    done = ~np.isnan(finish)
    assert done.sum() >= 505
    np.testing.assert_array_equal(arrival[1:], (finish[: len(arrival) - 1] + 10.0))
    assert 0 < arrival[0] < 10


def test_users_who_think_come_spread_out_and_think_the_same_under_every_scheduler():
    loop = ClosedLoop(200, 4, 3, think_s=50.0)
    slow, fast = (
        run(loop, profile=make_profile(verify=staircase([1, 1 << 16], [s, s]))).requests for s in (0.02, 0.01)
    )
    first = slow["arrival"].iloc[:150].to_numpy()
    assert len(set(first.tolist())) == 150
    # By then 200 users have asked for the first time at some of these times, exponential as all think times are.
    assert np.quantile(loop.first_asks(0), [0.25, 0.5, 0.9]) == pytest.approx([14.4, 34.7, 115.1], rel=0.25)
    assert fast["arrival"].iloc[:150].to_numpy() == pytest.approx(first, abs=1.0)
    even = ClosedLoop(2000, think_s=50.0, think_cv=0)
    assert np.quantile(even.first_asks(0), [0.0, 0.25, 0.5, 1.0]) == pytest.approx([0, 12.5, 25, 50], abs=1.5)
    wild = next(ClosedLoop(1, think_s=50.0, think_cv=2).thinks(0))
    assert (wild.mean(), wild.std() / wild.mean()) == (pytest.approx(50, rel=0.2), pytest.approx(2, rel=0.2))
    assert (ClosedLoop(5).first_asks(0) == 0).all()


def test_closed_loop_keeps_its_concurrency():
    result = run(ClosedLoop(3, 4, Empirical((2, 5, 9))))
    arrival, finish = np.array(column(result, "arrival")), np.array(column(result, "finish"))
    assert (arrival[:3] == 0).all()
    # Whoever arrives later takes the place of one who finished at that moment.
    times, counts = np.unique(arrival[3:], return_counts=True)
    ended, ends_there = np.unique(finish[~np.isnan(finish)], return_counts=True)
    at_end = dict(zip(ended.tolist(), ends_there.tolist(), strict=True))
    assert all(at_end[t] == c for t, c in zip(times.tolist(), counts.tolist(), strict=True))


def test_round_robin():
    result = run(make_arrivals([0.0, 0.0, 1.0, 2.0, 3.0], 4, 3), replicas=3)
    assert column(result, "replica") == [0, 1, 2, 0, 1]
    assert result.gpus == 3


def test_vllms_router_weighs_waiting_four_times_and_looks_every_tenth_of_a_second():
    # Prompts of 4 last a step of 1.06 s; rank 0 takes the first, and one each, for a request sent counts as waiting.
    burst = make_arrivals([0.0, 0.01, 0.02, 0.03], 4, 30)
    assert column(run(burst, replicas=2, router="vllm"), "replica") == [0, 1, 0, 1]
    # At 5 s rank 0 runs two and rank 1 one (two requests of one token have gone): two more fit there, by weight four.
    arrivals = make_arrivals([0.0, 0.01, 0.02, 0.03, 5.0, 5.01, 5.2], 4, [90, 90, 90, 1, 90, 90, 90])
    assert column(run(arrivals, replicas=2, router="vllm"), "replica") == [0, 1, 0, 1, 1, 0, 1]


def test_least_loaded_counts_running_and_waiting_and_takes_the_first_of_equals():
    arrivals = make_arrivals([0.0, 0.0, 10.0, 10.0, 10.0], 4, [50, 2, 9, 9, 9])
    assert column(run(arrivals, replicas=2, router="least_loaded"), "replica") == [0, 1, 1, 0, 1]


def test_the_random_router_is_decided_by_the_seed():
    arrivals = make_arrivals([0.0] * 300, 4, 2)
    picks = [column(run(arrivals, replicas=3, router="random", seed=s), "replica") for s in (0, 0, 1)]
    assert picks[0] == picks[1] != picks[2]
    # 100 each, give or take four deviations of sqrt(300 · 1/3 · 2/3).
    assert all(abs(picks[0].count(r) - 100) < 33 for r in range(3))


def test_replicas_are_engines_of_their_own():
    arrivals = [0.0, 0.5, 3.0, 3.5]
    both = run(make_arrivals(np.repeat(arrivals, 2).tolist(), 6, 8), replicas=2)
    alone = run(make_arrivals(arrivals, 6, 8))
    for replica in (0, 1):
        part = both.steps[both.steps["replica"] == replica].drop(columns="replica").reset_index(drop=True)
        assert part.equals(alone.steps.drop(columns="replica"))
    assert both.num_steps == 2 * alone.num_steps


def test_other_schedulers_meet_the_same_requests():
    drafter = synthetic(0.7, 3, concentration=4.0)
    base = Scenario(make_profile(), Poisson(0.5, 60, Empirical((4, 30)), Empirical((2, 17))), drafter)
    tables = [simulate(base.with_policy(p), 5).requests for p in (NoSpec(), StaticGamma(3), DSparkGreedy())]
    given = ["request_id", "domain", "arrival", "prompt_tokens", "output_tokens"]
    assert tables[0][given].equals(tables[1][given])
    assert tables[0][given].equals(tables[2][given])
    assert not tables[0]["finish"].equals(tables[1]["finish"])


# Domains


def test_domains_come_from_the_drafter_or_by_weight(drafter):
    base = Scenario(make_profile(), Poisson(1.0, 2000, 4, 2), drafter, StaticGamma(1))
    shares = simulate(base).requests["domain"].value_counts(normalize=True)
    assert shares["chat"] == pytest.approx(0.5, abs=0.045)
    weighted = Scenario(
        make_profile(), Poisson(1.0, 2000, 4, 2), drafter, StaticGamma(1), domains={"code": 3, "chat": 1}
    )
    assert simulate(weighted).requests["domain"].value_counts(normalize=True)["code"] == pytest.approx(0.75, abs=0.04)
    # A policy that runs no drafter keeps the mix of the scenario it is compared in.
    same = simulate(base.with_policy(NoSpec())).requests["domain"]
    assert same.astype(str).tolist() == simulate(base).requests["domain"].astype(str).tolist()


def test_a_workload_of_one_domain_reads_that_domain(drafter):
    result = simulate(Scenario(make_profile(), Poisson(1.0, 20, 4, 2, domain="code"), drafter, StaticGamma(1)))
    assert set(result.requests["domain"]) == {"code"}
    assert result.domains == ("code",)


# What cannot run


def broken(says, **fields):
    defaults = {
        "profile": make_profile(), "workload": make_arrivals([0.0], 4, 4), "drafter": always(1, 3),
        "scheduler": StaticGamma(1),
    }  # fmt: skip
    with pytest.raises(SpecsimError, match=says) as error:
        simulate(Scenario(**(defaults | fields)))
    assert "\n" not in str(error.value)


def test_a_block_longer_than_the_drafters():
    broken(
        r"StaticGamma\(5\): gamma: expected at most 3, the block length of drafter 'always'", scheduler=StaticGamma(5)
    )


def test_mtp1_wants_a_drafter_of_one():
    broken(
        r"MTP1\(\): gamma: expected a drafter of γ = 1, got 'always' of γ = 7", drafter=always(1, 7), scheduler=MTP1()
    )
    simulate(Scenario(make_profile(), make_arrivals([0.0], 4, 4), always(1, 1), MTP1()))


def test_a_domain_that_the_trace_lacks(drafter):
    asked = make_arrivals([0.0], 4, 4, domains=("poetry",))
    broken(
        "domain 'poetry': the trace has no blocks for it, expected one of chat, code", workload=asked, drafter=drafter
    )
    broken("domain 'poetry'", drafter=drafter, domains={"chat": 1, "poetry": 1})
    # A synthetic trace's "*" serves any.
    any_domain = simulate(Scenario(make_profile(), asked, synthetic(0.5, 2), StaticGamma(1)))
    assert set(any_domain.requests["domain"]) == {"poetry"}


@pytest.mark.parametrize("scheduler", [Threshold(0.5), DSparkGreedy(), GlobalArgmax(), DSparkAsync()], ids=repr)
def test_confidences_that_the_trace_lacks(scheduler):
    bare = Drafter(make_blocks([1, 0], 3, confidence=None), 3, name="bare")
    broken(r"needs confidences, and drafter 'bare' has none", drafter=bare, scheduler=scheduler)


def test_a_scheduler_that_did_not_say_that_it_needs_confidences():
    def mine(view):
        return (view.confidence[:, 0] > 0.5).astype(int)

    bare = Drafter(make_blocks([1, 0], 3, confidence=None), 3, name="bare")
    broken("scheduler .*mine.*: its drafter's trace has no confidences", drafter=bare, scheduler=mine)


def test_no_drafter_for_a_scheduler_that_verifies():
    broken(r"StaticGamma\(1\): expected a drafter \(a trace\): only NoSpec runs without one", drafter=None)
    broken("scheduler 'fast': expected something that can be called with a StepView", scheduler="fast")


def test_a_request_that_can_never_fit():
    broken(
        r"request 0: 4 prompt \+ 4 output \+ γ 3 tokens can never fit in the KV cache of 0 tokens \(--kv-tokens",
        kv_tokens=1,
    )


def test_a_budget_smaller_than_a_block():
    broken(r"max_num_batched_tokens: expected at least 1 \+ γ = 4, got 3", max_num_batched_tokens=3)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"replicas": 0}, "scenario: replicas: expected a whole number, 1 or more and at most 10000, got 0"),
        ({"max_num_seqs": 1.5}, "scenario: max_num_seqs"),
        ({"kv_tokens": -1}, "scenario: kv_tokens"),
        ({"router": "best"}, "scenario: router: expected round_robin or .*'best'"),
        ({"prefill": "never"}, "scenario: prefill: .*'never'"),
        ({"domains": {"a": -1.0}}, "scenario: domains: a: expected a weight"),
        ({"domains": {"a": float("nan")}}, "scenario: domains: a: expected a weight"),
        ({"domains": {"a": 0.0}}, "scenario: domains: expected at least one weight above 0"),
    ],
)
def test_a_scenario_that_makes_no_sense(fields, says):
    broken(says, **fields)


def test_a_rate_of_nothing():
    with pytest.raises(SpecsimError, match=r"Poisson\.rate: expected a number of at least 1e-06, got 0"):
        Poisson(0.0)


def test_a_label_names_scheduler_and_drafter():
    assert repr(Policy(StaticGamma(2), always(1, 3))) == "StaticGamma(2)@always"
    assert repr(Policy(NoSpec())) == "NoSpec()"


def test_the_step_table_is_kept_only_when_asked_for():
    scenario = Scenario(make_profile(), make_arrivals([0.0], 4, 4))
    assert simulate(scenario).steps is None
    assert len(simulate(scenario, steps=True).steps) == simulate(scenario).num_steps == 4
