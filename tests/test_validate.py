"""A recorded run replayed: a run that specsim itself made comes back without an error, and faults are one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bundles import EXPERTS
from conftest import always, make_arrivals, make_blocks, make_profile
from recordings import BLOCKS, ENGINE, meta_of, replayed, write_run
from test_bundle import bundle, sparse

from specsim.blocktrace import write_trace
from specsim.engine import Scenario, simulate
from specsim.hardware import save_profile
from specsim.hardware.devices import DEVICES, RESERVE_BYTES
from specsim.importers.recorded import Load, read_run
from specsim.plots import save_figure
from specsim.plots_validate import plot_validation
from specsim.replay import Told, ablations, kv_capacity, make_replay
from specsim.rules import RULES
from specsim.schedulers import StaticGamma
from specsim.types import SpecsimError
from specsim.validate import (
    Pair,
    broken_gates,
    compare,
    parse_gates,
    simulated_load,
    simulated_timings,
)

RUNS = Path(__file__).parents[1].parent / "shared" / "data" / "engine_runs"
REAL = ("RTX4090-Llama-3.1-8B", "RTXPRO6000-Llama-3.1-8B")
HOST = dict(zip(REAL, (0.0, 1.2e-3), strict=True))  # the only thing told, a constant for each machine
BARS = {
    "tpot.mean": 0.015, "tpot.p50": 0.015, "tpot.p90": 0.03, "tpot.p99": 0.03, "e2e.mean": 0.02, "e2e.p99": 0.02,
    "ttft.mean": 0.04, "ttft.p50": 0.06, "ttft.p99": 0.03,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip


@pytest.fixture
def prices(tmp_path):
    """The tiny profile's file."""
    path = tmp_path / "tiny.json"
    save_profile(make_profile(kind="measured"), path)
    return path


@pytest.fixture
def recorded(tmp_path, profile):
    """A run that specsim made, recorded."""
    return write_run(tmp_path / "run", replayed(profile))


def compared(folder, prices):
    run = read_run(folder)
    replay = make_replay(run, Told(profile=prices))
    return compare(run, simulate(replay.scenario, 0, steps=True), BLOCKS - 1)


# The replay


def test_a_run_that_specsim_made_comes_back_without_an_error(recorded, prices):
    found = compared(recorded, prices)
    assert len(found.pairs) == 3 * 5 + 3 * 2 + 2
    for name, pair in found.pairs.items():
        assert pair.error == pytest.approx(0, abs=1e-9), name
    assert found.correlation == pytest.approx(1)
    assert found.single_token == 1
    assert len(found.measured.tpot) == 5


def test_the_numbers_of_a_run_by_hand(tmp_path, recorded, prices):
    found = compared(recorded, prices)
    table = replayed(make_profile()).requests
    seen = table["queued"]
    assert found.metrics["ttft"]["mean"].measured == pytest.approx((table.first_token - seen).mean())
    assert found.metrics["e2e"]["p95"].measured == pytest.approx((table.finish - seen).quantile(0.95))
    assert found.makespan.measured == table.finish.max()
    assert found.throughput.measured == pytest.approx(152 / table.finish.max())
    slow = compared(write_run(tmp_path / "slow", replayed(make_profile()), slower=1.25), prices)
    for metric in ("ttft", "tpot", "e2e"):
        for pair in slow.metrics[metric].values():
            assert pair.error == pytest.approx(1 / 1.25 - 1)
    assert slow.correlation == pytest.approx(1)


def test_a_simulated_request_counts_from_when_its_replica_sees_it(profile):
    made = replayed(profile)
    seen = made.requests["arrival"] + np.arange(6) / 64
    timings = simulated_timings(replace(made, requests=made.requests.assign(queued=seen)))
    np.testing.assert_array_equal(timings.ttft, made.requests["first_token"] - seen)
    np.testing.assert_array_equal(timings.e2e, made.requests["finish"] - seen)
    np.testing.assert_array_equal(timings.arrival_s, made.requests["arrival"])


def test_clocks_are_brought_together(recorded):
    """The client's clock by the request that waited least, the ticks' by the start of the client."""
    run = read_run(recorded)
    made = simulated_timings(replayed(make_profile()))
    for name in ("arrival_s", "queued_s", "scheduled_s", "first_token_s", "finish_s", "prompt_tokens"):
        np.testing.assert_array_equal(getattr(run.requests, name), getattr(made, name))
    np.testing.assert_allclose(run.load.t, np.arange(1.0, 88.0))


def test_the_counts_of_the_step_under_way(profile):
    """Two requests for one place. Each prompt of 64 takes 2 s, each further token 1 + 1/64 s."""
    load = make_arrivals([0, 0.5], [64, 64], [2, 1])
    result = simulate(Scenario(profile=profile, workload=load, max_num_seqs=1), 0, steps=True)
    found = simulated_load(result, 10, np.array([-1, 0, 1, 2, 3.1, 5.1]))
    np.testing.assert_array_equal(found.running, [0, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(found.waiting, [0, 0, 0, 1, 0, 0])  # seen at the step's end, at 2 s
    np.testing.assert_allclose(found.kv_share * 10, [0, 4, 4, 5, 4, 0])  # 64 tokens are four blocks


def test_preempted_requests_wait(profile):
    result = replayed(profile)
    assert result.requests["preemptions"].sum() > 0
    start, timings = result.steps["start"].to_numpy(), simulated_timings(result)
    begun = (timings.scheduled_s <= start[:, None]) & (timings.finish_s > start[:, None])
    running = simulated_load(result, 12, start).running
    assert (running <= begun.sum(axis=1)).all()
    assert (running < begun.sum(axis=1)).any()


def test_zeros_throughout_are_no_kv_occupancy(tmp_path, prices):
    found = compared(write_run(tmp_path / "run", replayed(make_profile()), kv=False), prices)
    assert found.metrics["kv_occupancy"]["mean"].measured is None
    assert found.metrics["kv_occupancy"]["mean"].error is None
    assert found.metrics["running"]["mean"].error == pytest.approx(0, abs=1e-9)


def test_without_a_time_series_only_what_was_recorded_is_compared(recorded, prices):
    (recorded / "timeseries.csv").unlink()
    found = compared(recorded, prices)
    assert found.metrics["running"]["peak"].measured is None
    assert 1 <= found.metrics["running"]["peak"].simulated <= 4
    assert found.makespan.error == 0


def test_replicas_share_the_requests(recorded, prices):
    run = read_run(recorded)
    two = replace(run, settings=replace(run.settings, dp=2))
    replay = make_replay(two, Told(profile=prices))
    assert (replay.scenario.replicas, replay.scenario.router) == (2, "vllm")
    found = simulated_load(simulate(replay.scenario, 0, steps=True), 12, np.array([4.0]))
    assert found.running[0] + found.waiting[0] == 5


def test_experts_on_all_ranks_keep_replicas_in_step(recorded, prices):
    run = read_run(recorded)
    for dp, experts, lockstep in ((2, True, True), (2, False, False), (1, True, False)):
        told = replace(run, settings=replace(run.settings, dp=dp, expert_parallel=experts))
        assert make_replay(told, Told(profile=prices)).scenario.lockstep == lockstep


def test_experts_served_data_parallel_from_the_runs_folder_alone(tmp_path):
    """Two ranks that step together, experts split over them: all of it from meta.json, config.json and profile/."""
    engine = ENGINE | {"data_parallel_size": 2, "enable_expert_parallel": True, "max_num_batched_tokens": 16}
    meta = meta_of(engine_kwargs=engine)
    folder = write_run(tmp_path / "run", replayed(make_profile()), meta=meta)
    sparse(folder / "profile", config=None)
    (folder / "config.json").write_text(json.dumps(EXPERTS))
    told = Told(host_seconds=0.5, extrapolate=True)
    replay = make_replay(read_run(folder), told)
    scenario = replay.scenario
    assert (scenario.replicas, scenario.lockstep, scenario.router) == (2, True, "vllm")
    assert "experts lie on 2 ranks, 4 each" in scenario.profile.provenance.notes.lower()
    made = simulate(scenario, 0, steps=True)
    assert set(made.requests["replica"]) == {0, 1}
    together = made.steps.groupby("start")["duration"]
    assert (together.nunique() == 1).all()
    assert (together.size() == 2).any()
    again = read_run(write_run(folder, made, meta=meta))
    found = compare(again, simulate(make_replay(again, told).scenario, 0, steps=True), 12)
    for name in ("ttft.mean", "tpot.p99", "e2e.mean", "makespan"):
        assert found.pairs[name].error == pytest.approx(0, abs=1e-9), name


def test_the_engines_settings_rule(recorded, prices):
    run = read_run(recorded)
    for caching, blocks in ((True, 16), (None, 16), (False, 32)):
        told = replace(run, settings=replace(run.settings, prefix_caching=caching, block_size=blocks))
        scenario = make_replay(told, Told(profile=prices, without=("pause",))).scenario
        assert (scenario.rules.prefix_caching, scenario.rules.pause) == (caching is not False, False)
        assert (scenario.block_size, scenario.kv_tokens) == (blocks, (BLOCKS - 1) * blocks)
    with pytest.raises(SpecsimError, match=r"^--without: expected one of prefix_caching, .*, got 'paws'"):
        make_replay(run, Told(profile=prices, without=("paws",)))


def test_ablations_leave_one_thing_out_each(recorded, prices):
    run = read_run(recorded)
    replay = make_replay(run, Told(profile=prices, host_seconds=0.1))
    found = ablations(replay)
    assert [name for name in found if name.startswith("without ")] == [f"without {rule}" for rule in RULES]
    for name, scenario in found.items():
        back = replace(
            scenario, rules=replay.scenario.rules, block_size=16, kv_tokens=replay.scenario.kv_tokens,
            profile=replay.scenario.profile, async_scheduling=False, extrapolate=False,
        )  # fmt: skip
        assert back == replay.scenario, name
        assert scenario != replace(replay.scenario, extrapolate=True), name
    assert {"no host time", "host time hidden"} <= set(found)
    assert "no host time" not in ablations(make_replay(run, Told(profile=prices)))


def test_what_the_user_tells_goes_before_the_profiles_own(recorded, prices):
    run = read_run(recorded)
    assert make_replay(run, Told(profile=prices)).scenario.profile.host_seconds == 0
    slow = make_replay(run, Told(profile=prices, host_seconds=0.25, max_num_seqs=2, max_num_batched_tokens=32))
    assert slow.scenario.profile.host_seconds == 0.25
    assert (slow.scenario.max_num_seqs, slow.scenario.max_num_batched_tokens) == (2, 32)
    assert "250 ms" in slow.assumptions["step prices"]


def test_the_runs_own_bundle_gets_the_runs_parallelism(tmp_path, recorded):
    sparse(recorded / "profile")
    (recorded / "profile" / "config.json").rename(recorded / "config.json")
    meta = meta_of(model="org/Tiny-1B", engine_kwargs=ENGINE | {"enable_expert_parallel": True})
    meta["engine_kwargs"]["max_num_batched_tokens"] = 16
    (recorded / "meta.json").write_text(json.dumps(meta))
    profile = make_replay(read_run(recorded), Told(host_seconds=0.5)).scenario.profile
    assert (profile.tp, profile.host_seconds, profile.verify.type) == (1, 0.5, "layered")
    bundle(recorded / "other", config=None)
    (recorded / "config.json").write_text((bundle(tmp_path / "dense") / "config.json").read_text())
    dense = read_run(recorded)
    with pytest.raises(SpecsimError, match=r"other: meta.json's enable_expert_parallel: has no place in a model with"):
        make_replay(dense, Told(profile=recorded / "other"))


# KV capacity


@pytest.fixture
def memory(recorded):
    """A run of Llama-3.1-8B that did not record its blocks, and what to change in its settings."""
    (recorded / "config.json").write_text(json.dumps(LLAMA))
    run = read_run(recorded)
    return lambda **changes: replace(run, settings=replace(run.settings, num_blocks=None, **changes))


def test_the_engines_blocks_less_the_one_it_keeps_empty(recorded):
    tokens, why = kv_capacity(read_run(recorded), Told(), make_profile())
    assert tokens == (BLOCKS - 1) * 16
    assert "13 blocks less the one" in why
    assert kv_capacity(read_run(recorded), Told(kv_tokens=7), make_profile())[0] == 7


def test_capacity_worked_out_from_a_gpus_memory(memory):
    """An RTX 4090's, whose engine counted 2,588 blocks."""
    run = memory(device="NVIDIA GeForce RTX 4090")
    rated, why = kv_capacity(run, Told(), make_profile())
    assert rated == pytest.approx(41392, rel=0.02)
    assert "rating of NVIDIA GeForce RTX 4090" in why
    by_profile = kv_capacity(memory(), Told(), make_profile(device="RTX PRO 6000 Blackwell Server Edition"))
    assert "rating of NVIDIA RTX PRO 6000" in by_profile[1]
    size = DEVICES["rtx4090"].memory_bytes
    assert kv_capacity(memory(), Told(device_memory=size), make_profile())[0] == rated
    assert kv_capacity(memory(device_memory=size), Told(), make_profile())[0] == rated
    less = kv_capacity(memory(device_memory=size, utilisation=0.8), Told(), make_profile())[0]
    assert less == kv_capacity(memory(device_memory=size), Told(utilisation=0.8), make_profile())[0] < rated
    assert kv_capacity(memory(device_memory=size, kv_dtype="fp8"), Told(), make_profile())[0] > 1.99 * rated
    assert kv_capacity(memory(), Told(), make_profile(kv_tokens=999))[0] == 999


def test_memory_set_apart_for_kv(memory, recorded):
    """By hand: what the GPU has, and the weights' share of it, play no part."""
    size = 1024 * 131072  # 1,024 tokens
    for place in ("engine_kwargs", "kv_cache"):
        meta = meta_of(engine_kwargs=ENGINE | {"gpu_memory_utilization": 0.5, "quantization": "awq"}, kv_cache={})
        meta[place] = meta[place] | {"kv_cache_memory_bytes": size}
        (recorded / "meta.json").write_text(json.dumps(meta))
        run = read_run(recorded)
        tokens, why = kv_capacity(run, Told(), make_profile(kv_tokens=999))
        assert tokens == 1024 - 16
        assert why == "1,008 tokens, worked out: 0.1 GiB (kv_cache_memory_bytes)"
        assert run.settings.ignored == ()
    rated = kv_capacity(memory(), Told(device_memory=96e9), make_profile())
    assert kv_capacity(memory(kv_memory=size), Told(device_memory=96e9), make_profile()) == rated  # told goes first
    assert kv_capacity(memory(kv_memory=size, tp=2), Told(), make_profile())[0] == 2048 - 16


def test_experts_are_whole_on_one_of_all_ranks(memory, recorded):
    shape = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
    (recorded / "config.json").write_text(json.dumps(shape))
    size, share = 96 * 2**30, 0.9
    got, _ = kv_capacity(memory(expert_parallel=True, dp=4), Told(device_memory=size), make_profile())
    experts = 32 * 8 * 3 * 4096 * 14336 * 2
    rest = 2 * (2 * 32000 * 4096 + 32 * (4096 * 128 * 2 * (32 + 8) + 8 * 4096))
    room = size * share - RESERVE_BYTES - rest - experts / 4
    assert got == (int(room / 131072 / 16) - 1) * 16


@pytest.mark.parametrize(
    ("changes", "told", "says"),
    [
        (
            {},
            {},
            "kv_cache.num_gpu_blocks: is not told, nor the memory of a known GPU: expected --kv-tokens N or --dev",
        ),
        ({"device": "GPU X"}, {}, "expected --kv-tokens N or --device-memory BYTES"),
        ({}, {"device_memory": 16e9}, "leave no room in 0.9 of 14.9 GiB"),
        (
            {"kv_memory": 1e9},
            {"utilisation": 0.5},
            "--utilisation: has no meaning beside the kv_cache_memory_bytes",
        ),
        ({"kv_memory": 3e6}, {}, "kv_cache_memory_bytes: expected room for two blocks of 16 tokens, got 3e+06"),
        ({"dtype": "float32"}, {"device_memory": 96e9}, "engine_kwargs.dtype: expected auto, bfloat16"),
        ({"quantization": "awq"}, {"device_memory": 96e9}, "engine_kwargs.quantization: expected auto"),
        ({}, {"kv_tokens": 96, "device_memory": 96e9}, "--device-memory: has no meaning beside --kv-tokens"),
        ({}, {"kv_tokens": 96, "utilisation": 0.5}, "--utilisation: has no meaning beside --kv-tokens"),
    ],
)
def test_capacity_that_nobody_tells(memory, changes, told, says):
    with pytest.raises(SpecsimError) as error:
        kv_capacity(memory(**changes), Told(**told), make_profile())
    assert says in str(error.value)


# Gates


def test_errors_are_relative_to_what_was_measured():
    assert Pair(2.0, 3.0).error == 0.5
    assert Pair(0.0, 0.0).error == 0
    assert Pair(0.0, 1.0).error == np.inf
    assert Pair(None, 1.0).error is None
    assert Pair(float("nan"), float("nan")).error is None


def test_gates_of_a_latency_and_of_one_statistic():
    gates, options = parse_gates(
        {"ttft": None, "tpot": "3%", "e2e": "0.05"}, ["tpot.p99=4 %", "running.peak=0", "makespan=.5"]
    )
    assert gates == {
        "tpot.mean": 0.03, "tpot.p99": 0.04, "e2e.mean": 0.05, "e2e.p99": 0.05, "running.peak": 0, "makespan": 0.5,
    }  # fmt: skip
    assert options == {
        "tpot.mean": "--max-tpot-error", "tpot.p99": "--max-error", "e2e.mean": "--max-e2e-error",
        "e2e.p99": "--max-e2e-error", "running.peak": "--max-error", "makespan": "--max-error",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--max-tpot-error", "three", "--max-tpot-error: expected a share such as 3% or 0.03, got 'three'"),
        ("--max-tpot-error", "3", "expected a share such as 3% or 0.03, got '3'"),
        ("--max-ttft-error", "-1%", "--max-ttft-error: expected a share"),
        ("--max-e2e-error", "nan", "--max-e2e-error: expected a share"),
        ("--max-error", "tpot.p90", "--max-error: expected METRIC.STAT=SHARE such as tpot.p90=3%, got 'tpot.p90'"),
        ("--max-error", "tpot.p91=3%", "--max-error: 'tpot.p91' is not one of ttft.mean"),
        ("--max-error", "tpot.p90=", "--max-error tpot.p90: expected a share"),
        ("--max-error", "kv_occupancy.mean=3%", "kv_occupancy.mean: this run has nothing measured to compare with"),
    ],
)
def test_a_gate_that_says_nothing_is_a_mistake(tmp_path, prices, run, option, value, says):
    folder = write_run(tmp_path / "run", replayed(make_profile()), kv=False)
    code, out, err = run("validate", "recorded", folder, "--profile", prices, option, value, "--json", tmp_path / "j")
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "j").exists()


def test_broken_gates_exit_with_1_and_a_line_each(tmp_path, prices, run):
    folder = write_run(tmp_path / "run", replayed(make_profile()), slower=1.25)  # so that the replay is 20 % fast
    call = ("validate", "recorded", folder, "--profile", prices, "--json", tmp_path / "errors.json")
    code, out, err = run(*call, "--max-tpot-error", "3%", "--max-error", "e2e.p50=0.19", "--max-error", "e2e.p90=0.21")
    assert code == 1
    assert "error %" in out
    assert err.splitlines() == [
        "gate broken: tpot.mean: -20.00 % off, at most 3 % allowed",
        "gate broken: tpot.p99: -20.00 % off, at most 3 % allowed",
        "gate broken: e2e.p50: -20.00 % off, at most 19 % allowed",
    ]
    assert len(json.loads((tmp_path / "errors.json").read_text())["broken"]) == 3  # told, and kept too
    code, _, err = run(*call, "--max-tpot-error", "21%", "--max-ttft-error", "0.21", "--max-e2e-error", "0.21")
    assert (code, err) == (0, "")


def test_an_infinite_error_breaks_a_gate(recorded, prices):
    found = compared(recorded, prices)
    broken = replace(found, makespan=Pair(0.0, 1.0))
    assert broken_gates(broken, {"makespan": 5.0}, {"makespan": "--max-error"}) == [
        "makespan: +inf % off, at most 500 % allowed"
    ]


# The command


def test_what_is_printed_and_written(tmp_path, recorded, prices, run):
    out = tmp_path / "out"
    code, text, err = run(
        "validate", "recorded", recorded, "--profile", prices, "--out", out, "--json", tmp_path / "errors.json"
    )
    assert (code, err) == (0, "")
    for words in (
        "ttft (s)", "p99", "KV occupancy", "throughput", "correlation 1", "which have no tpot: 1",
        "192 tokens: the engine's 13 blocks", "prefix cache: preempted requests find their own", "0 ms of the host",
    ):  # fmt: skip
        assert words in text
    assert "\n  ttft (s) " in text  # text to the left, although cells below it are blank
    assert [p.name for p in out.iterdir()] == ["validation.png"]
    data = json.loads((tmp_path / "errors.json").read_text())
    assert set(data["metrics"]["tpot"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert set(data["metrics"]["tpot"]["p90"]) == {"measured", "simulated", "error"}
    assert data["correlation"]["ttft"] == pytest.approx(1)
    assert data["settings"]["kv_tokens"] == 192
    assert data["run"] == "run"
    assert "ablation" not in data
    first = (out / "validation.png").read_bytes()
    run("validate", "recorded", recorded, "--profile", prices, "--out", out)
    assert (out / "validation.png").read_bytes() == first


def test_the_worth_of_each_rule_is_printed_and_written(tmp_path, recorded, prices, run):
    call = ("validate", "recorded", recorded, "--profile", prices, "--ablate", "--json", tmp_path / "errors.json")
    code, text, err = run(*call, "--without", "lookahead")
    assert (code, err) == (0, "")
    assert "rules: without lookahead" in text
    table = text[text.index("What each rule is worth") :]
    rows = json.loads((tmp_path / "errors.json").read_text())["ablation"]
    for name in rows:
        assert name in table
    assert rows["as replayed"] == rows["without lookahead"]  # left out already
    assert rows["KV without end"]["preemptions"] == 0 < rows["as replayed"]["preemptions"]


def test_a_run_that_speculated_needs_to_be_told_how(tmp_path, prices, run):
    drafter = always(1, 2)
    made = replayed(make_profile(), drafter=drafter, scheduler=StaticGamma(2))
    meta = meta_of(engine_kwargs=ENGINE | {"speculative_config": {"num_speculative_tokens": 2}})
    folder = write_run(tmp_path / "run", made, meta=meta)
    write_trace(make_blocks([1] * 40, 3), tmp_path / "trace.parquet")  # longer than what the run drafted
    call = ("validate", "recorded", folder, "--profile", prices)
    code, _, err = run(*call)
    assert code == 2
    assert "speculative_config: the run drafted tokens" in err
    told = ("--trace", tmp_path / "trace.parquet", "--scheduler", "StaticGamma(2)")
    gates = ("--max-ttft-error", "0.0001%", "--max-tpot-error", "0.0001%", "--max-e2e-error", "0.0001%")
    code, text, _ = run(*call, *told, *gates)
    assert code == 0
    assert "speculation: 2 drafted tokens a request, by meta.json's num_speculative_tokens\n" in text
    err = run(*call, *told[:3], "StaticGamma(3)")[2]
    assert err == "error: scheduler StaticGamma(3): gamma: expected at most 2, the block length of drafter 'trace'\n"
    assert "--scheduler: expected one that speculates" in run(*call, *told[:3], "NoSpec")[2]
    assert "expected both" in run(*call, *told[:2])[2]
    (folder / "meta.json").write_text(json.dumps(meta_of()))
    assert "recorded without speculation" in run(*call, *told)[2]


def test_a_bundle_needs_the_models_config(recorded, run):
    bundle(recorded / "profile", config=None)
    code, _, err = run("validate", "recorded", recorded)
    assert code == 2
    assert "run/config.json: expected the model's, which says how often each kernel runs" in err


def test_other_mistakes_are_one_line_too(tmp_path, recorded, prices, run):
    call = ("validate", "recorded", recorded)
    for arguments, says in (
        (("validate", "recorded", tmp_path / "none"), "expected the folder of a recorded run"),
        (call, "profile: expected a bundle's folder there, or --profile FILE"),
        ((*call, "--profile", tmp_path / "none.json"), "none.json: cannot read"),
        ((*call, "--profile", prices, "--skew"), "--skew: has no meaning for the profile"),
        ((*call, "--host-ms", "-1"), "--host-ms: expected 0 or more, got -1"),
        ((*call, "--device-memory", "nan"), "--device-memory: expected bytes, above 0, got nan"),
        ((*call, "--device-memory", "0"), "--device-memory: expected bytes, above 0, got 0"),
        ((*call, "--utilisation", "1.5"), "--utilisation: expected a share above 0, up to 1, got 1.5"),
        ((*call, "--profile", prices, "--utilisation", "0.5"), "--utilisation: has no meaning beside the blocks"),
        ((*call, "--profile", prices, "--format", "gif"), "--format: expected png or svg"),
        ((*call, "--profile", prices, "--json", recorded / "meta.json"), "is the input RUN_DIR"),
        ((*call, "--profile", prices, "--json", prices), "is the input --profile"),
        ((*call, "--profile", prices, "--kv-tokens", "32"), "can never fit in the KV cache"),
        ((*call, "--profile", prices, "--kv-tokens", "0"), "kv_tokens: expected a whole number, 1 or more"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, ""), says
        assert says in err
        assert err.count("\n") == 1


# The picture


def test_every_panel_shows_both_sides(tmp_path, recorded, prices):
    found = compared(recorded, prices)
    figure = plot_validation(found, "Mine", ["analytic"])
    assert figure.get_suptitle() == "Mine"
    assert figure.get_supxlabel() == "analytic"
    assert len(figure.axes) == 6
    for axes, name in zip(figure.axes, ("ttft", "tpot", "e2e"), strict=False):
        assert axes.get_title(loc="left").startswith("error: mean ")
        for line, timings in zip(axes.lines, (found.measured, found.simulated), strict=True):
            values = np.sort(getattr(timings, name)) * (1e3 if name == "tpot" else 1)
            np.testing.assert_allclose(line.get_xdata()[1:], values)
            assert line.get_ydata()[-1] == 1
    dots = figure.axes[3].collections[0].get_offsets()
    np.testing.assert_allclose(dots[:, 0], found.measured.ttft)
    np.testing.assert_allclose(dots[:, 1], found.simulated.ttft)
    for axes, name in zip(figure.axes[4:], ("running", "waiting"), strict=True):
        np.testing.assert_array_equal(axes.lines[0].get_ydata(), getattr(found.measured_load, name))
    assert save_figure(figure, tmp_path / "p.svg").stat().st_size > 0


def test_a_picture_of_little(tmp_path, prices):
    """One request of one token: no tpot, no correlation, no time series."""
    made = simulate(Scenario(profile=make_profile(), workload=make_arrivals([0], 4, 1)), 0, steps=True)
    folder = write_run(tmp_path / "run", made, meta=meta_of(num_requests=1))
    (folder / "timeseries.csv").unlink()
    found = compared(folder, prices)
    assert found.correlation is None
    assert found.metrics["tpot"]["mean"].error is None
    assert save_figure(plot_validation(found), tmp_path / "p.png").stat().st_size > 0


# Real ones


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.skipif(not (RUNS / n).exists(), reason=f"{RUNS / n} is not here"))
        for n in REAL
    ],
)
def test_a_real_run_is_replayed(name):
    run = read_run(RUNS / name)
    assert len(run.requests) == 300
    assert isinstance(run.load, Load)
    assert (run.load.kv_share is not None) == name.startswith("RTX4090")
    # The recorded ticks count what the requests' own times say, so the clocks lie on each other.
    inside = (run.requests.queued_s <= run.load.t[:, None]) & (run.requests.finish_s > run.load.t[:, None])
    assert np.abs(inside.sum(axis=1) - run.load.running - run.load.waiting).mean() < 0.2
    replay = make_replay(run, Told(host_seconds=HOST[name]))
    found = compare(run, simulate(replay.scenario, 0, steps=True), replay.scenario.kv_tokens // 16)
    assert found.correlation > 0.99
    for pair, bar in BARS.items():
        assert abs(found.pairs[pair].error) <= bar, (pair, found.pairs[pair])
    for name in ("running.mean", "waiting.mean", "makespan", "throughput"):
        assert abs(found.pairs[name].error) <= 0.02, (name, found.pairs[name])
    if run.load.kv_share is not None:
        assert abs(found.pairs["kv_occupancy.mean"].error) <= 0.02


@pytest.mark.skipif(not (RUNS / REAL[0]).exists(), reason=f"{RUNS / REAL[0]} is not here")
def test_each_rule_brings_the_replay_closer_where_memory_is_short():
    """On the RTX 4090's run, where requests are put out all the time."""
    run = read_run(RUNS / REAL[0])
    replay = make_replay(run)
    scenarios = {"as replayed": replay.scenario} | ablations(replay)
    tpot, ttft = {}, {}
    for name in ("as replayed", "without prefix_caching", "without own_prefills", "without mixed", "KV without end"):
        pairs = compare(run, simulate(scenarios[name], 0, steps=True), 2587).pairs
        tpot[name], ttft[name] = abs(pairs["tpot.p99"].error), abs(pairs["ttft.mean"].error)
    for errors in (tpot, ttft):
        assert min(errors, key=errors.get) == "as replayed"
        assert errors["without prefix_caching"] > 0.03
        assert errors["KV without end"] > 0.5
