"""The target with its cache against transformers' own plain forward."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from tiny_models import CONFIGS, one_line, plain_model, plain_states, tiny_target, torch

from specsim.drafters.packed import Piece
from specsim.drafters.target import KVCache, load_target, pick_device, pick_dtype


@pytest.fixture(scope="module", params=CONFIGS)
def models(request):
    target = tiny_target(request.param)
    return target, plain_model(target)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def test_whole_texts_without_a_cache(models):
    target, model = models
    tokens = torch.randint(12, (3, 9), generator=torch.Generator().manual_seed(0))
    logits, states = plain_states(model, tokens)
    last, hidden = target.forward(tokens, None, (2, 0))
    close(last @ target.head.T, logits)
    close(hidden, states[:, :, [2, 0]])
    assert target.forward(tokens)[1] is None


def test_rejected_tokens_leave_no_trace_and_rows_keep_their_own_lengths(models):
    target, model = models
    rng = torch.Generator().manual_seed(1)
    texts = torch.randint(12, (4, 14), generator=rng)
    kept = torch.tensor([1, 4, 2, 3])
    cache = KVCache(target, 4, 16)
    target.forward(texts[:, :4], cache)
    cache.keep(kept)  # ragged: each row counts another number of the four
    for counts in ([2, 0, 1, 3], [1, 3, 0, 2]):
        counts = torch.tensor(counts)
        fed = torch.randint(12, (4, 3), generator=rng)  # what is not kept is some other text
        fed = torch.where(torch.arange(3) < counts[:, None], at(texts, kept, 3), fed)
        target.forward(fed, cache)
        cache.keep(counts)
        kept = kept + counts
    rows = torch.tensor([3, 1])
    cache.select(rows)
    assert cache.lengths.tolist() == kept[rows].tolist()
    last, hidden = target.forward(at(texts, kept, 2)[rows], cache, (1, 2))
    for i, row in enumerate(rows.tolist()):
        n = int(kept[row])
        logits, states = plain_states(model, texts[row : row + 1, : n + 2])
        close(last[i] @ target.head.T, logits[0, n:])
        close(hidden[i], states[0, n:, [1, 2]])


def at(texts, starts, count):
    return texts.gather(1, starts[:, None] + torch.arange(count))


def test_branches_side_by_side_behind_a_shared_text(models):
    # A small model drafts so: slots need not be positions, and a mask says who sees whom.
    target, model = models
    text = torch.tensor([[3, 1, 4, 1, 5, 9]])
    cache = KVCache(target, 1, 6)
    target.forward(text, cache)
    before, wide = cache.store.clone(), cache.widened(4)
    ends, branches = torch.tensor([[2, 6]]), torch.tensor([[[7, 8], [2, 0]]])  # two tokens after 2 and after 6 of text
    for k in range(2):
        slots = 6 + 2 * k + torch.arange(2)[None]
        mask = torch.cat((torch.arange(6) < ends[..., None], torch.eye(2, dtype=torch.bool).repeat(1, k + 1)[None]), -1)
        last, _ = target.forward(branches[..., k], wide, positions=ends + k, slots=slots, mask=mask)
        for branch, end in enumerate(ends[0].tolist()):
            whole = torch.cat((text[:, :end], branches[:, branch, : k + 1]), 1)
            close(last[:, branch] @ target.head.T, plain_states(model, whole)[0][:, -1])
    assert torch.equal(cache.store, before)  # the copy was written to, not the cache it came from


def test_generation_token_by_token_is_the_models_own(models):
    target, model = models
    text = torch.tensor([[1, 2, 3]])
    want = text
    for _ in range(10):
        want = torch.cat((want, plain_states(model, want)[0][:, -1:].argmax(-1)), 1)
    cache, got, fed = KVCache(target, 1, 20), text, text
    for _ in range(10):
        last, _ = target.forward(fed, cache)
        cache.keep(torch.tensor([fed.shape[1]]))
        fed = (last[:, -1:] @ target.head.T).argmax(-1)
        got = torch.cat((got, fed), 1)
    assert got.tolist() == want.tolist()


def test_a_folder_is_loaded_in_the_type_that_was_asked_for(models, tmp_path):
    target, _ = models
    target.model.save_pretrained(tmp_path)
    tokens = torch.tensor([[1, 2, 3]])
    again = load_target(tmp_path, "float32", "cpu")
    assert again.tokenizer is None
    close(again.forward(tokens)[0], target.forward(tokens)[0])
    assert load_target(tmp_path, "bfloat16", "cpu").embedding.dtype == torch.bfloat16


@pytest.mark.parametrize(("ends", "expected"), [(None, ()), (3, (3,))])
def test_end_tokens(ends, expected):
    assert tiny_target(ends=ends).end_tokens == expected


def test_what_is_no_model(tmp_path):
    with one_line(tmp_path / "none", "config.json"):
        load_target(tmp_path / "none")
    with one_line(tmp_path, "config.json"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with one_line(tmp_path, "cannot load"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3Eagle3Model"]}')
    with one_line(tmp_path, "is a drafter (Qwen3Eagle3Model)"):
        load_target(tmp_path)
    for device in ("meta", "tpu9"):
        with one_line("device", device):
            pick_device(device)
    with one_line("dtype", "'int8'"):
        pick_dtype("int8", torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), ["model.layers.2.mlp.up_proj.weight", "missing"]),
        (lambda t: t.pop("lm_head.weight"), ["lm_head.weight", "missing"]),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            ["model.norm.weight", "expected [16], got [3]"],
        ),
        (lambda t: t["model.norm.weight"].fill_(torch.nan), ["not numbers"]),
    ],
)
def test_weights_that_are_not_all_there_are_not_drawn_at_random(tmp_path, change, parts):
    safetensors = pytest.importorskip("safetensors.torch")
    tiny_target().model.save_pretrained(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    tensors = safetensors.load_file(path)
    change(tensors)
    safetensors.save_file(tensors, path, {"format": "pt"})
    with one_line(tmp_path.name, *parts):
        load_target(tmp_path, "float32")


def test_pieces_of_text_in_one_forward_are_what_each_is_alone(models):
    target, model = models
    texts = torch.randint(12, (5, 20), generator=torch.Generator().manual_seed(3))
    known = [4, 7, 2]
    cache = KVCache(target, 5, 24)
    target.forward_packed([Piece(row, texts[row : row + 1, :n]) for row, n in enumerate(known)], cache)
    cache.lengths[:3] = torch.tensor(known)
    # Three go on by 3, 1 and 2 tokens (the rest is padding that must not be run), two prompts join.
    counts = torch.tensor([3, 1, 2])
    fed = torch.stack([texts[row, n : n + 3] for row, n in enumerate(known)])
    pieces = [Piece(0, fed, counts), Piece(3, texts[3:5, :6])]
    with counted_tokens(target) as tokens:
        results = target.forward_packed(pieces, cache, (0, 2))
    assert tokens == [18]
    for piece, (last, hidden) in zip(pieces, results, strict=True):
        for i in range(len(piece.tokens)):
            row, n = piece.first + i, 0 if piece.first else known[i]
            count = 6 if piece.first else int(counts[i])
            logits, states = plain_states(model, texts[row : row + 1, : n + count])
            close(last[i, :count] @ target.head.T, logits[0, n:])
            close(hidden[i, :count], states[0, n:, [0, 2]])
            assert not last[i, count:].any()


@contextmanager
def counted_tokens(target):
    """The tokens that each forward of the model runs."""
    seen = []
    hook = target.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()
