"""A scenario and its simulation: SimPy replicas behind a router, fed by one process for arrivals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import simpy
from numpy.typing import NDArray

from specsim.acceptance import Drafter
from specsim.asking import check_callable, scheduler_name
from specsim.feeds import ClosedFeed, OpenFeed, shares_prefixes
from specsim.hardware import Profile, step_cost
from specsim.ledger import Ledger
from specsim.replica import Replica
from specsim.routing import ROUTERS, Router, make_router
from specsim.rules import VLLM, Limits, Rules
from specsim.schedulers import NoSpec
from specsim.stepping import run_in_lockstep
from specsim.types import Ints, Result, SpecsimError, Window, stream
from specsim.workload import ClosedLoop, Workload

STEP_COLUMNS = ("replica", "start", "duration", "num_seqs", "num_tokens", "prefill_tokens", "draft_tokens",
                "kv_tokens", "kv_blocks", "running", "waiting", "emitted")  # fmt: skip

MOST = {"replicas": 10_000, "max_num_seqs": 1 << 16, "max_num_batched_tokens": 1 << 24, "kv_tokens": 1 << 50,
        "block_size": 1 << 16}  # fmt: skip
"""Bounds of a scenario's numbers: beyond them a run would not fit in memory."""


@dataclass(frozen=True)
class Policy:
    """A scheduler and the drafter it runs on: what a comparison compares."""

    scheduler: Any
    drafter: Drafter | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, Drafter | None):
            raise SpecsimError(f"Policy: drafter: expected what load_drafter returns, got {self.drafter!r:.60}")

    def __repr__(self) -> str:
        name = scheduler_name(self.scheduler)
        return f"{name}@{self.drafter.name}" if self.drafter is not None and self.drafter.name else name


@dataclass(frozen=True)
class Scenario:
    """Everything that decides a run, but the seed.

    ``domains`` weighs the domains that requests without one are drawn from (None: the drafter's own,
    equally). ``kv_tokens=None`` takes the profile's, less the drafter's share. ``prefill="free"``
    leaves prompts out of budget, tokens and step time (they still take KV): decode-only studies.
    ``block_size``: tokens in a KV block; ``rules``: how the engine schedules. ``async_scheduling`` plans a step
    while the one before it runs: host time is hidden behind the forward, and a request is admitted a step later.
    ``lockstep``: replicas are data-parallel ranks that step together, the slowest deciding.
    ``extrapolate`` lets steps leave the profile's measured range, at the last slope, and counts them.
    ``calibrated=False`` hides the trace's temperatures from schedulers.
    """

    profile: Profile
    workload: Workload
    drafter: Drafter | None = None
    scheduler: Any = field(default_factory=NoSpec)
    domains: Mapping[str, float] | None = None
    replicas: int = 1
    router: Router = "round_robin"
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    kv_tokens: int | None = None
    block_size: int = 16
    prefill: Literal["chunked", "free"] = "chunked"
    rules: Rules = VLLM
    async_scheduling: bool = False
    lockstep: bool = False
    extrapolate: bool = False
    calibrated: bool = True

    def __post_init__(self) -> None:
        for name in ("replicas", "max_num_seqs", "max_num_batched_tokens", "kv_tokens", "block_size"):
            value = getattr(self, name)
            most = MOST[name]
            if value is not None and not (isinstance(value, int | np.integer) and 1 <= value <= most):
                raise SpecsimError(
                    f"scenario: {name}: expected a whole number, 1 or more and at most {most}, got {value!r}"
                )
        for name, known in (
            ("router", ROUTERS),
            ("prefill", ("chunked", "free")),
        ):
            if getattr(self, name) not in known:
                raise SpecsimError(f"scenario: {name}: expected {' or '.join(known)}, got {getattr(self, name)!r}")
        for domain, weight in (self.domains or {}).items():
            if not (weight >= 0 and np.isfinite(weight)):
                raise SpecsimError(f"scenario: domains: {domain}: expected a weight, 0 or more, got {weight}")
        if self.domains is not None and not sum(self.domains.values()) > 0:
            raise SpecsimError("scenario: domains: expected at least one weight above 0")

    def with_policy(self, policy: Any) -> Scenario:
        """This scenario under another policy: a scheduler, or a Policy with a drafter of its own.

        Where the domains are left to the drafter, they stay those of this scenario's.
        """
        if not isinstance(policy, Policy):
            policy = Policy(policy)
        domains = self.domains or (self.drafter and dict.fromkeys(self.drafter.domains, 1.0)) or None
        drafter = policy.drafter or self.drafter
        return replace(self, scheduler=policy.scheduler, drafter=drafter, domains=domains)


def simulate(
    scenario: Scenario, seed: int = 0, *, steps: bool = False, progress: Callable[[int, int], None] | None = None
) -> Result:
    """Run ``scenario`` once with the random streams of ``seed``; ``steps=True`` keeps the step table.

    Open loop: until every request has finished; closed loop: until the last measured one has.
    ``progress(done, total)`` hears of requests as they finish. Raises SpecsimError where the scenario
    cannot run (see its text).
    """
    return _Run(scenario, seed, steps, progress).result()


class _Run:
    def __init__(self, scenario: Scenario, seed: int, steps: bool, progress: Callable[[int, int], None] | None) -> None:
        if not isinstance(seed, int | np.integer) or seed < 0:
            raise SpecsimError(f"seed: expected a whole number, 0 or more, got {seed!r}")
        self.scenario, self.seed, self.steps, self.progress = scenario, seed, steps, progress
        self.drafter = _drafter_in_use(scenario)
        self.tape = self.drafter.tape(seed, scenario.calibrated) if self.drafter else None
        gamma = self.tape.gamma if self.tape else 0
        limits = self.limits = _limits(scenario, self.drafter, gamma)
        cost = step_cost(
            scenario.profile,
            limits.max_num_batched_tokens + gamma,  # the last decode of a full step has candidates beyond it
            limits.max_num_seqs,
            gamma,
            self.drafter.cost if self.drafter else None,
            extrapolate=scenario.extrapolate,
            hides_host=scenario.async_scheduling,
        )
        self.env = simpy.Environment()
        self.ledger = Ledger(shares_prefixes(scenario.workload))
        self.done = self.env.event()
        self.replicas: list[Replica] = []
        for i in range(scenario.replicas):
            self.replicas.append(
                Replica(
                    i,
                    self.env,
                    self.ledger,
                    limits,
                    scenario.rules,
                    cost,
                    self.tape,
                    scenario.scheduler,
                    self.finished,
                    steps,
                )
            )
        if scenario.lockstep:
            self.env.process(run_in_lockstep(self.env, self.replicas))
        else:
            for replica in self.replicas:
                self.env.process(replica.run())
        self.route = make_router(scenario.router, self.replicas, seed)
        self.domains: tuple[str, ...] = ()
        self.offsets = stream(seed, "acceptance")
        self.domain_draws = stream(seed, "domains")
        self.marks: list[tuple[float, NDArray[np.int64]]] = []

    def result(self) -> Result:
        """Run to the end and gather what is left behind."""
        workload = self.scenario.workload
        self.feed = feed = ClosedFeed(self, workload) if isinstance(workload, ClosedLoop) else OpenFeed(self, workload)
        self.env.process(feed.arrive())
        self.env.run(until=self.done)
        for r in self.replicas:
            r.close()
        (start, before), (end, after) = self.marks
        table = None
        if self.steps:
            rows = [row for r in self.replicas for row in r.steps or ()]
            table = pd.DataFrame(rows, columns=list(STEP_COLUMNS))
            whole = [c for c in STEP_COLUMNS if c not in ("start", "duration")]
            table[whole] = table[whole].astype(np.int64)
        return Result(
            requests=self.ledger.table(self.domains),
            steps=table,
            window=Window(feed.first, feed.last, start, end, after - before),
            domains=self.domains,
            gpus=self.scenario.profile.gpus * self.scenario.replicas,
            num_steps=sum(r.num_steps for r in self.replicas),
            extrapolated_steps=sum(r.extrapolated_steps for r in self.replicas),
            label=repr(Policy(self.scenario.scheduler, self.drafter)),
        )

    def submit(self) -> None:
        """The next request arrives now."""
        request = self.ledger.arrived
        self.ledger.arrived += 1
        self.ledger.arrival[request] = self.env.now
        self.route().submit(request)

    def finished(self, requests: list[int]) -> None:
        """A replica reports requests that finished now."""
        if requests:
            self.feed.finished(requests)
            if self.progress is not None:
                total = self.feed.last - self.feed.first if self.feed.closed else self.feed.last
                self.progress(total - max(self.feed.left, 0), total)

    def mark(self) -> None:
        """Note the time and the tokens emitted so far: an edge of the measurement window."""
        n = len(self.domains)
        tokens = self.ledger.tokens_by_domain(n) + sum(r.batch.emitted_by(n) for r in self.replicas)
        self.marks.append((self.env.now, tokens))

    def add(self, prompt: Ints, output: Ints, names: tuple[str, ...], codes: Ints) -> None:
        """Enter requests in the ledger: give each a domain, where it has none, and a place on the tape."""
        n = len(prompt)
        if names == ("",):
            drafter = self.scenario.drafter
            mix = self.scenario.domains or (drafter and dict.fromkeys(drafter.domains, 1.0)) or {"all": 1.0}
            names = tuple("all" if name == "*" else name for name in mix)
            edges = np.cumsum(np.array(list(mix.values())) / sum(mix.values()))
            codes = np.searchsorted(edges[:-1], self.domain_draws.random(n), side="right")
        self.domains = names
        part, place = np.zeros(n, dtype=np.int64), self.offsets.random(n)
        if self.scenario.drafter is not None:  # checked under NoSpec too: a comparison fails as a whole
            parts = _parts(self.scenario.drafter.domains, names)
        if self.tape is not None:
            part = parts[codes]
        most = self.limits.kv_blocks * self.limits.block_size
        gamma = self.tape.gamma if self.tape else 0
        too_long = np.flatnonzero(prompt + output + gamma > most)
        if len(too_long):
            i = int(too_long[0])
            asked, name = self.scenario.kv_tokens, self.scenario.profile.name
            source = f"profile {name}, kv_tokens" if asked is None else f"--kv-tokens, kv_tokens: {asked}"
            raise SpecsimError(
                f"request {self.ledger.known + i}: {prompt[i]} prompt + {output[i]} output + γ {gamma} tokens can "
                f"never fit in the KV cache of {most} tokens ({source}, in whole blocks of {self.limits.block_size})"
            )
        self.ledger.extend(prompt, output, codes, part, place)


def _drafter_in_use(scenario: Scenario) -> Drafter | None:
    """The drafter that runs, checked against what the scheduler needs; None under NoSpec."""
    scheduler, drafter = scenario.scheduler, scenario.drafter
    name = scheduler_name(scheduler)
    if isinstance(scheduler, NoSpec):
        return None
    if drafter is None:
        check_fit(scheduler, None, 0, False, " (a trace)")
        return None
    first = " (@TRACE:1: the first token of longer blocks)" if getattr(scheduler, "exact_gamma", None) == 1 else ""
    advice = f"; name one with {name}@TRACE{first} or Policy({name}, drafter)"
    check_fit(scheduler, drafter.name, drafter.gamma, drafter.has_confidence, advice)
    return drafter


def check_fit(scheduler: Any, drafter: str | None, gamma: int, has_confidence: bool, advice: str = "") -> None:
    """SpecsimError unless ``scheduler`` can be asked about blocks of ``gamma`` tokens of ``drafter`` (None: none).

    ``advice`` ends the error where another drafter is needed.
    """
    name = scheduler_name(scheduler)
    if isinstance(scheduler, NoSpec):
        return
    check_callable(scheduler)
    if drafter is None:
        raise SpecsimError(f"scheduler {name}: expected a drafter{advice}: only NoSpec runs without one")
    exact = getattr(scheduler, "exact_gamma", None)
    if exact is not None and gamma != exact:
        raise SpecsimError(
            f"scheduler {name}: gamma: expected a drafter of γ = {exact}, got {drafter!r} of γ = {gamma}{advice}"
        )
    least = getattr(scheduler, "gamma", None)
    if isinstance(least, int | np.integer) and least > gamma:
        raise SpecsimError(
            f"scheduler {name}: gamma: expected at most {gamma}, the block length of drafter {drafter!r}"
        )
    if getattr(scheduler, "needs_confidence", False) and not has_confidence:
        raise SpecsimError(f"scheduler {name}: needs confidences, and drafter {drafter!r} has none")


def pool_tokens(profile: Profile, drafter: Drafter | None) -> int | None:
    """Tokens that the profile's KV cache holds beside the drafter's weights and KV; None: not limited.

    Raises SpecsimError where a drafter takes memory and the profile does not tell what a token takes.
    """
    kv_tokens = profile.kv_tokens
    if kv_tokens is None or drafter is None or not (drafter.weight_bytes or drafter.kv_bytes_per_token):
        return kv_tokens
    per_token = profile.kv_bytes_per_token
    if per_token is None:
        raise SpecsimError(
            f"profile {profile.name}: kv_bytes_per_token: expected a number, to take the drafter's memory from"
        )
    return int((kv_tokens * per_token - drafter.weight_bytes) / (per_token + drafter.kv_bytes_per_token))


def _limits(scenario: Scenario, drafter: Drafter | None, gamma: int) -> Limits:
    kv_tokens = pool_tokens(scenario.profile, drafter) if scenario.kv_tokens is None else scenario.kv_tokens
    if scenario.max_num_batched_tokens < 1 + gamma:
        raise SpecsimError(
            f"scenario: max_num_batched_tokens: expected at least 1 + γ = {1 + gamma}, "
            f"got {scenario.max_num_batched_tokens}"
        )
    return Limits(
        max_num_seqs=scenario.max_num_seqs,
        max_num_batched_tokens=scenario.max_num_batched_tokens,
        kv_blocks=1 << 40 if kv_tokens is None else max(kv_tokens, 0) // scenario.block_size,
        prefill_free=scenario.prefill == "free",
        block_size=scenario.block_size,
        ahead=scenario.async_scheduling,
    )


def _parts(domains: tuple[str, ...], names: tuple[str, ...]) -> NDArray[np.int64]:
    """The number among a trace's ``domains`` that serves each of ``names``; ``*`` serves any."""
    known = {name: i for i, name in enumerate(domains)}
    for name in names:
        if name not in known and "*" not in known:
            raise SpecsimError(
                f"domain {name!r}: the trace has no blocks for it, expected one of {', '.join(domains)} "
                "(--domains gives requests others)"
            )
    return np.array([known.get(name, known.get("*", 0)) for name in names], dtype=np.int64)
