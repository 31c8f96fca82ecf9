"""Acceptance that others publish as JSON: rates by position, or one mean.

- rates by position: rows of ``per_position`` (unconditional, as vLLM counts) with a name, or the result file
  of ``vllm bench serve --save-result``, which says the same in its own words;
- DeepSpec's metrics.json: ``accept_rates_by_position``, 0-based and unconditional;
- llama.cpp's ``timings``: ``draft_n`` and ``draft_n_accepted``, sums over a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specsim.importers.evidence import (
    LOWER_BOUND,
    ONE_MEAN,
    PAST_END,
    Ask,
    Evidence,
    check_mean,
    check_survival,
    choose,
    constant_survival,
    is_number,
    length_notes,
    name_of,
    parse,
    positive,
    problem,
    whole,
)
from specsim.types import SpecsimError

BENCH = "spec_decode_per_position_acceptance_rates"
_BENCH_FIELDS = {
    BENCH: "per_position",
    "spec_decode_acceptance_length": "mean",
    "spec_decode_num_drafts": "num_drafts",
    "spec_decode_draft_tokens": "num_draft_tokens",
    "spec_decode_accepted_tokens": "num_accepted_tokens",
    "model_id": "verifier",
}
END_SHARE = 0.1
"""How far rounds that end on an end of sequence may move DeepSpec's means: one in ten rounds is a short answer."""


def rows_of(data: Any) -> list[tuple[str, Any]]:
    """The rows of a JSON document, each with its path: those of ``rows``, of a list, or the document itself."""
    if isinstance(data, dict) and isinstance(data.get("rows"), list):
        return [(f"rows.{i}", row) for i, row in enumerate(data["rows"])]
    return [(str(i), row) for i, row in enumerate(data)] if isinstance(data, list) else [("", data)]


def read_per_position(path: str | Path, text: str, ask: Ask) -> Evidence:
    """Read one row of rates by position; ``ask.select`` names its ``id`` or ``drafter`` among several.

    Raises SpecsimError naming file, row and field: rates out of 0..1 or increasing, a mean that is not
    1 + their sum, counts that contradict them.
    """
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for at, data in _objects(path, text):
        row = {_BENCH_FIELDS.get(key, key): value for key, value in data.items()}
        name = name_of(row, "id", "drafter", "label", "verifier") or f"row {len(rows) + 1}"
        if name in rows:
            raise problem(at, "id", "a name of its own", name)
        rows[name] = at, row
    named = [name for name, (_, row) in rows.items() if ask.select is not None and row.get("drafter") == ask.select]
    if named and ask.select not in rows:
        name = choose(str(path), f"rows of drafter {ask.select}", named, None)
    else:
        name = choose(str(path), "drafters", list(rows), ask.select)
    at, row = rows[name]
    survival = _rates(at, "per_position", row)
    if row.get("mean") is not None:
        check_mean(at, "mean", survival, positive(at, row, "mean"))
    per_draft = None
    if row.get("num_drafts") is not None and row.get("num_draft_tokens") is not None:
        per_draft = whole(at, row, "num_draft_tokens") / whole(at, row, "num_drafts", low=1)
    notes = (*length_notes(at, ask.fixed_length, len(survival), per_draft), PAST_END)
    said = name_of(row, "source")
    source = f"acceptance by position of {name}" + (f" ({said})" if said else "")
    return Evidence({"*": survival}, source, notes, name_of(row, "drafter", "id"), name_of(row, "verifier", "target"))


def read_deepspec(path: str | Path, text: str, ask: Ask) -> Evidence:
    """Read DeepSpec's metrics.json, or a list of its rows: a domain for each dataset.

    Rounds that end on an accepted end of sequence leave the positions behind it uncounted, which is our
    convention too, and have no bonus token, which is not: the imported tau may lie a little above
    ``acceptance_length``. Raises SpecsimError for rates that increase, for a mean that is far from them, and
    for an evaluation that trimmed its drafts, whose rates are those of the rounds that got that far.
    """
    survival: dict[str, tuple[float, ...]] = {}
    notes: list[str] = []
    arguments: Mapping[str, Any] = {}
    for at, data in _objects(path, text):
        row = data
        if isinstance(data.get("spec"), dict):
            at, row = f"{at}: spec", data["spec"]
            arguments = _object(_object(data.get("config")).get("args"))
        domain = name_of(row, "dataset") or "*"
        if domain in survival:
            raise problem(at, "dataset", "a name of its own", domain)
        survival[domain] = _deepspec_row(at, row)
        notes.append(f"{domain}: acceptance_length {row['acceptance_length']:.4g} as evaluated.")
    notes.append("A round that ends on an accepted end of sequence has no bonus token there and one here.")
    temperature = arguments.get("temperature")
    return Evidence(
        survival,
        "DeepSpec evaluation, batch 1",
        tuple(notes),
        name_of(arguments, "draft_name_or_path", "draft_model_path"),
        name_of(arguments, "target_name_or_path", "target_model_path"),
        float(temperature) if is_number(temperature) and 0 <= temperature < 2**53 else None,
    )


def _deepspec_row(at: str, row: Mapping[str, Any]) -> tuple[float, ...]:
    rates = row.get("accept_rates_by_position")
    if isinstance(rates, list):
        while rates and rates[-1] is None:  # positions that no round proposed
            rates = rates[:-1]
    survival = _rates(at, "accept_rates_by_position", {"accept_rates_by_position": rates})
    proposed = row.get("draft_tokens_per_proposal")
    if proposed is not None and positive(at, row, "draft_tokens_per_proposal") < (1 - END_SHARE) * len(survival):
        expected = f"about {len(survival)}: rates of trimmed drafts (confidence threshold) are not those of all rounds"
        raise problem(at, "draft_tokens_per_proposal", expected, proposed)
    check_mean(at, "acceptance_length", survival, positive(at, row, "acceptance_length"), END_SHARE)
    return survival


def read_llamacpp(path: str | Path, text: str, ask: Ask) -> Evidence:
    """Read the ``timings`` of llama.cpp responses (one document, a list, or a line each), added up.

    Each cycle makes its accepted tokens and one more, and the prompt makes the first token, so there
    were predicted_n - 1 - draft_n_accepted cycles. That gives tau, not the positions: acceptance is taken
    to be the same at every one of ``ask.gamma`` (the server's draft-max), which must be given.
    """
    if ask.gamma is None:
        raise SpecsimError(f"{path}: holds one mean, expected --gamma, the longest draft (the server's --draft-max)")
    cycles = drafted = accepted = 0
    for at, data in _objects(path, text):
        if "timings" in data:
            at, data = f"{at}: timings", _object(data["timings"])
        if "draft_n" not in data:
            continue  # llama.cpp leaves both out where a request had no draft
        kept = whole(at, data, "draft_n_accepted", 0, whole(at, data, "draft_n"))
        cycles += whole(at, data, "predicted_n", kept + 2) - 1 - kept
        drafted, accepted = drafted + data["draft_n"], accepted + kept
    if not cycles:
        raise problem(str(path), "timings.draft_n", "at least one response with a draft", None)
    if drafted > ask.gamma * cycles:
        raise problem(
            str(path), "--gamma", f"at least {-(-drafted // cycles)}: {drafted} drafted in {cycles}", ask.gamma
        )
    notes = (f"{cycles:,} cycles.", ONE_MEAN, *length_notes(str(path), ask.fixed_length, ask.gamma, drafted / cycles))
    return Evidence({"*": constant_survival(accepted / cycles, ask.gamma)}, "timings of llama.cpp", notes)


def mean_only(source: str, tau: float, gamma: int) -> Evidence:
    """The evidence in one mean acceptance length ``tau`` (bonus included) of blocks of ``gamma``."""
    return Evidence({"*": constant_survival(tau - 1, gamma)}, source, (ONE_MEAN, LOWER_BOUND))


def _rates(at: str, field: str, row: Mapping[str, Any]) -> tuple[float, ...]:
    rates = row.get(field)
    if not isinstance(rates, list) or not rates:
        raise problem(at, field, "a list of shares by position", rates)
    return check_survival(at, field, rates)


def _objects(path: str | Path, text: str) -> list[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file, one or more, each with where it stands."""
    found = []
    for where, data in parse(path, text):
        for at, row in rows_of(data):
            if not isinstance(row, dict):
                raise problem(where, at or "document", "a JSON object", row)
            found.append((f"{where}: {at}" if at else where, row))
    if not found:
        raise problem(str(path), "document", "at least one row", text.strip()[:60])
    return found


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
