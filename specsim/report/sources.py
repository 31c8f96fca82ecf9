"""What went into a report: every input with where it comes from, as headings with terms and their descriptions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specsim.acceptance import Drafter
from specsim.blocktrace import Trace
from specsim.engine import Policy, Scenario
from specsim.hardware import Profile
from specsim.rules import RULES
from specsim.schedulers import NoSpec
from specsim.synthesis import Synthetic
from specsim.workload import Arrivals, ClosedLoop, Ramp, Workload
from specsim.workload_file import WorkloadFile

KINDS = {
    "measured": "step times that specsim measured on this hardware",
    "imported": "step times that others measured or published",
    "fitted": "step times fitted to what a benchmark measured as a whole",
    "analytic": "worked out from the hardware's ratings: no measurement behind these step times",
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
    """Every input of a sweep; ``files``: the paths of profile, trace and arrivals, by option."""
    found = [_profile(scenario.profile, files.get("--profile"))]
    for drafter, labels in _drafters(scenario, policies):
        path = files.get("--trace") if drafter is scenario.drafter else None
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
    draft = f"{profile.draft.type} drafting, its own cost curve" if profile.draft else "none told: drafting is free"
    host, sync = 1e3 * profile.host_seconds, 1e3 * profile.sync_seconds
    rows = [
        ("File", _path(path)),
        ("Evidence", f"{profile.kind}: {KINDS[profile.kind]}"),
        ("Model", profile.model),
        ("Hardware", f"{profile.gpus} × {profile.device} a replica, tensor parallel {profile.tp}"),
        ("Engine", _text(profile.engine)),
        ("Step cost", f"{profile.verify.type}, {first:,} to {last:,} tokens a step"),
        ("Drafting", draft),
        ("Host time", f"{host:g} ms a step, {sync:g} ms more if synchronous"),
        ("KV cache", f"{profile.kv_tokens:,} tokens" if profile.kv_tokens else "not limited by the profile"),
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
            means = ", ".join(f"{mean:.3g}" for mean in domain.conditional_acceptance[: drafter.gamma])
            spread = "none" if domain.concentration is None else f"{domain.concentration:g}"
            rows.append((
                f"Acceptance, {'any domain' if name == ANY else name}",
                f"{means} by position; Beta concentration {spread}; correlation of a block's positions "
                f"{domain.block_correlation:g}, of a request's blocks {domain.autocorrelation:g}; "
                f"overconfidence {domain.overconfidence:g}",
            ))  # fmt: skip
    sts = "none in the trace"
    if meta.sts is not None:
        applied = "applied" if calibrated else "in the trace but not applied (--raw-confidence)"
        sts = f"temperatures {', '.join(f'{t:.3g}' for t in meta.sts)}, {applied}"
    rows += [("Confidence", meta.confidence_source), ("Calibration", sts)]
    if drafter.edges:
        rows.append(("Acceptance changes", f"at {', '.join(f'{e:,}' for e in drafter.edges)} tokens ({drafter.by})"))
    cost = "the profile's" if drafter.cost is None else f"{drafter.cost.type}, a curve of its own"
    rows.append(("Drafting cost", cost))
    rows += _provenance(trace.provenance if isinstance(trace, Synthetic) else meta)
    return Source(f"Drafter {drafter.name or meta.drafter}", kind, _told(rows))


def _workload(
    workloads: Sequence[Workload], scenario: Scenario, path: Path | None, arrivals: WorkloadFile | None
) -> Source:
    one = workloads[0]
    rows = [("File", _path(path)), ("Loads", ", ".join(w.label for w in workloads))]
    if isinstance(one, Arrivals):
        rows.append(("Requests", f"{len(one.table):,}, lengths as recorded"))
    else:
        rows += [("Prompt tokens", _law(one.prompt_tokens)), ("Output tokens", _law(one.output_tokens))]
    if isinstance(one, ClosedLoop):
        measured = ", ".join(f"{w.num_measured:,}" for w in workloads if isinstance(w, ClosedLoop))
        rows += [
            ("Closed loop", f"each user asks again {_think(one)} after the last answer"),
            ("Requests measured", f"{measured} (by load), after 5 a user of warm-up"),
        ]
        if one.has_turns:
            rows.append(("Turns of a conversation", _law(one.turns)))
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
    kv = "the profile's, less the drafter's share" if scenario.kv_tokens is None else f"{scenario.kv_tokens:,} tokens"
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
    return Source("Schedulers", "assumed", [(repr(p), _summary(p.scheduler)) for p in policies])


def _summary(scheduler: Any) -> str:
    """The first sentence of what a scheduler says of itself."""
    text = getattr(scheduler, "__doc__", None) or getattr(type(scheduler), "__doc__", None) or "–"
    return " ".join(text.strip().split("\n\n")[0].replace("``", "").split())


def _provenance(of: Any) -> list[tuple[str, str]]:
    versions = getattr(of, "versions", None) or {}
    rows = [(name.capitalize(), _text(getattr(of, name, None))) for name in ("source", "command", "date", "notes")]
    return [*rows, ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items()))]


def _think(loop: ClosedLoop) -> str:
    """The time that users think, in words: a number, or a mean and how it is spread."""
    if not loop.think_s or not loop.think_cv:
        return f"{loop.think_s:g} s"
    spread = "exponential" if loop.think_cv == 1 else f"gamma, CV {loop.think_cv:g}"
    return f"{loop.think_s:g} s ({spread}, on average)"


def _law(lengths: Any) -> str:
    """A law of lengths by its repr, or by its mean where that would be a table."""
    text = repr(lengths)
    if len(text) <= 160:
        return text
    mean = float(lengths.sample(np.random.default_rng(0), 4096).mean())
    return f"{type(lengths).__name__}, mean about {mean:.4g}"


def _domain(name: str) -> str:
    return "any" if name == ANY else name


def _told(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Rows that say something."""
    return [(term, text) for term, text in rows if text]


def _path(path: Path | None) -> str:
    return "" if path is None else os.path.normpath(path)


def _text(value: object) -> str:
    return "" if value is None else str(value)
