"""Measuring: shapes, the ragged forward against a plain one, the grid, the fit, and what is written."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest

from specsim.hardware.model_shape import PRESETS, ModelShape
from specsim.types import SpecsimError

torch = pytest.importorskip("torch")

from measure_inputs import made_up  # noqa: E402

from specsim.measure import machine  # noqa: E402
from specsim.measure.attention import (  # noqa: E402
    Lengths,
    PaddedCache,
    PagedCache,
    cache_tokens,
    fill,
    make_cache,
)
from specsim.measure.drafting import DraftBatch, draft_block, draft_chain, make_draft_weights  # noqa: E402
from specsim.measure.fit import decompose, relative_error  # noqa: E402
from specsim.measure.grid import Grid, Point, context_lengths, query_lengths  # noqa: E402
from specsim.measure.model import Batch, Decoder, make_fused, make_weights  # noqa: E402
from specsim.measure.records import kv_room  # noqa: E402
from specsim.measure.shape import find_shape  # noqa: E402
from specsim.measure.timing import Runner, take  # noqa: E402

TINY = ModelShape(
    name="tiny", hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=64, tied=True,
    qk_norm=True, max_position=512,
)  # fmt: skip
CPU = torch.device("cpu")


# Shapes


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-4b", 4.0), ("qwen3-8b", 8.2), ("qwen3-14b", 14.8), ("qwen3-32b", 32.8), ("llama-3.1-8b", 8.0),
     ("smollm2-135m", 0.1345)],
)  # fmt: skip
def test_presets_have_the_parameters_their_models_are_named_for(name, billions):
    assert PRESETS[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_kv_of_a_token():
    assert PRESETS["qwen3-8b"].kv_bytes_per_token(2) == 2 * 36 * 8 * 128 * 2


CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_a_config_gives_its_shape(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert find_shape(str(folder)) == TINY
    changed = find_shape(str(folder / "config.json"), layers=7, tied=None)
    assert changed == TINY.model_copy(update={"name": "tiny-changed", "layers": 7})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": 8}, "num_experts: expected none with model_type 'qwen3', got 8"),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2},
            "a mixture of experts cannot be measured, expected a dense model",
        ),
        ({"model_type": "gpt2"}, "model_type: expected one of llama, mistral, qwen2, qwen3, "),
        ({"hidden_size": "32"}, "hidden_size: "),
        ({"num_key_value_heads": 3}, "heads: expected a multiple of the 3 kv_heads, got 4"),
        ({"head_dim": 7}, "head_dim: expected an even number, got 7"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected greater than or equal to 1, got 0"),
        ({"head_dim": None, "num_attention_heads": 5}, "num_attention_heads: expected a divisor of 32, got 5"),
    ],
)
def test_a_config_that_is_no_such_model_is_refused(tmp_path, change, said):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | change))
    with pytest.raises(SpecsimError, match=re.escape(said)):
        find_shape(str(path))


def test_a_missing_field_and_an_unknown_model_are_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "vocab_size"}))
    with pytest.raises(SpecsimError, match="vocab_size: is missing"):
        find_shape(str(path))
    with pytest.raises(SpecsimError, match="did you mean qwen3-8b"):
        find_shape("qwen3-8")
    with pytest.raises(SpecsimError, match="--model: qwen3-30b-a3b: a mixture of experts cannot be measured"):
        find_shape("qwen3-30b-a3b")
    with pytest.raises(SpecsimError, match="also --head-dim, --heads, --intermediate"):
        find_shape(None, hidden=32)


# The forward


def reference(weights: Any, shape: ModelShape, tokens: list[int], keys: Any, values: Any) -> Any:
    """Logits [q, vocab] of one sequence, written out plainly; ``keys``, ``values``: [layers][c, kv_heads, d] so far."""
    context, width = keys[0].shape[0], shape.head_dim
    positions = torch.arange(context, context + len(tokens))

    def norm(x: Any) -> Any:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def turn(x: Any) -> Any:
        half = width // 2
        angle = positions[:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
        plane = torch.complex(x[..., :half].double(), x[..., half:].double())
        plane = plane * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat((plane.real, plane.imag), -1).float()

    x = weights.embed[torch.tensor(tokens)]
    for i, layer in enumerate(weights.layers):
        q, k, v = (norm(x) @ layer.qkv.T).split([shape.heads * width, *[shape.kv_heads * width] * 2], -1)
        q, k, v = (t.view(len(tokens), -1, width) for t in (q, k, v))
        q, k = turn(norm(q)), turn(norm(k))
        k, v = torch.cat((keys[i], k)), torch.cat((values[i], v))
        mixed = torch.zeros(len(tokens), shape.heads, width)
        for h in range(shape.heads):
            g = h // (shape.heads // shape.kv_heads)
            for t in range(len(tokens)):
                seen = context + t + 1
                weight = (k[:seen, g] @ q[t, h] / math.sqrt(width)).softmax(0)
                mixed[t, h] = weight @ v[:seen, g]
        x = x + mixed.flatten(1) @ layer.out.T
        gate, up = (norm(x) @ layer.gate_up.T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ layer.down.T
    return norm(x) @ weights.head.T


def plain_varlen(q, keys, values, query_starts, key_starts, most_queries, most_keys, **how):
    """What varlen_attn promises, for paged keys and values, one sequence and head at a time."""
    assert how["enable_gqa"]
    out = torch.zeros_like(q)
    for r in range(len(query_starts) - 1):
        start, end, used = int(query_starts[r]), int(query_starts[r + 1]), int(how["seqused_k"][r])
        assert end - start <= most_queries
        assert used <= most_keys
        assert int(key_starts[r + 1] - key_starts[r]) == used
        k, v = (pool[how["block_table"][r].long()].flatten(0, 1)[:used] for pool in (keys, values))
        for t in range(start, end):
            seen = used - (end - 1 - t) if how["window_size"] == (-1, 0) else used
            for h in range(q.shape[1]):
                g = h * k.shape[1] // q.shape[1]
                weight = (k[:seen, g] @ q[t, h] / math.sqrt(q.shape[2])).softmax(0)
                out[t, h] = weight @ v[:seen, g]
    return out


def make_decoder(way: str, tokens: int) -> tuple[Decoder, Any]:
    generator = torch.Generator().manual_seed(3)
    like = torch.empty(0)
    if way == "paged":
        pages = torch.empty(tokens // 16 + 1, 16, TINY.kv_heads, TINY.head_dim)
        cache: Any = PagedCache(fill(pages, 1.0, generator), fill(pages.clone(), 0.7, generator), plain_varlen)
    else:
        cache = make_cache(TINY, tokens, like, generator)
        assert isinstance(cache, PaddedCache)
    return Decoder(TINY, cache, make_fused(False)), make_weights(TINY, like, 128, generator)


def held(cache: Any, plan: Any, layer: int, row: int, size: int) -> tuple[Any, Any]:
    """Keys and values [size, kv_heads, d] that a sequence has in the cache before the step."""
    if isinstance(cache, PagedCache):
        pages = plan.tables[layer, row].long()
        return tuple(pool[pages].flatten(0, 1)[:size].clone() for pool in (cache.keys, cache.values))  # type: ignore
    keys, values = cache._place(layer, plan.shape[0], plan.shape[2])
    return keys[row, :, :size].transpose(0, 1).clone(), values[row, :, :size].transpose(0, 1).clone()


@pytest.mark.parametrize("way", ["padded", "paged"])
@pytest.mark.parametrize(
    ("queries", "contexts"),
    [([3, 1, 4, 2], [20, 5, 17, 31]), ([2, 2, 2], [7, 16, 30]), ([1, 1], [12, 33]), ([6], [0])],
    ids=["ragged", "even", "single", "chunk"],
)
def test_a_ragged_batch_gives_what_its_sequences_give_alone(way, queries, contexts):
    lengths = Lengths(queries, contexts, 40, max(queries))
    decoder, weights = make_decoder(way, cache_tokens(TINY.layers, len(queries), 40))
    total = sum(queries)
    padded = total + 3 if way == "paged" else total
    plan = decoder.cache.plan(TINY.layers, lengths, padded)
    tokens = torch.arange(padded) * 7 % TINY.vocab
    positions = torch.zeros(padded, dtype=torch.int64)
    positions[:total] = torch.cat([c + torch.arange(q) for c, q in zip(contexts, queries, strict=True)])
    before = [[held(decoder.cache, plan, layer, r, c) for layer in range(TINY.layers)] for r, c in enumerate(contexts)]
    got = decoder.logits(weights, Batch(tokens, positions, torch.arange(total), plan))
    start = 0
    for r, q in enumerate(queries):
        keys, values = zip(*before[r], strict=True)
        alone = reference(weights, TINY, tokens[start : start + q].tolist(), keys, values)
        torch.testing.assert_close(got[start : start + q], alone, atol=2e-4, rtol=2e-4)
        start += q


def test_layers_and_sequences_have_places_of_their_own():
    decoder, _ = make_decoder("paged", 2 * 3 * 48)
    plan: Any = decoder.cache.plan(2, Lengths([2, 1, 3], [30, 40, 20], 48, 3), 8)
    assert len(set(plan.tables.flatten().tolist())) == plan.tables.numel() == 2 * 3 * 3
    own = plan.slots[:, :6].flatten().tolist()
    assert len(set(own)) == 12
    spare = (decoder.cache.keys.shape[0] - 1) * 16  # type: ignore[union-attr]
    assert plan.slots[:, 6:].unique().tolist() == [spare]
    assert max(own) < spare


def test_a_small_pool_is_used_round_and_round():
    decoder, _ = make_decoder("paged", 96)
    plan: Any = decoder.cache.plan(2, Lengths([1, 1], [30, 30], 48, 1), 2)
    assert plan.tables.max() < 6
    padded, _ = make_decoder("padded", 96)
    one, other, again = (padded.cache._place(i, 1, 48)[0].data_ptr() for i in range(3))  # type: ignore[union-attr]
    assert one == again != other


def test_a_block_drafter_sees_its_block_both_ways_and_a_chain_only_what_came_before():
    """The last of the block's positions changes the first one's token's confidence only in a parallel drafter."""
    decoder, target = make_decoder("padded", cache_tokens(2, 2, 40))
    generator = torch.Generator().manual_seed(5)
    weights = make_draft_weights(decoder, "parallel", 2, 4, torch.empty(0), generator)
    contexts = torch.tensor([10, 20])
    batch = DraftBatch(
        anchors=torch.tensor([3, 5]),
        states=torch.randn(2 * 4, 5 * TINY.hidden, generator=generator),
        positions=(contexts[:, None] + torch.arange(3)).flatten(),
        slots=(contexts[:, None] + torch.arange(4)).flatten(),
        plan=decoder.cache.plan(2, Lengths([3, 3], contexts.tolist(), 40, 3, causal=False), 6),
    )
    tokens, sure = draft_block(decoder, target, weights, batch, 3)
    assert tokens.shape == sure.shape == (3, 2)
    assert ((sure > 0) & (sure < 1)).all()
    moved = batch._replace(positions=batch.positions + torch.tensor([0, 0, 9, 0, 0, 0]))
    again = draft_block(decoder, target, weights, moved, 3)[1]
    assert again[0, 0] != sure[0, 0]
    assert again[0, 1] == pytest.approx(float(sure[0, 1]), abs=1e-6)  # another sequence
    # The head loop makes a position depend on the token before it.
    other = draft_block(decoder, target, weights._replace(markov_out=-9 * weights.markov_out), batch, 3)[0]
    assert (other != tokens).any()

    chain = make_draft_weights(decoder, "autoregressive", 1, 4, torch.empty(0), generator)
    plan = decoder.cache.plan(1, Lengths([1, 1], contexts.tolist(), 40, 1), 2)
    states = torch.randn(2, TINY.hidden, generator=generator)
    one = DraftBatch(batch.anchors, states, contexts, contexts, plan)
    tokens, sure = draft_chain(decoder, target, chain, one, 3)
    assert tokens.shape == sure.shape == (3, 2)
    torch.testing.assert_close(draft_chain(decoder, target, chain, one, 2)[0], tokens[:2])


# The grid


def test_every_size_is_verified_and_every_context_and_prefills_are_there():
    grid = Grid((1, 2, 8, 12, 32, 64), (100, 400), (), gamma=3, max_seqs=8)
    points = grid.points()
    assert grid.verify_limit == 32
    assert len(points) == len(set(points))
    for p in points:
        if p.kind == "verify":
            assert p.num_seqs <= min(p.tokens, 8)
            assert p.tokens <= 4 * p.num_seqs
    sizes = {(p.tokens, p.context) for p in points if p.kind == "verify"}
    assert sizes == {(t, c) for t in (1, 2, 8, 12, 32) for c in (100, 400)}
    assert [p.tokens for p in points if p.kind == "chunk"] == [12, 32, 64]
    assert [p.num_seqs for p in points if p.kind == "draft"] == [1, 2, 4, 8]
    assert {p.num_seqs for p in points if p.tokens == 12} == {1, 3, 5, 8}


def test_drafting_is_for_no_more_sequences_than_a_forward_holds():
    points = Grid((2, 6), (100,), (), gamma=3, max_seqs=64).points()
    assert [p.num_seqs for p in points if p.kind == "draft"] == [1, 2, 4, 6]
    assert [p.num_seqs for p in points if p.kind == "sync"] == [6]


def test_sizes_are_padded_to_graphs_and_above_them_as_they_are():
    grid = Grid((1, 3, 8, 9, 20), (64,), (1, 4, 8), gamma=3, max_seqs=8)
    assert [grid.padded(n) for n in (1, 2, 3, 4, 5, 8, 9, 20)] == [1, 4, 4, 4, 8, 8, 9, 20]
    assert grid.verify_limit == 8


@pytest.mark.parametrize(
    ("change", "said"),
    [({"tokens": (0,)}, "--tokens: expected sizes of 1"), ({"gamma": 0}, "--gamma: expected 1 to 64, got 0"),
     ({"max_seqs": 0}, "--max-seqs: expected 1"), ({"contexts": ()}, "--contexts: expected at least one")],
)  # fmt: skip
def test_impossible_grids_are_refused(change, said):
    with pytest.raises(SpecsimError, match=said):
        Grid(**{"tokens": (1,), "contexts": (8,), "capture": (), "gamma": 3, "max_seqs": 4} | change)


@pytest.mark.parametrize(("tokens", "seqs"), [(20, 5), (17, 9), (9, 9), (30, 7)])
def test_lengths_are_ragged_and_add_up(tokens, seqs):
    rng = np.random.default_rng(0)
    for _ in range(20):
        queries = query_lengths(tokens, seqs, 4, rng)
        assert sum(queries) == tokens
        assert min(queries) >= 1
        assert max(queries) <= 5
        contexts = context_lengths(seqs, 100, rng)
        assert sum(contexts) == 100 * seqs
        assert min(contexts) >= 75
        assert max(contexts) <= 125
    assert len({*query_lengths(tokens, seqs, 4, rng)}) > 1 or tokens in (seqs, 5 * seqs)


# Timing


def test_rounds_are_interleaved_and_stop_in_time():
    order: list[tuple[int, int]] = []
    runners = [
        Runner(Point("verify", n, 1, 1), lambda i, n=n: order.append((n, i)), lambda: None)  # type: ignore[misc]
        for n in range(1, 6)
    ]
    how: dict[str, Any] = {"sets": 2, "sample_seconds": 0.0, "report": lambda done, total: None}
    measured = take(runners, CPU, rounds=4, until=math.inf, rng=np.random.default_rng(1), **how)
    assert [len(m.seconds) for m in measured] == [4] * 5
    rounds = [order[5 * i : 5 * i + 5] for i in range(5)]  # the first is the warm-up
    assert all(sorted(n for n, _ in part) == [1, 2, 3, 4, 5] for part in rounds)
    assert len({tuple(n for n, _ in part) for part in rounds[1:]}) > 1
    assert [{i for _, i in part} for part in rounds[1:]] == [{0}, {1}, {0}, {1}]
    late = take([Runner(Point("verify", 1, 1, 1), lambda i: None, lambda: None)], CPU, rounds=9, until=0.0,
                rng=np.random.default_rng(1), **how)  # fmt: skip
    assert len(late[0].seconds) == 3


# The fit


@pytest.mark.parametrize("capture", [(), (1, 4, 16, 64)], ids=["plain", "graphs"])
def test_a_sum_of_parts_is_found_again(capture):
    grid = Grid((1, 2, 3, 4, 8, 16, 40, 64), (128, 512), capture, gamma=7, max_seqs=32)
    measured = made_up(grid)
    found = decompose(measured, grid)
    error = relative_error(measured, found)
    assert np.abs(error[found.fitted]).max() < 1e-4
    assert error[~found.fitted] == pytest.approx(1 / 0.9 - 1, abs=1e-3)
    assert found.tokens.tolist() == ([1, 4, 16, 64] if capture else [1, 2, 3, 4, 8, 16, 40, 64])
    assert found.seconds == pytest.approx(0.01 + 1e-4 * found.tokens, rel=1e-3)
    assert found.kv_seconds[-1] == pytest.approx(1e-7 * found.kv_tokens[-1], rel=1e-2)
    assert found.seqs_seconds[-1] == pytest.approx(2e-5 * (found.num_seqs[-1] - 1), rel=1e-2)
    assert (found.high - found.seconds >= 0.0099 * found.seconds).all()
    assert (found.seconds - found.low > 0).all()


def test_what_could_be_any_part_is_put_into_tokens():
    """One context, and so few sequences that both could stand for what every step costs."""
    grid = Grid((1, 2, 4), (32,), (), gamma=3, max_seqs=4)
    found = decompose(made_up(grid, noise=0.01), grid)
    assert found.seconds == pytest.approx(0.01 + 1e-4 * found.tokens, rel=0.03)
    assert found.kv_tokens[-1] == 128
    single = Grid((1,), (32,), (), gamma=3, max_seqs=1)
    found = decompose(made_up(single), single)
    assert found.seconds == pytest.approx([0.0101], rel=1e-3)
    assert (found.num_seqs.tolist(), found.kv_tokens.tolist()) == ([1], [0, 32])


def test_noise_does_not_move_the_fit_far_and_no_part_falls():
    grid = Grid((1, 2, 4, 8, 16, 32, 64), (128, 512), (), gamma=7, max_seqs=32)
    found = decompose(made_up(grid, noise=0.02), grid)
    assert found.seconds == pytest.approx(0.01 + 1e-4 * found.tokens, rel=0.05)
    assert (np.diff(found.seqs_seconds) >= 0).all()
    assert (np.diff(found.kv_seconds) >= 0).all()


# The machine


def test_what_nvidia_smi_says_is_read():
    line = "NVIDIA H200, 570.86.15, 1980, 3201, 1980, 41, 118.20, [N/A]\n"
    assert machine.parse_query(line) == {
        "name": "NVIDIA H200", "driver": "570.86.15", "sm_clock_mhz": 1980.0, "memory_clock_mhz": 3201.0,
        "max_sm_clock_mhz": 1980.0, "temperature_c": 41.0, "power_w": 118.2,
    }  # fmt: skip


def test_conditions_are_said_before_and_after():
    said = machine.in_words(
        {"sm_clock_mhz": 1980.0, "temperature_c": 41.0}, {"sm_clock_mhz": 1755.0, "temperature_c": 63.0}
    )
    assert said == "before and after: SM clock 1980 and 1755 MHz, temperature 41 and 63 °C"
    assert machine.in_words({}, {}) == "before and after: temperature not readable"


def test_kv_room_is_what_the_weights_leave():
    shape = PRESETS["qwen3-8b"]
    assert kv_room(shape, 2, 141e9) == pytest.approx((0.9 * 141e9 - 2 * 8.19e9) / 147456, rel=1e-3)
    with pytest.raises(SpecsimError, match="--device-memory"):
        kv_room(shape, 2, 16e9)


def test_a_graph_reads_its_inputs_where_they_are_put_for_each_set(monkeypatch):
    """With CUDA's graphs stood in for: the batch that was captured stays where it is, and holds the set asked for."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    from specsim.measure import session

    replayed: list[int] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(replay=lambda: replayed.append(1))
    monkeypatch.setattr(session, "torch", SimpleNamespace(cuda=SimpleNamespace(
        Stream=lambda: stream, current_stream=lambda: stream, stream=lambda s: nullcontext(),
        CUDAGraph=lambda: graph, graph=lambda g, pool: nullcontext(),
    )))  # fmt: skip
    decoder, _ = make_decoder("padded", cache_tokens(2, 2, 40))
    batches = [
        Batch(*(torch.arange(3) + i for _ in range(3)), decoder.cache.plan(2, Lengths([2, 1], [9 + i, 7], 40, 2), 3))
        for i in range(2)
    ]
    held: list[Any] = []
    bench = SimpleNamespace(graph_pool="pool")
    runner = session._Bench._ready(bench, Point("verify", 3, 2, 8), batches, held.append, True)  # type: ignore[arg-type]
    assert len(held) == 2  # once before capturing, once captured
    assert held[0] is held[1]
    for i in (1, 0, 1):
        runner.load(i)
        runner.step()
        for mine, given in ((held[0].tokens, batches[i].tokens), (held[0].plan.slot, batches[i].plan.slot)):
            assert torch.equal(mine, given)
            assert mine.data_ptr() != given.data_ptr()
        assert torch.equal(held[0].plan.mask, batches[i].plan.mask)
    assert not torch.equal(batches[0].plan.slot, batches[1].plan.slot)
    assert replayed == [1, 1, 1]
