"""From the options of a load on the command line to workloads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from specsim.cli.inputs import parse_numbers
from specsim.importers.arrivals import open_workload
from specsim.types import SpecsimError
from specsim.workload import (
    LEAST_RATE,
    MOST_REQUESTS,
    Arrivals,
    ClosedLoop,
    Gamma,
    Lengths,
    Poisson,
    Ramp,
    Workload,
    parse_lengths,
)


def _law(option: str, text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except SpecsimError as error:
        raise SpecsimError(f"{option}: {error}") from error


def _rates(option: str, text: str) -> list[float]:
    """Requests per second from ``5,10``."""
    rates = parse_numbers(option, text)
    if min(rates) < LEAST_RATE:
        raise SpecsimError(f"{option}: expected at least {LEAST_RATE:g} requests/s, got {min(rates):g}")
    return rates


def _ramp(text: str, prompt: Lengths, output: Lengths) -> Ramp:
    """Arrivals from ``START,END,SECONDS``."""
    try:
        start, end, seconds = (float(part) for part in text.replace(":", ",").split(","))
    except ValueError:
        raise SpecsimError(f"--ramp: expected START,END,SECONDS such as 1,50,600, got {text!r}") from None
    try:
        return Ramp(start, end, seconds, prompt, output)
    except SpecsimError as error:
        raise SpecsimError(f"--ramp: {error}") from error


def parse_workloads(
    closed: str | None,
    poisson: str | None,
    cv: float,
    ramp: str | None,
    arrivals: Path | None,
    rate: str | None,
    num_requests: int | None,
    prompt_tokens: str | None,
    output_tokens: str | None,
    think: float,
    turns: str | None = None,
    forget_domains: bool = False,
) -> list[Workload]:
    """The workloads asked for: one an entry of --closed or --poisson, --ramp, or --arrivals with --rate.

    ``forget_domains`` drops the domains that recorded or fitted arrivals name, so that --domains rules.
    """
    kinds = {"--closed": closed, "--poisson": poisson, "--ramp": ramp, "--arrivals": arrivals}
    given = [name for name, value in kinds.items() if value is not None]
    if len(given) != 1:
        hint = " (--rate scales --arrivals; requests/s of a Poisson process are --poisson)" * (rate is not None)
        raise SpecsimError(f"workload: expected one of {', '.join(kinds)}, got {' and '.join(given) or 'none'}{hint}")
    unused = {
        "--rate": rate is not None and arrivals is None,
        "--cv": cv != 1 and poisson is None and (closed is None or think == 0),
        "--think": think != 0 and closed is None,
        "--turns": turns is not None and closed is None,
        "--num-requests": num_requests is not None and ramp is not None,
        "--prompt-tokens": prompt_tokens is not None and arrivals is not None,
        "--output-tokens": output_tokens is not None and arrivals is not None,
    }
    for option, is_unused in unused.items():
        if is_unused:
            without = " without --think" if option == "--cv" and closed is not None else ""
            raise SpecsimError(f"{option}: has no meaning with {given[0]}{without}")
    if num_requests is not None and not 1 <= num_requests <= MOST_REQUESTS:
        raise SpecsimError(f"--num-requests: expected 1 to {MOST_REQUESTS:,}, got {num_requests:,}")
    prompt = _law("--prompt-tokens", prompt_tokens or "512")
    output = _law("--output-tokens", output_tokens or "256")
    if closed is not None:
        users = [int(c) for c in parse_numbers("--closed", closed, whole=True)]
        said = _law("--turns", turns or "1")
        return [ClosedLoop(c, prompt, output, think, measured=num_requests, turns=said, think_cv=cv) for c in users]
    if poisson is not None:
        rates = _rates("--poisson", poisson)
        if cv == 1:
            return [Poisson(r, num_requests or 2000, prompt, output) for r in rates]
        return [Gamma(r, cv, num_requests or 2000, prompt, output) for r in rates]
    if ramp is not None:
        return [_ramp(ramp, prompt, output)]
    assert arrivals is not None
    workload = open_workload(arrivals)
    if forget_domains and isinstance(workload, Arrivals):
        table = replace(workload.table, domain=np.zeros(len(workload.table), dtype=np.int64), domains=("",))
        workload = replace(workload, table=table)
    elif forget_domains and not isinstance(workload, Arrivals):
        workload = replace(workload, domain="")
    if num_requests is not None:
        workload = (
            workload.head(num_requests)
            if isinstance(workload, Arrivals)
            else replace(workload, num_requests=num_requests)
        )
    if rate is None:
        return [workload]
    rates = _rates("--rate", rate)
    return [workload.scaled(r) if isinstance(workload, Arrivals) else replace(workload, rate=r) for r in rates]
