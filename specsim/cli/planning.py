"""plan: which scheduler and how many GPUs keep the promises of each tier."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from specsim.acceptance import load_trace
from specsim.blocktrace import Trace
from specsim.checkup import acceptance_check, gamma_check, gamma_words, sells_at_will
from specsim.cli import show
from specsim.cli.inputs import is_typed, typed_command
from specsim.cli.options import ENGINE, LOAD, MOST_SEEDS, RUN, WHAT, Options, option, with_options
from specsim.engine import Policy, Scenario
from specsim.files import check_apart, check_output, read_start
from specsim.hardware import load_profile
from specsim.importers.acceptance import load_acceptance
from specsim.plan import MOST_DEMAND, MOST_HEADROOM
from specsim.plan import plan as make_plan
from specsim.plan_answer import Plan
from specsim.plan_words import amount
from specsim.sensitivity import check_memory, memory_caveats
from specsim.synthesis import Synthetic
from specsim.tiers import Tier, parse_tier
from specsim.trial import THINKING, grid, most_users
from specsim.types import SpecsimError

PLAN = "Plan"
LEFT_OUT = ("profile", "closed", "poisson", "ramp", "rate", "replicas", "router", "lockstep")
"""Options that a plan answers, or spells otherwise."""
PLANNED = ("users", "scheduler", "shared", "headroom", "gpu_price", "sensitivity")
"""Options that a plan alone reads."""


@partial(with_options, leave_out=LEFT_OUT)
def plan(
    options: Options,
    context: typer.Context,
    profile: Annotated[
        list[Path] | None, option("--profile", help="Hardware profile (hw_profiles/*.json). Repeatable.", panel=WHAT)
    ] = None,
    rate: Annotated[
        float | None,
        option(
            "--rate",
            help="Demand: requests/s, Poisson unless --cv or --arrivals. A plan needs this or --users; with "
            "--check-gamma alone it says only that loads are requests/s, whatever its number.",
            panel=LOAD,
        ),
    ] = None,
    users: Annotated[
        int | None,
        option(
            "--users",
            help="Demand: users, each with one request at a time. A replica is asked about with at most --max-num-seqs "
            f"of them, {THINKING} times as many with --think.",
            panel=LOAD,
        ),
    ] = None,
    tier: Annotated[
        list[str] | None,
        option(
            "--tier",
            help="'pro: ttft<=1s@p95, share=0.3': a name, bounds on interactivity (tok/s, >=), ttft, tpot, e2e and "
            "queue (s or ms, <=) @mean, p10, p50, p90, p95 or p99 (default: p10 of interactivity, p90 of the others), "
            "and a share of the demand (default: an equal part of what is left). A plan needs one; repeatable.",
            panel=PLAN,
        ),
    ] = None,
    shared: Annotated[
        bool, option("--shared", help="One pool for all tiers, which keeps the strictest bounds.", panel=PLAN)
    ] = False,
    headroom: Annotated[str, option("--headroom", help="Traffic held on top: 20% or 0.2.", panel=PLAN)] = "20%",
    gpu_price: Annotated[
        list[float] | None,
        option("--gpu-price", help="Dollars for a GPU-hour; once, or once for each --profile.", panel=PLAN),
    ] = None,
    drafter_bytes: Annotated[
        float, option("--drafter-bytes", help="Weights of --trace's drafter, bytes, out of the KV cache.", panel=ENGINE)
    ] = 0.0,
    drafter_kv_bytes: Annotated[
        float, option("--drafter-kv-bytes", help="Bytes that a token takes in the drafter's KV cache.", panel=ENGINE)
    ] = 0.0,
    sensitivity: Annotated[
        bool, option("--sensitivity/--no-sensitivity", help="How the answer moves with inputs 10 % off.", panel=PLAN)
    ] = True,
    acceptance: Annotated[
        Path | None,
        option(
            "--check-acceptance",
            help="A trace, or an engine's counters as trace import reads them: is that acceptance normal?",
            panel=PLAN,
        ),
    ] = None,
    gamma_load: Annotated[
        float | None,
        option(
            "--check-gamma",
            help="Users (with --rate: requests/s) of one replica: is γ right there?",
            panel=PLAN,
        ),
    ] = None,
    seeds: Annotated[
        int,
        option(
            "--seeds", help="Repetitions, seeds 0, 1, ...: they make the intervals.", min=1, max=MOST_SEEDS, panel=RUN
        ),
    ] = 3,
    jobs: Annotated[int, option("--jobs", help="Processes (-1: one a core).", panel=RUN)] = -1,
    json: Annotated[Path | None, option("--json", help="Also write the results as JSON here.", panel=RUN)] = None,
) -> None:
    """Say which scheduler, and how many GPUs, keep the promises of each tier under a demand.

    Without --scheduler it compares NoSpec, MTP1, StaticGamma(γ), DSparkGreedy and DSparkAsync, as the trace allows.
    Exit code 1 where no scheduler keeps some tier.

    Example: specsim plan --profile hw_profiles/dsv4-flash-b300-tp4.json --trace traces/qwen3-4b-dspark.json --gamma 5
    --users 500 --tier 'pro: interactivity>=120@p10, ttft<=1s@p95, share=0.3' --tier 'standard: interactivity>=60@p10'
    """
    inputs = options.files() | {"--profile": list(profile or []), "--check-acceptance": acceptance}
    check_apart({"--json": json}, inputs)
    check_output("--json", json)
    tiers = [parse_tier(text) for text in tier or []]
    extra = _fraction("--headroom", headroom)
    if not tiers and acceptance is None and gamma_load is None:
        raise SpecsimError("--tier: expected at least one, such as 'pro: interactivity>=80@p10, ttft<=1s@p95'")
    if not tiers:
        _refuse_unused(context, profile or [], gamma_load is not None)
    data: dict[str, Any] = {"command": typed_command(context)}
    infeasible: tuple[str, ...] = ()
    if acceptance is not None:
        data["acceptance"] = _acceptance(acceptance)
    if tiers or gamma_load is not None:
        base, policies, profiles = _build(options, profile or [], rate, users, bool(tiers))
        base = _with_memory(base, drafter_bytes, drafter_kv_bytes)
        for one in profiles:
            try:
                check_memory(base, one)
            except SpecsimError as error:
                raise SpecsimError(f"--drafter-bytes: {error}") from error
        if tiers:
            with show.progress("trials simulated") as report:
                answer = make_plan(
                    base, policies, tiers, rate=rate, users=users, profiles=profiles, gpu_price=gpu_price,
                    headroom=extra, shared=shared, seeds=range(seeds), sensitivity=sensitivity, jobs=jobs,
                    progress=report,
                )  # fmt: skip
            _print(answer)
            data |= answer.to_dict()
            infeasible = answer.infeasible
        else:
            for line in memory_caveats(base, profiles[:1]):
                show.console().print(f"note: {line}", soft_wrap=True)
        if gamma_load is not None:
            data["gamma"] = _gamma(base, gamma_load, seeds, jobs)
    if json is not None:
        show.write_json_file(json, data)
    if infeasible:
        raise typer.Exit(1)


def _refuse_unused(context: typer.Context, profiles: list[Path], of_gamma: bool) -> None:
    """SpecsimError for an option typed beside checks alone, without a plan, that none of them reads."""
    check, reads = ("--check-gamma", None) if of_gamma else ("--check-acceptance", ("acceptance", "json", "scenario"))
    for parameter in context.command.params:
        name = parameter.name or ""
        if is_typed(context, name) and (name in PLANNED if reads is None else name not in reads):
            typed = _typed(parameter, context.params[name])
            raise SpecsimError(f"{typed}: has no meaning with {check} alone, without --tier")
    if len(profiles) > 1:
        raise SpecsimError(f"--profile: expected one with {check} alone, without --tier, got {len(profiles)}")


def _typed(parameter: Any, value: Any) -> str:
    """The option's long name; of a pair, the one that says ``value``."""
    names = parameter.secondary_opts if parameter.secondary_opts and value is False else parameter.opts
    return next(str(o) for o in names if o.startswith("--"))


def _build(
    options: Options, profile: list[Path], rate: float | None, users: int | None, planned: bool
) -> tuple[Scenario, list[Policy] | None, list[Any]]:
    """The base scenario with the demand's kind of load, the policies (None: the usual ones) and the profiles."""
    if not profile:
        raise SpecsimError("--profile: expected a hardware profile, such as hw_profiles/dsv4-flash-b300-tp4.json")
    if (rate is not None and users is not None) or (planned and rate is None and users is None):
        raise SpecsimError("demand: expected either --rate (requests/s) or --users")
    for name, value in (("--rate", rate), ("--users", users)):
        if value is not None and not 0 < value <= MOST_DEMAND:
            got = min(value, 10**300) if isinstance(value, int) else value  # a whole number may have no float
            raise SpecsimError(f"{name}: expected a number above 0, at most {MOST_DEMAND:g}, got {got:g}")
    spelled = {"poisson": "1"} if rate is not None else {"closed": "1"}
    if options.arrivals is not None:
        if rate is None:
            raise SpecsimError("--arrivals: expected --rate: recorded requests have no users")
        spelled = {}
    try:
        base, policies, _ = replace(options, profile=profile[0], **spelled).build()  # type: ignore[arg-type]
    except SpecsimError as error:
        raise SpecsimError(str(error).replace("--poisson", "--rate").replace("--closed", "--users")) from error
    return base, policies if options.scheduler else None, [base.profile, *map(load_profile, profile[1:])]


def _with_memory(base: Scenario, weights: float, per_token: float) -> Scenario:
    for name, value in (("--drafter-bytes", weights), ("--drafter-kv-bytes", per_token)):
        if not 0 <= value < math.inf:
            raise SpecsimError(f"{name}: expected bytes, 0 or more, got {value:g}")
        if value and base.drafter is None:
            raise SpecsimError(f"{name}: has no meaning without --trace")
    if base.drafter is None or not (weights or per_token):
        return base
    return replace(base, drafter=replace(base.drafter, weight_bytes=weights, kv_bytes_per_token=per_token))


def _print(answer: Plan) -> None:
    console = show.console()
    for tier in answer.tiers:
        console.print(_offers(answer, tier))
        console.print(answer.words(tier) + "\n", soft_wrap=True)
    for line in (answer.total_words(), *answer.leaders_words()):
        console.print(line + "\n", soft_wrap=True)
    if len(moves := answer.shown_sensitivity().astype(object)):
        noise = moves.pop("noise")
        moves["load"] = [f"{'≈ ' * n}{show.number(load)}" for n, load in zip(noise, moves["load"], strict=True)]
        rows = moves.where(moves.notna(), None).to_numpy().tolist()
        names = {
            "tier": "tier", "change": "what is off", "profile": "profile", "policy": "best then",
            "load": f"{answer.unit} a replica", "gpus": "GPUs", "gpus_kept": "GPUs with the plan's choice",
        }  # fmt: skip
        heads = [names[column] for column in moves.columns]
        told = "capacities move as they do under seed 0"
        told += "; ≈: within the plan's interval, perhaps noise" if any(noise) else ""
        console.print(show.table("If something is 10 % off", heads, rows, told))
    for line in (*answer.notes, *answer.caveats):
        console.print(f"note: {line}", soft_wrap=True)


def _offers(answer: Plan, tier: Tier) -> Any:
    priced = any(offer.price is not None for offer in answer.offers)
    rows = []
    for offer in answer.of(tier):
        found = offer.capacity
        load, ends = "–", f"cannot be kept: {found.nearest}"
        if found.feasible:
            low, high = show.number(found.low, 3), show.number(found.high, 3)
            load, ends = f"{show.number(found.value, 3)} ({low}–{high})", found.binding
        if found.at_least:
            load = f"≥ {show.number(found.value, 3)}"
        row = [offer.policy, load, ends, offer.replicas, offer.gpus]
        rows.append([offer.profile] * answer.several_profiles + row + [offer.dollars_per_million] * priced)
    heads = ["scheduler", f"{answer.unit} a replica", "ends by", "replicas", "GPUs"]
    heads = ["profile"] * answer.several_profiles + heads
    share = f", {show.number(100 * (tier.share or 1))} % of {amount(answer.demand, answer.unit)}"
    return show.table(f"{tier}{share}", heads + ["$/M tokens"] * priced, rows)


def _acceptance(path: Path) -> dict[str, Any]:
    check = acceptance_check(_read(path), path.stem)
    rows = [[str(int(r["position"])), *(float(r[c]) for c in check.positions.columns[1:6]), r["verdict"]]
            for _, r in check.positions.iterrows()]  # fmt: skip
    heads = ["position", "yours", "low", "high", "published from", "to", ""]
    show.console().print(show.table(f"Conditional acceptance by position, {path}", heads, rows))
    show.console().print(check.words() + "\n", soft_wrap=True)
    return {"drafter": check.drafter, "kinds": check.kinds, "sources": check.sources, "tau": check.tau,
            "tau_cycles": check.tau_cycles, "proposing": check.proposing,
            "tau_blocks": check.tau_blocks, "tau_published": check.tau_published, "words": check.words(),
            "positions": check.positions.to_dict("records")}  # fmt: skip


def _read(path: Path) -> Trace | Synthetic:
    """A trace of ours, or others' evidence of acceptance."""
    start = read_start(path)
    return load_trace(path) if start.startswith(b"PAR1") or b"specsim.synthetic/" in start else load_acceptance(path)


def _gamma(base: Scenario, load: float, seeds: int, jobs: int) -> dict[str, Any]:
    closed = base.workload.closed
    if not 0 < load < math.inf or (closed and load != int(load)):
        raise SpecsimError(f"--check-gamma: expected a {'whole ' * closed}number above 0, got {load:g}")
    if (most := grid(closed, most_users(base)).loads[-1]) < load:
        told = f"{most:,.0f} {'users, as --max-num-seqs allows' if closed else 'requests/s'}"
        raise SpecsimError(f"--check-gamma: expected at most {told}, got {load:g}")
    table = gamma_check(base, load, range(seeds), jobs)
    assert base.drafter is not None
    where = f"{show.number(load)} {'users' if closed else 'requests/s'} a replica"
    value = "the throughput" if sells_at_will(base.workload) else "tok/s/user"
    available = base.drafter.acceptance.gamma
    words = gamma_words(table, where, base.drafter.gamma, value, available)
    rows = [[str(int(r["gamma"])), *(float(r[c]) for c in ("throughput", "interactivity_p50", "tau")),
             100 * float(r["behind"]), 100 * float(r["behind_ci"])] for _, r in table.iterrows()]  # fmt: skip
    heads = ["γ", "tok/s/GPU", "tok/s/user p50", "tokens a cycle (τ)", "% behind the best", "±"]
    show.console().print(show.table(f"Blocks of γ tokens, verified whole, at {where}", heads, rows))
    show.console().print(words, soft_wrap=True)
    return {"load": load, "words": words, "lengths": table.to_dict("records")}


def _fraction(name: str, text: str) -> float:
    """A share from ``20%`` or ``0.2``."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    # A number above 1 without a sign is more likely percents than a multiple of the traffic.
    if not 0 <= value <= (MOST_HEADROOM if percent else 1):
        raise SpecsimError(f"{name}: expected a share like 0.2 or 20% (at most {MOST_HEADROOM:.0%}), got {text}")
    return value
