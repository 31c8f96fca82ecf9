"""Training: the losses are what the papers say, it learns, and an interruption changes nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_models import KINDS, answers, one_line, plain_model, plain_states, tiny_target, torch

from specsim.drafters.batches import draft_ids, draw_batch, target_probabilities
from specsim.drafters.checkpoint import load_checkpoint
from specsim.drafters.responses import Response
from specsim.drafters.train import Training, forward, frequent_tokens, held_out_acceptance, losses, new_drafter, train

LAYERS = (0, 1)


@pytest.fixture(scope="module")
def target():
    return tiny_target(scale=0.5)


@pytest.fixture(scope="module")
def corpus(target, tmp_path_factory):
    rng = np.random.default_rng(0)
    texts = ["".join("abcdefghijkl"[i] for i in rng.integers(12, size=4)) for _ in range(24)]
    return answers(tmp_path_factory.mktemp("corpus"), target, texts, temperature=1.0, max_tokens=30, extra=3)


def options(**fields):
    given = {
        "gamma": 3, "rank": 4, "num_layers": 1, "intermediate_size": 16, "rows": 4, "anchors": 8, "blocks": 32 * 40,
        "learning_rate": 0.01, "held_out": 0.2,
    }  # fmt: skip
    return Training.model_validate(given | fields)


def run(target, corpus, folder, training, **fields):
    return train(training, target, *corpus, LAYERS, folder, **fields)


# Learning


@pytest.mark.parametrize(("kind", "vocabulary"), [("dspark", 0), ("dspark-rnn", 9), ("dflash", 0), ("eagle3", 9),
                                                  ("mtp", 0)])  # fmt: skip
def test_it_learns_and_what_is_saved_is_what_was_learned(target, corpus, tmp_path, kind, vocabulary):
    rows = []
    model = run(target, corpus, tmp_path, options(kind=kind, vocabulary=vocabulary), log=rows.append, every=10)
    assert [row["step"] for row in rows] == [10, 20, 30, 40]
    parts = {"dspark": ["ce", "l1", "bce"], "dspark-rnn": ["ce", "l1", "bce"]}.get(kind, ["ce"])
    assert sum(rows[-1][part] for part in parts) < 0.95 * sum(rows[0][part] for part in parts)
    begun = []
    run(target, corpus, tmp_path / "begun", options(kind=kind, vocabulary=vocabulary, blocks=32), log=begun.append)
    assert rows[-1]["tau"] > begun[0]["tau"] > 1  # on answers it has not seen, and after one step
    assert rows[-1]["tau"] == pytest.approx(1 + sum(rows[-1]["survival"]), abs=0.001)
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == rows
    # On disk: in bfloat16, and the target's own tensors left to the target.
    again = load_checkpoint(tmp_path, target)
    assert again.gamma == (1 if kind == "mtp" else 3)
    recipe, responses = corpus
    columns = [recipe.layers.index(i) for i in model.target_layers]
    batch = draw_batch(responses, 2, 5, columns, 2, model.gamma, np.random.default_rng(1))
    torch.testing.assert_close(forward(again, batch)[0], forward(model, batch)[0].detach(), rtol=0.1, atol=0.1)
    kept = json.loads((tmp_path / "config.json").read_text())["specsim_training"]
    assert Training.model_validate(kept) == options(kind=kind, vocabulary=vocabulary)


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_an_interrupted_training_goes_on_as_if_it_was_not(target, corpus, tmp_path, kind):
    training = options(kind=kind, blocks=32 * 12)
    whole = run(target, corpus, tmp_path / "whole", training, every=4)

    def stop(row):
        if row["step"] == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(target, corpus, tmp_path / "cut", training, every=4, log=stop)
    assert not list((tmp_path / "cut").glob("*.safetensors"))
    parts = run(target, corpus, tmp_path / "cut", training, every=4)
    for name, value in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], value), name
    logs = [(tmp_path / folder / "log.jsonl").read_text() for folder in ("whole", "cut")]
    assert logs[0] == logs[1]
    # Once more changes nothing: it is done.
    seen = []
    done = run(target, corpus, tmp_path / "cut", training, every=4, log=seen.append)
    assert seen == []
    assert torch.equal(done.fc.weight, whole.fc.weight)


def test_another_training_in_the_folder_is_refused(target, corpus, tmp_path):
    training = options(blocks=32 * 2)
    run(target, corpus, tmp_path, training)
    state = tmp_path / "training.pt"
    with one_line(state, "another training"):
        run(target, corpus, tmp_path, options(blocks=32 * 2, learning_rate=0.5))
    with one_line(state, "another training"):
        train(training, target, *corpus, (0,), tmp_path)
    state.write_bytes(state.read_bytes()[:100])
    with one_line(state, "cannot read"):
        run(target, corpus, tmp_path, training)


def test_weights_to_begin_with(target, corpus, tmp_path):
    first = run(target, corpus, tmp_path / "a", options(blocks=32 * 5))
    slow = options(blocks=1, rows=1, anchors=1, learning_rate=1e-9, weight_decay=0.0)
    second = run(target, corpus, tmp_path / "b", slow, start=first)
    for name, value in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], value, rtol=0, atol=1e-6)


def test_responses_that_cannot_be_learned_from(target, corpus, tmp_path):
    recipe, responses = corpus
    with one_line("1 answers", "3 tokens"):
        run(target, (recipe, responses[:1]), tmp_path, options())
    other = recipe.model_copy(update={"layers": (0, 2, 5)})
    with one_line("layers", "after layer 1"):
        run(target, (other, responses), tmp_path, options())


# What is measured


def test_held_out_acceptance_is_what_rejection_sampling_would_keep(target, corpus):
    recipe, responses = corpus
    model = new_drafter(options(vocabulary=8), target, LAYERS, responses)
    torch.nn.init.normal_(model.markov_head.markov_w2.weight)
    columns, rng = [recipe.layers.index(i) for i in LAYERS], np.random.default_rng(4)
    batches = [draw_batch(responses, 2, 6, columns, 2, 3, rng) for _ in range(2)]
    ids = draft_ids(model.vocabulary, 12)
    got = held_out_acceptance(model, target, batches, 1.0, ids)
    plain, survived = plain_model(target), []
    places = {int(token): i for i, token in enumerate(model.vocabulary)}
    for batch in batches:
        q = forward(model, batch)[0].detach().softmax(-1)
        for s in range(2):
            p = plain_states(plain, batch.tokens[s : s + 1])[0][0].softmax(-1)
            for a in range(6):
                at, alive, row = int(batch.positions[s, a]), 1.0, []
                for k in range(3):
                    token = int(batch.tokens[s, at + k + 1])
                    chance = float(q[s, a, k, places[token]]) if token in places else 0.0
                    alive *= min(1.0, chance / float(p[at + k, token]))
                    row.append(alive)
                survived.append(row)
    assert got == pytest.approx(np.mean(survived, 0).tolist(), abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_targets_probabilities_from_its_states(target, temperature):
    logits, states = plain_states(plain_model(target), torch.tensor([[1, 2, 3, 4]]))
    p = (logits / temperature).softmax(-1)
    normalizer = (logits / temperature).logsumexp(-1)
    for vocabulary in (None, torch.tensor([2, 5, 7])):
        got = target_probabilities(target, states[:, :, -1], normalizer, temperature, vocabulary)
        torch.testing.assert_close(got, p if vocabulary is None else p[..., vocabulary], rtol=0, atol=1e-5)


# The losses, against sums over the whole vocabulary

VOCABULARY = torch.tensor([0, 2, 3])


@pytest.fixture
def case():
    """Logits of three of five tokens, confidences, and the target's probabilities of all five; blocks of 4."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, 3, generator=rng)
    full = torch.randn(2, 3, 4, 5, generator=rng).softmax(-1)
    block = torch.randint(5, (2, 3, 5), generator=rng)
    return logits, torch.randn(2, 3, 4, generator=rng), full, block


def by_position(weights, values):
    """The weighted mean over positions of a loss [S, A, γ]."""
    weights = torch.tensor(weights)
    return (values.mean((0, 1)) * weights / weights.sum()).sum()


def test_losses_of_dspark_and_dflash(case):
    logits, confidence, full, block = case
    ids, decay = draft_ids(VOCABULARY, 5), 2.5
    q = torch.zeros_like(full)
    q[..., VOCABULARY] = logits.softmax(-1)
    weights = [np.exp(-(k - 1) / decay) for k in (1, 2, 3, 4)]
    distance = (q - full).abs().sum(-1)  # what the drafter cannot propose counts: full sums to one over all five
    survives = 1 - distance / 2
    said = q.gather(-1, block[..., 1:, None])[..., 0]
    entropy = torch.where(said > 0, -said.clamp(min=1e-9).log(), 0.0)
    sure = confidence.sigmoid()
    bce = -(survives * sure.log() + (1 - survives) * (1 - sure).log())
    parts = losses("dspark", logits, confidence, full[..., VOCABULARY], block, ids, decay)
    want = {
        "ce": 0.1 * by_position(weights, entropy),
        "l1": 0.9 * by_position(weights, distance),
        "bce": by_position(weights, bce),
    }
    assert parts.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(parts[name], want[name].float(), rtol=1e-4, atol=1e-6)
    alone = losses("dflash", logits, None, full[..., VOCABULARY], block, ids, decay)
    assert alone.keys() == {"ce"}
    torch.testing.assert_close(alone["ce"], 10 * want["ce"].float(), rtol=1e-4, atol=1e-6)


def test_loss_of_eagle3(case):
    logits, _, full, block = case
    p = full[..., VOCABULARY]
    parts = losses("eagle3", logits, None, p, block, draft_ids(VOCABULARY, 5), 2.5)
    entropy = -(p * logits.log_softmax(-1)).sum(-1)
    want = by_position([0.8**k for k in range(4)], entropy)
    torch.testing.assert_close(parts["ce"], want.float(), rtol=1e-4, atol=1e-6)


def test_the_confidence_is_taught_and_teaches_nothing_else(case):
    logits, confidence, full, block = case
    logits, confidence = logits.requires_grad_(), confidence.requires_grad_()
    ids = draft_ids(VOCABULARY, 5)
    losses("dspark", logits, confidence, full[..., VOCABULARY], block, ids, 4.0)["bce"].backward()
    assert logits.grad is None
    assert confidence.grad.abs().min() > 0


# The draft vocabulary and the first weights


def test_the_most_frequent_tokens_of_the_answers():
    def response(prompt, answer):
        tokens = torch.tensor(prompt + answer)
        return Response("r", "d", tokens, torch.zeros(0), torch.zeros(0), len(prompt), len(answer))

    responses = [response([9, 9, 9], [5, 5, 2, 7]), response([9], [2, 5, 3])]
    assert frequent_tokens(responses, 2).tolist() == [2, 5]
    assert frequent_tokens(responses, 3).tolist() == [2, 3, 5]  # 3 and 7 come once: the lower one
    assert frequent_tokens(responses, 10).tolist() == list(range(10))


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_drafter_starts_from_the_targets_embedding_head_and_norm(target, corpus, kind):
    model = new_drafter(options(kind=kind, vocabulary=8), target, LAYERS, corpus[1])
    assert model.target_layers == ((2,) if kind == "mtp" else LAYERS)
    assert torch.equal(model.embed_tokens.weight, target.embedding)
    assert torch.equal(model.lm_head.weight, target.head[model.vocabulary])
    assert torch.equal(model.norm.weight, target.model.base_model.norm.weight)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}
    again = new_drafter(options(kind=kind, vocabulary=8), target, LAYERS, corpus[1])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
