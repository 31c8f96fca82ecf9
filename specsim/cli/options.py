"""The options that every simulating verb shares, declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from specsim.acceptance import Drafter
from specsim.baseline import MadeOf, fingerprint
from specsim.cli.inputs import is_typed, parse_domains, parse_names, parse_policies, policy_files, read_scenario
from specsim.cli.loads import parse_workloads
from specsim.engine import Policy, Scenario
from specsim.hardware import load_profile
from specsim.routing import ROUTERS
from specsim.rules import RULES, VLLM, Rules
from specsim.types import SpecsimError
from specsim.workload import Workload

WHAT = "What is served"
LOAD = "Load"
ENGINE = "Engine"
RUN = "Run"
MOST_SEEDS = 100_000
LOADS = ("closed", "poisson", "ramp", "arrivals")
BY_CONTENT = ("profile", "trace", "arrivals", "scenario", "scheduler")
"""Options that results tell by the files' content and the policies' labels instead of as they were typed."""
READ_OFF = {"sweep": ("sla", "base"), "baseline": ("base",)}
"""What a scenario file may say, by the verb that passes it over: how others read the same runs off."""


def option(*names: str, help: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=more.pop("show_default", True), **more)


def _load_scenario(context: typer.Context, path: Path | None) -> Path | None:
    """Make the scenario file's entries the defaults of this call's options."""
    if path is not None:
        passed_over = READ_OFF.get(str(context.info_name), ())
        options = {key: value for key, value in read_scenario(path).items() if key not in passed_over}
        known = {p.name for p in context.command.params}
        for key in options:
            if key not in known:
                raise SpecsimError(f"{path}: {key}: not an option of specsim {context.info_name}")
        if "scenario" in options:
            raise SpecsimError(f"{path}: scenario: a scenario file reads no other one: expected its options here")
        context.default_map = {**(context.default_map or {}), **options}
    return path


@dataclass
class Options:
    """What makes a scenario; the fields are the command line's flags."""

    profile: Annotated[Path | None, option("--profile", help="Hardware profile (hw_profiles/*.json).", panel=WHAT)] = (
        None
    )
    trace: Annotated[Path | None, option("--trace", help="Drafter's trace: block trace or synthetic.", panel=WHAT)] = (
        None
    )
    gamma: Annotated[
        int | None,
        option("--gamma", help="Block length; also the most of an @TRACE's (default: the traces' own).", panel=WHAT),
    ] = None
    scheduler: Annotated[
        list[str] | None,
        option(
            "--scheduler",
            "-s",
            help="NAME, 'NAME(args)' or file.py:NAME; NAME@TRACE for another drafter, NAME@TRACE:1 "
            "for blocks of its first token. Repeatable.",
            panel=WHAT,
        ),
    ] = None
    domains: Annotated[
        str | None,
        option(
            "--domains",
            help="Mix of domains, such as math:1,code:1 (default: those of --arrivals, or the trace's equally).",
            panel=WHAT,
        ),
    ] = None
    acceptance_by: Annotated[
        str | None,
        option(
            "--acceptance-by",
            help="Recorded traces: blocks as far along as the request is, position:64,256 or context:4096.",
            panel=WHAT,
        ),
    ] = None
    raw_confidence: Annotated[
        bool, option("--raw-confidence", help="Ignore the trace's calibration temperatures.", panel=WHAT)
    ] = False
    closed: Annotated[str | None, option("--closed", help="Closed loops of so many users: 1,4,16.", panel=LOAD)] = None
    poisson: Annotated[
        str | None, option("--poisson", help="Poisson arrivals at so many requests/s: 5,10.", panel=LOAD)
    ] = None
    cv: Annotated[
        float,
        option(
            "--cv",
            help="Spread of the gaps between arrivals (or of --think): 1 is Poisson (exponential), more is bursty.",
            panel=LOAD,
        ),
    ] = 1.0
    ramp: Annotated[
        str | None,
        option(
            "--ramp",
            help="Poisson arrivals at a changing rate, START,END,SECONDS: 2,20,600 rises from 2 to 20/s in 10 minutes.",
            panel=LOAD,
        ),
    ] = None
    arrivals: Annotated[
        Path | None,
        option("--arrivals", help="Recorded or fitted arrivals: Azure, BurstGPT, Mooncake, vLLM, ours.", panel=LOAD),
    ] = None
    rate: Annotated[
        str | None, option("--rate", help="Scale --arrivals to these mean requests/s: 5,10.", panel=LOAD)
    ] = None
    num_requests: Annotated[
        int | None,
        option(
            "--num-requests",
            help="Requests of an open loop (default 2000, or all); measured in a closed one (10 a user, 500 at least).",
            panel=LOAD,
        ),
    ] = None
    prompt_tokens: Annotated[
        str | None, option("--prompt-tokens", help="512 (default), or 'lognormal(512, 1.2)'.", panel=LOAD)
    ] = None
    output_tokens: Annotated[
        str | None, option("--output-tokens", help="256 (default), or 'lognormal(256, 1)'.", panel=LOAD)
    ] = None
    think: Annotated[
        float,
        option(
            "--think",
            help="Mean seconds a closed-loop user thinks between requests: exponential, or always so many (--cv 0).",
            panel=LOAD,
        ),
    ] = 0.0
    turns: Annotated[
        str | None,
        option("--turns", help="Closed-loop users hold conversations: requests in each, 5 or a law.", panel=LOAD),
    ] = None
    replicas: Annotated[int, option("--replicas", help="Engine replicas.", panel=ENGINE)] = 1
    router: Annotated[str, option("--router", help="round_robin, least_loaded, random or vllm.", panel=ENGINE)] = (
        "round_robin"
    )
    max_num_seqs: Annotated[int, option("--max-num-seqs", help="Most running requests.", panel=ENGINE)] = 1024
    max_num_batched_tokens: Annotated[
        int, option("--max-num-batched-tokens", help="Most tokens in a step.", panel=ENGINE)
    ] = 8192
    kv_tokens: Annotated[
        int | None, option("--kv-tokens", help="KV cache size (default: the profile's).", panel=ENGINE)
    ] = None
    prefill: Annotated[str, option("--prefill", help="chunked, or free (decode-only studies).", panel=ENGINE)] = (
        "chunked"
    )
    block_size: Annotated[int, option("--block-size", help="Tokens in a KV block.", panel=ENGINE)] = 16
    without: Annotated[
        str | None, option("--without", help=f"Rules of vLLM V1 to switch off: {', '.join(RULES)}.", panel=ENGINE)
    ] = None
    async_scheduling: Annotated[
        bool,
        option("--async-scheduling", help="Plan a step while the one before it runs: hides host time.", panel=ENGINE),
    ] = False
    lockstep: Annotated[
        bool, option("--lockstep", help="Replicas are ranks that step together (expert parallel).", panel=ENGINE)
    ] = False
    extrapolate: Annotated[
        bool, option("--extrapolate", help="Continue the profile beyond what it measured.", panel=ENGINE)
    ] = False
    scenario: Annotated[
        Path | None,
        option(
            "--scenario",
            help="TOML file with these options by name; flags win, paths are relative to it.",
            panel=RUN,
            is_eager=True,
            callback=_load_scenario,
        ),
    ] = None

    def files(self) -> dict[str, list[Path]]:
        """The files that are read, by option."""
        alone = {name: getattr(self, name) for name in ("profile", "trace", "arrivals", "scenario")}
        named = {f"--{name}": [path] for name, path in alone.items() if path is not None}
        return named | {"--scheduler": [path for text in self.scheduler or [] for path in policy_files(text)]}

    def made_of(self) -> MadeOf:
        """What results of these options, which ``build`` found good, are made from.

        What a scenario file says is among the settings; a pipe that was read tells nothing more.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in BY_CONTENT}
        read = {name: paths for name, paths in self.files().items() if name != "--scenario"}
        inputs = [fingerprint(name, path) for name, paths in read.items() for path in paths if path.is_file()]
        return MadeOf(
            settings={name: value for name, value in values.items() if value is not None},
            inputs=list({(i.option, i.name, i.sha256): i for i in inputs}.values()),
        )

    def build(self) -> tuple[Scenario, list[Policy], list[Workload]]:
        """The base scenario, the policies and the workloads that were asked for."""
        if self.profile is None:
            raise SpecsimError("--profile: expected a hardware profile, such as hw_profiles/dsv4-flash-b300-tp4.json")
        for name, told in (("--lockstep", self.lockstep), ("--router", self.router in ROUTERS[1:])):
            if told and self.replicas == 1:
                raise SpecsimError(f"{name}: has no meaning with one replica (--replicas N)")
        profile = load_profile(self.profile)
        drafter, policies = parse_policies(self.scheduler or ["NoSpec"], self.trace, self.gamma, self.acceptance_by)
        workloads = parse_workloads(
            self.closed, self.poisson, self.cv, self.ramp, self.arrivals, self.rate, self.num_requests,
            self.prompt_tokens, self.output_tokens, self.think, self.turns, self.domains is not None,
        )  # fmt: skip
        base = Scenario(
            profile=profile,
            workload=workloads[0],
            drafter=drafter,
            scheduler=policies[0].scheduler,
            domains=parse_domains(self.domains) if self.domains else _default_mix(drafter, policies),
            replicas=self.replicas,
            router=self.router,  # type: ignore[arg-type]
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_tokens=self.kv_tokens,
            block_size=self.block_size,
            rules=_rules(self.without),
            async_scheduling=self.async_scheduling,
            lockstep=self.lockstep,
            prefill=self.prefill,  # type: ignore[arg-type]
            extrapolate=self.extrapolate,
            calibrated=not self.raw_confidence,
        )
        return base, policies, workloads


def _rules(text: str | None) -> Rules:
    try:
        return VLLM.without(*parse_names(text))
    except SpecsimError as error:
        raise SpecsimError(str(error).replace("rules:", "--without:", 1)) from error


def _default_mix(drafter: Drafter | None, policies: list[Policy]) -> dict[str, float] | None:
    """The domains of --trace, equally; without one, those of the first policy's own trace."""
    chosen = drafter or next((p.drafter for p in policies if p.drafter is not None), None)
    return dict.fromkeys(chosen.domains, 1.0) if chosen is not None else None


def with_options(verb: Callable[..., None], leave_out: Collection[str] = ()) -> Callable[..., None]:
    """Give a verb whose first parameter is an Options all its flags, but those left out, ahead of the verb's own."""
    hints = get_type_hints(Options, include_extras=True)
    taken = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]
    own = [p for p in taken if p.annotation is not typer.Context]  # its own context is the one that all verbs have
    shared = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in fields(Options)
        if f.name not in leave_out
    ]
    names = {p.name for p in shared}

    def call(context: typer.Context, **given: Any) -> None:
        typed = [k for k in LOADS if is_typed(context, k)]
        for name in LOADS if typed else ():
            if name in names and name not in typed:
                given[name] = None  # a load typed here replaces the scenario file's, of whatever kind
        options = Options(**{k: v for k, v in given.items() if k in names})
        more = {p.name: context for p in taken if p not in own}
        verb(options, **more, **{k: v for k, v in given.items() if k not in names})

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *shared, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    call.__name__, call.__doc__ = verb.__name__, verb.__doc__
    return call
