"""What went into a report: every input with where it comes from, as headings with terms and their descriptions."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specsim.acceptance import Drafter
from specsim.blocktrace import Trace
from specsim.engine import Policy, Scenario
from specsim.hardware import Profile
from specsim.lengths import Empirical, Fixed, Lengths, LogNormal, as_lengths
from specsim.rules import RULES
from specsim.schedulers import NoSpec
from specsim.synthesis import Domain, Synthetic
from specsim.workload import Arrivals, ClosedLoop, Ramp, Workload
from specsim.workload_file import WorkloadFile

KINDS = {
    "measured": "step times that specsim measured on this hardware",
    "imported": "step times that others measured or published",
    "fitted": "step times fitted to what a benchmark measured as a whole",
    "analytic": "worked out from the hardware's ratings: no measurement behind these step times",
}
STEP_COSTS = {
    "table1d": "a table by tokens in the step",
    "table2d": "a table by tokens in the step and tokens of context",
    "additive": "a table by tokens in the step, with what requests and their context add",
    "layered": "the model's kernels, measured one by one and added up",
    "roofline": "a roofline: the longer of computing and of moving memory, matrix by matrix",
}
DRAFTING = {"parallel": "a block in one pass", "autoregressive": "a token at a time"}
CONFIDENCES = {
    "head": "each block's own chances, as the drafter's confidence head tells them",
    "draft_prob": "each token's own probability, as the drafter tells it",
    "position_mean": "the mean acceptance of the position: nothing about the block",
    "none": "none: schedulers that want confidences refuse the trace",
}
ANY = "*"


@dataclass(frozen=True)
class Source:
    """One input: a heading, what kind of evidence it is, and rows of (term, description)."""

    heading: str
    kind: str
    rows: list[tuple[str, str]] = field(default_factory=list)


def sources(
    scenario: Scenario,
    policies: Sequence[Policy],
    workloads: Sequence[Workload],
    files: Mapping[str, Path | None],
    arrivals: WorkloadFile | None = None,
) -> list[Source]:
    """Every input of a sweep.

    ``files``: the paths of profile, trace and arrivals by option, those of drafters that are a policy's own by its
    label.
    """
    found = [_profile(scenario.profile, files.get("--profile"))]
    for drafter, labels in _drafters(scenario, policies):
        path = files.get("--trace" if drafter is scenario.drafter else labels[0])
        found.append(_drafter(drafter, labels, path, scenario.calibrated))
    found.append(_workload(workloads, scenario, files.get("--arrivals"), arrivals))
    found.append(_engine(scenario))
    found.append(_schedulers(policies))
    return found


def drafters(scenario: Scenario, policies: Sequence[Policy]) -> list[Drafter]:
    """The drafters that some policy runs on, each once."""
    return [drafter for drafter, _ in _drafters(scenario, policies)]


def _drafters(scenario: Scenario, policies: Sequence[Policy]) -> list[tuple[Drafter, list[str]]]:
    found: list[tuple[Drafter, list[str]]] = []
    for policy in policies:
        drafter = policy.drafter or scenario.drafter
        if drafter is None or isinstance(policy.scheduler, NoSpec):
            continue
        labels = next((labels for other, labels in found if other is drafter), None)
        if labels is None:
            found.append((drafter, labels := []))
        labels.append(repr(policy))
    return found


def _profile(profile: Profile, path: Path | None) -> Source:
    first, last = profile.verify.range[0], profile.last_tokens
    drafting = profile.draft and f"{DRAFTING[profile.draft.type]}, at the profile's own prices"
    host, sync = 1e3 * profile.host_seconds, 1e3 * profile.sync_seconds
    rows = [
        ("File", _path(path)),
        ("Evidence", f"{profile.kind}: {KINDS[profile.kind]}"),
        ("Model", profile.model),
        ("Hardware", f"{profile.gpus} × {profile.device} a replica, tensor parallel {profile.tp}"),
        ("Engine", _text(profile.engine)),
        ("Step cost", f"{STEP_COSTS[profile.verify.type]}, {first:,} to {last:,} tokens a step"),
        ("Drafting", drafting or "none told: drafting is free"),
        ("Host time", f"{host:g} ms a step, {sync:g} ms more if synchronous"),
        ("KV cache", f"{profile.kv_tokens:,} tokens" if profile.kv_tokens else "no size told"),
        *_provenance(profile.provenance),
    ]  # fmt: skip
    return Source(f"Hardware profile {profile.name}", profile.kind, _told(rows))


def _drafter(drafter: Drafter, labels: list[str], path: Path | None, calibrated: bool) -> Source:
    trace = drafter.acceptance
    meta: Any = trace if isinstance(trace, Synthetic) else trace.meta
    rows = [
        ("File", _path(path)),
        ("Used by", ", ".join(labels)),
        ("Drafter and target", f"{meta.drafter}, drafting for {meta.target}"),
        ("Block length", f"γ = {drafter.gamma}, of {trace.gamma} in the trace"),
        ("Temperature", _text(meta.temperature)),
    ]
    if isinstance(trace, Trace):
        kind = "recorded"
        size = f"{len(trace):,} blocks of {int(trace.responses()[-1]) + 1:,} responses, {meta.kind}"
        rows += [
            ("Evidence", f"recorded: {size}; domains {', '.join(trace.domains)}"),
            ("Draft sampling", _text(meta.draft_sampling)),
            ("Data set", _text(meta.dataset)),
            ("Seed", _text(meta.seed)),
        ]
    else:
        kind = "synthetic"
        rows.append(("Evidence", "synthetic: blocks drawn from parameters, not recorded"))
        for name, domain in trace.domains.items():
            told = _acceptance(domain, drafter.gamma, confidences=trace.confidence_source == "head")
            rows.append((f"Acceptance, {'any domain' if name == ANY else name}", told))
    sts = "none in the trace"
    if meta.sts is not None:
        applied = "applied" if calibrated else "in the trace but not applied (--raw-confidence)"
        sts = f"temperatures {', '.join(f'{t:.3g}' for t in meta.sts)}, {applied}"
    rows += [("Confidence", CONFIDENCES[meta.confidence_source]), ("Calibration", sts)]
    if drafter.edges:
        rows.append(("Acceptance changes", f"at {', '.join(f'{e:,}' for e in drafter.edges)} tokens ({drafter.by})"))
    cost = "the profile's" if drafter.cost is None else f"{DRAFTING[drafter.cost.type]}, at prices of its own"
    rows.append(("Drafting cost", cost))
    rows += _provenance(trace.provenance if isinstance(trace, Synthetic) else meta)
    return Source(f"Drafter {drafter.name or meta.drafter}", kind, _told(rows))


def _acceptance(domain: Domain, gamma: int, confidences: bool) -> str:
    """A synthetic domain in words; ``confidences``: whether a scheduler sees each block's own."""
    means = ", ".join(f"{mean:.3g}" for mean in domain.conditional_acceptance[:gamma])
    within, between = domain.block_correlation, domain.autocorrelation
    parts = [
        f"{means}{' by position' if gamma > 1 else ''}",
        "the same in every block"
        if domain.concentration is None
        else f"varying from block to block (Beta, concentration {domain.concentration:g})",
        f"correlated within a block ({within:g}) and along an answer ({between:g})" if within or between else "",
    ]
    if confidences:
        off = domain.overconfidence
        parts.append("confidences as they are" if off == 1 else f"confidences too sure, {off:g} times on the logit")
    return "; ".join(filter(None, parts))


def _workload(
    workloads: Sequence[Workload], scenario: Scenario, path: Path | None, arrivals: WorkloadFile | None
) -> Source:
    one = workloads[0]
    rows = [("File", _path(path)), ("Loads", _loads(workloads))]
    if isinstance(one, Arrivals):
        rows.append(("Requests", f"{len(one.table):,}, lengths as recorded"))
    else:
        rows += [("Prompt tokens", _law(one.prompt_tokens)), ("Output tokens", _law(one.output_tokens))]
    if isinstance(one, ClosedLoop):
        measured = ", ".join(f"{w.num_measured:,}" for w in workloads if isinstance(w, ClosedLoop))
        rows += [
            ("Closed loop", f"each user asks again {_think(one)}"),
            ("Requests measured", f"{measured} (by load), after 5 a user of warm-up"),
        ]
        if one.has_turns:
            rows.append(("Turns of a conversation", _law(one.turns, "conversation")))
    elif not isinstance(one, Ramp | Arrivals):
        rows.append(("Requests", f"{one.num_requests:,}, the first tenth of the run is warm-up"))
    mix = scenario.domains or {}
    total = sum(mix.values())
    rows.append(("Domains", ", ".join(f"{_domain(d)} {w / total:.3g}" for d, w in mix.items()) if mix else ""))
    kind = "generated"
    if arrivals is not None:
        kind = arrivals.kind
        rows += _provenance(arrivals.provenance)
    elif isinstance(one, Arrivals):
        kind = "recorded"
    return Source("Workload", kind, _told(rows))


def _engine(scenario: Scenario) -> Source:
    off = [name for name in RULES if not getattr(scenario.rules, name)]
    kv = "not limited: neither the profile nor --kv-tokens tells a size"
    if scenario.kv_tokens is not None:
        kv = f"{scenario.kv_tokens:,} tokens"
    elif scenario.profile.kv_tokens is not None:
        kv = "the profile's, less the drafter's share"
    prompts = "chunked, in the decodes' steps" if scenario.prefill == "chunked" else "free: decode only"
    replicas = f"{scenario.replicas:,}, router {scenario.router}" if scenario.replicas > 1 else "1"
    rows = [
        ("Replicas", replicas + (", stepping together" if scenario.lockstep else "")),
        ("Batch", f"at most {scenario.max_num_seqs:,} requests and {scenario.max_num_batched_tokens:,} tokens a step"),
        ("KV cache", f"{kv}, blocks of {scenario.block_size} tokens"),
        ("Prompts", prompts),
        ("Rules of vLLM V1 switched off", ", ".join(off) or "none"),
        ("Scheduling", "a step ahead (asynchronous)" if scenario.async_scheduling else "step by step"),
        ("Beyond the profile's range", "continued at the last slope" if scenario.extrapolate else "refused"),
    ]
    return Source("Simulated engine", "assumed", rows)


def _schedulers(policies: Sequence[Policy]) -> Source:
    said: dict[str, list[str]] = {}
    for policy in policies:
        said.setdefault(_summary(policy.scheduler), []).append(repr(policy))
    return Source("Schedulers", "assumed", [(", ".join(labels), text) for text, labels in said.items()])


def _summary(scheduler: Any) -> str:
    """The first paragraph of what a scheduler says of itself, without the names of its arguments in brackets."""
    text = getattr(scheduler, "__doc__", None) or getattr(type(scheduler), "__doc__", None) or "–"
    first = re.sub(r" \(``\w+``\)", "", text.strip().split("\n\n")[0])
    return " ".join(first.replace("``", "").split())


def _provenance(of: Any) -> list[tuple[str, str]]:
    versions = getattr(of, "versions", None) or {}
    rows = [(name.capitalize(), _text(getattr(of, name, None))) for name in ("source", "command", "date", "notes")]
    return [*rows, ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items()))]


def _think(loop: ClosedLoop) -> str:
    """When users ask again, in words: a time, or a mean and how it is spread."""
    if not loop.think_s:
        return "upon an answer"
    if not loop.think_cv:
        return f"{loop.think_s:g} s after an answer"
    spread = "exponential" if loop.think_cv == 1 else f"gamma, CV {loop.think_cv:g}"
    return f"{loop.think_s:g} s ({spread}, on average) after an answer"


def _loads(workloads: Sequence[Workload]) -> str:
    if all(isinstance(w, ClosedLoop) for w in workloads):
        return ", ".join(f"{w.load:g}" for w in workloads) + " users, each with one request at a time"
    return ", ".join(w.label for w in workloads)


def _law(lengths: Lengths | int, of: str = "request") -> str:
    """A law of lengths in words."""
    law = as_lengths(lengths)
    if isinstance(law, Fixed):
        return f"{law.tokens:,} in every {of}"
    if isinstance(law, LogNormal):
        most = "" if law.maximum is None else f", {law.maximum:,} at most"
        least = f", {law.minimum:,} at least" if law.minimum > 1 else ""
        return f"log-normal, median {law.median:,g}, σ {law.sigma:g}{least}{most}"
    mean = float(law.sample(np.random.default_rng(0), 4096).mean())
    how = f"{len(law.values):,} values" if isinstance(law, Empirical) else f"{len(law.tokens):,} quantiles"
    return f"drawn from {how}, mean about {mean:.4g}"


def _domain(name: str) -> str:
    return "any" if name == ANY else name


def _told(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Rows that say something."""
    return [(term, text) for term, text in rows if text]


def _path(path: Path | None) -> str:
    return "" if path is None else os.path.normpath(path)


def _text(value: object) -> str:
    return "" if value is None else str(value)
