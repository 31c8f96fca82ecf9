"""The target's answers and their states: whole, repeatable, and taken up again where they were left."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from tiny_models import answers, chi_square, joint, one_line, plain_model, plain_states, prompts, tiny_target, torch

from specsim.drafters.responses import Recipe, load_responses, respond

TEXTS = ["abc", "b", "cabba", "abc", "lk", "acd", "dddddd", "e"]


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3", ends=4)


@pytest.fixture(scope="module")
def model(target):
    return plain_model(target)


def recipe(target, **fields):
    given = {"target": target.name, "temperature": 0.8, "max_tokens": 9, "layers": (2, 0), "extra": 3, "batch": 3}
    return Recipe.model_validate(given | fields)


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    return respond(target, prompts(TEXTS), tmp_path_factory.mktemp("responses") / "made", recipe(target))


# What is in them


def test_states_and_normalizers_are_those_of_a_plain_forward_over_the_whole_answer(folder, model):
    made, responses = load_responses(folder)
    assert made.layers == (2, 0)
    seen = set()
    for r in responses:
        n, start = len(r.tokens), r.prompt_tokens
        text = "".join("abcdefghijkl"[i] for i in r.tokens[:start].tolist())
        assert text == TEXTS[int(r.id[1:])]
        logits, states = plain_states(model, r.tokens[None])
        assert r.hidden.shape == (n, 2, 16)
        torch.testing.assert_close(r.hidden[:-1], states[0, :-1, [2, 0]], rtol=0, atol=2e-5)
        want = (logits[0, start - 1 : -1] / 0.8).logsumexp(-1)
        torch.testing.assert_close(r.log_normalizer[start - 1 : -1], want, rtol=0, atol=2e-5)
        assert r.log_normalizer[: start - 1].isnan().all()
        # Cut at an end token, which is not kept, or told on by the extra.
        assert 4 not in r.tokens[start:].tolist()
        assert 1 <= r.output_tokens == min(n - start, 9)
        seen.add(n - start == 12)
    assert seen == {True, False}  # some ended by themselves and some did not
    assert len({r.id for r in responses}) == len(responses)


@pytest.mark.parametrize("states", ["float16", "bfloat16"])
def test_states_in_half_the_space(target, folder, tmp_path, states):
    _, half = load_responses(respond(target, prompts(TEXTS), tmp_path, recipe(target, states=states)))
    for a, b in zip(half, load_responses(folder)[1], strict=True):
        assert a.hidden.dtype == getattr(torch, states)
        assert torch.equal(a.tokens, b.tokens)
        torch.testing.assert_close(a.hidden.float(), b.hidden, rtol=0.01, atol=0.01)


def test_greedy_answers_are_the_models_argmax(target, model, tmp_path):
    _, responses = load_responses(respond(target, prompts(TEXTS), tmp_path, recipe(target, temperature=0.0)))
    got = {r.id: r.tokens.tolist() for r in responses}
    for i, text in enumerate(TEXTS):
        tokens = ["abcdefghijkl".index(letter) for letter in text]
        start = len(tokens)
        while len(tokens) < start + 12:
            token = int(plain_states(model, torch.tensor([tokens]))[0][0, -1].argmax())
            if token == 4:
                break
            tokens.append(token)
        if len(tokens) == start:  # an answer of nothing is left out
            assert f"p{i}" not in got
        else:
            assert got[f"p{i}"] == tokens


def test_answers_are_drawn_from_the_model(tmp_path):
    target = tiny_target(vocab=5)
    temperature, count = 0.7, 4000
    _, responses = answers(
        tmp_path, target, ["abc"] * count, temperature=temperature, max_tokens=1, extra=1, batch=count
    )
    pairs = torch.stack([r.tokens[3:5] for r in responses])
    got = torch.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25)
    assert chi_square(got, joint(plain_model(target), [0, 1, 2], 2, temperature)) > 0.001


# Made once, and the same again


def test_made_again_they_are_the_same_bytes_and_an_interrupted_run_goes_on(target, folder, tmp_path):
    again = respond(target, prompts(TEXTS), tmp_path / "again", recipe(target))
    want = content(folder)
    assert list(want) == ["responses.json", *(f"shard-{i:05d}.safetensors" for i in range(3))]
    assert content(again) == want
    (again / "shard-00001.safetensors").unlink()
    untouched = (again / "shard-00000.safetensors").stat().st_mtime_ns
    seen = []
    respond(target, prompts(TEXTS), again, recipe(target), lambda done, of: seen.append((done, of)))
    assert content(again) == want
    assert (again / "shard-00000.safetensors").stat().st_mtime_ns == untouched
    most = recipe(target).max_tokens + recipe(target).extra
    assert {of for _, of in seen} == {3 * most}
    steps = [done for done, _ in seen]
    assert steps == sorted(steps)
    assert {most, 2 * most, 3 * most} <= set(steps)
    assert len(set(steps)) > 3  # and while the batch that was missing is answered


def test_another_seed_gives_other_answers(target, folder, tmp_path):
    _, other = load_responses(respond(target, prompts(TEXTS), tmp_path, recipe(target, seed=1)))
    assert [r.tokens.tolist() for r in other] != [r.tokens.tolist() for r in load_responses(folder)[1]]


def test_another_recipe_or_other_prompts_are_refused(target, folder):
    before = content(folder)
    changed = [TEXTS[0][::-1] + "a", *TEXTS[1:]]
    for texts, fields, words in (
        (TEXTS, {"seed": 2}, "another recipe"),
        (TEXTS, {"temperature": 1.0}, "another recipe"),
        (TEXTS[1:], {}, "other prompts"),
        (changed, {}, "other prompts"),  # under the same ids
    ):
        with one_line(folder / "responses.json", words):
            respond(target, prompts(texts), folder, recipe(target, **fields))
    renamed = [replace(p, domain="other") for p in prompts(TEXTS)]
    with one_line(folder / "responses.json", "other prompts"):
        respond(target, renamed, folder, recipe(target))
    assert content(folder) == before


def test_answers_that_do_not_say_how_they_were_made_are_not_used(target, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "responses.json").unlink()
    with one_line(copy, "without responses.json"):
        respond(target, prompts(TEXTS), copy, recipe(target, temperature=0.5))
    assert not (copy / "responses.json").exists()


def test_prompts_that_are_too_long_are_left_out(target, tmp_path):
    _, responses = load_responses(respond(target, prompts(TEXTS), tmp_path, recipe(target, max_prompt_tokens=3)))
    assert max(r.prompt_tokens for r in responses) <= 3
    with one_line("prompts", "at most 1"):
        respond(target, prompts(["abc"]), tmp_path / "none", recipe(target, max_prompt_tokens=1))


def test_a_batch_of_answers_that_all_end_at_once(tmp_path):
    target = tiny_target(ends=4)
    first = int(plain_states(plain_model(target), torch.tensor([[0, 1]]))[0][0, -1].argmax())
    target.model.generation_config.eos_token_id = first
    folder = respond(target, prompts(["ab", "ab"]), tmp_path, recipe(target, temperature=0.0))
    assert load_responses(folder)[1] == []


# Broken folders


def test_broken_shards(target, tmp_path):
    respond(target, prompts(TEXTS[:2]), tmp_path, recipe(target))
    path = tmp_path / "shard-00000.safetensors"
    whole = path.read_bytes()
    for size in (len(whole) - 10, 40, 0):
        path.write_bytes(whole[:size])
        with one_line(path):
            load_responses(tmp_path)
    safetensors = pytest.importorskip("safetensors.torch")
    for metadata in (None, {"names": "{"}, {"names": '{"ids": [], "domains": []}'}):
        safetensors.save_file({"tokens": torch.zeros(3)}, path, metadata)
        with one_line(path):
            load_responses(tmp_path)
    path.unlink()
    with one_line(tmp_path, "shard-"):
        load_responses(tmp_path)
    (tmp_path / "responses.json").write_text('{"recipe": {"target": "t"}, "prompts": []}')
    with one_line(tmp_path / "responses.json", "recipe.temperature"):
        load_responses(tmp_path)
