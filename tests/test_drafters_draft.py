"""Drafting: many anchors at once, in pieces, blind to what follows, against the plain way of doing it."""

from __future__ import annotations

import random

import pytest
from scipy.stats import chisquare
from tiny_models import (
    KINDS,
    Forced,
    any_drafter,
    one_line,
    plain_model,
    plain_states,
    tiny_drafter,
    tiny_target,
    torch,
)

from specsim.drafters.batches import make_batch
from specsim.drafters.draft import draft, pick, probabilities
from specsim.drafters.lookup import PromptLookup, SmallModel, check_vocabulary
from specsim.drafters.responses import Response
from specsim.drafters.train import forward

VOCABULARY = (0, 2, 3, 7, 8, 11)
DRAFTERS = [*KINDS, "lookup", "small", "reduced"]
N = 13  # tokens of a text


@pytest.fixture(scope="module", params=DRAFTERS)
def drafter(request):
    if request.param == "small":
        return SmallModel(tiny_target("qwen3", seed=5, layers=2), gamma=3)
    if request.param == "reduced":
        return tiny_drafter("dspark", vocabulary=VOCABULARY)
    return any_drafter(request.param)


@pytest.fixture(scope="module")
def text():
    """Tokens [2, N + 1] (few different ones: lookups find some) and random states of three layers [2, N, ..]."""
    rng = torch.Generator().manual_seed(3)
    return torch.randint(4, (2, N + 1), generator=rng), torch.randn(2, N, 3, 16, generator=rng)


def read(drafter, tokens, hidden, pieces=None, size=None):
    """A context that has read all tokens but the last, whole or in pieces of these lengths."""
    n = tokens.shape[1] - 1
    context = drafter.context(len(tokens), size or n)
    start = 0
    for count in pieces or [n]:
        slots = torch.arange(start, start + count).expand(len(tokens), -1)
        states = hidden[:, start : start + count, list(drafter.target_layers)]
        drafter.read(context, tokens[:, start : start + count + 1], states, slots)
        start += count
    assert start == n
    return context


def shown(drafter, context, tokens, positions):
    """Distributions [S, A, γ, V'] and confidences along blocks that follow from the rows of ``tokens``."""
    vocabulary = drafter.vocabulary
    anchors = tokens.gather(1, positions)
    # Any block will do, as long as it is the same for the same anchor and within the draft vocabulary.
    steps = (5 * positions[..., None] + 3 * torch.arange(drafter.gamma)) % 12
    block = steps if vocabulary is None else vocabulary[steps % len(vocabulary)]
    forced = Forced(block, vocabulary)
    made = draft(drafter, context, anchors, positions, 0.7, forced)
    assert torch.equal(made.tokens, block)
    return torch.stack(forced.shown, 2), made.confidence


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)


POSITIONS = torch.tensor([[4, 9, 1, 12], [2, 3, 11, 6]])


def test_many_anchors_are_drafted_as_one_at_a_time_from_what_stands_before_it(drafter, text):
    tokens, hidden = text
    q, confidence = shown(drafter, read(drafter, tokens, hidden), tokens, POSITIONS)
    for s in range(2):
        for a, p in enumerate(POSITIONS[s].tolist()):
            row = tokens[s : s + 1, : p + 1]
            alone = shown(drafter, read(drafter, row, hidden[s : s + 1]), row, torch.tensor([[p]]))
            there = None if confidence is None else confidence[s : s + 1, a : a + 1]
            assert_same((q[s : s + 1, a : a + 1], there), alone)


def test_what_stands_after_an_anchor_is_not_looked_at(drafter, text):
    tokens, hidden = text
    p = 6
    at = torch.full((2, 1), p)
    before = shown(drafter, read(drafter, tokens, hidden), tokens, at)
    other, states = tokens.clone(), hidden.clone()
    other[:, p + 1 :] = (other[:, p + 1 :] + 1) % 4
    states[:, p:] = 9.0
    assert_same(shown(drafter, read(drafter, other, states), other, at), before)
    # The last thing before the anchor is looked at.
    other[:, p - 1] = (other[:, p - 1] + 1) % 4
    states[:, p - 1] = -1.0
    assert not torch.equal(shown(drafter, read(drafter, other, states), other, at)[0], before[0])


@pytest.mark.parametrize("pieces", [[1] * N, [5, 1, 7]])
def test_reading_in_pieces_is_reading_at_once(drafter, text, pieces):
    tokens, hidden = text
    whole, parts = (read(drafter, tokens, hidden, cut, size=N + 3) for cut in (None, pieces))
    positions = torch.full((2, 1), N)  # the last token is the anchor, as in speculation
    assert_same(shown(drafter, parts, tokens, positions), shown(drafter, whole, tokens, positions))


def test_a_rejected_tail_is_overwritten_and_rows_are_dropped(drafter, text):
    tokens, hidden = text
    context = drafter.context(2, N + 3)
    ranges = torch.arange(8).expand(2, -1)
    wrong = tokens[:, :9].clone()
    wrong[:, 6:] = 3 - wrong[:, 6:]
    layers = list(drafter.target_layers)
    states = torch.where(torch.arange(8)[:, None, None] < 6, hidden[:, :8], 5.0)
    drafter.read(context, wrong, states[:, :, layers], ranges)
    # Six tokens were right, and the last right state was read with a wrong token after it: row 0 goes on from there,
    # row 1 from one before, side by side.
    slots = torch.tensor([[5], [4]]) + torch.arange(5)
    follow = torch.cat((slots, slots[:, -1:] + 1), 1)
    drafter.read(context, tokens.gather(1, follow), hidden[torch.arange(2)[:, None], slots][:, :, layers], slots)
    rows = torch.tensor([1, 0])
    context.move(rows, 0, 10)  # all that is written
    context = context.part(0, 2, 10)
    tokens, hidden, at = tokens[rows], hidden[rows], follow[rows, -1:]
    assert_same(shown(drafter, context, tokens, at), shown(drafter, read(drafter, tokens, hidden), tokens, at))


@pytest.mark.parametrize("kind", [*KINDS, "reduced"])
def test_training_sees_what_drafting_sees(kind):
    vocabulary = VOCABULARY if kind == "reduced" else None
    drafter = tiny_drafter("dspark" if kind == "reduced" else kind, vocabulary=vocabulary)
    rng = torch.Generator().manual_seed(8)
    inside = torch.tensor(vocabulary or range(12))
    responses = []
    for n, prompt in ((11, 2), (16, 5)):  # the shorter one is padded
        tokens = inside[torch.randint(len(inside), (n,), generator=rng)]
        states = torch.randn(n, 3, 16, generator=rng)
        responses.append(Response("r", "d", tokens, states, torch.zeros(n), prompt, n - prompt))
    positions = torch.tensor([[2, 5, 3], [5, 12, 7]])
    batch = make_batch(responses, positions, drafter.target_layers, 2, drafter.gamma)
    logits, confidence = forward(drafter, batch)
    for s, r in enumerate(responses):
        for a, p in enumerate(positions[s].tolist()):
            context = read(drafter, r.tokens[None, : p + 1], r.hidden[None])
            forced = Forced(r.tokens[p + 1 : p + 1 + drafter.gamma][None, None], drafter.vocabulary)
            made = draft(drafter, context, r.tokens[p][None, None], torch.tensor([[p]]), 1.0, forced)
            assert_same((logits[s, a].softmax(-1),), (torch.stack(forced.shown, 2)[0, 0],))
            if confidence is not None:
                assert_same((confidence[s, a].sigmoid(),), (made.confidence[0, 0],))
            # What the loss is taken from stands at the tokens that the drafts stand for.
            assert torch.equal(batch.final[s, a], r.hidden[p : p + drafter.gamma, 2])
            assert torch.equal(batch.block[s, a], r.tokens[p : p + drafter.gamma + 1])


# Drafters without weights of their own


def continuation(text, gamma, longest, shortest):
    """What followed the latest earlier occurrence of the longest suffix that has one, by str.rfind."""
    for size in range(longest, shortest - 1, -1):
        if size < len(text) and (at := text.rfind(text[-size:], 0, len(text) - 1)) >= 0:
            return text[at + size : at + size + gamma]
    return ""


@pytest.mark.parametrize(("gamma", "longest", "shortest"), [(3, 4, 2), (5, 3, 1), (2, 2, 2)])
def test_lookup_finds_what_a_string_search_finds(gamma, longest, shortest):
    rng = random.Random(gamma)
    drafter = PromptLookup(12, gamma, longest, shortest)
    found = []
    for _ in range(60):
        text = "".join(rng.choices("abc", k=rng.randint(2, 20)))
        tokens = torch.tensor([[ord(letter) - ord("a") for letter in text]])
        context = drafter.context(1, 30)
        drafter.read(context, tokens, None, torch.arange(len(text) - 1)[None])
        at = torch.tensor([[len(text) - 1]])
        made = draft(drafter, context, tokens[:, -1:], at, 1.0, lambda k, q: q.argmax(-1))
        count = int(made.proposed)
        assert "".join("abc"[i] for i in made.tokens[0, 0, :count].tolist()) == continuation(
            text, gamma, longest, shortest
        )
        assert made.draft_prob[0, 0].tolist() == [1.0] * count + [0.0] * (gamma - count)
        found.append(count)
    assert {0, gamma} < set(found)  # nothing, part of a block and a whole one all came up


def test_a_small_models_blocks_are_the_model_run_on_the_text_and_the_draft(text):
    small = SmallModel(tiny_target("qwen3", seed=5, layers=2), gamma=9)  # long enough for the cache to grow twice
    model, tokens = plain_model(small.model), text[0]
    q, _ = shown(small, read(small, *text), tokens, POSITIONS)
    steps = (5 * POSITIONS[..., None] + 3 * torch.arange(9)) % 12
    for s in range(2):
        for a, p in enumerate(POSITIONS[s].tolist()):
            whole = torch.cat((tokens[s, : p + 1], steps[s, a, :-1]))[None]
            want = (plain_states(model, whole)[0][0, p:] / 0.7).softmax(-1)
            torch.testing.assert_close(q[s, a], want, rtol=0, atol=1e-5)


def test_a_small_model_of_another_vocabulary_is_refused():
    with one_line("vocab_size", "12", "9"):
        check_vocabulary(tiny_target(), tiny_target("qwen3", 9))


# Probabilities and draws


def test_probabilities():
    none = float("-inf")
    logits = torch.tensor([[1.0, 3.0, 2.0], [none, 0.0, none], [none, none, none]])
    assert probabilities(logits, 0).tolist() == [[0, 1, 0], [0, 1, 0], [0, 0, 0]]
    torch.testing.assert_close(probabilities(logits, 0.5)[0], torch.tensor([2.0, 6.0, 4.0]).softmax(-1))
    assert probabilities(logits, 0.5)[1:].tolist() == [[0, 1, 0], [0, 0, 0]]


def test_a_drafter_that_overflows_is_no_drafter():
    drafter = tiny_drafter()
    drafter.fc.weight.data.fill_(1e38)
    context = drafter.context(1, 4)
    tokens, hidden = torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 3, len(drafter.target_layers), 16)
    drafter.read(context, tokens, hidden * 1e38, torch.arange(3)[None])
    with one_line("drafter", "not numbers"):
        draft(
            drafter, context, tokens[:, :1], torch.tensor([[2]]), 1.0, lambda k, q: torch.zeros(1, 1, dtype=torch.long)
        )


def test_draws_follow_the_weights_whatever_their_sum():
    weights = torch.tensor([0.5, 0.0, 2.0, 1.5]).expand(2, 20_000, 4)
    drawn = pick(weights, torch.Generator().manual_seed(0))
    share = torch.bincount(drawn.flatten(), minlength=4) / drawn.numel()
    torch.testing.assert_close(share, torch.tensor([0.125, 0.0, 0.5, 0.375]), rtol=0, atol=0.01)
    assert drawn.shape == (2, 20_000)
    assert pick(torch.zeros(2, 3), torch.Generator()).tolist() == [0, 0]


def test_draws_among_many_follow_the_weights_too():
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(200, generator=generator) * (torch.arange(200) % 3 > 0)
    weights[64:128] = 0  # a whole span that is never drawn
    drawn = pick(weights.expand(200_000, 200), generator)
    seen = torch.bincount(drawn, minlength=200)
    assert (seen[weights == 0] == 0).all()
    expected = (weights / weights.sum() * len(drawn))[weights > 0]
    assert chisquare(seen[weights > 0], expected.double() * (len(drawn) / expected.double().sum())).pvalue > 0.001
