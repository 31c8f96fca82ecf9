"""From a recorded engine run to the Scenario that replays it: step prices, KV capacity, the engine's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specsim.acceptance import Drafter
from specsim.engine import Policy, Scenario
from specsim.hardware import DEVICES, Profile, load_profile
from specsim.hardware.devices import RESERVE_BYTES
from specsim.hardware.model_shape import BYTES, Dtype, ModelShape, kv_bytes_on_gpu, read_model
from specsim.importers.likeness import FORMATS, plain_gpu, unlike
from specsim.importers.profile_parts import Ask
from specsim.importers.profiles import load_profile_source
from specsim.importers.recorded import RecordedRun
from specsim.rules import RULES, VLLM
from specsim.schedulers import NoSpec
from specsim.types import Requests, SpecsimError
from specsim.workload import Arrivals

UTILISATION = 0.9
"""The share of a GPU's memory that vLLM takes unless told otherwise."""
MEANT = {
    "--tp": "meta.json's tensor_parallel_size",
    "--expert-parallel": "meta.json's enable_expert_parallel",
    "or --config FILE": "or in the run's folder",
}
"""What stands in a run's folder for the options of a bundle's import."""


@dataclass(frozen=True)
class Told:
    """What the user says of a replay: where to look for what the run's folder lacks, and what to leave out.

    ``profile`` is one of our JSON profiles or a bundle's folder (None: the run's own); ``host_seconds`` a
    constant of each step (None: the JSON profile's own, 0 for a bundle); ``skew`` keeps a bundle's skew_fit.csv.
    ``async_scheduling`` hides the host's time behind the forward; ``without`` names rules of the engine
    (``specsim.rules``) to switch off. ``device_memory`` is bytes, ``utilisation`` the engine's share of them.
    Raises SpecsimError for a number that makes no sense, in the words of the command line.
    """

    profile: Path | None = None
    host_seconds: float | None = None
    skew: bool = False
    link_bandwidth: float | None = None
    link_latency: float | None = None
    kv_tokens: int | None = None
    device_memory: float | None = None
    utilisation: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    async_scheduling: bool = False
    without: tuple[str, ...] = ()
    extrapolate: bool = False

    def __post_init__(self) -> None:
        for name in self.without:
            if name not in RULES:
                raise SpecsimError(f"--without: expected one of {', '.join(RULES)}, got {name!r}")
        if self.host_seconds is not None and not 0 <= self.host_seconds < float("inf"):
            raise SpecsimError(f"--host-ms: expected 0 or more, got {1e3 * self.host_seconds:g}")
        if self.device_memory is not None and not 0 < self.device_memory < float("inf"):
            raise SpecsimError(f"--device-memory: expected bytes, above 0, got {self.device_memory:g}")
        if self.utilisation is not None and not 0 < self.utilisation <= 1:
            raise SpecsimError(f"--utilisation: expected a share above 0, up to 1, got {self.utilisation:g}")


@dataclass(frozen=True)
class Replay:
    """A scenario that replays a run, the settings it has, in words what was assumed, by subject, and what to mind."""

    scenario: Scenario
    settings: Mapping[str, Any]
    assumptions: Mapping[str, str]
    caveats: tuple[str, ...] = ()


def make_replay(
    run: RecordedRun, told: Told | None = None, policy: Policy | None = None, drafter: Drafter | None = None
) -> Replay:
    """The scenario of ``run``, with what the user ``told``.

    ``policy``, on ``drafter`` where it has none of its own, stands for the run's speculation, which no recording
    tells; without one the run must have had none. The drafter's block length is that of the run's
    num_speculative_tokens, where it is told. Raises SpecsimError for what is neither recorded nor told, and
    for what cannot be replayed.
    """
    told, settings = told or Told(), run.settings
    if settings.speculation and policy is None:
        raise SpecsimError(
            f"{run.path / 'meta.json'}: engine_kwargs.speculative_config: the run drafted tokens, and what was "
            "accepted is not in it: expected --trace FILE and --scheduler NAME"
        )
    if policy is not None and not settings.speculation:
        raise SpecsimError(f"--scheduler: has no meaning for {run.path}, which was recorded without speculation")
    if policy is not None and isinstance(policy.scheduler, NoSpec):
        raise SpecsimError(
            f"--scheduler: expected one that speculates, as the run did (engine_kwargs.speculative_config of "
            f"{run.path / 'meta.json'}), got NoSpec"
        )
    profile, source, steps = _profile(run, told)
    capacity, counted = kv_capacity(run, told, profile)
    requests = run.requests
    table = Requests(
        arrival_s=requests.arrival_s,
        prompt_tokens=requests.prompt_tokens,
        output_tokens=requests.output_tokens,
        domain=np.zeros(len(requests), dtype=np.int64),
        domains=("",),
    )
    fields: dict[str, Any] = {
        "replicas": settings.dp,
        "router": "vllm" if settings.dp > 1 else "round_robin",
        "max_num_seqs": _needed(run, "max_num_seqs", told.max_num_seqs),
        "max_num_batched_tokens": _needed(run, "max_num_batched_tokens", told.max_num_batched_tokens),
        "kv_tokens": capacity,
        "block_size": settings.block_size,
        "async_scheduling": told.async_scheduling,
        "rules": VLLM.without(*told.without, *([] if settings.prefix_caching is not False else ["prefix_caching"])),
        "extrapolate": told.extrapolate,
    }
    if settings.dp > 1 and settings.expert_parallel:
        fields["lockstep"] = True  # experts on all ranks: none can run ahead of the others
    drafter = drafter if policy is not None else None
    scenario = Scenario(profile=profile, workload=Arrivals(table, run.name), drafter=drafter, **fields)
    if policy is not None:
        scenario = scenario.with_policy(policy)
        scenario = replace(scenario, drafter=_as_deep(run, scenario.drafter))
    _check_fits(run, scenario, counted)
    assumptions = {"step prices": steps, "KV capacity": counted, "asynchronous scheduling": _asynchronous(run, told)}
    if scenario.drafter is not None:
        gamma, told_by = scenario.drafter.gamma, "meta.json's num_speculative_tokens"
        assumptions["speculation"] = f"{gamma} drafted tokens a request, " + (
            f"by {told_by}" if settings.drafted else f"the block length of its trace: {told_by} is not told"
        )
    if settings.prefix_caching is not False:
        assumptions["prefix cache"] = "preempted requests find their own blocks; which prompts share is not recorded"
    if told.without:
        assumptions["rules"] = f"without {', '.join(told.without)}"
    if settings.ignored:
        assumptions["engine_kwargs that are ignored"] = ", ".join(settings.ignored)
    settled = asdict(settings) | fields | {"rules": asdict(scenario.rules)}
    return Replay(scenario, settled, assumptions, unlike(settings, source, profile, own=source == run.profile))


def _as_deep(run: RecordedRun, drafter: Drafter | None) -> Drafter | None:
    """``drafter`` with blocks as long as the run's; SpecsimError where its trace has shorter ones."""
    drafted = run.settings.drafted
    if drafter is None or drafted is None:
        return drafter
    if drafted > drafter.acceptance.gamma:
        raise SpecsimError(
            f"{run.path / 'meta.json'}: engine_kwargs.speculative_config.num_speculative_tokens: expected at most "
            f"{drafter.acceptance.gamma}, the block length of the trace {drafter.name!r}, got {drafted}"
        )
    return replace(drafter, gamma=drafted)


def _asynchronous(run: RecordedRun, told: Told) -> str:
    """Whether the host's time is hidden, and what the engine did."""
    if told.async_scheduling:
        return "on, as told: the host's time is hidden behind the forward"
    if not run.settings.async_scheduling:
        return "off"
    return (
        f"the engine's, by meta.json's {run.settings.async_by}: the host's time a step is what of it was not hidden "
        "(--async-scheduling hides it)"
    )


def _check_fits(run: RecordedRun, scenario: Scenario, counted: str) -> None:
    """Refuse a request that the KV cache can never hold, by its line."""
    requests, gamma = run.requests, scenario.drafter.gamma if scenario.drafter is not None else 0
    most = (scenario.kv_tokens or 0) // scenario.block_size * scenario.block_size
    for i in np.flatnonzero(requests.prompt_tokens + requests.output_tokens + gamma > most):
        drafts = f" + {gamma} drafted" if gamma else ""
        raise SpecsimError(
            f"{run.path / 'requests.jsonl'}: line {run.lines[i]}: {requests.prompt_tokens[i]} prompt + "
            f"{requests.output_tokens[i]} output{drafts} tokens can never fit in the KV cache: {counted}"
        )


def ablations(replay: Replay) -> dict[str, Scenario]:
    """The replay with each thing that it does left out in turn, by what is left out.

    They may hold larger steps than were measured: the last slopes go on.
    """
    base = replace(replay.scenario, extrapolate=True)
    rules = {f"without {name}": replace(base, rules=base.rules.without(name)) for name in RULES}
    found = rules | {
        "KV in single tokens": replace(base, block_size=1),
        "KV without end": replace(base, kv_tokens=1 << 40),
    }
    if base.profile.host_seconds:
        found["no host time"] = replace(base, profile=base.profile.model_copy(update={"host_seconds": 0.0}))
        hidden = base.async_scheduling
        found["host time not hidden" if hidden else "host time hidden"] = replace(base, async_scheduling=not hidden)
    if base.lockstep:
        found["ranks out of step"] = replace(base, lockstep=False)
    return found


def _needed(run: RecordedRun, field: str, told: int | None) -> int:
    value: int | None = told if told is not None else getattr(run.settings, field)
    if value is None:
        option = f"--{field.replace('_', '-')}"
        raise SpecsimError(
            f"{run.path / 'meta.json'}: engine_kwargs.{field}: is not told (the engine's default depends on the GPU): "
            f"expected {option} N"
        )
    return value


# Step prices


def _profile(run: RecordedRun, told: Told) -> tuple[Profile, Path, str]:
    """The run's own bundle, or what the user names, where it is, and a word on it."""
    source = told.profile or run.profile
    if source is None:
        raise SpecsimError(f"{run.path / 'profile'}: expected a bundle's folder there, or --profile FILE")
    warnings: list[str] = []
    if source.is_dir():
        profile, warnings = _bundle(run, source, told)
        steps = f"kernel times of {source}, {'with' if told.skew else 'without'} skew_fit.csv"
    else:
        profile = _ours(run, source, told)
        steps = f"profile {profile.name}, {profile.kind}"
    steps = "; ".join([steps, *(text.rstrip(".") for text in warnings)])
    return profile, source, f"{steps}; {1e3 * profile.host_seconds:g} ms of the host's time a step"


def _bundle(run: RecordedRun, source: Path, told: Told) -> tuple[Profile, list[str]]:
    settings = run.settings
    if run.config is None and source == run.profile:
        raise SpecsimError(f"{run.path / 'config.json'}: expected the model's, which says how often each kernel runs")
    ask = Ask(
        # The run's own folder is its own word that the two belong together, whatever they call the model.
        model=None if source == run.profile else settings.model.rstrip("/").rpartition("/")[2],
        tp=settings.tp,
        config=run.config,
        no_skew=not told.skew,
        expert_parallel=settings.dp * settings.tp if settings.expert_parallel else None,
        link_bandwidth=told.link_bandwidth,
        link_latency=told.link_latency,
        host_seconds=told.host_seconds,
    )
    try:
        return load_profile_source(source, "bundle", ask)
    except SpecsimError as error:  # said of options that an import has; here meta.json decides
        words = str(error)
        for name, field in MEANT.items():
            words = re.sub(rf"{name}(?![\w-])", field, words)
        raise SpecsimError(words if str(source) in words else f"{source}: {words}") from error


def _ours(run: RecordedRun, source: Path, told: Told) -> Profile:
    for name in ("skew", "link_bandwidth", "link_latency"):
        if getattr(told, name) not in (None, False):
            raise SpecsimError(f"--{name.replace('_', '-')}: has no meaning for the profile {source}, not a bundle")
    profile = load_profile(source)
    if profile.tp is not None and profile.tp != run.settings.tp:
        raise SpecsimError(
            f"{source}: tp: expected {run.settings.tp}, the run's tensor_parallel_size, got {profile.tp}"
        )
    if told.host_seconds is None:
        return profile
    return profile.model_copy(update={"host_seconds": told.host_seconds})


# KV capacity


def kv_capacity(run: RecordedRun, told: Told, profile: Profile) -> tuple[int, str]:
    """KV tokens of one replica, and where the number comes from.

    What is told goes before what was recorded (blocks, or else bytes for KV), and that before what a GPU of this
    name is rated at. One block is left out of the engine's count: vLLM keeps it empty. Raises SpecsimError where
    nothing is known.
    """
    settings, meta = run.settings, run.path / "meta.json"
    if told.kv_tokens is not None:
        _no_share(told, "--kv-tokens")
        if told.device_memory is not None:
            raise SpecsimError("--device-memory: has no meaning beside --kv-tokens")
        return told.kv_tokens, f"{told.kv_tokens:,} tokens, as told (--kv-tokens)"
    if told.device_memory is None and settings.num_blocks is not None:
        _no_share(told, f"the blocks that {meta} counts")
        tokens = (settings.num_blocks - 1) * settings.block_size
        return tokens, f"{tokens:,} tokens: the engine's {settings.num_blocks:,} blocks less the one it keeps empty"
    if told.device_memory is None and settings.kv_memory is not None:
        _no_share(told, f"the kv_cache_memory_bytes that {meta} tells")
        tokens = _tokens_in(run, _model(run), settings.kv_memory)
        if tokens < 1:
            raise SpecsimError(
                f"{meta}: kv_cache_memory_bytes: expected room for two blocks of {settings.block_size} tokens, "
                f"got {settings.kv_memory:g}"
            )
        return tokens, f"{tokens:,} tokens, worked out: {settings.kv_memory / 2**30:.1f} GiB (kv_cache_memory_bytes)"
    memory, whose = _memory(run, told, profile)
    if memory is None:
        if profile.kv_tokens is not None:
            return profile.kv_tokens, f"{profile.kv_tokens:,} tokens, by the profile {profile.name}"
        raise SpecsimError(
            f"{run.path / 'meta.json'}: kv_cache.num_gpu_blocks: is not told, nor the memory of a known GPU: "
            "expected --kv-tokens N or --device-memory BYTES"
        )
    share = told.utilisation or settings.utilisation or UTILISATION
    model = _model(run)
    weights = _weight_bytes(run, model)
    tokens = _tokens_in(run, model, memory * share - RESERVE_BYTES - weights)
    if tokens < 1:
        raise SpecsimError(
            f"KV capacity: {weights / 2**30:.1f} GiB of weights and {RESERVE_BYTES / 2**30:.1f} GiB for all else leave "
            f"no room in {share:g} of {memory / 2**30:.1f} GiB ({whose}): expected --kv-tokens N or --device-memory"
        )
    return tokens, (
        f"{tokens:,} tokens, worked out: {share:g} of {memory / 2**30:.1f} GiB ({whose}) less "
        f"{weights / 2**30:.1f} GiB of weights and {RESERVE_BYTES / 2**30:.1f} GiB for all else"
    )


def _no_share(told: Told, known: str) -> None:
    """Refuse --utilisation where the capacity does not hang on it."""
    if told.utilisation is not None:
        raise SpecsimError(f"--utilisation: has no meaning beside {known}")


def _memory(run: RecordedRun, told: Told, profile: Profile) -> tuple[float | None, str]:
    """Bytes of a GPU, and who says so."""
    if told.device_memory is not None:
        return told.device_memory, "--device-memory"
    if run.settings.device_memory is not None:
        return run.settings.device_memory, "recorded"
    if profile.kv_tokens is None:
        for name in (run.settings.device, profile.device):
            for key, device in DEVICES.items():
                if name and plain_gpu(name) in (plain_gpu(device.name), key):
                    return device.memory_bytes, f"rating of {device.name}"
    return None, ""


def _model(run: RecordedRun) -> ModelShape:
    if run.config is None:
        raise SpecsimError(
            f"{run.path / 'config.json'}: expected the model's, to work the KV cache out, or --kv-tokens"
        )
    return read_model(run.config)


def _tokens_in(run: RecordedRun, model: ModelShape, room: float) -> int:
    """KV tokens of the blocks in ``room`` bytes of each GPU, less the one kept empty; 0 or less: none."""
    kv, size = _format(run, "kv_cache_dtype", run.settings.kv_dtype), run.settings.block_size
    return (int(room / kv_bytes_on_gpu(model, kv, run.settings.tp) / size) - 1) * size


def _weight_bytes(run: RecordedRun, model: ModelShape) -> float:
    """Bytes of the weights on each GPU."""
    settings = run.settings
    weights = _format(
        run, "quantization" if settings.quantization else "dtype", settings.quantization or settings.dtype
    )
    if not settings.expert_parallel:
        return model.weight_bytes(weights) / settings.tp
    # Whole experts, each on one of all ranks; the rest is split over those of one replica alone.
    experts = 3 * model.moe_layers * model.experts * model.hidden * model.expert_intermediate * BYTES[weights]
    return (model.weight_bytes(weights) - experts) / settings.tp + experts / (settings.dp * settings.tp)


def _format(run: RecordedRun, field: str, name: str) -> Dtype:
    found = "fp8" if name.startswith("fp8") else FORMATS.get(name)
    if found is None:
        raise SpecsimError(
            f"{run.path / 'meta.json'}: engine_kwargs.{field}: expected {', '.join(FORMATS)} or fp8, to work the KV "
            f"cache out, or --kv-tokens N, got {name!r}"
        )
    return found
