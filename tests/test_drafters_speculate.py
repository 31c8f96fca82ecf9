"""The real sampler loses nothing: its outputs have the target's own distribution, whatever is verified."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from tiny_models import (
    KINDS,
    all_texts,
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

from specsim.drafters import speculate as module
from specsim.drafters.lookup import SmallModel
from specsim.drafters.speculate import speculate
from specsim.schedulers import DSparkAsync, DSparkGreedy, GlobalArgmax, StaticGamma, Threshold
from specsim.views import StepView

VOCAB, LENGTH, ROWS = 6, 4, 3000
PROMPT = [0, 1, 0, 1]


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab=VOCAB)


@pytest.fixture(scope="module")
def model(target):
    return plain_model(target)


@pytest.fixture(scope="module")
def exact(model):
    """Chances of all texts of four tokens after the prompt."""
    chances = joint(model, PROMPT, LENGTH, 1.0).numpy()
    assert chances.sum() == pytest.approx(1)
    return chances


def made(kind):
    if kind == "small":
        return SmallModel(tiny_target("qwen3", VOCAB, seed=5, layers=2), gamma=3)
    if kind == "reduced":
        return tiny_drafter("dspark", VOCAB, vocabulary=(0, 2, 3, 5))
    return any_drafter(kind, VOCAB)


def sampled(target, drafter, scheduler, seed=0, rows=ROWS):
    """How often each text of four tokens comes out, and the draft lengths."""
    # By these costs some drafts are worth it and some are not.
    out = speculate(target, drafter, [PROMPT] * rows, scheduler, max_tokens=LENGTH, seed=seed,
                    step_seconds=lambda tokens: 1 + np.asarray(tokens) / 4 / rows, ends=())  # fmt: skip
    texts = np.array(out.outputs)
    assert texts.shape == (rows, LENGTH)
    codes = texts @ VOCAB ** np.arange(LENGTH - 1, -1, -1)
    return np.bincount(codes, minlength=VOCAB**LENGTH), np.array([c.draft_len for c in out.cycles])


LOSSLESS = [
    ("dspark", StaticGamma(1)), ("dspark", StaticGamma(3)), ("reduced", StaticGamma(3)), ("lookup", StaticGamma(3)),
    ("eagle3", StaticGamma(2)), ("dspark", Threshold(0.5)), ("reduced", DSparkGreedy()),
    ("dspark", DSparkAsync(staleness=1)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "scheduler"), LOSSLESS, ids=lambda x: x if isinstance(x, str) else repr(x))
def test_the_first_tokens_have_the_targets_joint_distribution(target, exact, kind, scheduler):
    counts, verified = sampled(target, made(kind), scheduler)
    assert chi_square(counts, exact) > 0.001
    if not isinstance(scheduler, StaticGamma):
        assert len(set(verified)) >= 3  # it did choose


def residual_of_the_target(monkeypatch):
    """After a rejection the token is drawn from p, not from (p - q)+."""
    real = module.Batch._drafter
    monkeypatch.setattr(module.Batch, "_drafter", lambda *args: torch.zeros_like(real(*args)))


def accepts_too_much(monkeypatch):
    """Drafts are accepted with min(1, 2p/q)."""
    real = module.Batch.draft
    monkeypatch.setattr(module.Batch, "draft", lambda self: halved(real(self)))


def halved(made):
    return replace(made, draft_prob=made.draft_prob / 2)


def accepts_by_q_over_p(monkeypatch):
    """Drafts are accepted with min(1, q/p)."""
    real = module.Batch.verify

    def verify(self, made, lens, prompts=(), **more):
        if made is None:
            return real(self, made, lens, prompts, **more)
        # With p as given and p²/q in the place of q, u·p²/q < p is u < q/p.
        fed = torch.cat((self.anchors[:, None], made.tokens[:, 0]), 1)
        cache = self.cache.part(0, self.n, self.cache.store.shape[4])
        p = self._target(self.target.forward(fed, cache)[0], 1.0)[:, :-1]
        p = p.gather(-1, made.tokens[:, 0][..., None])[..., 0][:, None]
        return real(self, replace(made, draft_prob=p * p / made.draft_prob), lens, **more)

    monkeypatch.setattr(module.Batch, "verify", verify)


def residual_of_the_next_position(monkeypatch):
    """After a rejection the token is drawn from p less the drafter's distribution of another position."""
    real = module.Batch._drafter
    monkeypatch.setattr(module.Batch, "_drafter", lambda self, made, rows, k: real(self, made, rows, (k + 1) % 3))


@pytest.mark.parametrize(
    "break_it", [residual_of_the_target, accepts_too_much, accepts_by_q_over_p, residual_of_the_next_position]
)
def test_a_broken_sampler_is_found_out(target, exact, monkeypatch, break_it):
    break_it(monkeypatch)
    counts, _ = sampled(target, made("dspark"), StaticGamma(3))
    assert chi_square(counts, exact) < 1e-6


# A scheduler that looks at this block's later confidences is not lossless


@dataclass
class Telltale:
    """Two uniform tokens; the second's confidence is high exactly if the first is token 0. Reads nothing."""

    gamma: int = 2
    target_layers: tuple[int, ...] = ()
    vocabulary: None = None

    def context(self, rows, size):
        return self

    def part(self, first, last, size):
        return self

    def move(self, rows, first, size):
        pass

    def read(self, context, tokens, hidden, slots):
        pass

    def block(self, context, anchors, positions):
        return Tell()


@dataclass
class Tell:
    k: int = 0

    def next(self, before):
        self.k += 1
        sure = torch.full(before.shape, 0.8) if self.k == 1 else torch.where(before == 0, 0.98, 0.02)
        return torch.zeros(*before.shape, VOCAB), sure.logit()


def apart(policy):
    """Ask ``policy`` for each request alone, as if R = 1, on the step costs of the paper's example."""
    seconds = 1 / np.array([1.0, 0.5, 0.45])

    def schedule(view):
        return np.array(
            [int(policy(StepView(np.zeros(1), row[None], lambda k: seconds[k]))[0]) for row in view.survival]
        )

    return schedule


def test_global_argmax_bends_the_distribution(target, exact):
    counts, verified = sampled(target, Telltale(), apart(GlobalArgmax()), rows=4000)
    assert set(verified) == {0, 2}  # all or nothing, as the first token tells
    # The draft counts only where it is token 0: at the second token, which is drafted first, there are too many of it.
    second = all_texts(VOCAB, LENGTH)[:, 1]
    marginal = [np.array([x[second == token].sum() for token in range(VOCAB)]) for x in (counts, exact)]
    assert chi_square(*marginal) < 1e-6
    assert marginal[0][0] > 1.1 * marginal[1][0] * 4000
    counts, verified = sampled(target, Telltale(), apart(DSparkGreedy()), rows=1500)
    assert set(verified) == {0}
    assert chi_square(counts, exact) > 0.001


# Step by step


@pytest.mark.parametrize("kind", [*KINDS, "lookup", "small", "reduced"])
def test_greedy_outputs_are_the_models_own(target, model, kind):
    texts = [[0, 1, 0, 1], [2], [5, 4, 3, 2, 1, 0, 3, 3]]
    want = []
    for text in texts:
        whole = torch.tensor([text])
        for _ in range(12):
            whole = torch.cat((whole, plain_states(model, whole)[0][:, -1:].argmax(-1)), 1)
        want.append(whole[0, len(text) :].tolist())
    lens = iter(range(100))

    def uneven(view):  # other lengths for every request and step
        return (next(lens) + np.arange(view.num_seqs)) % (view.gamma + 1)

    for scheduler in (StaticGamma(3), uneven):
        out = speculate(target, made(kind), texts, scheduler, max_tokens=12, temperature=0.0)
        assert out.outputs == want
        for request in range(3):
            mine = [c for c in out.cycles if c.request == request]
            assert [c.position for c in mine[1:]] == list(np.cumsum([c.accepted + 1 for c in mine])[:-1])


def test_an_end_token_ends_its_request_and_no_other(target):
    def out(**fields):
        return speculate(target, made("dspark"), [PROMPT] * 6, StaticGamma(3), max_tokens=30, seed=2, **fields).outputs

    whole, cut = out(ends=()), out(ends=(4,))
    assert all(len(output) == 30 for output in whole)
    assert len({len(output) for output in cut}) > 1
    for output in cut:
        assert output[-1] == 4 or len(output) == 30
        assert 4 not in output[:-1]
    assert cut == out(ends=(4,))  # the same again


def test_what_a_scheduler_sees(target):
    seen = []

    def watch(view):
        seen.append((view, [(r.draft_lens.tolist(), r.emitted.tolist()) for r in view.previous]))
        return np.full(view.num_seqs, 2)

    out = speculate(target, made("dspark"), [PROMPT] * 3, watch, max_tokens=8, seed=1)
    view, _ = seen[0]
    assert view.num_seqs == 3
    assert view.gamma == 3
    first = np.stack([c.confidence for c in out.cycles[:3]])
    np.testing.assert_allclose(view.confidence, first, rtol=1e-5)
    assert view.step_seconds(np.array([0, 5])).tolist() == [1.0, 1.0]
    # Later steps look back on what was verified and what came of it.
    assert seen[1][1][-1] == ([2, 2, 2], [c.accepted + 1 for c in out.cycles[:3]])


@pytest.mark.parametrize("kind", ["dspark", "reduced", "lookup", "small"])
def test_expected_is_accepted_on_average(target, kind):
    out = speculate(target, made(kind), [PROMPT] * 2000, StaticGamma(3), max_tokens=LENGTH, seed=3, ends=())
    gap = np.array([c.accepted - c.expected for c in out.cycles])
    assert gap.std() > 0.1
    assert abs(gap.mean()) < 4 * gap.std() / len(gap) ** 0.5
    chances = np.array([c.expected for c in out.cycles])
    assert chances.min() >= 0
    assert (chances <= np.array([min(c.accepted + 1, c.draft_len) for c in out.cycles]) + 1e-5).all()
    sure = speculate(target, made(kind), [PROMPT], StaticGamma(3), max_tokens=20, temperature=0.0, ends=())
    assert [c.expected for c in sure.cycles] == [c.accepted for c in sure.cycles]


def test_a_scheduler_that_needs_confidences_and_a_drafter_without(target):
    with one_line("confidences"):
        speculate(target, made("eagle3"), [PROMPT], Threshold(0.5), max_tokens=4)


def test_the_head_multiplies_once_a_step(target, monkeypatch):
    """As in serving engines, so that a step's price is one of its tokens, however many positions are reached."""
    real, rows = module.Batch._target, []
    monkeypatch.setattr(module.Batch, "_target", lambda self, x, heat: rows.append(len(x)) or real(self, x, heat))
    done = speculate(target, made("dspark"), [PROMPT] * 2, StaticGamma(3), max_tokens=6, seed=1)
    assert rows[0] == 2  # after the prompts
    assert set(rows[1:]) <= {4, 8}  # of one request or both: each draft's place and the one behind
    assert len(rows) <= 1 + len(done.cycles)
