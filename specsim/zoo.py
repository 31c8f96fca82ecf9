"""Schedulers as others published them, each in a few lines: what a new one has to beat.

More of them are built in: vLLM's table by batch size (BatchSizeTable), a level of each position's confidence
(Threshold), vllm-ascend's budget (LoadBlind), vLLM's adaptive verification (DSparkAsync(staleness=1)), and a bound
that none can pass (Oracle). EAGLE-2's rule is StaticGamma or TETRIS (see SpecDecPP). DSpark without its calibration
is any of them on ``Scenario(calibrated=False)``, or with ``--raw-confidence``.

Papers that stop drafting early are told here as what is verified: a block is drafted whole, and paid for. Where
they take the drafter's own probability for a confidence, a scheduler here takes what the trace has (its meta's
``confidence_source``), and what :class:`DCut` says of losing the target's distribution where drafts are sampled goes
for TETRIS too.
WrongCost is no one's proposal but a question to ask of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from specsim.asking import Scheduler, fresh
from specsim.schedulers import BuiltIn, GlobalArgmax, at_least, chance, row_counts, top_k
from specsim.types import SpecsimError
from specsim.views import Array, Lens, OracleView, StepView

Kind = Literal["flat", "scaled", "stale"]


@dataclass(frozen=True, repr=False)
class TETRIS(BuiltIn):
    """The draft tokens of the batch that survive best, so many (``budget``) whatever the step costs (arXiv 2502.15197).

    A server has room for so many tokens a step; taking the largest products of probabilities, prefix by prefix,
    gives the most accepted tokens that can be expected of it. The product is the view's survival.
    """

    budget: int
    synchronous = True
    needs_confidence = True

    def __post_init__(self) -> None:
        at_least("TETRIS", "budget", self.budget, 0)

    def __call__(self, view: StepView) -> Lens:
        return top_k(view.survival, self.budget)


@dataclass(frozen=True, repr=False)
class SmartSpec(BuiltIn):
    """One length for the whole batch, that of the most goodput (arXiv 2406.14066; later called TurboSpec).

    Goodput of length k over R requests: R·(1 + α + … + α^k) tokens, and the first tokens of prompts that end, over
    the seconds of a step with R·k drafts. α is the chance that a draft token is accepted where those before it were:
    accepted tokens over tried ones in the steps so far, a step counting ``decay`` times as much as the next.
    ``acceptance`` is assumed at first and always counts as one token: after many steps without drafts α has
    come back to it, and drafts are tried again. An answer that ends inside a block looks like a rejection.
    """

    acceptance: float = 0.7
    decay: float = 0.9
    uses_previous = True

    def __post_init__(self) -> None:
        chance("SmartSpec", "acceptance", self.acceptance)
        chance("SmartSpec", "decay", self.decay, "0 or more and below 1", below=1)

    def start(self) -> Scheduler:
        """A fresh scheduler that counts what was tried and what was accepted."""
        counts = np.zeros(2)  # accepted, tried

        def schedule(view: StepView) -> Lens:
            if view.previous:
                last = view.previous[-1]
                accepted = last.emitted - 1
                counts[:] *= self.decay
                counts[:] += accepted.sum(), (accepted + (accepted < last.draft_lens)).sum()
            alpha = (counts[0] + self.acceptance) / (counts[1] + 1)
            k = np.arange(view.gamma + 1)
            tokens = view.num_seqs * np.add.accumulate(alpha**k) + view.finishing_prefills
            best = int((tokens / view.step_seconds(view.num_seqs * k)).argmax())
            return np.full(view.num_seqs, best)

        return schedule

    def __call__(self, view: StepView) -> Lens:
        raise TypeError("SmartSpec remembers past steps: call start() and use what it returns")


@dataclass(frozen=True, repr=False)
class SpecDecPP(BuiltIn):
    """Stop once a rejection is likelier than a bound (``rejection``): SpecDec++, arXiv 2405.19715.

    Position k is verified if 1 − c_1·…·c_{k−1} ≤ h: the draft that tips the scale still is, so no decision
    depends on the token that it is about, and the first always is. Threshold looks at each confidence alone.
    EAGLE-2 (arXiv 2406.16858) ranks drafts by the same product and keeps a fixed number of them: on chains
    StaticGamma by request, TETRIS over a batch.
    """

    rejection: float = 0.7
    synchronous = True
    needs_confidence = True

    def __post_init__(self) -> None:
        chance("SpecDecPP", "rejection", self.rejection)

    def __call__(self, view: StepView) -> Lens:
        return np.minimum(1 + row_counts(1 - view.survival <= self.rejection), view.gamma)


@dataclass(frozen=True, repr=False)
class DCut(GlobalArgmax):
    """The most expected tokens a second over all budgets, by the drafter's softmax (vllm-project/vllm#47131, #44885).

    It is GlobalArgmax: what differs is the confidence, so give it a trace whose ``confidence_source`` is
    ``draft_prob``. Where drafts are sampled, c_k is p_d(x_k), known only once x_k is drawn, and whether x_k is verified
    depends on x_k itself: the output leaves the target's distribution even if the search stopped early. Where drafts
    are the drafter's argmax (vLLM's default: ``draft_sample_method`` "greedy", vllm-project/vllm#16899), a block and
    its confidences follow from the text before it, and DCut is lossless at any temperature of the target.
    """


@dataclass(frozen=True, repr=False)
class GammaBandit(BuiltIn):
    """Lengths 0..γ for the whole batch, tried and compared while serving: an ε-greedy bandit.

    After BanditSpec (arXiv 2505.15141), which has UCB and EXP3 choose a configuration for one request at a time;
    here the arms are lengths and the reward is tokens a second of the steps they were used in, first tokens of
    prompts included, a step counting ``decay`` times as much as the next of its arm. Batches of 1, 2–3, 4–7, ...
    requests are learned apart, for the best length falls with load. Each arm is tried once, then the best, but
    with chance ``epsilon`` a random one, drawn from a stream of its own ``seed`` (the same on every replica).
    """

    epsilon: float = 0.05
    decay: float = 0.98
    seed: int = 0
    uses_previous = True

    def __post_init__(self) -> None:
        chance("GammaBandit", "epsilon", self.epsilon)
        chance("GammaBandit", "decay", self.decay, "0 or more and below 1", below=1)
        at_least("GammaBandit", "seed", self.seed, 0)

    def start(self) -> Scheduler:
        """A fresh scheduler that knows nothing yet."""
        rng = np.random.default_rng(self.seed)
        known: dict[int, Array] = {}  # by size of batch: tokens and seconds, [2, γ + 1] by length
        last: list[Any] = []  # the step before: its arm's tokens and seconds, first tokens, and price by drafts

        def schedule(view: StepView) -> Lens:
            if last and view.previous:
                arm, first, curve = last
                record = view.previous[-1]
                arm *= self.decay
                arm += record.emitted.sum() + first, curve[record.draft_lens.sum()]
            n, gamma = view.num_seqs, view.gamma
            curve = view.step_curve(n * gamma)
            there = np.flatnonzero(np.isfinite(curve[::n]))  # lengths that the profile can price
            table = known.setdefault(n.bit_length(), np.zeros((2, gamma + 1)))
            rate = np.full(gamma + 1, np.inf)  # untried ones come first
            np.divide(table[0], table[1], out=rate, where=table[1] > 0)
            explore = rng.random() < self.epsilon
            k = 0  # where nothing has a price, the run ends with an error that says so
            if len(there):
                k = int(rng.choice(there) if explore else there[rate[there].argmax()])
            last[:] = table[:, k], view.finishing_prefills, curve
            return np.full(n, k)

        return schedule

    def __call__(self, view: StepView) -> Lens:
        raise TypeError("GammaBandit remembers past steps: call start() and use what it returns")


@dataclass(frozen=True, repr=False)
class WrongCost(BuiltIn):
    """Another scheduler, shown a wrong price of the step; what the step really costs is unchanged.

    "flat": drafts cost nothing, as where an engine has no table. "scaled": what drafts add to the step counts
    ``factor`` times (a factor on the whole price would move no argmax). "stale": the price is read from ``table``,
    rows (tokens in the forward, seconds of the step) measured some other day or on another machine, linear between
    rows and constant beyond them, as SGLang clamps its own. Steps that the profile cannot price stay infinite.
    """

    scheduler: Any
    kind: Kind = "flat"
    factor: float = 2.0
    table: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        inner, factor = self.scheduler, self.factor
        if isinstance(inner, type) or not (callable(inner) or hasattr(inner, "start")):
            raise SpecsimError(f"WrongCost: scheduler: expected one, such as DSparkAsync(), got {inner!r}")
        if self.kind not in get_args(Kind):
            raise SpecsimError(f"WrongCost: kind: expected flat, scaled or stale, got {self.kind!r}")
        if isinstance(factor, bool) or not isinstance(factor, int | float | np.number) or not 0 <= factor < np.inf:
            raise SpecsimError(f"WrongCost: factor: expected a number, 0 or more, got {factor!r}")
        object.__setattr__(self, "table", _table(self.table, wanted=self.kind == "stale"))
        # What an engine asks of a scheduler, it asks of the one inside.
        for name, default in (("synchronous", False), ("needs_confidence", False), ("uses_previous", True),
                              ("replay", "approximate"), ("oracle", False), ("exact_gamma", None),
                              ("gamma", None)):  # fmt: skip
            object.__setattr__(self, name, getattr(inner, name, default))

    def start(self) -> Scheduler:
        """A fresh scheduler of the kind inside, behind wrong prices."""
        inner = fresh(self.scheduler)
        return lambda view: inner(self._shown(view))

    def _shown(self, view: StepView) -> StepView:
        """``view`` as it is but for step_seconds and step_curve."""
        accepted = getattr(view, "accepted", None)
        shown = (StepView if accepted is None else OracleView)(
            view.request_ids,
            lambda: view.survival,
            self._price(view),
            gamma=view.gamma,
            confidence=lambda: view.confidence,
            prefill_tokens=view.prefill_tokens,
            finishing_prefills=view.finishing_prefills,
            prefilled=view.prefilled,
            previous=view.previous,
        )
        if accepted is not None:
            shown.accepted = accepted  # type: ignore[attr-defined]
        return shown

    def _price(self, view: StepView) -> Callable[[Any], Any]:
        before = view.num_seqs + view.prefill_tokens

        def price(draft_tokens: Any) -> Any:
            right = view.step_seconds(draft_tokens)
            if self.kind == "stale":
                wrong = np.interp(before + np.asarray(draft_tokens), *np.array(self.table, dtype=np.float64).T)
            else:
                none = view.step_seconds(0)
                with np.errstate(invalid="ignore"):  # what has no price is put right below
                    wrong = none + (self.factor if self.kind == "scaled" else 0.0) * (right - none)
            return np.where(np.isfinite(right), wrong, np.inf)[()]

        return price

    def __call__(self, view: StepView) -> Lens:
        raise TypeError("WrongCost may remember past steps: call start() and use what it returns")


def _table(rows: Any, wanted: bool) -> tuple[tuple[int, float], ...]:
    """The rows (tokens, seconds) of a stale table, checked; none unless ``wanted``."""
    if not wanted and rows != ():
        raise SpecsimError("WrongCost: table: has no meaning unless kind is stale")
    expected = "WrongCost: table: expected rows (tokens, seconds), tokens increasing and seconds above 0"
    try:
        table = tuple((int(tokens), float(seconds)) for tokens, seconds in rows)
    except (TypeError, ValueError) as error:
        raise SpecsimError(f"{expected}, got {rows!r}") from error
    tokens = [t for t, _ in table]
    if wanted and not (table and tokens == sorted(set(tokens)) and all(0 < s < np.inf for _, s in table)):
        raise SpecsimError(f"{expected}, got {rows!r}")
    return table
