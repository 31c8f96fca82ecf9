"""Recordings that cannot be read or replayed: one line says what is wrong, and where."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from bundles import META, bundle
from conftest import always, make_profile
from recordings import BLOCKS, BOOT, ENGINE, EPOCH, edit, engine, meta, replayed, row, rows, write_run

from specsim.engine import Policy
from specsim.hardware import save_profile
from specsim.importers.recorded import TIMES, read_run
from specsim.replay import Told, ablations, kv_capacity, make_replay
from specsim.schedulers import NoSpec, StaticGamma
from specsim.types import SpecsimError


@pytest.fixture
def recorded(tmp_path):
    """A run that specsim made, recorded."""
    return write_run(tmp_path / "run", replayed(make_profile()))


@pytest.fixture
def prices(tmp_path):
    """The tiny profile's file."""
    path = tmp_path / "tiny.json"
    save_profile(make_profile(kind="measured"), path)
    return path


def thousandfold(time, _):
    return 1e3 * time


FAULTS = {
    "no requests": (lambda f: (f / "requests.jsonl").unlink(), "requests.jsonl: cannot read"),
    "no meta": (lambda f: (f / "meta.json").unlink(), "meta.json: cannot read"),
    "no lines": (edit("requests.jsonl", lambda _: "\n"), "requests.jsonl: expected at least one request, got none"),
    "not JSON": (edit("requests.jsonl", lambda t: "x" + t), "requests.jsonl: line 1: expected a JSON object"),
    "a list": (edit("requests.jsonl", lambda t: "[]\n" + t), "requests.jsonl: line 1: "),
    "no last token": (row(2, last_token_ts=None), "line 2: last_token_ts: expected"),
    "no field": (row(2, last_token_ts=...), "line 2: last_token_ts: is missing"),
    "text for a time": (row(3, queued_ts="soon"), "line 3: queued_ts: expected"),
    "half a token": (row(3, input_toks=1.5), "line 3: input_toks: expected"),
    "no output": (row(4, output_toks=0), "line 4: output_toks: expected"),
    "time runs backwards": (row(1, last_token_ts=BOOT), "line 1: last_token_ts: expected first_token_ts, "),
    "scheduled before it came": (row(1, scheduled_ts=BOOT), "line 1: scheduled_ts: expected queued_ts, "),
    "milliseconds": (row(1, arrival_time=EPOCH * 1e3), "arrival_time: expected seconds, as queued_ts"),
    "twice": (row(2, request_id="r5"), "line 2: request_id: 'r5' is also on line 1"),
    "another count": (meta(num_requests=7), "meta.json: num_requests: expected 6, the lines of requests.jsonl, got 7"),
    "no model": (edit("meta.json", lambda _: json.dumps({"engine_kwargs": {}})), "meta.json: model: is missing"),
    "no engine": (edit("meta.json", lambda _: json.dumps({"model": "m"})), "meta.json: engine_kwargs: is missing"),
    "broken meta": (edit("meta.json", lambda t: t[:-1]), "meta.json: expected JSON"),
    "no start": (meta(started_at="noon"), "meta.json: started_at: expected a date and time (ISO 8601), got 'noon'"),
    "seqs": (engine(max_num_seqs=None), "engine_kwargs.max_num_seqs: is not told"),
    "tokens": (engine(max_num_batched_tokens=None), "expected --max-num-batched-tokens N"),
    "a share": (engine(gpu_memory_utilization=1.5), "engine_kwargs.gpu_memory_utilization: expected"),
    "blocks of 0": (meta(kv_cache={"num_gpu_blocks": 9, "block_size": 0}), "block_size: expected"),
    "pipeline": (engine(pipeline_parallel_size=2), "engine_kwargs.pipeline_parallel_size: expected 1"),
    "unchunked": (engine(enable_chunked_prefill=False), "engine_kwargs.enable_chunked_prefill: expected True"),
    "speculation": (engine(speculative_config={"method": "ngram"}), "expected --trace FILE and --scheduler NAME"),
    "drafts of nothing": (
        engine(speculative_config={"num_speculative_tokens": 0}),
        "engine_kwargs.speculative_config.num_speculative_tokens: expected a whole number, 1 or more, got 0",
    ),
    "drafts of a half": (engine(speculative_config={"num_speculative_tokens": 1.5}), "1 or more, got 1.5"),
    "two GPUs": (engine(tensor_parallel_size=2), "tiny.json: tp: expected 2, the run's tensor_parallel_size, got 1"),
    "columns": (edit("timeseries.csv", lambda _: "t,running\n1,2\n"), "timeseries.csv: expected the columns t"),
    "ticks": (edit("timeseries.csv", lambda _: "t,running,waiting\n2,1,1\n1,1,1\n"), "line 3: t: expected more than 2"),
    "half a request": (edit("timeseries.csv", lambda _: "t,running,waiting\n2,1.5,1\n"), "line 2: running: expected"),
    "no time": (
        rows(**dict.fromkeys(TIMES, lambda _, i: BOOT + i)), "line 1: last_token_ts: expected later than queued_ts"
    ),
    "one queued long ago": (row(2, queued_ts=-5), "line 2: queued_ts: expected seconds, as arrival_time"),
    "one sent long ago": (row(2, arrival_time=-5), "line 2: arrival_time: expected seconds, as queued_ts"),
    "an engine's milliseconds": (
        rows(**dict.fromkeys(TIMES, thousandfold)),
        "jsonl: arrival_time, queued_ts: expected both in seconds, got clocks of which the second goes 1000 times as",
    ),
    "a client's milliseconds": (rows(arrival_time=thousandfold), "the second goes 0.001 times as fast"),
    "a client's nanoseconds": (
        rows(arrival_time=lambda t, _: 1e9 * t), "arrival_time: expected seconds that can tell milliseconds apart"
    ),
    "milliseconds throughout": (
        rows(**dict.fromkeys((*TIMES, "arrival_time"), thousandfold)),
        "requests.jsonl: arrival_time: expected seconds since 1970, from 2023-11-14T22:13:18+00:00 on, meta.json's",
    ),
    "no arrivals": (rows(arrival_time=lambda *_: 0), "arrival_time: expected each request's own, got 0 on all 6 lines"),
    "arrivals of no sense": (rows(arrival_time=lambda *_: -2e9), "expected each request's own, got -2e+09 on all 6"),
    "arrivals of long ago": (rows(arrival_time=lambda t, _: t - 2e9), "arrival_time: expected seconds since 1970, "),
    "another year": (
        meta(started_at="2020-01-01T00:00:00Z"),
        "meta.json: started_at: expected less than a day before the first arrival_time of requests.jsonl, 2023-11-14T",
    ),
    "begun too late": (meta(started_at="2023-11-14T22:13:40Z"), "meta.json: started_at: expected less than a day bef"),
    "ended too soon": (
        meta(finished_at="2023-11-14T22:13:40Z"),
        "meta.json: finished_at: expected a moment after the last token by requests.jsonl, 2023-11-14T22:14:",
    ),
    "no end": (meta(finished_at="noon"), "meta.json: finished_at: expected a date and time (ISO 8601), got 'noon'"),
    "ticks of another run": (
        edit("timeseries.csv", lambda _: "t,running,waiting\n2000,1,1\n2001,1,1\n"),
        "timeseries.csv: t: expected seconds since meta.json's started_at that meet the run's, 2 to ",
    ),
    "ticks before the run": (
        edit("timeseries.csv", lambda _: "t,running,waiting\n0,1,1\n1,1,1\n"), "got 0 to 1"
    ),
    "cut prompts": (engine(long_prefill_token_threshold=64), "long_prefill_token_threshold: expected 0, the only one"),
    "prompts at once": (engine(max_num_partial_prefills=4), "max_num_partial_prefills: expected 1, the only one"),
    "several steps": (engine(num_scheduler_steps=8), "engine_kwargs.num_scheduler_steps: expected 1, the only one"),
    "decided by the engine": (
        meta(resolved_config={"scheduler_config": {"long_prefill_token_threshold": 64}}),
        "meta.json: resolved_config.scheduler_config.long_prefill_token_threshold: expected 0, the only one simulated",
    ),
    "priorities": (
        meta(resolved_config={"scheduler_config": {"policy": "priority"}}),
        "resolved_config.scheduler_config.policy: expected fcfs, the only one simulated, got priority",
    ),
    "stages": (
        meta(resolved_config={"parallel_config": {"pipeline_parallel_size": 2}}),
        "resolved_config.parallel_config.pipeline_parallel_size: expected 1, the only one simulated, got 2",
    ),
    "two counts of requests": (
        meta(resolved_config={"scheduler_config": {"max_num_seqs": 5}}),
        "resolved_config.scheduler_config.max_num_seqs: expected 4, as engine_kwargs.max_num_seqs says, got 5",
    ),
    "two counts of tokens": (
        meta(resolved_config={"scheduler_config": {"max_num_batched_tokens": 65}}),
        "scheduler_config.max_num_batched_tokens: expected 64, as engine_kwargs.max_num_batched_tokens says, got 65",
    ),
    "two blocks": (
        engine(block_size=32), "meta.json: kv_cache.block_size: expected 32, as engine_kwargs.block_size says, got 16"
    ),
    "blocks by hand": (
        engine(num_gpu_blocks_override=14),
        "kv_cache.num_gpu_blocks: expected 14, as engine_kwargs.num_gpu_blocks_override says, got 13",
    ),
    "two memories": (
        meta(engine_kwargs=ENGINE | {"kv_cache_memory_bytes": 2e9}, kv_cache={"kv_cache_memory_bytes": 1e9}),
        "kv_cache.kv_cache_memory_bytes: expected 2000000000.0, as engine_kwargs.kv_cache_memory_bytes says, got 1000",
    ),
    "too long for the engine": (
        engine(max_model_len=100),
        "line 2: input_toks, output_toks: expected at most 100 together, meta.json's engine_kwargs.max_model_len, "
        "got 90 + 12",
    ),
    "fp8 of float32": (engine(quantization="fp8", dtype="float32"), "engine_kwargs.dtype: expected auto, bfloat16 or"),
    "tokens and blocks": (
        meta(kv_cache={"num_gpu_blocks": 13, "block_size": 16, "num_kv_tokens": 999}),
        "meta.json: kv_cache.num_kv_tokens: expected 208, num_gpu_blocks 13 of 16 tokens, got 999",
    ),
    "a block of tokens": (meta(kv_cache={"num_kv_tokens": 31}), "num_kv_tokens: expected two blocks of 16, got 31"),
    "too long for the KV": (
        meta(kv_cache={"num_gpu_blocks": 7, "block_size": 16}),
        "requests.jsonl: line 6: 64 prompt + 40 output tokens can never fit in the KV cache: 96 tokens: the engine's 7",
    ),
    "too full": (
        edit("timeseries.csv", lambda _: "t,running,waiting,kv_cache_pct\n2,1,1,101\n"),
        "line 2: kv_cache_pct: expected 0 to 100, got 101",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_one_line_says_what_is_wrong(tmp_path, recorded, run, fault):
    save_profile(make_profile(tp=1), tmp_path / "tiny.json")
    spoil, says = FAULTS[fault]
    spoil(recorded)
    out = tmp_path / "j.json"
    code, text, err = run("validate", "recorded", recorded, "--profile", tmp_path / "tiny.json", "--json", out)
    assert (code, text) == (2, "")
    assert says in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not out.exists()


def test_a_run_may_start_long_before_its_first_request_and_stamp_a_burst_once(recorded):
    """An engine takes its time to load, and six requests may be sent, and seen, at once."""
    edit("timeseries.csv", lambda _: "t,running,waiting\n3600,1,1\n")(recorded)
    meta(started_at="2023-11-14T21:13:20Z", finished_at="2023-11-14T22:15:00Z")(recorded)
    read_run(recorded)
    rows(arrival_time=lambda *_: EPOCH, **dict.fromkeys(TIMES[:3], lambda _, i: BOOT + 1e-4 * i))(recorded)
    assert read_run(recorded).requests.queued_s.max() == pytest.approx(5e-4)


# What meta.json says


def test_lines_follow_the_requests(recorded):
    """They stand last first in the file."""
    run = read_run(recorded)
    assert run.lines.tolist() == [6, 5, 4, 3, 2, 1]
    assert run.requests.prompt_tokens.tolist() == [64, 20, 33, 16, 90, 10]


@pytest.mark.parametrize(
    ("told", "decided", "option", "says"),
    [
        (None, None, False, "off"),
        (True, False, False, "the engine's, by meta.json's engine_kwargs.async_scheduling"),
        (None, True, False, "the engine's, by meta.json's resolved_config.scheduler_config.async_scheduling"),
        (True, None, True, "on, as told"),
        (None, None, True, "on, as told"),
    ],
)
def test_host_time_is_hidden_where_the_user_says_so(recorded, prices, told, decided, option, says):
    """An engine that schedules ahead still has host time that is not hidden: that is the constant to give."""
    resolved = {"scheduler_config": {"async_scheduling": decided, "policy": "fcfs"}, "model_config": {}}
    meta(engine_kwargs=ENGINE | {"async_scheduling": told}, resolved_config=resolved)(recorded)
    replay = make_replay(read_run(recorded), Told(profile=prices, async_scheduling=option, host_seconds=0.1))
    assert (replay.scenario.async_scheduling, replay.settings["async_scheduling"]) == (option, option)
    assert replay.assumptions["asynchronous scheduling"].startswith(says)
    other = ablations(replay)["host time not hidden" if option else "host time hidden"]
    assert other.async_scheduling != option


def test_the_command_hides_host_time(tmp_path, recorded, prices, run):
    for options, on in (((), False), (("--async-scheduling",), True)):
        call = ("validate", "recorded", recorded, "--profile", prices, *options, "--json", tmp_path / "j.json")
        assert run(*call)[0] == 0
        assert json.loads((tmp_path / "j.json").read_text())["settings"]["async_scheduling"] == on


def test_settings_that_a_replay_knows_nothing_of_are_named(recorded, prices, run):
    engine(seed=42, model="m", max_model_len="auto", enforce_eager=False, swap_space=None, new_thing={"a": 1})(recorded)
    code, text, err = run("validate", "recorded", recorded, "--profile", prices)
    assert (code, err) == (0, "")
    assert "engine_kwargs that are ignored: enforce_eager, new_thing\n" in text


def test_a_count_of_tokens_is_one_of_blocks(recorded):
    for tokens in (BLOCKS * 16, BLOCKS * 16 + 15):
        meta(kv_cache={"num_gpu_blocks": None, "num_kv_tokens": tokens})(recorded)
        assert kv_capacity(read_run(recorded), Told(), make_profile())[0] == (BLOCKS - 1) * 16


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens"])
def test_the_engine_settles_what_it_was_not_told(recorded, prices, field):
    resolved = {"scheduler_config": {field: 48}, "parallel_config": {"pipeline_parallel_size": 1}}
    meta(engine_kwargs=ENGINE | {field: None}, resolved_config=resolved)(recorded)
    run = read_run(recorded)
    assert getattr(make_replay(run, Told(profile=prices)).scenario, field) == 48
    assert getattr(make_replay(run, Told(profile=prices, **{field: 50})).scenario, field) == 50


def test_blocks_set_by_hand_are_the_engines(recorded, prices):
    for place, cache in (({"num_gpu_blocks_override": 12}, {}), ({}, {"num_gpu_blocks_override": 12})):
        meta(engine_kwargs=ENGINE | place, kv_cache=cache)(recorded)
        replay = make_replay(read_run(recorded), Told(profile=prices))
        assert replay.scenario.kv_tokens == 11 * 16
        assert "engine_kwargs that are ignored" not in replay.assumptions


# In the words of the command, and of the run


def test_what_meta_says_is_called_by_its_name(tmp_path, recorded, run):
    (recorded / "config.json").write_text((bundle(tmp_path / "dense") / "config.json").read_text())
    bundle(recorded / "profile", config=None, meta=META | {"tp_degrees": [1]})
    for changes, says in (
        ({"tensor_parallel_size": 2}, "meta.json's tensor_parallel_size"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "meta.json's enable_expert_parallel: has no place"),
    ):
        engine(**changes)(recorded)
        code, _, err = run("validate", "recorded", recorded)
        assert code == 2
        assert says in err
        assert str(recorded / "profile") in err
        assert "--tp" not in err
        assert "--expert" not in err
        assert err.count("\n") == 1


def test_options_are_called_by_their_names(tmp_path, recorded, prices, run):
    call = ("validate", "recorded", recorded, "--profile", prices)
    assert run(*call, "--without", "nope")[2].startswith("error: --without: expected one of prefix_caching, ")
    meta(num_requests=1)(recorded)
    edit("requests.jsonl", lambda text: text.splitlines()[2])(recorded)  # the request of one output token
    (recorded / "timeseries.csv").unlink()
    code, _, err = run(*call, "--max-tpot-error", "3%")
    assert (code, err) == (2, "error: --max-tpot-error: tpot.mean: this run has nothing measured to compare with\n")
    assert "error: --max-error: tpot.mean: this run has" in run(*call, "--max-error", "tpot.mean=3%")[2]


@pytest.mark.parametrize(
    ("model", "device", "changes", "says"),
    [
        ("tiny", "RTX 4090", {}, None),
        ("Tiny-Instruct", "NVIDIA GeForce RTX 4090", {}, None),
        ("tiny-8B", "RTX4090", {}, "profile tiny is of the model tiny-8B, the run is of org/tiny"),
        ("tiny", "NVIDIA H200", {}, "profile tiny is of the device NVIDIA H200, the run is of NVIDIA GeForce RTX 4090"),
        ("tiny", "RTX 409", {}, "profile tiny is of the device RTX 409, "),
        ("tiny", "RTX4090", {"kv_cache_dtype": "fp8"}, "the run's kv_cache_dtype is fp8, profile tiny does not say"),
        ("tiny", "RTX4090", {"dtype": "float32"}, "the run's dtype is float32, profile tiny does not say"),
    ],
)
def test_prices_of_something_else_are_told_of(tmp_path, recorded, run, model, device, changes, says):
    save_profile(make_profile(kind="measured", model=model, device=device), tmp_path / "p.json")
    meta(engine_kwargs=ENGINE | changes, hardware={"device_name": "NVIDIA GeForce RTX 4090"})(recorded)
    out = tmp_path / "out"
    call = ("validate", "recorded", recorded, "--profile", tmp_path / "p.json", "--json", tmp_path / "j.json")
    code, text, err = run(*call, "--out", out, "--format", "svg")
    assert (code, err) == (0, "")
    assert ("note: " in text) == (says is not None)
    caveats = json.loads((tmp_path / "j.json").read_text())["caveats"]
    assert len(caveats) == (says is not None)
    if says:
        assert f"note: {says}" in text
        assert says in caveats[0]
        assert "profile tiny" in (out / "validation.svg").read_text()


@pytest.mark.parametrize(
    ("variant", "changes", "caveats"),
    [
        ("bf16", {"kv_cache_dtype": "auto", "dtype": "bfloat16"}, ()),
        ("bf16", {"kv_cache_dtype": "fp8"}, ("kv_cache_dtype is fp8, profile {} was measured as bf16",)),
        ("bf16-kvfp8", {"kv_cache_dtype": "fp8_e4m3"}, ()),
        ("fp8-kvfp8", {"kv_cache_dtype": "fp8", "quantization": "fp8"}, ()),
        ("bf16", {"quantization": "awq"}, ("quantization is awq, profile {} was measured as bf16",)),
    ],
)
def test_a_bundle_says_in_which_formats_it_was_measured(tmp_path, recorded, variant, changes, caveats):
    (recorded / "config.json").write_text((bundle(tmp_path / "dense") / "config.json").read_text())
    bundle(recorded / "profile", config=None)
    path = recorded / "profile" / "meta.yaml"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"variant": variant}))
    engine(max_num_batched_tokens=8, **changes)(recorded)
    replay = make_replay(read_run(recorded), Told(extrapolate=True))
    name = replay.scenario.profile.name
    assert replay.caveats == tuple(f"the run's {text.format(name)}" for text in caveats)


def test_what_speculates_needs_room_for_its_drafts(recorded, prices):
    """The largest request has 104 tokens."""
    run = read_run(recorded)
    told = Told(profile=prices, kv_tokens=112)
    assert make_replay(run, told).scenario.kv_tokens == 112
    drafted = replace(run, settings=replace(run.settings, speculation={"num_speculative_tokens": 11}))
    policy = Policy(StaticGamma(11), always(1, 11))
    with pytest.raises(SpecsimError, match=r"line 6: 64 prompt \+ 40 output \+ 11 drafted tokens can never fit"):
        make_replay(drafted, told, policy)
    assert make_replay(drafted, told, Policy(StaticGamma(8), always(1, 8))).scenario.kv_tokens == 112


def test_blocks_are_as_long_as_the_run_drafted(recorded, prices):
    """Whoever proposes them; a scheduler may verify fewer."""
    told, deep = Told(profile=prices), always(1, 4)
    for config in ({"num_speculative_tokens": 2}, '{"num_speculative_tokens": 2}'):
        engine(speculative_config=config)(recorded)
        run = read_run(recorded)
        for policy, drafter in ((Policy(StaticGamma(1), deep), None), (Policy(StaticGamma(1)), deep)):
            replay = make_replay(run, told, policy, drafter)
            assert (replay.scenario.drafter.gamma, replay.settings["drafted"]) == (2, 2)
            says = replay.assumptions["speculation"]
            assert says == "2 drafted tokens a request, by meta.json's num_speculative_tokens"
    with pytest.raises(SpecsimError, match=r"num_speculative_tokens: expected at most 1, the block length .*, got 2"):
        make_replay(run, told, Policy(StaticGamma(1), always(1, 1)))
    with pytest.raises(SpecsimError, match=r"--scheduler: expected one that speculates, as the run did .*, got NoSpec"):
        make_replay(run, told, Policy(NoSpec(), deep))
    engine(speculative_config="NoSpec")(recorded)  # as the reference engine tells it
    assert make_replay(read_run(recorded), told).scenario.drafter is None
    for config in ({"method": "mtp"}, "EAGLE"):
        engine(speculative_config=config)(recorded)
        replay = make_replay(read_run(recorded), told, Policy(StaticGamma(1), deep))
        assert replay.scenario.drafter.gamma == 4
        assert "the block length of its trace: meta.json's num_spec" in replay.assumptions["speculation"]
