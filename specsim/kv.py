"""A replica's KV cache: which freed blocks still hold content that can be found again.

vLLM V1's block pool (vllm/v1/core/block_pool.py and kv_cache_manager.py), counted in runs of blocks instead of
one by one. Free blocks stand in a queue and are taken from its head, the least recently used first. A request
that leaves puts its blocks at the tail, its last block first, and full blocks keep their content until they are
taken: a preempted request, the next turn of a session, or a prompt that starts alike finds the unbroken start.

How many blocks running requests hold is the replica's to say (``settle``). As long as no prefixes are shared and
nobody was preempted, nothing could be found, and no order is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Content(NamedTuple):
    """What a request's KV holds: shared prefixes (key, blocks) in order, then what is its ``own``."""

    own: Hashable
    shared: Sequence[tuple[Hashable, int]] = ()


class Match(NamedTuple):
    """Blocks that a request finds: ``hit`` in all, ``in_use`` of them held by others already.

    ``parts``: blocks found of each shared prefix, in order; ``own``: of its own content.
    """

    hit: int = 0
    in_use: int = 0
    parts: Sequence[int] = ()
    own: int = 0


PREFIX_TOKENS = 512
"""Prompt tokens that each of a workload's prefix hashes stands for; the last may stand for fewer."""


def contents(
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    hashes: Sequence[Sequence[int]] | None,
    sessions: Sequence[int] | None,
    block_size: int,
) -> list[Content]:
    """What the requests of a workload hold: prompts of the same prefix hashes share them, and turns of one session
    all that was said before. A prompt shorter than that begins its session anew.
    """
    found, said, epochs = [], dict[int, int](), dict[int, int]()
    for i, (prompt, output) in enumerate(zip(prompt_tokens, output_tokens, strict=True)):
        if hashes is not None:
            found.append(Content(("own", i), split(hashes[i], prompt, block_size)))
        elif sessions is not None:
            session = sessions[i]
            if prompt < said.get(session, 0):
                epochs[session] = epochs.get(session, 0) + 1
            said[session] = prompt + output
            found.append(conversation(i, (session, epochs.get(session, 0)), prompt + output, block_size))
        else:
            found.append(Content(("own", i)))
    return found


def conversation(request: int, session: Hashable, tokens: int, block_size: int) -> Content:
    """A turn that ends with ``tokens`` tokens said in its ``session``."""
    return Content(
        ("own", request), split([(session, k) for k in range(-(-tokens // PREFIX_TOKENS))], tokens, block_size)
    )


def split(keys: Sequence[Hashable], tokens: int, block_size: int) -> list[tuple[Hashable, int]]:
    """The full blocks of ``tokens`` tokens by the key of the prefix in which each ends, keys without any left out."""
    ends = [min((k + 1) * PREFIX_TOKENS, tokens) // block_size for k in range(len(keys))]
    sizes = (end - start for start, end in zip([0, *ends], ends, strict=False))
    return [(key, size) for key, size in zip(keys, sizes, strict=True) if size > 0]


@dataclass(slots=True)
class _Free:
    """Free blocks that were put in the queue together, and the chain whose last blocks they are."""

    count: int
    chain: _Chain | None


@dataclass(slots=True)
class _Chain:
    """Blocks of consecutive content, of which ``cached`` from the start on hold theirs.

    ``users``: how many of its blocks each running request takes from it, one of which, the ``filler``, may make
    it longer; with none it stands in the queue.
    """

    key: Hashable
    cached: int = 0
    filler: int | None = None
    users: list[int] = field(default_factory=list)
    free: _Free | None = None

    @property
    def held(self) -> int:
        return max(self.users, default=0)


@dataclass(slots=True)
class _Use:
    """A running request's part in a shared prefix, from its block ``start`` on.

    ``counted`` of its blocks are the chain's. One request ``fills`` a chain: it gets longer as that one goes.
    """

    chain: _Chain
    start: int
    size: int
    counted: int
    fills: bool


class Pool:
    """The ``blocks`` blocks of one replica; ``sharing``: the workload has prefixes or sessions to find again.

    ``caching=False``: freed blocks lose their content at once. ``shared``: blocks in use beyond those that each
    running request counts for itself; below 0 where several hold the same.
    """

    def __init__(self, blocks: int, block_size: int, caching: bool = True, sharing: bool = False) -> None:
        self.blocks, self.block_size, self.caching = blocks, block_size, caching
        self.sharing = self.tracking = caching and sharing
        self.shared = 0
        self._queue: deque[_Free] = deque()
        self._queued = 0
        self._chains: dict[Hashable, _Chain] = {}
        self._uses: dict[int, list[_Use]] = {}

    # Looking up and taking

    def find(self, content: Content, tokens: int, named: Callable[[int], int] = lambda request: 0) -> Match:
        """What a request that knows ``tokens`` tokens finds of them; the last is always computed anew.

        ``named`` tells how many tokens of a running request have blocks that can be found.
        """
        limit = (tokens - 1) // self.block_size
        hit = in_use = 0
        parts = []
        for key, size in content.shared:
            chain = self._chains.get(key)
            if chain and chain.filler is not None and chain.cached < size:
                self.fill(chain.filler, named(chain.filler))
            found = min(chain.cached, size, limit - hit) if chain else 0
            parts.append(found)
            hit += found
            in_use += found if chain and chain.users else 0
            if found < size:
                return Match(hit, in_use, parts)
        chain = self._chains.get(content.own)
        own = min(chain.cached, limit - hit) if chain else 0
        return Match(hit + own, in_use, parts, own)

    def take(self, request: int, content: Content, match: Match) -> None:
        """Give a request what it found, and let it fill the shared prefixes that nobody holds."""
        uses, start = [], 0
        for i, (key, size) in enumerate(content.shared):
            found = match.parts[i] if i < len(match.parts) else 0
            chain = self._chains.get(key)
            fills = chain is None or not chain.users
            if fills:
                chain, found = self._claim(key, found), size
            elif not found:
                break  # another request fills it, and what follows
            else:
                self.shared -= found
            assert chain is not None
            chain.users.append(found)
            chain.filler = request if fills else chain.filler
            uses.append(_Use(chain, start, size, found, fills))
            start += size
        if uses:
            self._uses[request] = uses
        if content.own in self._chains:
            self._claim(content.own, match.own)
            del self._chains[content.own]
            self._forget()

    def fill(self, request: int, tokens: int) -> None:
        """A request holds ``tokens`` tokens: the shared prefixes among them can be found from now on."""
        for use in self._uses.get(request, ()):
            if use.fills:
                use.chain.cached = max(use.chain.cached, _inside(tokens // self.block_size - use.start, use.size))

    # Giving back

    def release(self, request: int, content: Content, named: int, held: int, findable: bool) -> None:
        """A request leaves, of whose tokens ``named`` can be found in full blocks and ``held`` have blocks.

        ``findable``: it will look for its own content again.
        """
        self.fill(request, named)
        uses = self._uses.pop(request, [])
        full, blocks = named // self.block_size, -(-held // self.block_size)
        parts = [_inside(blocks - use.start, use.size) if use.fills else use.counted for use in uses]
        own = full - sum(size for _, size in content.shared)
        if own > 0 and findable and self.caching:
            chain = self._chains[content.own] = _Chain(content.own, own)
            self._push(blocks - sum(parts) - own, None)
            self._push(own, chain)
        else:
            self._push(blocks - sum(parts), None)
        for use, part in zip(reversed(uses), reversed(parts), strict=True):
            self._leave(use, part)
        self._forget()

    def _leave(self, use: _Use, part: int) -> None:
        """One request less uses a chain, of which it held ``part`` blocks; what nobody else uses is free."""
        chain, before = use.chain, use.chain.held
        chain.users.remove(use.counted)
        chain.filler = None if use.fills else chain.filler
        left = chain.held
        self.shared += use.counted - (before - left)
        if chain.users:
            chain.cached = min(chain.cached, left)  # no more is held; whether the rest is found is not kept
            self._push(part - left, None)
        elif chain.cached:
            self._push(part - chain.cached, None)
            self._push(chain.cached, chain)
        else:
            self._push(part, None)
            del self._chains[chain.key]

    def settle(self, used: int) -> None:
        """Running requests hold ``used`` blocks: what they have taken since comes from the head of the queue.

        While no order is kept, it says what is free before the first request is put out.
        """
        left = max(self.blocks - used, 0)  # without lookahead, drafts may be kept that no block was reserved for
        self._pop(self._queued - left)
        self._push(left - self._queued, None)
        if self.tracking:
            self._forget()

    def _claim(self, key: Hashable, found: int) -> _Chain:
        """A chain that nobody uses, with ``found`` blocks of it out of the queue; the others lose their name."""
        chain = self._chains.setdefault(key, _Chain(key))
        if chain.free is not None:
            chain.free.count -= found
            chain.free.chain, chain.free = None, None
            self._queued -= found
        chain.cached = found
        return chain

    def _push(self, count: int, chain: _Chain | None) -> None:
        if count > 0:
            free = _Free(count, chain)
            if chain is not None:
                chain.free = free
            self._queue.append(free)
            self._queued += count

    def _pop(self, count: int) -> None:
        while count > 0:
            free = self._queue[0]
            taken = min(free.count, count)
            count -= taken
            self._queued -= taken
            free.count -= taken
            if free.chain is not None:
                free.chain.cached -= taken
                if not free.chain.cached:
                    del self._chains[free.chain.key]
            if not free.count:
                self._queue.popleft()

    def _forget(self) -> None:
        """Keep no order once nothing can be found."""
        self.tracking = self.sharing or bool(self._chains)
        if not self.tracking:
            self._queue.clear()
            self._queued = 0


def _inside(blocks: int, size: int) -> int:
    return min(max(blocks, 0), size)
