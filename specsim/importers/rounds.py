"""Acceptance round by round, in the order it happened: sequential block traces.

- Spec-Bench answers (JSON lines): ``accept_lengths``, tokens of every cycle, bonus included;
- SGLang's ``/server_info``: ``dspark_info_record.records``, one a decode step, with ``reqs`` where the server
  was told to record them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specsim.blocktrace import Trace, TraceMeta, make_trace
from specsim.files import read_text
from specsim.importers.evidence import LONGEST, Ask, Evidence, is_number, name_of, parse, positive, problem, whole
from specsim.importers.rates import mean_only
from specsim.types import SpecsimError

TREE = (
    "Every cycle is taken to have proposed gamma tokens. A tree drafter verifies more tokens than the gamma of its "
    "longest path: the acceptance is its own, the cost of its step is not that of gamma + 1 tokens."
)
CUT = "The last cycle of a request may have been cut by its end."


def read_specbench(path: str | Path, text: str, ask: Ask) -> Trace:
    """Read Spec-Bench JSON lines: accept_lengths (at the top or in each of ``choices``), category.

    Each becomes a request of domain ``category``, its cycles in order, so autocorrelation is kept. γ is the
    longest length - 1 unless ``ask.gamma`` says more. Raises SpecsimError naming file, line and field.
    """
    requests: list[tuple[str, str, list[int]]] = []
    models: dict[str, None] = {}
    for number, (where, row) in enumerate(parse(path, text), start=1):
        if not isinstance(row, dict):
            raise problem(where, "line", "a JSON object", row)
        domain, name = name_of(row, "category") or "*", name_of(row, "question_id", "task_id") or f"line {number}"
        models |= dict.fromkeys([m] if (m := name_of(row, "model_id")) else [])
        choices = row.get("choices") if "accept_lengths" not in row else [row]
        if not isinstance(choices, list) or not choices:
            raise problem(where, "accept_lengths", "a list of tokens by cycle", None)
        for i, choice in enumerate(choices):
            lengths = choice.get("accept_lengths") if isinstance(choice, dict) else None
            label = name if len(choices) == 1 else f"{name}/{i}"
            requests.append((label, domain, _lengths(where, lengths, ask.gamma)))
    requests = [r for r in requests if r[2]]  # a choice that failed has no cycles
    names = [name for name, _, _ in requests]
    if not requests or len(set(names)) < len(names):
        got = next((name for name in names if names.count(name) > 1), None)
        raise problem(str(path), "question_id", "one or more requests, each with its own", got)
    longest = max(max(lengths) for _, _, lengths in requests)
    if longest < 2 and ask.gamma is None:
        raise problem(str(path), "accept_lengths", "a length above 1 (or --gamma)", longest)
    gamma = ask.gamma or longest - 1
    size = [len(lengths) for _, _, lengths in requests]
    tokens = np.concatenate([lengths for _, _, lengths in requests])
    columns = {
        "request_id": np.repeat(np.array(names, dtype=object), size),
        "domain": np.repeat(np.array([domain for _, domain, _ in requests], dtype=object), size),
        # The prompt's own token has index 0 and is the first anchor.
        "position": np.concatenate([np.cumsum([0, *lengths[:-1]]) for _, _, lengths in requests]),
        "confidence": None,
        "accepted": tokens - 1,
        "proposed": np.full(len(tokens), gamma),
    }
    known = f"gamma = {gamma} is " + ("as given." if ask.gamma else "the longest length seen, less the bonus token.")
    meta = _meta(path, ask, gamma, "none", f"Spec-Bench accept lengths. {known} {TREE} {CUT}", *models)
    return make_trace(meta, columns, str(path))


def _lengths(where: str, lengths: Any, gamma: int | None) -> list[int]:
    if not isinstance(lengths, list):
        raise problem(where, "accept_lengths", "a list of tokens by cycle", lengths)
    most = LONGEST + 1 if gamma is None else gamma + 1
    for i, length in enumerate(lengths, start=1):
        if type(length) is not int or not 1 <= length <= most:
            expected = f"a whole number, 1..{most} (the bonus token counts)"
            raise problem(where, f"accept_lengths, cycle {i}", expected, length)
    return lengths


def read_sglang(path: str | Path, text: str, ask: Ask) -> Trace | Evidence:
    """Read an SGLang /server_info (or its dspark_info_record): what it can say of acceptance.

    With ``reqs`` in the records (SGLANG_DSPARK_DEBUG_DUMP=core,reqs) a sequential trace: ``correct_drafts`` of
    the ``verify_len`` - 1 draft tokens verified, and confidences where ``survival`` is there. Tokens trimmed
    before verification are not known and count as not proposed. Without ``reqs`` only the engine's
    ``avg_spec_accept_length``, one mean. Records of neither are step times (``sglang_steps``): refused.
    """
    states = _states(path, text)
    records = [(at, record) for at, _, state in states for at, record in _records(at, state)]
    if not any(record.get("reqs") for _, record in records):
        return _sglang_mean(path, states, ask)
    rows = [row for at, record in records for row in _requests(at, record)]
    gamma = ask.gamma or _sglang_gamma(path, states)
    table = pd.DataFrame(rows)
    for at, length in zip(table["at"], table["verify_len"], strict=True):
        if length > gamma + 1:
            raise problem(at, "verify_len", f"1..{gamma + 1}, for gamma = {gamma}", length)
    known = any(table["survival"].map(len))
    for at, survival in zip(table["at"], table["survival"], strict=True):
        if known and len(survival) != gamma:
            raise problem(at, "survival", f"{gamma} numbers, one a draft position", survival)
    trimmed = float((table["verify_len"] <= gamma).mean())
    notes = (
        f"SGLang step records. In {trimmed:.1%} of the rounds the scheduler verified less than gamma: what it trimmed "
        "is not known and counts as not proposed, so replay cannot verify more than it did."
    )
    if known:
        notes += " Confidences are as the server used them."
    before = table.groupby("rid")["acc_len"].cumsum() - table["acc_len"]
    columns = {
        "request_id": table["rid"].to_numpy(dtype=object),
        "domain": np.full(len(table), "*", dtype=object),
        "position": before.to_numpy(dtype=np.int64),
        "confidence": _confidence(np.array(table["survival"].tolist(), dtype=np.float64)) if known else None,
        "accepted": table["correct_drafts"].to_numpy(dtype=np.int64),
        "proposed": table["verify_len"].to_numpy(dtype=np.int64) - 1,
    }
    return make_trace(_meta(path, ask, gamma, "head" if known else "none", notes), columns, str(path))


def sglang_steps(path: str | Path) -> pd.DataFrame:
    """The decode steps in SGLang's records, as a table: what they say of load and time.

    Columns: rank, step (forward_ct), num_seqs, num_tokens (verified, anchors included), per_request, and, NaN
    where not recorded, step_s, draft_s, verify_s, predicted_s (seconds).
    """
    seconds = {
        "step_s": "step_gpu_ms", "draft_s": "draft_gpu_ms", "verify_s": "target_verify_gpu_ms",
        "predicted_s": "predicted_step_ms",
    }  # fmt: skip
    rows = []
    for at, rank, state in _states(path, read_text(path)):
        for where, record in _records(at, state):
            seqs, tokens = whole(where, record, "bs", 1), whole(where, record, "num_verify_tokens", 1)
            row = {"rank": rank, "step": record.get("forward_ct"), "num_seqs": seqs, "num_tokens": tokens}
            times = {
                column: positive(where, record, field) / 1e3 if record.get(field) is not None else np.nan
                for column, field in seconds.items()
            }
            rows.append(row | {"per_request": tokens / seqs} | times)
    if not rows:
        raise problem(str(path), "dspark_info_record.records", "at least one record", None)
    return pd.DataFrame(rows)


def _states(path: str | Path, text: str) -> list[tuple[str, int, dict[str, Any]]]:
    """Where, rank and content of each rank's state; a bare dspark_info_record is one rank's."""
    where, data = parse(path, text)[0]
    if not isinstance(data, dict):
        raise problem(where, "document", "a JSON object", data)
    if not isinstance(states := data.get("internal_states"), list):
        states = [data if "dspark_info_record" in data else {"dspark_info_record": data}]
        return [(where, 0, states[0])]
    return [(f"{where}: internal_states.{i}", i, s) for i, s in enumerate(states) if isinstance(s, dict)]


def _records(at: str, state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    info = state.get("dspark_info_record")
    records = info.get("records") if isinstance(info, dict) else None
    for i, record in enumerate(records if isinstance(records, list) else []):
        where = f"{at}: dspark_info_record.records.{i}"
        if not isinstance(record, dict):
            raise problem(where, "record", "a JSON object", record)
        yield where, record


def _requests(at: str, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What one step did to each request: a row a request, checked."""
    requests = record.get("reqs")
    if not isinstance(requests, list):
        raise problem(at, "reqs", "a list, as in other records", requests)
    for i, request in enumerate(requests):
        where = f"{at}.reqs.{i}"
        if not isinstance(request, dict) or (name := name_of(request, "rid")) is None:
            raise problem(where, "rid", "the name of a request", request)
        length = whole(where, request, "verify_len", 1, LONGEST + 1)
        correct = whole(where, request, "correct_drafts", 0, length - 1)
        survival = request.get("survival") or []
        if not isinstance(survival, list) or not all(is_number(s) and 0 <= s <= 1 for s in survival):
            raise problem(where, "survival", "a list of shares 0..1", survival)
        made = whole(where, request, "acc_len", 1, correct + 1) if "acc_len" in request else correct + 1
        counts = {"verify_len": length, "correct_drafts": correct, "acc_len": made}
        yield {"at": where, "rid": name, "survival": survival} | counts


def _confidence(survival: NDArray[np.float64]) -> NDArray[np.float64]:
    """c_k = a_k / a_{k-1} [n, γ] of recorded survivals, which are rounded: at most 1, and 0 after a 0."""
    before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
    ratio = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
    return np.asarray(np.minimum(ratio, 1.0), dtype=np.float64)


def _sglang_gamma(path: str | Path, states: list[tuple[str, int, dict[str, Any]]]) -> int:
    """γ: what the record says, or a block less its anchor."""
    for at, _, state in states:
        info = state.get("dspark_info_record")
        if isinstance(info, dict) and "gamma" in info:
            return whole(at, info, "gamma", 1, LONGEST)
        if isinstance(info, dict) and "verify_num_draft_tokens" in info:
            return whole(at, info, "verify_num_draft_tokens", 2, LONGEST + 1) - 1
    raise SpecsimError(f"{path}: dspark_info_record.gamma: is missing, expected it or --gamma")


def _sglang_mean(path: str | Path, states: list[tuple[str, int, dict[str, Any]]], ask: Ask) -> Evidence:
    means = [(at, state) for at, _, state in states if state.get("avg_spec_accept_length") is not None]
    if not means:
        steps = sglang_steps(path)
        step = steps["step_s"].mean() * 1e3
        took = "" if np.isnan(step) else f" of {step:.3g} ms"
        raise SpecsimError(
            f"{path}: dspark_info_record.records: expected reqs with correct_drafts (start the server with "
            f"SGLANG_DSPARK_DEBUG_DUMP=core,reqs): these {len(steps)} steps{took} say that "
            f"{steps['per_request'].mean():.3g} tokens a request were verified, not how many were accepted"
        )
    if len(means) > 1:
        raise SpecsimError(f"{path}: avg_spec_accept_length: expected that of one rank, got {len(means)} to weigh")
    at, state = means[0]
    gamma = ask.gamma or _sglang_gamma(path, states)
    tau = positive(at, state, "avg_spec_accept_length")
    if not 1 <= tau <= gamma + 1:
        raise problem(at, "avg_spec_accept_length", f"1..{gamma + 1} (the bonus token counts)", tau)
    return mean_only("avg_spec_accept_length of SGLang", tau, gamma)


def _meta(path: str | Path, ask: Ask, gamma: int, confidence: str, notes: str, *drafters: str) -> TraceMeta:
    return TraceMeta.model_validate(
        {
            "drafter": ask.drafter or ", ".join(drafters) or "unknown",
            "target": ask.target or "unknown",
            "gamma": gamma,
            "kind": "sequential",
            "confidence_source": confidence,
            "dataset": Path(path).name,
            "command": ask.command,
            "notes": f"imported: {notes}",
        }
    )
