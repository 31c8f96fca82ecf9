"""The audit: schedulers that keep the target's law, schedulers that do not, and the exact law by another way."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

import specsim as ss
from specsim.audit.law import Asked, distance, distance_of, output_law, target_law
from specsim.audit.models import Decoder, Instance, Prompts, Size, drawn, from_drafter, of_head, plain, sps_shapes
from specsim.audit.simpler import simplified
from specsim.schedulers import (
    MTP1,
    BatchSizeTable,
    DSparkAsync,
    DSparkGreedy,
    GlobalArgmax,
    LoadBlind,
    NoSpec,
    Oracle,
    StaticGamma,
    Threshold,
)
from specsim.types import SpecsimError
from specsim.views import StepRecord, StepView

FEW = {"instances": 144, "histories": 8}


def sure(view, level=0.5):
    """How many confidences from the start of each block are ``level`` or more."""
    return np.logical_and.accumulate(view.confidence >= level, axis=1).sum(axis=1)


def d_cut(view):
    """Leaves out the first token that is not sure, and all that follow."""
    return sure(view)


def cut_behind(view):
    """Leaves out what follows the first token that is not sure, and keeps that one."""
    return np.minimum(sure(view) + 1, view.gamma)


# What is lossless, and what is not

LOSSLESS = [
    NoSpec(), MTP1(), StaticGamma(0), StaticGamma(2), StaticGamma(5), BatchSizeTable(((1, 1, 2), (2, 2, 1))),
    Threshold(0.5), Threshold(0.9), DSparkGreedy(), DSparkAsync(),
    DSparkAsync(staleness=1, newcomer="mean", reset=True), DSparkAsync(staleness=1, floor=0.3, least=1, fill=True),
    LoadBlind(every=1, at_once=False), LoadBlind(every=1, at_once=False, least=0),
]  # fmt: skip


@pytest.mark.parametrize("scheduler", LOSSLESS, ids=repr)
def test_lossless_schedulers_keep_the_law(scheduler):
    found = ss.audit(scheduler, **FEW)
    assert found.lossless
    assert 0 < found.tv < 1e-12
    assert found.instances >= (144 if scheduler != StaticGamma(5) else 36)
    assert found.histories >= 8 or (scheduler == StaticGamma(5) and found.histories == 2)
    assert found.counterexample is None
    assert "is lossless in" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [StaticGamma(2), Threshold(0.5), DSparkGreedy(), DSparkAsync()], ids=repr)
def test_lossless_schedulers_keep_the_law_in_ten_thousand_instances(scheduler):
    found = ss.audit(scheduler)
    assert found.tv < 1e-12
    assert found.instances >= 10_000
    assert found.histories >= 200


def test_the_appendix_is_found_by_itself():
    """Arxiv 2607.05147, Appendix A: the argmax over this step's confidences looks at what follows."""
    found = ss.audit(GlobalArgmax())
    assert not found.lossless
    case = found.counterexample
    assert case.tv == pytest.approx(0.15, abs=1e-12)
    [decoder] = case.instance.decoders
    assert decoder.vocabulary == 2
    assert decoder.gamma == 2
    assert (1 / case.instance.seconds).tolist() == pytest.approx([1.0, 0.5, 0.45])
    assert case.step == 1
    assert [(text, *(round(p, 12) for p in law)) for text, *law in case.laws] == [
        (("a",), 0.7, 0.85), (("b",), 0.3, 0.15),
    ]  # fmt: skip
    assert [(*d.drafts, d.chance, d.confidence[0], *d.verified) for d in case.drafted] == [
        ("aa", 0.25, (0.8, 0.9), 2), ("ab", 0.25, (0.8, 0.9), 2),
        ("ba", 0.25, (0.8, 0.0), 0), ("bb", 0.25, (0.8, 0.0), 0),
    ]  # fmt: skip
    assert found.sizes[-1] == Size(2, 2, 1, 1)
    text = str(found)
    for line in ("  a            0.7     0.85", "draft token 1 is verified", "1 0.5 0.45", "total variation 0.15"):
        assert line in text


def test_a_budget_used_on_the_blocks_it_was_counted_on_is_found():
    """vllm-ascend's: with blocks of 3 the third tokens' confidences say whether second tokens are verified."""
    case = ss.audit(LoadBlind(every=1), **FEW).counterexample
    assert case.tv > 0.01
    assert (case.instance.decoders[0].gamma, len(case.instance.decoders)) == (3, 2)


@pytest.mark.parametrize("scheduler", [ss.DCut(), LoadBlind(every=1)], ids=repr)
def test_nothing_leaks_where_drafts_are_the_drafters_argmax(scheduler):
    """The confidence is the drafter's probability of its likeliest token; the target still draws."""
    rng, worst = np.random.default_rng(0), {False: 0.0, True: 0.0}
    for size in [Size(2, 2, 1, 1), Size(2, 3, 2, 1), Size(3, 2, 2, 1)] * 12:
        sampled = drawn(size, "draft_prob", rng)
        for argmax in worst:
            decoders = tuple(
                replace(d, drafter=tuple(np.eye(t.shape[-1])[t.argmax(-1)] for t in d.drafter)) if argmax else d
                for d in sampled.decoders
            )
            worst[argmax] = max(worst[argmax], distance_of(replace(sampled, decoders=decoders), Asked(scheduler)))
    assert worst[True] < 1e-12
    assert worst[False] > 0.01


@pytest.mark.parametrize("level", [0.1, 0.25, 0.5, 0.75, 0.9, 0.97])
def test_a_threshold_on_the_drafters_probability_is_lossy_before_the_token_and_not_after_it(level):
    found = ss.audit(lambda view: sure(view, level), confidence="draft_prob", **FEW)
    case = found.counterexample
    assert case.tv > 0.005
    assert case.instance.decoders[0].gamma == 1
    behind = ss.audit(lambda view: np.minimum(sure(view, level) + 1, view.gamma), confidence="draft_prob", **FEW)
    assert behind.lossless
    # The confidences of a head tell nothing of the token.
    assert ss.audit(lambda view: sure(view, level), **FEW).lossless


def test_d_cuts_law_by_hand():
    """Drafts with q(x) >= 1/2 are verified alone: a, drafted with 0.7, is kept, and for b the target draws."""
    case = ss.audit(d_cut, confidence="draft_prob", **FEW).counterexample
    q = case.instance.decoders[0].drafter[0][0, 0, 0]
    (_, target, output), _ = case.laws
    assert target == pytest.approx(0.7)
    assert output == pytest.approx(min(0.7, q) + (1 - q) * 0.7)
    assert ss.audit(cut_behind, confidence="draft_prob", **FEW).lossless


def crossed(view):
    """A block is verified as the other request's last confidence says."""
    if view.num_seqs < 2:
        return np.zeros(1, dtype=int)
    return np.where(view.confidence[::-1, -1] > 0.5, view.gamma, 0)


def leader(view):
    """All of the first request's block; the second's as the first's last confidence says."""
    lens = np.full(view.num_seqs, view.gamma)
    if view.num_seqs > 1 and view.confidence[0, -1] > 0.5:
        lens[1] = 0
    return lens


def test_another_requests_tokens_may_decide_if_their_own_fate_is_settled_first():
    assert ss.audit(leader, **FEW).lossless
    found = ss.audit(crossed, **FEW)
    # Each output has the target's law, and yet they are not independent: only the joint law shows it.
    case = found.counterexample
    joint = np.array([law for _, *law in case.laws]).reshape(2, 2, 2)
    assert case.requests == (0, 1)
    for axis in (0, 1):
        target, output = joint.sum(axis=axis).T
        assert output == pytest.approx(target)
    assert case.tv > 0.04
    assert "ties their outputs together" in str(case)


class Late:
    """Lossless in its first step, and the argmax from then on."""

    def start(self):
        steps = itertools.count()
        return lambda view: (GlobalArgmax() if next(steps) else DSparkGreedy())(view)


def emboldened(view):
    """The argmax once a draft was kept, which only view.previous tells."""
    if not view.previous:
        return np.full(view.num_seqs, view.gamma)
    kept = (view.previous[-1].emitted > 1).all()
    return GlobalArgmax()(view) if kept else np.zeros(view.num_seqs, dtype=int)


def by_what_came(view):
    """As many drafts as the last step put out: the past may decide as it likes."""
    last = int(view.previous[-1].emitted.mean()) if view.previous else 1
    return np.full(view.num_seqs, min(view.gamma, last))


@pytest.mark.parametrize("scheduler", [Late(), emboldened], ids=["start", "previous"])
def test_memory_needs_several_steps(scheduler):
    assert ss.audit(scheduler, **FEW | {"steps": 1}).lossless
    found = ss.audit(scheduler, **FEW)
    case = found.counterexample
    assert case.step > 1
    assert case.history[0].seen.ids == (0,)
    assert case.instance.steps == 3
    assert "where a" in str(case)
    assert "step 1 before it: confidences" in str(case)
    assert ss.audit(by_what_came, **FEW).lossless


def peeks(view):
    """The argmax where the first confidence lies in a narrow band, that no plain number hits."""
    odd = (view.confidence[:, 0] > 0.31) & (view.confidence[:, 0] < 0.36) & (view.confidence[:, -1] > 0.5)
    return np.where(odd, view.gamma, 0)


def test_a_drawn_counterexample_is_made_plain():
    case = ss.audit(peeks, instances=1500, histories=0).counterexample
    [decoder] = case.instance.decoders
    assert decoder.target[0].tolist() == [[0.7, 0.3]]
    assert all((table == table.round(2)).all() for table in decoder.confidence)
    assert case.tv > 0.1


def band(view):
    """Verifies nothing where the last confidence of any request lies in a narrow band, and else everything."""
    last = view.confidence[:, -1]
    return np.full(view.num_seqs, 0 if ((last > 0.612) & (last < 0.614)).any() else view.gamma)


def test_a_request_that_plays_no_part_is_left_out():
    found = ss.audit(band, instances=1000, histories=0, seed=1)
    assert found.sizes[-1].requests == 2
    case = found.counterexample
    assert (len(case.instance.decoders), len(case.instance.seconds)) == (1, 3)
    assert case.requests == case.decoding == (0,)
    assert case.tv > 0.05
    assert "blocks of 2, 1 request, 1 step;" in str(found)
    assert "request 2" not in str(found)
    data = case.data()
    assert (data["requests"], len(data["request_ids"]), data["present"]) == (1, 1, [[True]])


def test_steps_that_play_no_part_are_left_out_and_what_does_is_kept():
    class Second:
        def start(self):
            steps = itertools.count(1)
            return lambda view: GlobalArgmax()(view) if next(steps) == 2 else np.zeros(view.num_seqs, dtype=int)

    left = []
    for scheduler, requests in ((Second(), 1), (crossed, 2)):
        rng, asked = np.random.default_rng(7), Asked(scheduler)
        instances = (drawn(Size(2, 2, requests, 3), "head", rng) for _ in range(200))
        bent = next(i for i in instances if distance_of(i, asked) > 0.005)
        simpler = simplified(bent, asked, 1e-12)
        assert distance_of(simpler, asked) > distance_of(bent, asked) / 20 > 1e-4
        assert len(simpler.prompts) == simpler.steps
        left.append((len(simpler.decoders), simpler.steps))
    assert left == [(1, 2), (2, 1)]


# The law by another way: every path on its own, in plain Python


def brute(instance, scheduler):
    """The joint law, path by path, with nothing merged, cached or multiplied as matrices."""
    decoders = instance.decoders
    v, gamma, length = decoders[0].vocabulary, decoders[0].gamma, decoders[0].length
    law = defaultdict(float)

    def code(text):
        return sum(x * v ** (len(text) - 1 - i) for i, x in enumerate(text))

    def target(seat, text):
        return decoders[seat].target[len(text)][code(text)]

    def one(seat, out, draft, lens, anchor):
        """Texts and chances after verifying ``lens`` of ``draft``."""
        ends, chance = [], 1.0
        for k in range(lens + 1):
            text = out + draft[:k]
            if len(text) == length:
                return [*ends, (text, chance)]
            p = target(seat, text)
            if k == lens:
                return ends + [((*text, x), chance * p[x]) for x in range(v)]
            q = decoders[seat].drafter[k][anchor][code(draft[:k])]
            keep = min(1.0, p[draft[k]] / q[draft[k]])
            rest = np.maximum(p - q, 0)
            if keep < 1:
                ends += [((*text, x), chance * (1 - keep) * rest[x] / rest.sum()) for x in range(v)]
            chance *= keep
        raise AssertionError

    def views(past):
        """The views of the steps until now, with the records before them, as an engine makes them."""
        made, records = [], []
        for ids, rows, prompts, lens, emitted in past:
            confidence = np.array(rows)
            n, names = len(ids), np.array([instance.ids[s] for s in ids])
            dearer = instance.seconds[0] * prompts[0] / 2000
            seconds = np.append(instance.seconds[n - 1 : n * (gamma + 1)] + dearer, np.inf)
            view = StepView(
                names, np.cumprod(confidence, axis=1), lambda k, s=seconds: s.take(k, mode="clip"),
                confidence=confidence, prefill_tokens=prompts[0], finishing_prefills=prompts[1],
                prefilled=prompts[2], previous=tuple(records),
            )  # fmt: skip
            made.append(view)
            if lens is not None:
                bare = StepView(names, np.cumprod(confidence, axis=1), None)
                records.append(StepRecord(bare, np.array(lens), np.array(emitted)))
        return made

    def go(step, outs, past, chance):
        if step == instance.steps:
            finish(outs, chance)
            return
        ids = [s for s in range(len(decoders)) if instance.present[step][s] and len(outs[s]) < length]
        if not ids:
            go(step + 1, outs, past, chance)
            return
        anchors = [outs[s][-1] if outs[s] and len(decoders[s].drafter[0]) > 1 else 0 for s in ids]
        for drafts in itertools.product(itertools.product(range(v), repeat=gamma), repeat=len(ids)):
            drawn_with, rows = 1.0, []
            for s, draft, a in zip(ids, drafts, anchors, strict=True):
                drawn_with *= np.prod([decoders[s].drafter[k][a][code(draft[:k])][draft[k]] for k in range(gamma)])
                rows.append([decoders[s].confidence[k][a][code(draft[: k + 1])] for k in range(gamma)])
            if drawn_with == 0:
                continue
            now = (ids, rows, instance.prompts[step], None, None)
            schedule = scheduler.start() if hasattr(scheduler, "start") else scheduler
            lens = [schedule(view) for view in views([*past, now])][-1]
            ways = [one(s, outs[s], d, int(n), a) for s, d, n, a in zip(ids, drafts, lens, anchors, strict=True)]
            for ends in itertools.product(*ways):
                p = chance * drawn_with * np.prod([e[1] for e in ends])
                if p > 0:
                    new = list(outs)
                    for s, e in zip(ids, ends, strict=True):
                        new[s] = e[0]
                    emitted = [len(e[0]) - len(outs[s]) for s, e in zip(ids, ends, strict=True)]
                    go(step + 1, tuple(new), [*past, (*now[:3], lens.tolist(), emitted)], p)

    def finish(outs, chance):
        short = next((s for s in range(len(decoders)) if len(outs[s]) < length), None)
        if short is None:
            law[tuple(map(code, outs))] += chance
            return
        for x, p in enumerate(target(short, outs[short])):
            if p > 0:
                finish((*outs[:short], (*outs[short], x), *outs[short + 1 :]), chance * p)

    go(0, ((),) * len(decoders), [], 1.0)
    out = np.zeros((v**length,) * len(decoders))
    for texts, p in law.items():
        out[texts] = p
    return out


def stubborn(view):
    """Lossy, and looks at all that a view has: the past's survivals, lengths and tokens, prompts and prices."""
    seen = sum(float(r.survival.sum() + 2 * r.draft_lens.sum() + 3 * r.emitted.sum()) for r in view.previous)
    seen += float(view.confidence.sum()) + view.prefill_tokens + view.finishing_prefills + view.prefilled
    seen += float(view.step_seconds(view.num_seqs * view.gamma))
    return (int(seen * 1000) + view.request_ids) % (view.gamma + 1)


@pytest.mark.parametrize("confidence", ["head", "draft_prob"])
@pytest.mark.parametrize(
    "size",
    [
        Size(3, 2, 1, 1),
        Size(2, 3, 1, 1),
        Size(2, 2, 2, 1),
        Size(3, 1, 2, 1),
        Size(2, 2, 1, 3),
        Size(2, 1, 2, 2),
        Size(2, 4, 2, 1),
        Size(2, 5, 1, 2),
    ],
    ids=lambda s: f"{s.vocabulary}{s.gamma}{s.requests}{s.steps}",
)
def test_the_law_is_that_of_all_paths(size, confidence):
    rng = np.random.default_rng(6)
    schedulers = (GlobalArgmax(), Late(), stubborn, emboldened, DSparkAsync(staleness=1))
    bent = 0
    for scheduler in schedulers:
        instance = drawn(size, confidence, rng)
        law, want = output_law(instance, Asked(scheduler)), brute(instance, scheduler)
        assert law.shape == want.shape
        assert law.sum() == pytest.approx(1.0, abs=1e-12)
        np.testing.assert_allclose(law, want, atol=1e-14)
        alone = brute(Instance(instance.decoders, instance.seconds, (), (), confidence), scheduler)
        np.testing.assert_allclose(target_law(instance), alone, atol=1e-14)
        bent += distance(law, alone) > 1e-3
    if size.gamma > 1 or confidence == "draft_prob":
        assert bent  # what was compared is more than the target's own law


def test_requests_that_join_late_or_pause_are_drawn():
    rng = np.random.default_rng(0)
    found = [drawn(Size(2, 1, 2, 3), "head", rng) for _ in range(40)]
    second = {tuple(row[1] for row in instance.present) for instance in found}
    assert {(True, True, True), (False, True, True), (True, False, True), (False, False, True)} <= second
    joining = [i for i in found if [row[1] for row in i.present] == [False, True, True]]
    for i in joining:  # its prompt ends in the step before, or was computed in a step of its own
        assert (i.prompts[0].tokens >= 4 and i.prompts[0].ending) or i.prompts[1].before
    joins = next(i for i in joining if i.prompts[0].ending and i.ids == (0, 1))
    scheduler = DSparkAsync(staleness=1, newcomer=0.2)
    np.testing.assert_allclose(output_law(joins, Asked(scheduler)), brute(joins, scheduler), atol=1e-14)
    seen = []

    def watch(view):
        seen.append(view.request_ids.tolist())
        return np.zeros(view.num_seqs, dtype=int)

    output_law(joins, Asked(watch))
    assert [0] in seen  # in the first step, where the second request does not decode
    assert [0, 1] in seen


# How it is asked


def test_a_scheduler_is_asked_once_for_each_view():
    tables = of_head([np.array([[0.9]]), np.array([[0.4, 0.6]])], 2)
    target = tuple(np.tile((0.7, 0.3), (2**n, 1)) for n in range(3))
    even = tuple(np.full((1, 2**k, 2), 0.5) for k in range(2))
    decoder = Decoder(target, even, tables)
    instance = Instance((decoder, decoder), sps_shapes(2, 2)[0], ((True, True),), (Prompts(),), "head")
    seen = []

    def watch(view):
        seen.append(view.confidence.tolist())
        return np.zeros(2, dtype=int)

    asked = Asked(watch)
    output_law(instance, asked)
    assert asked.calls == len(seen) == 4  # of 16 drafts: the last token of a block tells nothing
    assert sorted(seen)[0] == [[0.9, 0.4], [0.9, 0.4]]
    seen.clear()
    uneven = tuple(np.tile((0.8, 0.2), (1, 2**k, 1)) for k in range(2))
    telling = from_drafter(Decoder(target, uneven, uneven), "draft_prob")
    output_law(replace(instance, decoders=(telling, telling)), Asked(watch))
    assert len(seen) == 16


def test_the_same_seed_gives_the_same_audit():
    one, again, other = (ss.audit(peeks, instances=1500, histories=0, seed=s) for s in (1, 1, 2))
    assert one.data() == again.data()
    assert str(one) == str(again)
    assert one.tv != other.tv


def test_more_instances_are_the_same_ones_and_others():
    rngs = [np.random.default_rng(3) for _ in range(2)]
    few, many = ([drawn(Size(2, 2, 1, 1), "head", rng) for _ in range(n)] for rng, n in zip(rngs, (3, 6), strict=True))
    assert [i.seconds.tolist() for i in few] == [i.seconds.tolist() for i in many[:3]]


def test_plain_instances_begin_with_the_paper():
    first = list(itertools.islice(plain(Size(2, 2, 1, 1), "head"), 6))
    assert [round(1 / s, 12) for s in first[0].seconds] == [1.0, 0.5, 0.45]
    assert [t.tolist() for t in first[5].decoders[0].confidence] == [[[0.8, 0.8]], [[0.9, 0.9, 0.0, 0.0]]]


@pytest.mark.parametrize("gamma", [4, 5, 7])
def test_of_long_blocks_two_requests_and_memory_are_looked_at(gamma):
    def crossing(view):
        ends = view.survival[::-1, -1] >= 0.5
        return np.where(ends, gamma, 0) if view.num_seqs > 1 else np.full(1, gamma)

    class Later:
        def start(self):
            steps = itertools.count()
            return lambda view: np.where(view.survival[:, -1] >= 0.5, gamma, 0) if next(steps) else np.full(
                view.num_seqs, gamma)  # fmt: skip

    few = 40 * 2 ** (gamma - 3)
    crossing.gamma = Later.gamma = gamma
    # By itself a request keeps its law: the difference is between two.
    case = ss.audit(crossing, instances=few, histories=0).counterexample
    assert (len(case.instance.decoders), case.instance.decoders[0].gamma) == (2, gamma)
    case = ss.audit(Later(), instances=2, histories=few // 2).counterexample
    assert case.step > 1
    assert "Why: whether" in str(case)


@pytest.mark.parametrize(
    ("gamma", "numbers", "missing"),
    [
        (1, {}, ()),
        (1, {"steps": 6, "histories": 1}, ("two requests in more than 4 steps (too many histories)",)),
        (1, {"steps": 1}, ("memory from step to step (steps are 1)",)),
        (4, {}, ("two requests in more than 2 steps (γ = 4 is too long to enumerate)",)),
        (5, {"histories": 0}, ("a vocabulary of 3 (γ = 5 is too long to enumerate)",
                               "memory from step to step (histories are 0)")),
        (7, {"steps": 4}, ("a vocabulary of 3, one request in more than 3 steps, two requests in several steps "
                           "(γ = 7 is too long to enumerate)",)),
    ],
)  # fmt: skip
def test_what_was_not_looked_at_is_said(gamma, numbers, missing):
    found = ss.audit(StaticGamma(gamma), **{"instances": 16, "histories": 4} | numbers)
    assert found.not_looked_at == missing
    assert found.data()["not_looked_at"] == list(missing)
    first, *_ = str(found).splitlines()
    assert first.endswith(f". Not looked at: {'; '.join(missing)}" if missing else "e-16")


PEEKS_WHERE = {
    "a large chunk": lambda view: view.prefill_tokens >= 2048,
    "several prompts end": lambda view: view.finishing_prefills >= 3,
    "prompts had steps of their own": lambda view: view.prefilled and not view.prefill_tokens,
    "a request of another name": lambda view: (view.request_ids > 1000).any(),
    "names out of order": lambda view: view.num_seqs > 1 and view.request_ids[0] > view.request_ids[1],
    "prompts make the step dear": lambda view: view.step_seconds(0) > 6,
}


@pytest.mark.parametrize("where", PEEKS_WHERE.values(), ids=list(PEEKS_WHERE))
def test_a_view_is_what_an_engine_may_show(where):
    def peeking(view):
        ends = view.survival[:, -1] >= 0.5
        return np.where(ends, view.gamma, 0) if where(view) else np.zeros(view.num_seqs, dtype=int)

    assert not ss.audit(peeking, instances=1000, histories=0).lossless


def test_prompts_are_such_as_an_engine_has():
    rng = np.random.default_rng(1)
    prompts = [p for _ in range(300) for p in drawn(Size(2, 1, 1, 3), "head", rng).prompts]
    assert all(0 <= p.ending <= p.tokens for p in prompts)
    assert {p.ending for p in prompts} == {0, 1, 2, 3}
    assert max(p.tokens for p in prompts) > 2048
    assert (0, 0, True) in prompts


def test_memory_that_acts_in_the_sixth_step_is_found_in_six():
    class Sixth:
        def start(self):
            steps = itertools.count(1)
            return lambda view: GlobalArgmax()(view) if next(steps) == 6 else np.zeros(view.num_seqs, dtype=int)

    few = {"instances": 8, "histories": 4}
    assert ss.audit(Sixth(), steps=5, **few).lossless
    assert ss.audit(Sixth(), steps=6, **few).counterexample.step == 6


def swallowing(view):
    """``emboldened``, were it not for what it catches."""
    try:
        kept = (view.previous[-1].emitted > 1).all()
    except:  # noqa: E722
        return np.full(view.num_seqs, view.gamma)
    return GlobalArgmax()(view) if kept else np.zeros(view.num_seqs, dtype=int)


def raising_another(view):
    try:
        return swallowing(view) if view.previous else np.full(view.num_seqs, view.gamma)
    except BaseException as error:
        raise ValueError("no past") from error


@pytest.mark.parametrize("scheduler", [swallowing, raising_another])
def test_looking_back_is_noticed_whatever_it_catches(scheduler):
    assert ss.audit(scheduler, **FEW).counterexample.step > 1


def test_hidden_memory_is_noticed_in_long_blocks():
    hidden = Hidden()
    hidden.gamma = 7
    with pytest.raises(SpecsimError, match="answers one and the same view in two ways"):
        ss.audit(hidden, instances=16, histories=0)


def test_a_schedulers_gamma_makes_blocks_longer():
    assert {s.gamma for s in ss.audit(StaticGamma(8), instances=2, histories=2).sizes} == {8}
    assert {s.gamma for s in ss.audit(StaticGamma(2), **FEW).sizes} == {2, 3}
    found = ss.audit(StaticGamma(6), instances=20, histories=4)
    assert {(s.vocabulary, s.gamma, s.requests) for s in found.sizes} == {(2, 6, 1), (2, 6, 2), (2, 7, 1)}
    assert {s.gamma for s in ss.audit(MTP1(), **FEW).sizes} == {1}


@pytest.mark.parametrize("gamma", [3, 7])
def test_one_with_a_gamma_is_audited_in_blocks_one_longer(gamma):
    """It can be run on them: without exact_gamma, gamma is the least length of a block."""

    class Peeks:
        def __call__(self, view):
            more = view.confidence[:, self.gamma] > 0.5 if view.gamma > self.gamma else np.ones(view.num_seqs, bool)
            return np.where(more, self.gamma, 0)

    Peeks.gamma = gamma
    found = ss.audit(Peeks(), instances=1000, histories=0)
    assert found.sizes[-1] == Size(2, gamma + 1, 1, 1)
    assert found.counterexample.instance.decoders[0].gamma == gamma + 1
    Peeks.exact_gamma = gamma
    assert ss.audit(Peeks(), instances=16, histories=0).lossless


class Full:
    """Verifies all that its gamma allows, whatever the confidences."""

    gamma = 3

    def __call__(self, view):
        return np.full(view.num_seqs, 3 if view.confidence.size else 0)


def test_all_that_its_gamma_allows_is_all():
    assert ss.audit(Full(), instances=16, histories=0).verified == "all"


def test_a_gamma_that_is_no_cap_is_none():
    """The shortest block that it takes, beyond which it decides by confidences."""

    class FromOneOn:
        gamma = 1

        def __call__(self, view):
            return 1 + (view.confidence[:, 1:] > 0.5).cumprod(axis=1).sum(axis=1)

    assert ss.audit(FromOneOn(), instances=400, histories=0).verified == "some"


def test_progress_is_told():
    told = []
    ss.audit(NoSpec(), instances=24, histories=4, progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert {total for _, total in told} == {len(told)}


def test_simplified_keeps_a_case():
    rng = np.random.default_rng(2)
    size = Size(2, 2, 2, 1)
    cases = (drawn(size, "head", rng) for _ in range(300))
    asked = Asked(GlobalArgmax())
    case = next(c for c in cases if distance(output_law(c, asked), target_law(c)) > 0.02)
    simpler = simplified(case, asked, 1e-12)
    assert distance(output_law(simpler, asked), target_law(simpler)) > 1e-3
    for decoder in simpler.decoders:
        for table in decoder.target:
            assert table.sum(axis=-1) == pytest.approx(1.0)


# What cannot be audited


class Hidden:
    """Memory outside start()."""

    def __init__(self):
        self.steps = 0

    def __call__(self, view):
        self.steps += 1
        return np.full(view.num_seqs, self.steps % 2)


class Weights:
    """Made for blocks of three, and not said to be for no others."""

    gamma = 3

    def __call__(self, view):
        return ((view.confidence * np.ones(3)).sum(axis=1) > 9).astype(int)


class Loose:
    """Memory that start() does not make anew."""

    def __init__(self):
        self.steps = 0

    def start(self):
        def schedule(view):
            self.steps += 1
            return np.full(view.num_seqs, self.steps % 2)

        return schedule


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (Oracle(), r"scheduler Oracle\(\): knows what will be accepted: an upper bound"),
        (StaticGamma(9), r"scheduler StaticGamma\(9\): gamma: expected blocks of at most 8 tokens"),
        (Hidden(), "scheduler Hidden: answers one and the same view in two ways"),
        (Loose(), "scheduler Loose: answers one and the same view in two ways"),
        (lambda view: np.full(view.num_seqs, 0.5), "expected 1 whole draft lengths within 0..1, got float64"),
        (lambda view: np.full(view.num_seqs, 4), "expected 1 whole draft lengths within 0..1, got int64"),
        (
            lambda view: np.full(view.num_seqs, 2),
            r"within 0..1, got int64 .* \(asked about blocks of 1; a field gamma",
        ),
        (
            Weights(),
            r"ValueError: .*\(asked about blocks of 4; exact_gamma = 3 would say",
        ),
        (lambda view: view.survival[:, 9], r"IndexError: index 9 .*blocks of 1; a field gamma would say"),
        (ss.WrongCost(Weights()), r"asked about blocks of 4; exact_gamma = 3 would"),
        (type("No", (NoSpec,), {"exact_gamma": 0})(), "exact_gamma: expected 1 or more, got 0"),
        (5, "scheduler 5: expected something that can be called with a StepView"),
        (Hidden, r"scheduler Hidden: expected an instance, such as Hidden\(\), got the class"),
    ],
)
def test_what_cannot_be_audited_is_told_in_one_line(scheduler, words):
    with pytest.raises(SpecsimError, match=words) as error:
        ss.audit(scheduler, **FEW)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["confidence", "survival", "request_ids"])
def test_a_view_cannot_be_written_to(field):
    def cheat(view):
        getattr(view, field)[:] = 1
        return np.zeros(view.num_seqs, dtype=int)

    with pytest.raises(SpecsimError, match="read-only"):
        ss.audit(cheat, **FEW)


@pytest.mark.parametrize(
    ("gamma", "got"),
    [("x", "'x'"), (2.5, "2.5"), (True, "True"), (np.ones(2), "ndarray"), (None, None), (np.int64(2), None)],
)
def test_an_exact_gamma_that_is_no_whole_number_is_refused_and_a_gamma_is_something_else(gamma, got):
    mine = NoSpec()
    object.__setattr__(mine, "gamma", gamma)
    assert ss.audit(mine, instances=2, histories=0).lossless
    object.__setattr__(mine, "exact_gamma", gamma)
    if got is None:
        assert ss.audit(mine, instances=2, histories=0).lossless
        return
    with pytest.raises(SpecsimError) as error:
        ss.audit(mine, **FEW)
    assert str(error.value) == f"scheduler NoSpec(): exact_gamma: expected a whole number, got {got}"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"confidence": "softmax"}, "confidence: expected head or draft_prob, got 'softmax'"),
        ({"instances": -1}, "instances: expected a whole number, 0 to"),
        ({"histories": 1.5}, "histories: expected a whole number"),
        ({"steps": 7}, "steps: expected a whole number, 1 to 6, got 7"),
        ({"seed": True}, "seed: expected a whole number"),
    ],
)
def test_wrong_numbers(wrong, words):
    with pytest.raises(SpecsimError, match=words):
        ss.audit(NoSpec(), **wrong)
