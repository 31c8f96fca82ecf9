"""Is my acceptance normal, and is γ right for my load?"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import draft_cost, make_blocks, make_profile

import specsim as ss
from specsim.acceptance import load_trace
from specsim.checkup import PUBLISHED, TOO_FEW, acceptance_check, gamma_check, gamma_words
from specsim.trace_stats import tau_table
from specsim.types import SpecsimError

ROOT = Path(__file__).parents[1]
SHIPPED = {"DSpark": "qwen3-4b-dspark", "DFlash": "qwen3-4b-dflash", "Eagle3": "qwen3-4b-eagle3"}


def test_what_is_published_is_what_the_shipped_traces_hold():
    for kind, name in SHIPPED.items():
        trace = load_trace(ROOT / f"traces/{name}.json")
        (published,) = [p for p in PUBLISHED if p.kind == kind]
        assert published.domains == {n: d.conditional_acceptance for n, d in trace.domains.items()}
        assert all(words in trace.provenance.source for words in published.source.split(", "))
    mtp = next(p for p in PUBLISHED if p.kind == "MTP")
    assert mtp.domains["lowest"] == load_trace(ROOT / "traces/mtp1.json").domains["*"].conditional_acceptance


@pytest.mark.parametrize("kind", SHIPPED)
def test_a_shipped_trace_is_normal(kind):
    check = acceptance_check(load_trace(ROOT / f"traces/{SHIPPED[kind]}.json"))
    assert check.kinds == (kind,)
    assert set(check.positions["verdict"]) == {"within"}
    assert ", within the " in check.words()
    assert "Look for" not in check.words()


def test_low_and_high_acceptance_are_named_by_position():
    trace = make_blocks([2, 0] * 3000, 2, drafter="my-eagle3", request_id=["a"] * 3000 + ["b"] * 3000)
    check = acceptance_check(trace)
    assert check.kinds == ("Eagle3",)
    assert check.positions["yours"].tolist() == [0.5, 1.0]
    assert check.positions["verdict"].tolist() == ["below", "above"]
    assert check.tau == pytest.approx(2.0)
    assert "Below every published domain: position 1. Above every published domain: position 2." in check.words()
    unknown = acceptance_check(make_blocks([1, 0] * 50, 1, drafter="mine"))
    assert len(unknown.kinds) == len(PUBLISHED)
    assert unknown.positions["published_low"][0] == 0.5336


def test_tokens_a_block_and_tokens_a_cycle_are_told_apart():
    """Blocks that get through are passed by a replay: four blocks in a row of two tokens each, then four of none."""
    trace = make_blocks([2, 2, 2, 0, 0, 0] * 100, 2, request_id=[f"r{i // 6}" for i in range(600)])
    check = acceptance_check(trace)
    assert check.tau == pytest.approx(2.0)  # of all anchors
    assert check.tau_cycles == pytest.approx(6 / 4)  # 3 tokens, then one in each of three cycles
    assert "2.00 tokens a block of 2 drafted whole, bonus token included" in check.words()
    assert "Over the cycles of a replay, as trace compare counts, τ is 1.50" in check.words()
    table = tau_table(trace)
    assert check.tau_cycles == table.loc[(table["domain"] == "all") & (table["gamma"] == 2), "tau"].iloc[0]
    one = acceptance_check(ss.synthetic(0.7, gamma=3).acceptance)
    assert one.tau_cycles != one.tau_cycles
    assert "replay" not in one.words()


def test_a_drafter_that_often_proposes_nothing_is_judged_by_its_blocks_as_they_are():
    """Half of the blocks propose nothing; the others are as good as what was published."""
    accepted, proposed = [2, 0, 1, 0] * 100, [2, 0, 2, 0] * 100
    trace = make_blocks(accepted, 2, proposed=proposed, drafter="ngram", request_id=[f"r{i // 20}" for i in range(400)])
    check = acceptance_check(trace)
    assert (check.proposing, check.tau_blocks) == (0.5, 1.75)
    words = check.words()
    assert "only 50 % of its blocks propose anything. As they are, blocks of up to 2 give 1.75 tokens" in words
    assert (
        "1.75 tokens, bonus token included, within the" in words or "1.75 tokens, bonus token included, below" in words
    )
    assert "drafted whole" not in words
    ngram = acceptance_check(load_trace(ROOT / "traces/smollm2-ngram-t06.parquet"))
    assert 0.4 < ngram.proposing < 0.6
    assert "bonus token included, below the 2.41 to 5.56 published" in ngram.words()


def test_few_blocks_are_not_judged():
    """One block reached position 2 and failed: its acceptance is anything, not 0 to 0."""
    check = acceptance_check(make_blocks([0] * 99 + [1], 2, drafter="dflash", request_id=["a"] * 50 + ["b"] * 50))
    assert check.positions["verdict"].tolist() == ["below", TOO_FEW]
    assert check.positions["blocks"].tolist() == [100, 1]
    assert check.positions["high"][1] == pytest.approx(0.7935, abs=1e-3)  # Wilson's
    assert f"{TOO_FEW.capitalize()}: position 2." in check.words()
    one = acceptance_check(make_blocks([2], 2, drafter="dflash"))
    assert one.words() == "dflash: too few blocks to tell whether acceptance is normal: 1, expected 20 or more."
    last = acceptance_check(load_trace(ROOT / "traces/smollm2-dflash-t06.parquet")).positions.iloc[-1]
    assert last["verdict"] == TOO_FEW


def test_counters_are_told_as_they_are(tmp_path):
    check = acceptance_check(ss.synthetic((0.8, 0.625, 0.4)).acceptance)
    assert check.positions["yours"].tolist() == pytest.approx([0.8, 0.625, 0.4], rel=1e-12)
    assert check.tau == pytest.approx(2.5, rel=1e-12)
    mixed = ss.synthetic((0.8, 0.5)).acceptance
    domain = mixed.domains["*"]
    easy = domain.model_copy(update={"conditional_acceptance": (1.0, 1.0)})
    both = acceptance_check(mixed.model_copy(update={"domains": {"a": domain, "b": easy}}))
    assert both.positions["yours"].tolist() == pytest.approx([0.9, 0.7 / 0.9])
    assert both.tau_cycles == pytest.approx(2 / (1 / 2.2 + 1 / 3))
    unknown = mixed.model_copy(update={"drafter": "unknown"})
    assert acceptance_check(unknown, "metrics").words().startswith("metrics: 2.20 tokens a block")
    assert acceptance_check(mixed, "metrics").drafter == mixed.drafter
    with pytest.raises(SpecsimError, match="these are arrivals"):
        ss.load_acceptance(ROOT / "traces/azure-2023-code.json")


def scenario(step, workload, **fields):
    verify = {"type": "table1d", "tokens": [1, 4096], "seconds": step, "below": "linear"}
    return ss.Scenario(make_profile(verify=verify, **fields), workload, ss.synthetic(0.6, gamma=3))


def test_the_best_length_and_what_another_costs():
    """Steps that do not grow: the longest is best. Steps that grow with every token: none is."""
    loop = ss.ClosedLoop(1, 4, 32, measured=40)
    flat = gamma_check(scenario([0.01, 0.01], loop), 4, range(2), jobs=1)
    assert flat["gamma"].tolist() == [0, 1, 2, 3]
    assert flat["behind"].idxmin() == 3
    assert flat["tau"].iloc[3] > 2
    words = gamma_words(flat, "4 users", 3, "the throughput")
    assert words.startswith("At 4 users, γ = 3 is the best fixed length: it is right (the longest that the trace has).")
    cut = gamma_words(flat, "4 users", 3, "the throughput", 7)
    assert "it is right (the longest that --gamma allows; the trace has 7)." in cut
    shorter = gamma_words(flat.assign(value=[0, 1, 9, 2], behind=0.5), "4 users", 2, "the throughput")
    assert shorter == "At 4 users, γ = 2 is the best fixed length: it is right."
    level = gamma_words(flat.assign(behind=[0.5, 0.01, 0.2, 0], behind_ci=0.1), "4 users", 3, "the throughput")
    assert level.endswith("Within the noise of it: γ = 1.")
    steep = gamma_check(scenario([0.001, 4.096], loop), 4, range(2), jobs=1)
    assert steep["behind"].idxmin() == 0
    assert "γ = 0 is the best fixed length: γ = 3 costs" in gamma_words(steep, "4 users", 3, "the throughput")
    open_loop = gamma_check(scenario([0.01, 0.01], ss.Poisson(1, 60, 4, 16)), 2.0, range(2), jobs=1)
    assert open_loop["behind"].idxmin() == 3
    assert (open_loop["value"] == open_loop["interactivity_p50"]).all()


def test_lengths_that_do_not_keep_up_with_arrivals_are_not_right():
    """Four seats and steps of 10 ms: 40 requests of 16 tokens a second need drafts, of 400 a second none are served."""
    base = replace(scenario([0.01, 0.01], ss.Poisson(1, 200, 4, 16)), max_num_seqs=4)
    some = gamma_check(base, 40.0, range(2), jobs=1)
    assert (some["served"] < 0.9).tolist() == [True, False, False, False]
    assert np.isnan(some["value"].iloc[0])
    told = gamma_words(some, "40 requests/s", 0, "tok/s/user")
    assert told == "At 40 requests/s, γ = 0 does not keep up with the arrivals: γ = 3 is the best length that does."
    none = gamma_check(base, 400.0, range(2), jobs=1)
    assert (none["value"] == none["throughput"]).all()
    assert "no length keeps up with the arrivals" in gamma_words(none, "400 requests/s", 3, "tok/s/user")
    with pytest.raises(SpecsimError, match="more requests"):
        gamma_check(replace(base, workload=ss.Poisson(1, 8, 4, 16)), 4000.0, [0], jobs=1)


def test_where_thinking_decides_the_throughput_speed_is_compared():
    thinking = gamma_check(scenario([0.01, 0.01], ss.ClosedLoop(1, 4, 32, think_s=5.0, measured=60)), 8, [0], jobs=1)
    assert (thinking["value"] == thinking["interactivity_p50"]).all()


def test_drafting_is_paid_for_the_tokens_that_are_drafted():
    """An autoregressive drafter as slow as the target: only γ = 0 is right."""
    slow = draft_cost(0.01, "autoregressive").model_dump()
    table = gamma_check(scenario([0.01, 0.01], ss.ClosedLoop(1, 4, 32, measured=40), draft=slow), 2, [0], jobs=1)
    assert table["behind"].idxmin() == 0
    assert table["behind"].is_monotonic_increasing
    with pytest.raises(SpecsimError, match="expected a scenario with a drafter"):
        gamma_check(ss.Scenario(make_profile(), ss.ClosedLoop(1)), 2)
