"""The experiment against a server whose steps are known: what it learns, predicts and says of faults."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("httpx", reason="the extra live is not installed")

import httpx
from fake_engine import FakeEngine, FakeTransport, virtual

from specsim.cli.living_report import caveats, last_whole
from specsim.hardware import Profile
from specsim.live.calibrating import StepTable, draft_cost, quiet_table, read_by_both, sending, step_table, to_profile
from specsim.live.client import Target
from specsim.live.comparing import Model, Row, Told, compare, drafter_of, fixed_length, model_of
from specsim.live.engines import Drafted, Engine
from specsim.live.experiment import Measured, Plan, Repeat, run
from specsim.live.load import Drive
from specsim.schedulers import StaticGamma
from specsim.types import SpecsimError

JAGGED = {0: 0.0, 1: 0.020, 2: 0.031, 3: 0.033, 4: 0.052, 5: 0.060, 6: 0.061, 7: 0.066, 8: 0.050}


def jagged(decodes: int, prompt: int) -> float:
    """Eight together step faster than four, as on a CPU; beyond, and for prompts, a line."""
    tokens = decodes + prompt
    return JAGGED[tokens] if tokens in JAGGED else 0.060 + 0.001 * tokens


def experiment(engine: FakeEngine, plan: Plan, kind: str | None = None, timeout: float = 60.0) -> Measured:
    async def main() -> Measured:
        target, clock = Target("http://127.0.0.1:1", "", timeout), asyncio.get_running_loop().time
        return await run(target, plan, kind=kind, transport=FakeTransport(engine), wall=clock)

    return virtual(main())


def profile_of(measured: Measured, number: int = 0) -> Profile:
    repeat = measured.repeats[number]
    table = step_table(repeat.steps, repeat.alone)
    return to_profile(table, measured.engine, "a test", "specsim", "2026-11-30")


def rows_by_name(rows: list[Row]) -> dict[tuple[str, str], Row]:
    return {(row.load, row.metric): row for row in rows}


def test_a_jagged_step_cost_is_learned_whole_and_predicts_the_loads_between():
    plan = Plan(prompt_tokens=64, output_tokens=48, poisson=0.3, repeat=2)
    measured = experiment(FakeEngine(jagged), plan)
    assert measured.stopped is None
    assert measured.faults == []
    table = step_table(measured.repeats[0].steps, measured.repeats[0].alone)
    # Loads of 1, 3 and 8 users, and the drains from 3 and 8 down to 1, tell the price of every number between.
    assert table.seconds == pytest.approx({n: JAGGED[n] for n in range(1, 9)})
    assert table.prompts == pytest.approx({64: jagged(0, 64), 256: jagged(0, 256)})
    models = {n: Model(profile_of(measured, n), measured.engine) for n in range(2)}
    rows = compare(measured, plan, models, {"throughput": 0.02}).rows
    found = rows_by_name(rows)
    assert [load for load, metric in found if metric == "tpot"] == ["closed 2", "closed 4", "closed 6", "poisson 0.3/s"]
    for (load, metric), row in found.items():
        assert abs(row.error) < 0.02, (load, metric, row.error)
        assert len(row.measured) == len(row.predicted) == 2
    assert not any(row.broken for row in rows)
    # Without the drains a line from 3 to 8 would miss: the test above is worth something.
    assert np.interp(4, [3, 8], [JAGGED[3], JAGGED[8]]) < 0.72 * JAGGED[4]


def test_acceptance_is_counted_and_predicts_speculation():
    plan = Plan(prompt_tokens=64, output_tokens=48, repeat=1)
    profile = profile_of(experiment(FakeEngine(jagged), plan))
    pattern = [2, 0, 1, 2, 2, 1, 0, 2, 1, 1]  # accepted a cycle: survival 0.8, 0.4

    def speculating(kind: str) -> FakeEngine:
        return FakeEngine(
            lambda decodes, prompt: jagged(decodes, prompt) + 0.004 * (decodes > 0),
            kind,
            gamma=2,
            accept=lambda cycle: pattern[cycle % 10],
        )

    plan = Plan(calibrate=(1,), check=(1, 2), prompt_tokens=64, output_tokens=48, repeat=2, requests=32,
                known_steps=True, known_draft=True)  # fmt: skip
    for kind in ("vllm", "llamacpp", "specsim", "sglang"):
        measured = experiment(speculating(kind), plan)
        assert measured.speculates
        evidence = [r.acceptance for r in measured.repeats if r.acceptance is not None]
        assert len(evidence) == 2
        drafter = drafter_of(evidence, draft_cost(None, 4.0, plan.check), ("draft", "tiny"))
        assert drafter.gamma == 2
        model = Model(profile, measured.engine, fixed_length(drafter), drafter)
        rows = compare(measured, plan, dict.fromkeys(range(2), model), {}).rows
        found = rows_by_name(rows)
        for users in (1, 2):
            # SGLang is simulated as it schedules, prompts in steps of their own; the fake one mixes them.
            off = 0.08 if kind == "sglang" else 0.04
            assert abs(found[f"closed {users}", "throughput"].error) < off, (kind, users)
            assert abs(found[f"closed {users}", "tpot"].error) < off
            tau, verified = (found.get((f"closed {users}", name)) for name in ("tau", "verified_tokens"))
            if kind == "sglang":  # it counts no drafts
                assert tau is None
                assert verified is None
                continue
            assert tau is not None
            assert verified is not None
            assert np.mean(tau.measured) == pytest.approx(1 + np.mean(pattern), rel=0.02)
            assert abs(tau.error) < 0.03
            assert verified.measured == verified.predicted == (3.0, 3.0)


class Servers(httpx.AsyncBaseTransport):
    """Fake engines by port."""

    def __init__(self, **engines: FakeEngine) -> None:
        self.transports = {name.removeprefix("at"): FakeTransport(engine) for name, engine in engines.items()}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self.transports[str(request.url.port)].handle_async_request(request)


@pytest.mark.parametrize(("kind", "forwards"), [("vllm", 2), ("llamacpp", 3)])
def test_steps_and_drafting_are_learned_beside_from_servers_of_their_own(kind: str, forwards: int):
    def draft(decodes: int, prompt: int) -> float:
        return 0.004 + 0.001 * decodes + 0.0001 * prompt

    def both(decodes: int, prompt: int) -> float:
        """The draft model reads prompts too, and in llama.cpp what was verified once more."""
        drafting = forwards * draft(decodes // 3, 0) * (decodes > 0) + draft(0, prompt) * (prompt > 0)
        return jagged(decodes, prompt) + drafting

    speculating = FakeEngine(
        both,
        kind,
        gamma=2,
        accept=lambda cycle: (2, 0, 1, 2)[cycle % 4],
        sending=0.002,
    )
    plain, alone = FakeEngine(jagged, kind, sending=0.002), FakeEngine(draft, kind, sending=0.002)
    servers = Servers(at1=speculating, at2=plain, at3=alone)
    plan = Plan(calibrate=(1, 2, 3, 6), check=(1, 2), prompt_tokens=64, output_tokens=48, repeat=2, requests=32,
                known_draft=True, draft_len=2)  # fmt: skip

    async def main() -> Measured:
        clock = asyncio.get_running_loop().time
        return await run(Target("http://127.0.0.1:1", ""), plan, plain="http://127.0.0.1:2",
                         draft="http://127.0.0.1:3", transport=servers, wall=clock)  # fmt: skip

    measured = virtual(main())
    assert (measured.stopped, measured.faults) == (None, [])
    models = {}
    for number, repeat in enumerate(measured.repeats):
        assert [d.name for d in repeat.counted] == ["drafts of 1", "drafts of 2"]  # 3 and 6 are for the table of steps
        # Six tokens are two requests' with two drafts each: six requests hold as much KV as these two.
        for drives, held in ((repeat.bursts, (64 + 24) / 3), (repeat.draft_bursts, 64 + 24)):
            longest = [max(d.answers, key=lambda a: a.order.output_tokens).order for d in drives]
            assert max(len(order.prompt) + order.output_tokens / 2 for order in longest) == pytest.approx(held, abs=0.7)
        table, streamed = quiet_table(repeat.bursts, repeat.alone), step_table(repeat.steps, repeat.alone)
        assert table.seconds == pytest.approx({n: JAGGED[n] for n in (1, 2, 3, 6)}, rel=1e-3)
        assert streamed.seconds == pytest.approx({n: JAGGED[n] + 0.002 * n for n in (1, 2)}, rel=5e-3)
        drafts = quiet_table(repeat.draft_bursts, repeat.draft_alone)
        assert drafts.seconds == pytest.approx({n: draft(n, 0) for n in (1, 2)})
        drafting, steps = (to_profile(t, measured.engine, "a test", "specsim", "2026-11-30") for t in (drafts, table))
        told = Told(cost=draft_cost(drafting, None, plan.counted), sending=sending(streamed, table))
        assert told.sending == pytest.approx(0.002, rel=0.05)
        both_read = read_by_both(steps, drafting, 6)
        assert "came whole" in both_read.provenance.source
        assert "draft model" in both_read.provenance.notes
        model = model_of(measured, number, both_read, told)
        assert model is not None
        models[number] = model
    found = rows_by_name(compare(measured, plan, models, {}).rows)
    for users in (1, 2):
        assert abs(found[f"closed {users}", "throughput"].error) < 0.04
        assert abs(found[f"closed {users}", "tpot"].error) < 0.04
        assert abs(found[f"closed {users}", "ttft"].error) < 0.08
    assert sum(measured.counts().values()) - measured.counts()["sent"] == measured.counts()["sent"]


def test_blocks_that_are_verified_in_part_are_predicted_so():
    engine = FakeEngine(jagged, "specsim", gamma=2, positions=7, accept=lambda cycle: (2, 1, 0)[cycle % 3])
    measured = experiment(engine, Plan(calibrate=(1,), check=(), repeat=1, known_steps=True, known_draft=True))
    assert measured.repeats[0].draft_length == 2
    profile = profile_of(experiment(FakeEngine(jagged), Plan(repeat=1)))
    model = model_of(measured, 0, profile, Told(cost=draft_cost(None, 0.0, (1,))))
    assert model is not None
    assert model.drafter is not None
    assert (model.drafter.gamma, model.scheduler) == (7, StaticGamma(2))


def test_acceptance_is_read_from_timings_where_there_are_no_counters():
    engine = FakeEngine(jagged, "llamacpp", gamma=2, accept=lambda cycle: (2, 1, 0)[cycle % 3], metrics=False)
    plan = Plan(calibrate=(1,), check=(1,), repeat=1, known_steps=True, known_draft=True)
    measured = experiment(engine, plan)
    [acceptance] = [r.acceptance for r in measured.repeats]
    assert acceptance is not None
    assert sum(acceptance.survival["*"]) == pytest.approx(1.0, abs=0.05)
    assert measured.faults[0].startswith("metrics: the server has no /metrics")
    assert experiment(engine, Plan(**{**plan.__dict__, "metrics": False})).faults == []


def test_an_engine_that_speculates_cannot_be_calibrated():
    engine = FakeEngine(jagged, gamma=2, accept=lambda cycle: 1)
    with pytest.raises(SpecsimError, match=r"vLLM 0.99 speculates: its steps are learned without"):
        experiment(engine, Plan())
    with pytest.raises(SpecsimError, match=r"expected what drafting costs: --draft-url \(the draft model"):
        experiment(engine, Plan(known_steps=True))


def test_prompts_stay_within_what_the_engine_takes():
    engine = FakeEngine(jagged, longest=200)
    plan = Plan(calibrate=(1, 3), check=(2,), repeat=1, prompt_tokens=64, output_tokens=32, requests=4)
    measured = experiment(engine, plan)
    assert measured.faults == []
    assert max(len(body["prompt"]) for body in engine.bodies) == 192
    with pytest.raises(SpecsimError, match=r"at most 192 together, .* vLLM 0.99 takes, got 200 and 64"):
        experiment(engine, Plan(prompt_tokens=200))


def test_ctrl_c_between_two_loads_keeps_what_was_measured():
    class Interrupting(FakeTransport):
        scrapes = 0

        async def handle_async_request(self, request: Any) -> Any:
            self.scrapes += request.url.path == "/metrics"
            if self.scrapes == 8:  # after the check of the first repetition, as the second one begins
                task = asyncio.current_task()
                assert task is not None
                task.cancel()  # as asyncio.run does
                await asyncio.sleep(0)
            return await super().handle_async_request(request)

    async def main() -> Measured:
        clock = asyncio.get_running_loop().time
        plan = Plan(calibrate=(1,), check=(2,), repeat=5, requests=2, known_steps=True, known_draft=True)
        transport = Interrupting(FakeEngine(jagged, gamma=2, accept=lambda cycle: 1))
        return await run(Target("http://127.0.0.1:1", ""), plan, transport=transport, wall=clock)

    measured = virtual(main())
    assert measured.stopped == "interrupted"
    assert "closed 2" in measured.repeats[0].checks


def test_a_server_that_dies_leaves_the_repetitions_before():
    plan = Plan(calibrate=(1, 3), check=(2,), repeat=3, prompt_tokens=64, output_tokens=16, requests=4)
    whole = experiment(FakeEngine(jagged), plan)
    sent = whole.counts()["sent"]
    gone = int(sent * 0.75)
    measured = experiment(FakeEngine(jagged, refuse=lambda i: -1 if i >= gone else None), plan)
    assert measured.stopped is not None
    assert "requests failed one after the other" in measured.stopped
    counts = measured.counts()
    assert counts["sent"] == sum(count for name, count in counts.items() if name != "sent")
    [line] = measured.faults
    assert line.startswith(f"no connection: {counts['no connection']} of {counts['sent']} requests, first in ")
    models = {n: Model(profile_of(measured, n), measured.engine) for n in range(2)}
    rows = compare(measured, plan, models, {}).rows
    assert len(rows_by_name(rows)["closed 2", "throughput"].measured) == 2


def test_short_answers_are_predicted_as_short_as_they_were():
    plan = Plan(calibrate=(1, 3), check=(2,), repeat=1, prompt_tokens=64, output_tokens=32)
    measured = experiment(FakeEngine(jagged, short_by=12), plan)
    assert [line.partition(":")[0] for line in measured.faults] == ["fewer tokens than asked"]
    rows = compare(measured, plan, {0: Model(profile_of(measured), measured.engine)}, {}).rows
    assert abs(rows_by_name(rows)["closed 2", "throughput"].error) < 0.02


def test_an_engine_that_streams_every_few_steps_is_learned_by_the_step():
    plan = Plan(calibrate=(1, 3), check=(2,), repeat=1, output_tokens=49)
    measured = experiment(FakeEngine(jagged, per_chunk=4), plan)
    table = step_table(measured.repeats[0].steps, measured.repeats[0].alone)
    assert table.seconds[1] == pytest.approx(JAGGED[1], rel=0.02)
    assert table.seconds[3] == pytest.approx(JAGGED[3], rel=0.05)  # a gap of four steps may straddle an end


@pytest.mark.parametrize(
    ("kind", "name", "seqs", "kv"),
    [
        ("vllm", "vLLM 0.99", None, 16_000),
        ("llamacpp", "llama.cpp b1", 8, 16_384),
        ("sglang", "SGLang 0.5", 32, None),
        ("specsim", "specsim's reference engine 0.99", 64, None),
    ],
)
def test_engines_tell_what_they_are(kind: str, name: str, seqs: int | None, kv: int | None):
    engine = experiment(FakeEngine(jagged, kind), Plan(calibrate=(1,), check=(), repeat=1)).engine
    assert (engine.kind, engine.name, engine.max_num_seqs, engine.kv_tokens) == (kind, name, seqs, kv)
    assert engine.model == "tiny"


def test_an_engine_that_does_not_say_who_owns_it_is_told_by_its_pages():
    assert experiment(FakeEngine(jagged, "mute"), Plan(calibrate=(1,), check=(), repeat=1)).engine.kind == "vllm"


def test_what_cannot_be_asked_is_refused():
    plan = Plan(calibrate=(1,), check=(), repeat=1)
    with pytest.raises(SpecsimError, match="cannot tell the engine, expected --engine"):
        experiment(FakeEngine(jagged, "nobody"), plan)
    main = run(Target("http://127.0.0.1:1", ""), plan, model="big", transport=FakeTransport(FakeEngine(jagged)))
    with pytest.raises(SpecsimError, match=r"'big' is not served at .*, expected one of tiny"):
        virtual(main)


def test_a_load_that_cannot_be_simulated_is_told_of_and_takes_nothing_from_the_others():
    plan = Plan(calibrate=(1, 3), check=(2,), poisson=0.3, repeat=1)
    measured = experiment(FakeEngine(jagged), plan)
    model = Model(profile_of(measured), measured.engine, max_num_batched_tokens=1)
    small = replace(model, profile=model.profile.model_copy(update={"kv_tokens": 100}))
    compared = compare(measured, plan, {0: small}, {})
    assert compared.rows == []
    assert [line.partition(": request")[0] for line in compared.problems] == [
        "prediction of closed 2", "prediction of poisson 0.3/s",
    ]  # fmt: skip


def test_noise_of_the_engine_is_not_called_error():
    row = Row("closed 2", 2, "tpot", measured=(1.0, 1.2, 0.8), predicted=(1.15,) * 3, gate=0.08)
    assert row.error == pytest.approx(0.15)
    assert row.spread == pytest.approx(0.2)
    assert row.bound == pytest.approx(0.4)
    assert not row.broken
    assert Row("closed 2", 2, "tpot", (1.0, 1.0), (1.15, 1.15), 0.08).broken
    assert not Row("closed 2", 2, "tpot", (1.0, 1.0), (1.15, 1.15)).broken


def test_a_draft_models_own_profile_is_what_drafting_costs():
    profile: Any = profile_of(experiment(FakeEngine(jagged), Plan(repeat=1)))
    cost = draft_cost(profile, None, (1, 4))
    assert cost is not None
    assert cost.type == "autoregressive"
    assert cost.seconds == pytest.approx([JAGGED[n] for n in range(1, 5)])
    assert draft_cost(None, None, (1,)) is None


def test_bursts_that_noise_turned_around_are_no_prices_below_nothing():
    gaps = np.array([-0.059, -0.01, 0.12])
    table = StepTable({1: float(gaps.mean())}, {1: gaps}, {64: 0.1}, 0)
    verify = to_profile(table, Engine("vllm", "m"), "a test", "specsim", "2026-11-30").verify
    assert verify.low[0] == 0
    assert verify.low[0] < verify.seconds[0] < verify.high[0]


def test_the_profile_that_is_kept_is_not_one_that_was_cut_short():
    engine = Engine("vllm", "m")
    whole, short = (
        Model(to_profile(StepTable({1: 0.01}, {}, prompts, 0), engine, "a test", "specsim", "2026-11-30"), engine)
        for prompts in ({64: 0.1, 256: 0.4}, {64: 0.1})
    )
    assert last_whole({0: whole, 1: short}) is whole
    assert last_whole({0: short, 1: whole}) is whole
    assert last_whole({0: whole, 1: replace(whole)}) is not whole


def test_longer_blocks_than_the_traces_are_told():
    drive = Drive("closed 2")
    drive.drafted = Drafted(100.0, 700.0, 90.0)
    measured = Measured(Engine("vllm", "m"), repeats=[Repeat(checks={"closed 2": drive})])
    assert caveats(measured, Plan(), 0, None, 7) == []
    assert caveats(measured, Plan(), 0, None, 1) == [
        "7 tokens of a block were verified on average, --trace has blocks of 1"
    ]
