"""The recorder has the law of speculative sampling, and its traces replay to what speculation does."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import norm
from tiny_models import (
    Forced,
    all_texts,
    answers,
    any_drafter,
    chi_square,
    one_line,
    plain_model,
    plain_states,
    tiny_drafter,
    tiny_target,
    torch,
)

from specsim.blocktrace import TraceMeta
from specsim.drafters import recorder
from specsim.drafters.draft import draft
from specsim.drafters.recorder import Coupled, position_means, record
from specsim.drafters.speculate import speculate
from specsim.schedulers import StaticGamma, Threshold
from specsim.views import StepView

VOCAB = 7
VOCABULARY = (0, 1, 3, 4, 6)
GAMMA = 3
TEXT = "abcdefgab"  # every token stands there, so that lookups always propose
PROMPT = ["abcdefg".index(letter) for letter in TEXT]


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab=VOCAB, scale=0.2)  # flat enough for a random drafter to be accepted now and then


@pytest.fixture(scope="module")
def model(target):
    return plain_model(target)


def made(kind):
    """A drafter by name; "reduced" is DSpark with a smaller vocabulary."""
    if kind == "reduced":
        return tiny_drafter("dspark", VOCAB, vocabulary=VOCABULARY, scale=0.2)
    return any_drafter(kind, VOCAB, scale=0.2)


def meta(kind, temperature, **fields):
    source = "head" if kind in ("dspark", "reduced") else "none"
    given = {"drafter": kind, "target": "tiny", "gamma": GAMMA, "kind": "dense", "temperature": temperature, "seed": 5}
    return TraceMeta.model_validate(given | {"confidence_source": source} | fields)


CASES = [("dspark", 1.0), ("reduced", 0.6), ("lookup", 1.0)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def recorded(request, target, tmp_path_factory):
    """A drafter, its temperature, 50 answers of 40 tokens and their trace."""
    kind, temperature = request.param
    texts = [TEXT] * 50
    recipe, responses = answers(
        tmp_path_factory.mktemp("long"), target, texts, temperature=temperature, max_tokens=40, extra=GAMMA
    )
    drafter = made(kind)
    return drafter, temperature, responses, record(drafter, target, recipe, responses, meta(kind, temperature))


# The law


@pytest.mark.parametrize("vocabulary", [(0, 1, 2, 3), (0, 2, 3)])
def test_a_coupled_draft_has_the_drafters_law_and_is_accepted_as_in_rejection_sampling(vocabulary):
    n, p_full = 200_000, torch.tensor([0.4, 0.3, 0.2, 0.1])
    rng = torch.Generator().manual_seed(0)
    said = torch.multinomial(p_full, n, replacement=True, generator=rng)
    p = p_full[list(vocabulary)]
    q = torch.tensor([0.1, 0.2, 0.3, 0.4])[: len(vocabulary)]
    q = q / q.sum()
    ids = torch.full((4,), -1)
    ids[list(vocabulary)] = torch.arange(len(vocabulary))
    answer = SimpleNamespace(drafted=ids[said], p=p.expand(n, -1))
    coupled = Coupled(answer, torch.arange(n), rng)
    drawn = coupled(0, q.expand(1, n, -1))[0]
    accepted = coupled.accepted
    assert torch.equal(ids[said][accepted == 1], drawn[accepted == 1])
    counts = torch.bincount(2 * drawn + accepted, minlength=2 * len(q)).view(-1, 2)
    chances = torch.stack(((q - p).clamp(min=0), torch.minimum(p, q)), 1)
    possible = chances > 0
    assert counts[~possible].sum() == 0
    assert chi_square(counts[possible], chances[possible]) > 0.001
    torch.testing.assert_close(coupled.rates[0][0], torch.minimum(p, q).sum())


def exact_survival(target, model, drafter, temperature, greedy):
    """P(accepted >= k) [γ] after the first token of an answer to PROMPT, by enumeration of all drafts."""
    inside = torch.arange(VOCAB) if drafter.vocabulary is None else drafter.vocabulary
    places = all_texts(len(inside), GAMMA)
    drafts = inside[places].repeat(VOCAB, 1)
    anchors = torch.arange(VOCAB).repeat_interleave(len(places))
    text = torch.cat((torch.tensor(PROMPT).expand(len(drafts), -1), anchors[:, None], drafts), 1)
    logits, states = plain_states(model, text)
    p = (logits / temperature).softmax(-1)[:, len(PROMPT) - 1 :]
    n = len(PROMPT)
    context = drafter.context(len(text), n)
    slots = torch.arange(n).expand(len(text), -1)
    drafter.read(context, text[:, : n + 1], states[:, :n, list(drafter.target_layers)], slots)
    forced = Forced(drafts[:, None], drafter.vocabulary)
    draft(drafter, context, anchors[:, None], torch.full((len(text), 1), n), 0.0 if greedy else temperature, forced)
    q = torch.stack([shown[:, 0].gather(1, places.repeat(VOCAB, 1)[:, k : k + 1])[:, 0] for k, shown in
                     enumerate(forced.shown)], 1)  # fmt: skip
    p_x = p[:, 1:-1].gather(-1, drafts[..., None])[..., 0]
    p_anchor = p[:, 0].gather(-1, anchors[:, None])[:, 0]
    survival = []
    for k in range(1, GAMMA + 1):
        kept = p_anchor * torch.minimum(p_x, q)[:, :k].prod(1)
        # Texts that share their first k drafts count once.
        survival.append(float(kept.view(VOCAB, len(inside) ** k, -1)[..., 0].sum()))
    return np.array(survival)


@pytest.mark.parametrize(("kind", "temperature", "sampling"), [
    ("reduced", 0.6, "probabilistic"), ("reduced", 1.0, "greedy"), ("lookup", 1.0, "probabilistic"),
])  # fmt: skip
def test_survival_is_that_of_an_enumeration(target, model, tmp_path, kind, temperature, sampling):
    drafter, n = made(kind), 200
    recipe, responses = answers(
        tmp_path, target, [TEXT] * n, temperature=temperature, max_tokens=1, extra=GAMMA, batch=n
    )
    trace = record(drafter, target, recipe, responses, meta(kind, temperature, draft_sampling=sampling))
    assert len(trace) == n
    want = exact_survival(target, model, drafter, temperature, sampling == "greedy")
    assert want[0] > 0.05
    got = (trace.accepted[:, None] >= np.arange(1, GAMMA + 1)).mean(0)
    assert (np.abs(got - want) < 3.5 * np.sqrt(want * (1 - want) / n) + 1e-9).all(), (got, want)


def test_acceptance_has_the_rate_that_is_recorded(recorded):
    _, _, _, trace = recorded
    for k in range(GAMMA):
        reached = (trace.accepted >= k) & (trace.proposed > k)
        surprise = (trace.accepted[reached] > k) - trace.accept_rate[reached, k]
        per_response = np.bincount(trace.responses()[reached], surprise)
        error = np.sqrt((per_response**2).sum()) / reached.sum()
        assert error < 0.08
        assert abs(surprise.mean()) < 3.5 * error, k


def test_the_rate_is_one_minus_the_total_variation_of_the_full_distributions(recorded, model):
    drafter, temperature, responses, trace = recorded
    checked = 0
    for response in responses[:2]:
        rows = np.flatnonzero(np.array(trace.request_ids)[trace.request_id] == response.id)
        logits, states = plain_states(model, response.tokens[None])
        p = (logits[0] / temperature).softmax(-1)
        for row in rows[:40]:
            at = response.prompt_tokens + int(trace.position[row])
            context = drafter.context(1, at)
            slots = torch.arange(at)[None]
            drafter.read(context, response.tokens[None, : at + 1], states[:, :at, list(drafter.target_layers)], slots)
            forced = Forced(response.tokens[at + 1 : at + 1 + GAMMA][None, None], drafter.vocabulary)
            draft(drafter, context, response.tokens[None, None, at], torch.tensor([[at]]), temperature, forced)
            last = min(int(trace.accepted[row]) + 1, int(trace.proposed[row]))
            for k in range(last):
                q = torch.zeros(VOCAB)
                q[torch.arange(VOCAB) if drafter.vocabulary is None else drafter.vocabulary] = forced.shown[k][0, 0]
                rate = 1 - (p[at + k] - q).abs().sum() / 2
                assert trace.accept_rate[row, k] == pytest.approx(float(rate), abs=2e-5)
                checked += 1
            assert np.isnan(trace.accept_rate[row, last:]).all()
    assert checked > 60


def test_rows_are_all_anchors_whose_block_was_recorded_and_depend_on_no_other_response(recorded, target):
    drafter, temperature, responses, trace = recorded
    assert len(trace) == 50 * 40
    assert set(np.bincount(trace.responses())) == {40}
    picked = [responses[5], responses[2]]
    recipe = SimpleNamespace(layers=(0, 1, 2), temperature=temperature)
    again = record(drafter, target, recipe, picked, trace.meta)
    for response in picked:
        here, there = (np.array(t.request_ids)[t.request_id] == response.id for t in (again, trace))
        for name in ("position", "accepted", "proposed", "draft_prob", "prompt_tokens", "output_tokens"):
            np.testing.assert_array_equal(getattr(again, name)[here], getattr(trace, name)[there], name)
        if trace.confidence is not None:
            np.testing.assert_allclose(again.confidence[here], trace.confidence[there], rtol=1e-5)


# Replay against speculation


def lens(scheduler, trace):
    """What ``scheduler`` verifies of each row."""
    survival = np.zeros((len(trace), GAMMA)) if trace.confidence is None else trace.confidence.cumprod(1)
    view = StepView(np.arange(len(trace)), survival, lambda k: np.ones_like(k, dtype=float))
    return np.minimum(scheduler(view), trace.proposed)


def replayed(scheduler, trace):
    """Cycles (response, position, draft_len, accepted), int [n, 4], of a walk over each response."""
    cycles, verified, of = [], lens(scheduler, trace), trace.responses()
    for response in range(of[-1] + 1):
        rows = np.flatnonzero(of == response)
        at = 0
        while at < len(rows):
            row = rows[at]
            kept = min(int(trace.accepted[row]), int(verified[row]))
            cycles.append((response, at, int(verified[row]), kept))
            at += kept + 1
    return np.array(cycles)


def spoken(target, drafter, scheduler, temperature, requests, tokens, seed):
    """The same of real speculation; ``tokens`` positions can hold an anchor."""
    made = speculate(
        target, drafter, [PROMPT] * requests, scheduler, max_tokens=tokens + 1, temperature=temperature, seed=seed
    )
    cycles = np.array([(c.request, c.position, c.draft_len, c.accepted) for c in made.cycles])
    return cycles[np.lexsort((cycles[:, 1], cycles[:, 0]))]


def ratios(cycles):
    """(ratio, its variance, tries) of τ and of the conditional acceptance at each position, clustered by response."""
    of, _, verified, accepted = cycles.T
    tops = [(accepted + 1, np.ones_like(accepted))]
    for k in range(1, GAMMA + 1):
        reached = (verified >= k) & (accepted >= k - 1)
        tops.append(((reached & (accepted >= k)).astype(int), reached.astype(int)))
    for hits, tries in tops:
        a, b = np.bincount(of, hits), np.bincount(of, tries)
        n = max(b.sum(), 1)
        yield a.sum() / n, ((a - a.sum() / n * b) ** 2).sum() / n**2, b.sum()


def test_replay_has_the_law_of_speculation(recorded, target):
    drafter, temperature, _, trace = recorded
    pairs = []
    for scheduler in (StaticGamma(1), StaticGamma(3), *([] if trace.confidence is None else [Threshold(0.3)])):
        real = spoken(target, drafter, scheduler, temperature, requests=100, tokens=40, seed=3)
        both = zip(ratios(replayed(scheduler, trace)), ratios(real), strict=True)
        pairs += [(a, b) for a, b in both if min(a[2], b[2]) >= 50]  # positions that come up
    assert len(pairs) >= (8 if trace.confidence is not None else 5)
    bound = norm.ppf(1 - 0.01 / 2 / len(pairs))  # family-wise 99 %
    for (a, va, _), (b, vb, _) in pairs:
        assert abs(a - b) < bound * np.sqrt(va + vb), (a, b)
    assert np.sqrt(pairs[0][0][1] + pairs[0][1][1]) < 0.03  # good enough to tell


@pytest.mark.parametrize("kind", ["dspark", "reduced", "lookup", "eagle3"])
def test_at_temperature_zero_they_agree_token_by_token(target, tmp_path, kind, monkeypatch):
    drafter = made(kind)
    texts = ["abab", "cab", "gfe", "aaaaab"]
    recipe, responses = answers(tmp_path, target, texts, temperature=0.0, max_tokens=40, extra=GAMMA)
    trace = record(drafter, target, recipe, responses, meta(kind, 0.0))
    assert set(np.nan_to_num(trace.accept_rate).ravel()) <= {0.0, 1.0}
    for scheduler in (StaticGamma(1), StaticGamma(3), *([] if trace.confidence is None else [Threshold(0.3)])):
        prompts = [r.tokens[: r.prompt_tokens].tolist() for r in responses]
        made_ = speculate(target, drafter, prompts, scheduler, max_tokens=41, temperature=0.0)
        for r, output in zip(responses, made_.outputs, strict=True):
            assert r.tokens[r.prompt_tokens :][:41].tolist() == output
        cycles = sorted((c.request, c.position, c.draft_len, c.accepted) for c in made_.cycles)
        assert cycles == [tuple(cycle) for cycle in replayed(scheduler, trace)]
    assert trace.accepted.max() > 0
    monkeypatch.setattr(recorder, "CHUNK", 7)  # anchors in several forwards
    parts = record(drafter, target, recipe, responses, trace.meta)
    np.testing.assert_array_equal(parts.accepted, trace.accepted)
    np.testing.assert_array_equal(parts.position, trace.position)


# Confidences by choice, and what cannot be recorded


def test_confidences_of_drafters_without_a_head(target, tmp_path):
    recipe, responses = answers(tmp_path, target, [TEXT] * 5, max_tokens=40, extra=GAMMA)
    drafter = made("eagle3")

    def trace(source):
        return record(drafter, target, recipe, responses, meta("eagle3", 1.0, confidence_source=source))

    none, prob, mean = (trace(source) for source in ("none", "draft_prob", "position_mean"))
    assert none.confidence is None
    np.testing.assert_array_equal(prob.confidence, prob.draft_prob)
    shares = [(mean.accepted > k).sum() / (mean.accepted >= k).sum() for k in range(GAMMA)]
    np.testing.assert_allclose(mean.confidence, np.broadcast_to(shares, (len(mean), GAMMA)), rtol=1e-6)
    with one_line("confidence", "draft_prob"):
        trace("head")


def test_position_means_are_taken_by_domain_over_what_was_reached_and_proposed():
    accepted, proposed = np.array([2, 0, 1, 1, 0]), np.array([2, 2, 1, 2, 0])
    means = position_means(accepted, proposed, np.array(["a", "a", "a", "b", "b"], dtype=object), 2)
    np.testing.assert_allclose(means, [[2 / 3, 1]] * 3 + [[1, 0]] * 2, rtol=1e-6)


def test_the_chance_of_each_drafted_token_is_kept(recorded):
    _, _, _, trace = recorded
    inside = np.arange(GAMMA) < trace.proposed[:, None]
    assert (trace.draft_prob[inside] > 0).all()
    assert (trace.draft_prob[~inside] == 0).all()


def test_responses_that_lack_a_layer_or_are_too_short(target, tmp_path):
    recipe, responses = answers(tmp_path / "a", target, ["abab"], layers=(1, 2))
    with one_line("layers", "expected states after layer 0", "[1, 2]"):
        record(made("dspark"), target, recipe, responses, meta("dspark", 1.0))
    recipe, responses = answers(tmp_path / "b", target, ["abab"], max_tokens=1, extra=1)
    with one_line("more than gamma = 3"):
        record(made("dspark"), target, recipe, responses, meta("dspark", 1.0))
