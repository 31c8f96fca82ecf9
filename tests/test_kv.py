"""The pool of freed blocks against one that keeps every block by itself, as vLLM does."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.kv import PREFIX_TOKENS, Content, Pool, contents, conversation

SIZE = 128  # tokens in a block: four blocks in a shared prefix
KEPT = PREFIX_TOKENS // SIZE


class Blocks:
    """vLLM's pool, block by block: a free queue, a hash for each full block, reference counts."""

    def __init__(self, blocks):
        self.free = deque(range(blocks))
        self.hash_of = {}
        self.where = {}
        self.refs = [0] * blocks

    def find(self, hashes):
        hit = []
        for key in hashes:
            if not self.where.get(key):
                break
            hit.append(self.where[key][-1])
        return hit

    def touch(self, blocks):
        for block in blocks:
            if not self.refs[block]:
                self.free.remove(block)
            self.refs[block] += 1

    def allocate(self, n):
        taken = [self.free.popleft() for _ in range(n)]
        for block in taken:
            self.refs[block] = 1
            if block in self.hash_of:
                self.where[self.hash_of.pop(block)].remove(block)
        return taken

    def name(self, blocks, hashes):
        for block, key in zip(blocks, hashes, strict=False):
            if block not in self.hash_of:
                self.hash_of[block] = key
                self.where.setdefault(key, []).append(block)

    def give_back(self, blocks):
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)


class Both:
    """The same requests on both pools; what they find and what is free must agree."""

    def __init__(self, blocks, sharing):
        self.pool, self.blocks = Pool(blocks, SIZE, sharing=sharing), Blocks(blocks)
        self.total, self.tokens, self.held = blocks, {}, {}

    def hashes(self, content, tokens):
        shared = [(key, k) for key, size in content.shared for k in range(size)]
        own = [(content.own, k) for k in range(max(tokens // SIZE - len(shared), 0))]
        return (shared + own)[: tokens // SIZE]

    def used(self):
        return sum(-(-t // SIZE) for t in self.tokens.values()) + self.pool.shared

    def admit(self, request, content, tokens):
        """Admit, whole, a request that fits; returns the blocks found."""
        known = self.hashes(content, tokens)[: (tokens - 1) // SIZE]
        hit = self.blocks.find(known)
        match = self.pool.find(content, tokens) if self.pool.tracking else None
        assert len(hit) == (match.hit if match else 0)
        in_use = sum(self.blocks.refs[block] > 0 for block in hit)
        assert in_use == (match.in_use if match else 0)
        needed = -(-tokens // SIZE)
        if needed - in_use > len(self.blocks.free):
            return None
        self.blocks.touch(hit)
        self.held[request] = hit + self.blocks.allocate(needed - len(hit))
        self.blocks.name(self.held[request], self.hashes(content, tokens))
        self.tokens[request] = tokens
        if match:
            self.pool.take(request, content, match)
            self.pool.fill(request, tokens)
            self.pool.settle(self.used())
        self.check()
        return len(hit)

    def grow(self, request, content, tokens):
        needed = -(-tokens // SIZE) - len(self.held[request])
        if needed > len(self.blocks.free):
            return
        self.held[request] += self.blocks.allocate(needed)
        self.blocks.name(self.held[request], self.hashes(content, tokens))
        self.tokens[request] = tokens
        if self.pool.tracking:
            self.pool.settle(self.used())
        self.check()

    def leave(self, request, content, findable):
        if not self.pool.tracking:
            self.pool.settle(self.used())
        tokens = self.tokens.pop(request)
        self.pool.release(request, content, tokens, tokens, findable)
        blocks = self.held.pop(request)
        if not findable:  # nobody has this content: forget its names, as nobody will ask for them
            for block in blocks[sum(size for _, size in content.shared) :]:
                key = self.blocks.hash_of.pop(block, None)
                if key is not None:
                    self.blocks.where[key].remove(block)
        self.blocks.give_back(blocks)
        self.check()

    def check(self):
        assert self.total - self.used() == len(self.blocks.free)
        if self.pool.tracking:
            assert self.pool._queued == len(self.blocks.free) == sum(free.count for free in self.pool._queue)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(12, 60), st.sampled_from(["private", "sessions", "prefixes"]))
def test_what_is_found_is_what_single_blocks_would_hold(data, blocks, kind):
    both = Both(blocks, sharing=kind != "private")
    content, tokens, running, waiting, turns = {}, {}, [], [], {}
    for step in range(data.draw(st.integers(5, 60))):
        action = data.draw(st.sampled_from(["new", "again", "grow", "preempt", "finish"]))
        if action == "new":
            if kind == "prefixes":
                count = data.draw(st.integers(0, 3))
                branch = data.draw(st.integers(0, 1))
                keys = [(branch if k == count - 1 else 0, k) for k in range(count)]
                content[step] = Content(step, [(key, KEPT) for key in keys])
                prompt = count * PREFIX_TOKENS + data.draw(st.integers(1, 700))
            elif kind == "sessions":
                session = data.draw(st.integers(0, 3))
                if any(content[r].own[1] == session for r in [*running, *waiting]):
                    continue  # the turn before has not ended
                prompt = turns.get(session, 0) + data.draw(st.integers(1, 900))
                most = prompt + 400  # no request grows further
                content[step] = conversation(step, session, most, SIZE)._replace(own=("own", session, step))
            else:
                content[step], prompt = Content(step), data.draw(st.integers(1, 900))
            tokens[step] = prompt
            waiting.append(step)
        elif action == "again" and waiting:
            request = waiting[-1]
            if both.admit(request, content[request], tokens[request]) is not None:
                running.append(waiting.pop())
        elif action == "grow" and running:
            request = data.draw(st.sampled_from(running))
            tokens[request] += data.draw(st.integers(1, 40 if kind == "sessions" else 300))
            both.grow(request, content[request], tokens[request])
            tokens[request] = both.tokens[request]
        elif action == "preempt" and running:
            request = running.pop()
            both.leave(request, content[request], findable=True)
            waiting.append(request)
        elif action == "finish" and running:
            request = running.pop(data.draw(st.integers(0, len(running) - 1)))
            both.leave(request, content[request], findable=False)
            if kind == "sessions":
                turns[content[request].own[1]] = tokens[request] + 1
    for request in running:
        both.leave(request, content[request], findable=False)
    assert both.used() == 0
    assert both.pool.shared == 0


def test_a_preempted_request_finds_the_start_that_was_not_taken():
    pool = Pool(10, 16)
    pool.settle(5)
    pool.release(0, Content(0), 5 * 16, 5 * 16, findable=True)
    assert pool.find(Content(0), 5 * 16).hit == 4  # the last token is computed anew
    assert pool.find(Content(0), 5 * 16 + 1).hit == 5
    pool.settle(7)  # the five that were free before, then its last two
    assert pool.find(Content(0), 5 * 16 + 1).hit == 3
    pool.settle(10)
    assert pool.find(Content(0), 5 * 16 + 1).hit == 0
    assert not pool.tracking


def test_without_caching_nothing_is_found():
    pool = Pool(10, 16, caching=False, sharing=True)
    pool.settle(5)
    pool.release(0, Content(0), 5 * 16, 5 * 16, findable=True)
    assert not pool.tracking
    assert pool.find(Content(0), 81).hit == 0


def test_contents_of_prompts_and_sessions():
    three = [(7, 32), (8, 32), (9, 4)]
    assert contents([1100], [1], [[7, 8, 9]], None, 16) == [Content(("own", 0), three)]
    assert contents([1030], [1], [[7, 8, 9]], None, 16)[0].shared == three[:2]
    first, second, third = contents([500, 1100, 100], [20, 5, 1], None, [3, 3, 3], 16)
    assert first.shared == [(((3, 0), 0), 32)]  # 520 tokens: the last eight fill no block
    assert second.shared == [(((3, 0), 0), 32), (((3, 0), 1), 32), (((3, 0), 2), 5)]
    assert third.shared == [(((3, 1), 0), 6)]  # shorter than what was said: another conversation
    assert contents([5], [1], None, None, 16) == [Content(("own", 0))]


@pytest.mark.parametrize("block", [16, 48, 100, 512, 1000, 1024, 2048])
def test_a_block_belongs_to_the_prefix_in_which_it_ends(block):
    sizes = dict(contents([4096], [1], [list(range(8))], None, block)[0].shared)
    assert sum(sizes.values()) == 4096 // block
    for k in range(8):
        ends = [e for e in range(block, 4097, block) if 512 * k < e <= 512 * (k + 1)]
        assert sizes.get(k, 0) == len(ends)


def test_two_that_start_alike_hold_the_start_once():
    pool = Pool(100, SIZE, sharing=True)
    alike = [Content(i, [("a", KEPT)]) for i in range(2)]
    for i in range(2):
        pool.take(i, alike[i], match := pool.find(alike[i], 600))
        pool.fill(i, 600)
    assert match == (KEPT, KEPT, [KEPT], 0)
    assert pool.shared == -KEPT
    pool.release(0, alike[0], 600, 600, findable=False)
    assert pool.find(alike[0], 600).in_use == KEPT
    pool.release(1, alike[1], 600, 600, findable=False)
    assert pool.find(alike[0], 600) == (KEPT, 0, [KEPT], 0)


def test_a_start_that_another_still_computes_is_shared_as_far_as_it_is():
    pool = Pool(100, SIZE, sharing=True)
    first, second = (Content(i, [("a", KEPT)]) for i in range(2))
    pool.take(0, first, pool.find(first, 600))
    pool.fill(0, 2 * SIZE)
    match = pool.find(second, 600)
    assert match == (2, 2, [2], 0)
    pool.take(1, second, match)
    assert pool.shared == -2
    pool.release(0, first, 2 * SIZE + 5, 2 * SIZE + 5, findable=True)  # put out before it was done
    assert pool.shared == 0
    pool.release(1, second, 600, 600, findable=False)
    assert pool.shared == 0
    assert pool.find(first, 600).hit == 2
