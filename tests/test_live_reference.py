"""The reference engine: the target's own outputs whatever is verified, joins and leaves, and what schedulers see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import (
    any_drafter,
    chi_square,
    joint,
    one_line,
    plain_model,
    plain_states,
    tiny_drafter,
    tiny_target,
    torch,
)

import specsim as ss
from specsim.drafters.lookup import SmallModel
from specsim.live.reference import Engine
from specsim.schedulers import (
    MTP1,
    BatchSizeTable,
    DSparkAsync,
    DSparkGreedy,
    LoadBlind,
    NoSpec,
    Oracle,
    StaticGamma,
    Threshold,
)

VOCAB, LENGTH = 6, 4
PROFILE = Path(__file__).parents[1] / "hw_profiles/cpu-2core-smollm2-135m.json"


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab=VOCAB, ends=4)


@pytest.fixture(scope="module")
def profile():
    return ss.load_profile(PROFILE)


def uneven(view):
    """Other lengths for every request, and none for some."""
    return (view.request_ids + view.num_seqs) % (view.gamma + 1)


def run(engine, arrivals, rng=None):
    """Submit ``arrivals`` (submit's arguments each), some at every step by ``rng``, until all are served."""
    left, requests = list(arrivals), []
    while left or engine.busy:
        count = len(left) if rng is None else int(rng.integers(3))
        requests += [engine.submit(*one) for one in left[:count]]
        del left[:count]
        engine.step()
    return requests


def texts(count, rng):
    return [
        (rng.integers(VOCAB, size=rng.integers(1, 12)).tolist(), int(rng.integers(1, 20)), 0.0) for _ in range(count)
    ]


def plain(model, prompt, count, end=4):
    whole = torch.tensor([prompt])
    for _ in range(count):
        whole = torch.cat((whole, plain_states(model, whole)[0][:, -1:].argmax(-1)), 1)
        if whole[0, -1] == end:
            break
    return whole[0, len(prompt) :].tolist()


SCHEDULERS = [
    ("none", NoSpec()), ("dspark", NoSpec()), ("mtp", MTP1()), ("dspark", StaticGamma(1)), ("dspark", StaticGamma(3)),
    ("eagle3", StaticGamma(2)), ("lookup", StaticGamma(3)), ("small", StaticGamma(3)), ("dspark", Threshold(0.5)),
    ("dspark", BatchSizeTable(((1, 2, 3), (3, 4, 1)))), ("dspark", DSparkGreedy()), ("reduced", DSparkAsync()),
    ("dspark", DSparkAsync(staleness=1, newcomer="mean", reset=True, fill=True)), ("dspark", LoadBlind(every=2)),
    ("dspark", uneven), ("small", uneven), ("eagle3", uneven),
]  # fmt: skip


def made(kind):
    if kind == "none":
        return None
    if kind == "small":
        return SmallModel(tiny_target("qwen3", VOCAB, seed=5, layers=2), gamma=3)
    if kind == "reduced":
        return tiny_drafter("dspark", VOCAB, vocabulary=(0, 2, 3, 5))
    return any_drafter(kind, VOCAB)


@pytest.mark.parametrize(("kind", "scheduler"), SCHEDULERS, ids=lambda x: x if isinstance(x, str) else None)
def test_greedy_outputs_are_plain_decoding_whoever_joins_and_leaves(target, profile, kind, scheduler):
    rng = np.random.default_rng(0)
    asked = texts(14, rng)
    engine = Engine(target, made(kind), scheduler, max_num_seqs=5, max_model_len=40, profile=profile)
    requests = run(engine, asked, rng)
    model = plain_model(target)
    for request, (prompt, count, _) in zip(requests, asked, strict=True):
        want = plain(model, prompt, count)
        assert request.output == want
        assert request.finish == ("stop" if want[-1] == 4 else "length")
    assert {r.finish for r in requests} == {"stop", "length"}
    assert engine.counts.generated == sum(len(r.output) for r in requests)
    assert engine.counts.prompt_tokens == sum(len(r.prompt) for r in requests)


@pytest.mark.parametrize("scheduler", [StaticGamma(3), uneven, DSparkGreedy()], ids=["static", "uneven", "greedy"])
def test_the_first_tokens_have_the_targets_joint_distribution(target, scheduler):
    prompt, rows = [0, 1, 0, 1], 4000
    engine = Engine(target, made("dspark"), scheduler, max_num_seqs=400, max_model_len=20, seed=1)
    rng = np.random.default_rng(2)
    # Greedy ones of other lengths among them: rows of all ages and temperatures stand side by side.
    asked = [(prompt, LENGTH, 1.0, True) for _ in range(rows)]
    for at in rng.integers(rows, size=200):
        asked.insert(int(at), (rng.integers(VOCAB, size=rng.integers(1, 9)).tolist(), int(rng.integers(1, 9)), 0.0))
    requests = []
    while asked or engine.busy:
        count = int(rng.integers(150, 250))
        requests += [engine.submit(*one) for one in asked[:count]]
        del asked[:count]
        engine.step()
    out = np.array([r.output for r in requests if r.temperature])
    codes = out @ VOCAB ** np.arange(LENGTH - 1, -1, -1)
    exact = joint(plain_model(target), prompt, LENGTH, 1.0).numpy()
    assert chi_square(np.bincount(codes, minlength=VOCAB**LENGTH), exact) > 0.001
    model = plain_model(target)
    assert all(r.output == plain(model, r.prompt, r.max_tokens) for r in requests if not r.temperature)


def test_what_is_verified_is_what_the_scheduler_said_and_counts_add_up(target, profile):
    seen, rows = [], []

    def watch(view):
        lens = (view.request_ids + len(seen)) % (view.gamma + 1)
        seen.append((view, lens, [(r.request_ids.tolist(), r.draft_lens.tolist(), r.emitted.tolist())
                                  for r in view.previous]))  # fmt: skip
        return lens

    rng = np.random.default_rng(3)
    engine = Engine(target, made("dspark"), watch, max_num_seqs=4, max_model_len=40, profile=profile, log=rows.append)
    with watched_forwards(target) as forwards:
        requests = run(engine, texts(12, rng), rng)
    counts = engine.counts
    assert [row["draft_tokens"] for row in rows if row["num_seqs"]] == [int(lens.sum()) for _, lens, _ in seen]
    assert forwards == [row["num_seqs"] + row["draft_tokens"] + row["prefill_tokens"] for row in rows]
    assert max(row["num_seqs"] + row["prefills"] for row in rows) == 4
    assert counts.draft_tokens == sum(int(lens.sum()) for _, lens, _ in seen)
    assert counts.drafts == sum(int((lens > 0).sum()) for _, lens, _ in seen)
    assert counts.cycles == sum(len(lens) for _, lens, _ in seen)
    assert counts.accepted == counts.accepted_at.sum()
    assert counts.generated == sum(len(r.output) for r in requests) == sum(row["emitted"] for row in rows)
    # Every request: one token from its prompt, then accepted + 1 a cycle; past its end some are cut off.
    assert 0 <= len(requests) + counts.cycles + counts.accepted - counts.generated < 12 * 3
    assert counts.tau == 1 + counts.accepted / counts.cycles
    assert all(row["seconds"] >= row["draft_seconds"] >= 0 for row in rows)
    # The view: who is here, this step's prompts, the profile's prices, and the steps before.
    decoding = [row for row in rows if row["num_seqs"]]
    assert [view.prefill_tokens for view, *_ in seen] == [row["prefill_tokens"] for row in decoding]
    assert [view.finishing_prefills for view, *_ in seen] == [row["prefills"] for row in decoding]
    view, row = seen[5][0], decoding[5]
    # A watcher's view keeps its confidences.
    assert view.confidence.shape == (row["num_seqs"], 3)
    assert seen[6][2][-1][:2] == (view.request_ids.tolist(), seen[5][1].tolist())
    bare = next(i for i, row in enumerate(decoding) if not row["prefills"])
    tokens, n = decoding[bare]["num_seqs"] + 2, decoding[bare]["num_seqs"]
    want = profile.step_seconds(tokens, n, 3, decoding[bare]["kv_tokens"])
    assert seen[bare][0].step_seconds(2) == pytest.approx(float(want))
    assert seen[bare][0].step_seconds(n * 3 + 1) == np.inf


def watched_forwards(target):
    from test_drafters_target import counted_tokens

    return counted_tokens(target)


def test_the_same_arrivals_and_seed_give_the_same_tokens(target):
    def outputs(seed):
        rng = np.random.default_rng(4)
        engine = Engine(target, made("dspark"), DSparkAsync(), max_num_seqs=3, max_model_len=40, seed=seed)
        asked = [(prompt, 15, None, True) for prompt, *_ in texts(8, rng)]
        return [r.output for r in run(engine, asked, rng)]

    assert outputs(0) == outputs(0)
    assert outputs(0) != outputs(1)


@pytest.mark.parametrize("kind", ["dspark", "reduced", "eagle3", "lookup", "small"])
def test_drafters_remember_each_request_whoever_joins_and_leaves(target, kind):
    """Outputs cannot show it: a drafter that reads the wrong text only drafts worse."""

    def drafts(most):
        engine, seen = Engine(target, made(kind), StaticGamma(2), max_num_seqs=most, max_model_len=40), {}
        draft = engine.batch.draft

        def spy():
            blocks = draft()
            for request, tokens in zip(engine.running, blocks.tokens[:, 0].tolist(), strict=True):
                seen.setdefault(request.number, []).append((len(request.output), tokens))
            return blocks

        engine.batch.draft = spy
        rng = np.random.default_rng(5)
        asked = [(prompt, count, 0.0, True) for prompt, count, _ in texts(12, rng)]
        run(engine, asked, rng)
        return seen, engine.counts

    alone, counts = drafts(1)
    together, same = drafts(5)
    assert together == alone
    assert same.accepted == counts.accepted
    assert same.steps < 0.6 * counts.steps  # they did share steps


def test_a_cancelled_request_frees_its_row_and_its_place_in_the_queue(target):
    engine = Engine(target, made("dspark"), StaticGamma(2), max_num_seqs=2, max_model_len=40, temperature=0.0)
    first, second, third, fourth = (engine.submit([k, 1, 2], 30, None, True) for k in range(4))
    engine.step()
    assert engine.running == [first, second]
    engine.cancel(first)
    engine.cancel(third)
    assert set(engine.step()) >= {first, third}
    assert engine.running == [second, fourth]
    assert first.finish == third.finish == "cancelled"
    while engine.busy:
        engine.step()
    model = plain_model(target)
    for request in (second, fourth):
        assert request.output == plain(model, request.prompt, 30, end=None)
    assert len(first.output) < 30
    assert not third.output


def test_prompts_join_whole_within_the_budget_of_a_step(target):
    rows = []
    engine = Engine(
        target, None, NoSpec(), max_num_seqs=8, max_model_len=40, max_num_batched_tokens=12, log=rows.append
    )
    run(engine, [([0] * 8, 3), ([1] * 8, 3), ([2] * 20, 3), ([3], 3)])
    assert [row["prefill_tokens"] for row in rows][:3] == [8, 8, 20]  # the last alone: larger than any step
    assert rows[3]["prefill_tokens"] == 1


def test_a_wrong_answer_of_a_scheduler_is_one_line(target):
    def engine(scheduler):
        engine = Engine(target, made("dspark"), scheduler, max_num_seqs=2, max_model_len=40)
        engine.submit([1, 2], 9, None, True)
        return engine

    def broken(view):
        return view.no_such_thing

    for scheduler, words in (
        (lambda view: np.full(view.num_seqs, 4), "expected 1 whole draft lengths within 0..3, got int64 (1,): [4]"),
        (lambda view: np.array([0.5]), "expected 1 whole draft lengths within 0..3"),
        (lambda view: np.zeros(5, dtype=int), "expected 1 whole draft lengths within 0..3, got int64 (5,)"),
        (broken, "scheduler broken: AttributeError"),
    ):
        wrong = engine(scheduler)
        wrong.step()
        with one_line(words):
            wrong.step()


def test_what_does_not_fit_is_one_line(target, profile):
    def fails(words, drafter, scheduler, **fields):
        with one_line(words):
            Engine(target, made(drafter), scheduler, max_model_len=40, **fields)

    fails("StaticGamma(3): expected a drafter: only NoSpec", "none", StaticGamma(3))
    fails("gamma: expected at most 3, the block length of drafter 'DSpark'", "dspark", StaticGamma(4))
    fails("expected a drafter of γ = 1, got 'DSpark' of γ = 3", "dspark", MTP1())
    fails("DSparkGreedy(): needs confidences, and drafter 'Eagle3' has none", "eagle3", DSparkGreedy())
    fails("Oracle(): knows what will be accepted", "dspark", Oracle())
    fails("expected an instance", "dspark", DSparkGreedy)
    bare = profile.model_copy(update={"draft": None})
    fails("draft: expected a draft cost", "dspark", StaticGamma(1), profile=bare)
    with one_line("max_model_len: expected at most 512, as target tiny-llama, got 513"):
        Engine(target, None, NoSpec(), max_model_len=513)
    assert Engine(target, None, NoSpec()).max_model_len == 512
    with one_line(f"KV of {10**15} rows (max_num_seqs) of 12 tokens (max_model_len) on cpu: expected less"):
        Engine(target, None, NoSpec(), max_num_seqs=10**15, max_model_len=10)
    engine = Engine(target, None, NoSpec(), max_model_len=10)
    for prompt, most, words in (
        ([], 3, "prompt: expected at least one token"),
        ([0] * 10, None, "prompt: expected fewer than 10 tokens (max_model_len), got 10"),
        ([0] * 6, 5, "max_tokens: expected 1..4 after a prompt of 6 tokens (max_model_len 10), got 5"),
        ([0], 0, "max_tokens: expected 1..9"),
        ([0, VOCAB], 3, f"prompt: expected token ids within 0..5, got {VOCAB}"),
        ([-1], 3, "expected token ids within 0..5, got -1"),
    ):
        with one_line(words):
            engine.submit(prompt, most)
    assert not engine.busy
    assert engine.submit([0] * 6).max_tokens == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_answers_as_the_cpu_does():
    answers = []
    for device in ("cpu", "cuda"):
        there, drafter = tiny_target(vocab=VOCAB, ends=4), tiny_drafter("dspark", VOCAB)
        there.model.to(device)
        engine = Engine(there, drafter.to(device), uneven, max_num_seqs=3, max_model_len=64)
        requests = run(engine, texts(6, np.random.default_rng(7)), np.random.default_rng(1))
        answers.append([request.output for request in requests])
    assert answers[0] == answers[1]
