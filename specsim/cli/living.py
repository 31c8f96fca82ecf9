"""validate live: a running engine calibrated, predicted, measured and compared; what it says is in living_report."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from specsim.cli import living_report
from specsim.cli.inputs import one_of, parse_numbers, parse_policies, policy_files, typed_command
from specsim.cli.options import option
from specsim.files import check_apart, check_folder, check_output
from specsim.hardware import Profile, load_profile, save_profile
from specsim.types import SpecsimError, to_install
from specsim.validate import parse_share

if TYPE_CHECKING:
    from specsim.acceptance import Drafter
    from specsim.live.calibrating import StepTable
    from specsim.live.client import Target
    from specsim.live.comparing import Model, Told
    from specsim.live.experiment import Measured, Plan

SERVER = "Server"
LOADS = "Loads"
KNOWN = "What is known beforehand"
GATES = "Gates: exit code 1 where one is broken by more than twice the engine's own spread"
RUN = "Run"
MOST_TOKENS = 1 << 24
ENGINES = ("vllm", "sglang", "llamacpp", "specsim")


def live(
    context: typer.Context,
    url: Annotated[str | None, option("--url", help="The server, such as http://127.0.0.1:8000.", panel=SERVER)] = None,
    engine: Annotated[
        str | None, option("--engine", help=f"{', '.join(ENGINES)} (default: asked).", panel=SERVER)
    ] = None,
    plain_url: Annotated[
        str | None,
        option("--plain-url", help="The same without speculation, to learn steps from in turn.", panel=SERVER),
    ] = None,
    draft_url: Annotated[
        str | None, option("--draft-url", help="The draft model served alone: γ of its steps.", panel=SERVER)
    ] = None,
    model: Annotated[str | None, option("--model", help="Of several that it serves.", panel=SERVER)] = None,
    allow_remote: Annotated[
        bool, option("--allow-remote", help="Let load go to another machine than this.", panel=SERVER)
    ] = False,
    timeout: Annotated[
        float, option("--timeout", help="Seconds without a byte after which a request is given up.", panel=SERVER)
    ] = 60.0,
    no_metrics: Annotated[
        bool, option("--no-metrics", help="It is known that the server has no /metrics.", panel=SERVER)
    ] = False,
    max_num_seqs: Annotated[
        int | None,
        option("--max-num-seqs", help="Most running requests (default: as it says).", panel=SERVER),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, option("--max-num-batched-tokens", help="Most tokens a step (default: the same).", panel=SERVER)
    ] = None,
    calibrate: Annotated[
        str, option("--calibrate", help="Users of the loops it learns from, 1 among them.", panel=LOADS)
    ] = "1,3,8",
    check: Annotated[str, option("--check", help="Users of the loops it predicts.", panel=LOADS)] = "2,4,6",
    poisson: Annotated[
        float | None, option("--poisson", help="Also predict Poisson arrivals at so many requests/s.", panel=LOADS)
    ] = None,
    arrivals: Annotated[
        Path | None, option("--arrivals", help="Also replay recorded arrivals (the first --requests).", panel=LOADS)
    ] = None,
    prompt_tokens: Annotated[
        int, option("--prompt-tokens", help="Of random ids; more than --calibrate's users.", panel=LOADS)
    ] = 64,
    output_tokens: Annotated[
        int, option("--output-tokens", help="Of an answer, give or take a quarter; 8 at least.", panel=LOADS)
    ] = 64,
    prompts: Annotated[
        Path | None, option("--prompts", help='JSON lines {"prompt": TEXT or ids} instead, in turn.', panel=LOADS)
    ] = None,
    temperature: Annotated[float, option("--temperature", help="Of sampling.", panel=LOADS)] = 0.0,
    ignore_eos: Annotated[
        bool,
        option("--ignore-eos/--end-at-eos", help="Answers run to their length, or may end.", panel=LOADS),
    ] = True,
    requests: Annotated[int, option("--requests", help="Measured in each load, at least.", panel=LOADS)] = 16,
    repeat: Annotated[int, option("--repeat", help="Repetitions of all loads, interleaved.", panel=LOADS)] = 3,
    max_seconds: Annotated[float, option("--max-seconds", help="For all of it.", panel=LOADS)] = 1800.0,
    profile: Annotated[
        Path | None, option("--profile", help="Its step cost, instead of a calibration.", panel=KNOWN)
    ] = None,
    trace: Annotated[
        Path | None, option("--trace", help="Its drafter's trace, instead of counters.", panel=KNOWN)
    ] = None,
    scheduler: Annotated[
        str | None, option("--scheduler", "-s", help="Its verification (default: lengths as counted).", panel=KNOWN)
    ] = None,
    draft_ms: Annotated[float | None, option("--draft-ms", help="What drafting adds to a step.", panel=KNOWN)] = None,
    draft_profile: Annotated[
        Path | None, option("--draft-profile", help="The draft model's own profile, instead.", panel=KNOWN)
    ] = None,
    from_results: Annotated[
        list[Path] | None,
        option(
            "--from-results", help="vllm bench serve, GuideLLM or AIPerf files, no server. Repeatable.", panel=KNOWN
        ),
    ] = None,
    max_throughput_error: Annotated[
        str | None, option("--max-throughput-error", help="Such as 8% or 0.08.", panel=GATES)
    ] = None,
    max_tpot_error: Annotated[str | None, option("--max-tpot-error", help="The same.", panel=GATES)] = None,
    max_ttft_error: Annotated[str | None, option("--max-ttft-error", help="The same.", panel=GATES)] = None,
    out: Annotated[Path | None, option("--out", help="Folder for the picture and the profile.", panel=RUN)] = None,
    record: Annotated[
        Path | None, option("--record", help="Folder for a recorded run of each load checked.", panel=RUN)
    ] = None,
    json: Annotated[Path | None, option("--json", help="Also write everything as JSON here.", panel=RUN)] = None,
) -> None:
    """Learn a running engine's step cost, predict it at other loads, measure those, and say how far apart they are.

    Closed loops of --calibrate users, and drains from them, tell what a step costs; the simulator predicts the loops of
    --check users and the arrivals, which are measured in turn, --repeat times over. An error below twice the engine's
    own spread is not told from noise. An engine that speculates needs a server of the same without (--plain-url) or its
    --profile, and the draft model alone (--draft-url), its --draft-profile or --draft-ms; its acceptance is counted.
    A key comes from the environment variable SPECSIM_API_KEY alone.

    Example: specsim validate live --url http://127.0.0.1:8000 --poisson 0.5 --out out/live --max-tpot-error 8%
    """
    if importlib.util.find_spec("httpx") is None:
        raise SpecsimError(f"validate live: needs httpx: {to_install('live')}")
    from specsim.live import comparing
    from specsim.live.client import check_url

    bounds = {"throughput": max_throughput_error, "tpot": max_tpot_error, "ttft": max_ttft_error}
    gates = {m: parse_share(f"--max-{m}-error", text) for m, text in bounds.items() if text is not None}
    picture = None if out is None else out / "live.png"
    learned = None if out is None else out / "profile.json"
    inputs: dict[str, Any] = {"--profile": profile, "--trace": trace, "--draft-profile": draft_profile,
                              "--arrivals": arrivals, "--prompts": prompts, "--from-results": from_results,
                              "--scheduler": policy_files(scheduler) if scheduler else []}  # fmt: skip
    check_apart({"--out": picture, "--out profile": learned, "--json": json}, inputs)
    for flag, folder in (("--out", out), ("--record", record)):
        if folder is not None:
            check_folder(folder, flag)
    check_output("--json", json)
    if scheduler is not None and trace is None:
        raise SpecsimError("--scheduler: expected --trace too; without both, blocks are verified as counted")
    if (trace is not None or from_results) and profile is None and plain_url is None:
        raise SpecsimError("--profile: expected the engine's step cost, learned without speculation, beside --trace or "
                           "--from-results (or --plain-url, to learn it)")  # fmt: skip
    for name, at, instead in (("plain", plain_url, profile), ("draft", draft_url, draft_profile or draft_ms)):
        if at is not None and (instead is not None or from_results):
            given = "--from-results" if from_results else "a profile or a time that tells the same"
            raise SpecsimError(f"--{name}-url: has no meaning beside {given}")
    for name, value in (("--max-num-seqs", max_num_seqs), ("--max-num-batched-tokens", max_num_batched_tokens)):
        if value is not None:
            _check_within(name, value, 1, MOST_TOKENS)
    for name, at in (("--plain-url", plain_url), ("--draft-url", draft_url)):
        if at is not None and url is not None and at.rstrip("/") == url.rstrip("/"):
            raise SpecsimError(f"{name}: expected another server than --url, got the same")
    known = load_profile(profile) if profile is not None else None
    cost = _draft_cost(draft_profile, draft_ms, calibrate, check)
    drafter, policies = parse_policies([scheduler] if scheduler else [], trace, None)
    verify = policies[0].scheduler if policies else comparing.fixed_length(drafter) if drafter is not None else None
    # What every prediction shares; each repetition learns the rest.
    told = comparing.Told(known, cost, verify, drafter, max_num_seqs, max_num_batched_tokens)
    if from_results:
        if url is not None:
            raise SpecsimError("--url: has no meaning beside --from-results, which asks no server")
        if cost is not None and drafter is not None:
            told = replace(told, drafter=replace(drafter, cost=cost))
        living_report.results(from_results, told, gates, picture, json)
        return
    if url is None:
        raise SpecsimError("--url: expected the server, such as http://127.0.0.1:8000")
    plan = _plan(
        calibrate,
        check,
        poisson,
        arrivals,
        prompt_tokens,
        output_tokens,
        requests,
        repeat,
        max_seconds,
        known_steps=known is not None,
        known_draft=cost is not None or draft_url is not None or (known is not None and known.draft is not None),
        needs_acceptance=drafter is None,
        draft_len=_draft_len(verify, drafter),
        metrics=not no_metrics,
    )
    servers = {"--url": url, "--plain-url": plain_url, "--draft-url": draft_url}
    where = [None if at is None else check_url(at, allow_remote, name) for name, at in servers.items()]
    target = _target(timeout, temperature, ignore_eos)
    measured = _drive(where, engine, model, target, prompts, plan)
    notes: list[str] = []
    models: dict[int, Model] = {}
    for number in range(len(measured.repeats)):
        try:
            found = _model(context, measured, number, known, told, plan, url, notes)
        except SpecsimError as error:
            notes.append(f"repetition {number + 1}: {error}")
            continue
        if found is not None:
            models[number] = found
    compared = comparing.Compared()
    try:
        compared = comparing.compare(measured, plan, models, gates)
    except KeyboardInterrupt:  # what was measured is kept all the same
        measured.stopped = "the predictions: interrupted"
    measured.faults += compared.problems
    notes += living_report.caveats(
        measured, plan, compared.extrapolated, known, drafter.gamma if drafter is not None else None
    )
    report = living_report.Report(measured, plan, models, compared.rows, notes, gates)
    living_report.show_all(report)
    if learned is not None and known is None and models:
        save_profile(living_report.last_whole(models).profile, learned)
    living_report.write(report, picture, record, json)
    living_report.end(report)


def _draft_cost(draft_profile: Path | None, draft_ms: float | None, calibrate: str, check: str) -> Any:
    from specsim.live.calibrating import draft_cost

    if draft_profile is not None and draft_ms is not None:
        raise SpecsimError("--draft-profile and --draft-ms: expected one of them")
    if draft_ms is not None and not 0 <= draft_ms < 1e6:
        raise SpecsimError(f"--draft-ms: expected milliseconds, 0 to 1e6, got {draft_ms}")
    users = [*_users("--calibrate", calibrate), *_users("--check", check)]
    return draft_cost(load_profile(draft_profile) if draft_profile is not None else None, draft_ms, users)


def _check_within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise SpecsimError(f"{name}: expected {least:g} to {most:,.0f}, got {value:g}")


def _draft_len(verify: Any, drafter: Drafter | None) -> int:
    """Tokens of a block that are verified: as the scheduler says where it is static, else all."""
    gamma = 0 if drafter is None else drafter.gamma
    return min(gamma, int(getattr(verify, "gamma", gamma)))


def _users(name: str, text: str) -> list[int]:
    users = [int(n) for n in parse_numbers(name, text, whole=True)]
    if max(users) > 4096:
        raise SpecsimError(f"{name}: expected at most 4096 users, got {max(users)}")
    return users


def _plan(
    calibrate: str, check: str, poisson: float | None, arrivals: Path | None, prompt_tokens: int, output_tokens: int,
    requests: int, repeat: int, max_seconds: float, **known: Any,
) -> Plan:  # fmt: skip
    from specsim.importers.arrivals import load_arrivals
    from specsim.live.experiment import Plan
    from specsim.workload import Arrivals

    for name, value, least, most in (
        ("--prompt-tokens", prompt_tokens, 1, 1 << 20),
        ("--output-tokens", output_tokens, 8, 1 << 20),
        ("--requests", requests, 1, 100_000),
        ("--repeat", repeat, 1, 100),
        ("--max-seconds", max_seconds, 1, 1e6),
        ("--poisson", 1.0 if poisson is None else poisson, 1e-6, 1e6),
    ):
        _check_within(name, value, least, most)
    learned = sorted(_users("--calibrate", calibrate))
    if learned[0] != 1 and not known["known_steps"]:
        raise SpecsimError(f"--calibrate: expected 1 among the users, got {calibrate}")
    if prompt_tokens <= max(learned) and not known["known_steps"]:
        raise SpecsimError(
            f"--prompt-tokens: expected more than {max(learned)}, the most users of --calibrate, got {prompt_tokens}: "
            "steps are priced by their tokens"
        )
    table = None if arrivals is None else Arrivals(load_arrivals(arrivals)).head(requests).table
    return Plan(learned, sorted(_users("--check", check)), poisson, table, prompt_tokens, output_tokens, requests,
                repeat, seconds=max_seconds, **known)  # fmt: skip


def _target(timeout: float, temperature: float, ignore_eos: bool) -> Target:
    from specsim.live.client import KEY_VARIABLE, Target

    if not 0 < timeout <= 1e6:
        raise SpecsimError(f"--timeout: expected seconds above 0, 1e6 at most, got {timeout:g}")
    if not 0 <= temperature <= 100:
        raise SpecsimError(f"--temperature: expected 0 to 100, got {temperature:g}")
    return Target("", "", timeout, temperature, ignore_eos, key=os.environ.get(KEY_VARIABLE))


def _drive(
    where: Sequence[str | None], engine: str | None, model: str | None, target: Target, prompts: Path | None, plan: Plan
) -> Measured:
    from specsim.live.experiment import run
    from specsim.live.load import Prompts, read_prompts

    one_of("--engine", engine, ENGINES)
    given = read_prompts(prompts) if prompts is not None else []
    url, plain, draft = where
    # Other prompts in every run: what a cache of prefixes keeps from the last one is of no use.
    random = Prompts(secrets.randbits(32), given)
    return asyncio.run(
        run(
            replace(target, url=url or ""), plan, kind=engine, model=model, prompts=random, plain=plain, draft=draft,
            say=lambda line: typer.echo(line, err=True),
        )
    )  # fmt: skip


def _model(
    context: typer.Context, measured: Measured, number: int, known: Profile | None, told: Told, plan: Plan, url: str,
    notes: list[str],
) -> Model | None:  # fmt: skip
    """What predicts the loads of a repetition: told, or learned in it. Raises SpecsimError where it was cut short."""
    from specsim.live import calibrating, comparing

    loads = measured.repeats[number]

    def profile_of(table: StepTable) -> Profile:
        device, today = f"the server at {urlsplit(url).hostname}", datetime.now(UTC).date().isoformat()
        return calibrating.to_profile(table, measured.engine, device, typed_command(context), today)

    steps = known
    if known is None:
        table = calibrating.step_table(loads.steps, loads.alone)
        if table.pauses:
            notes.append(f"repetition {number + 1}: {table.pauses} gaps of more than ten steps were left out (pauses)")
        if loads.bursts:
            quiet = calibrating.quiet_table(loads.bursts, loads.alone)
            told, table = replace(told, sending=calibrating.sending(table, quiet)), quiet
        steps = profile_of(table)
    assert steps is not None
    if loads.draft_bursts:
        draft = profile_of(calibrating.quiet_table(loads.draft_bursts, loads.draft_alone))
        told = replace(told, cost=calibrating.draft_cost(draft, None, plan.counted))
        if known is None:
            steps = calibrating.read_by_both(steps, draft, max(plan.calibrate))
    return comparing.model_of(measured, number, steps, told)
