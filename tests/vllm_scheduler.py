"""vLLM V1's scheduler and block pool, literally and block by block (vllm/v1/core/sched/scheduler.py, block_pool.py).

Slow and plain: what the simulator's runs are compared with. Decodes of a request accept the same number of draft
tokens in every step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field


@dataclass
class Request:
    arrival: float
    prompt: int
    output: int
    name: Callable[[int], Hashable]
    """The name of the content up to and with block j."""
    computed: int = 0
    emitted: int = 0
    named: int = 0
    decodes: bool = False
    blocks: list[int] = field(default_factory=list)
    queued: float = -1.0
    scheduled: float = -1.0
    first: float = -1.0
    finish: float = -1.0
    cached: int = 0
    preemptions: int = 0

    @property
    def known(self) -> int:
        return self.prompt + self.emitted


class Pool:
    def __init__(self, blocks: int, size: int, caching: bool) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self.refs, self.size, self.caching = [0] * blocks, size, caching
        self.name_of: dict[int, Hashable] = {}
        self.where: dict[Hashable, OrderedDict[int, None]] = {}

    def take(self, count: int) -> list[int]:
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.refs[block] = 1
            if block in self.name_of:
                name = self.name_of.pop(block)
                del self.where[name][block]
        return taken

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.refs[block]:
                del self.free[block]
            self.refs[block] += 1

    def give_back(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free[block] = None
        request.blocks, request.named = [], 0

    def find(self, request: Request) -> list[int]:
        hit: list[int] = []
        for j in range((request.known - 1) // self.size if self.caching else 0):
            there = self.where.get(request.name(j))
            if not there:
                break
            hit.append(next(iter(there)))
        return hit

    def set_names(self, request: Request, tokens: int) -> None:
        full = tokens // self.size if self.caching else 0
        for j in range(request.named, full):
            name = request.name(j)
            self.name_of[request.blocks[j]] = name
            self.where.setdefault(name, OrderedDict())[request.blocks[j]] = None
        request.named = max(request.named, full)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.size)


def serve(
    requests: list[Request],
    pool: Pool,
    *,
    budget: int,
    max_num_seqs: int,
    seconds: Callable[[int], float],
    whole_prompt: bool = True,
    gamma: int = 0,
    accepted: int = 0,
) -> list[tuple[float, int, int, int, int]]:
    """Run to the end; a row a step: start, decoding requests, tokens of prompts, blocks in use, waiting."""
    now, arrived, left = 0.0, 0, len(requests)
    running: list[Request] = []
    waiting: deque[Request] = deque()
    steps = []
    while left:
        if not running and not waiting:
            now = max(now, requests[arrived].arrival)
        while arrived < len(requests) and requests[arrived].arrival <= now:
            requests[arrived].queued = now
            waiting.append(requests[arrived])
            arrived += 1
        tokens, preempted, scheduled = budget, False, []
        k = 0
        while k < len(running) and tokens > 0:
            request = running[k]
            wanted = min(1 + gamma if request.decodes else request.known - request.computed, tokens)
            fits = False
            while True:
                need = pool.blocks(request.computed + wanted) - len(request.blocks)
                if need <= len(pool.free):
                    fits = True
                    break
                last = running.pop()
                pool.give_back(last)
                last.computed, last.decodes = 0, False
                last.preemptions += 1
                waiting.appendleft(last)
                preempted = True
                if last is request:
                    break
            if not fits:
                break
            request.blocks += pool.take(max(need, 0))
            pool.set_names(request, min(request.computed + wanted, request.known))
            tokens -= wanted
            scheduled.append((request, wanted))
            k += 1
        while not preempted and waiting and tokens > 0 and len(running) < max_num_seqs:
            request = waiting[0]
            hit = pool.find(request)
            done = len(hit) * pool.size
            chunk = min(request.known - done, tokens)
            unused = sum(not pool.refs[block] for block in hit)
            whole = pool.blocks(request.known) - len(hit) + unused
            need = pool.blocks(done + chunk) - len(hit)
            if (whole_prompt and whole > len(pool.free)) or need + unused > len(pool.free):
                break
            waiting.popleft()
            pool.touch(hit)
            request.blocks, request.named, request.computed = hit + pool.take(need), len(hit), done
            request.cached += done
            if request.scheduled < 0:
                request.scheduled = now
            pool.set_names(request, min(done + chunk, request.known))
            running.append(request)
            scheduled.append((request, chunk))
            tokens -= chunk
        decodes = [wanted for request, wanted in scheduled if request.decodes]
        prompts = sum(chunk for request, chunk in scheduled if not request.decodes)
        held = len(pool.refs) - len(pool.free)
        steps.append((now, len(decodes), prompts, held, len(waiting)))
        now += seconds(sum(decodes) + prompts)
        for request, wanted in scheduled:
            if request.decodes:
                made = min(accepted, wanted - 1) + 1
                request.computed += made
                request.emitted += made
            else:
                request.computed += wanted
                if request.computed == request.known:
                    request.emitted += 1
                    request.decodes = True
                    request.first = now if request.first < 0 else request.first
            if request.emitted >= request.output:
                request.finish = now
                pool.give_back(request)
                running.remove(request)
                left -= 1
    assert len(pool.free) == len(pool.refs)
    return steps
