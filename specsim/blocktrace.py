"""The block trace: what a drafter and its target did at every anchor position (``traces/*.parquet``).

One row an anchor position; :class:`Trace` tells the columns. The file's metadata, a JSON object under
the key ``specsim``, says who made it and how.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specsim.calibration import apply_sts
from specsim.files import first_error, write_atomic
from specsim.types import SpecsimError

SCHEMA = "specsim.trace/1"
_REQUIRED = ("request_id", "domain", "position", "confidence", "accepted", "proposed")
_OPTIONAL = ("draft_prob", "accept_rate", "prompt_tokens", "output_tokens")
_LISTS = ("confidence", "draft_prob", "accept_rate")
TOTAL = "all"
"""The sum over domains in every table: no domain may have this name."""

ListType = Literal["float32", "float16"]
"""What the numbers of a trace file's lists may be stored as; in memory they are float32."""


class TraceMeta(BaseModel):
    """The metadata of a block trace."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Literal["specsim.trace/1"] = Field(alias="schema", default="specsim.trace/1")
    drafter: str
    target: str
    gamma: Annotated[int, Field(ge=1, le=64)]
    kind: Literal["dense", "sequential"]
    temperature: Annotated[float, Field(ge=0)] | None = None
    draft_sampling: Literal["probabilistic", "greedy"] | None = None
    confidence_source: Literal["head", "draft_prob", "position_mean", "none"] = "head"
    sts: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    dataset: str | None = None
    seed: int | None = None
    command: str | None = None
    versions: dict[str, str] = {}
    notes: str | None = None


@dataclass(frozen=True)
class Trace:
    """A block trace in memory, rows grouped by domain, then response, in order of position.

    ``request_id`` and ``domain`` are int codes [n] into ``request_ids`` and ``domains``; ``position``
    [n] is the 0-based output index of the anchor; ``confidence`` float32 [n, γ] in [0, 1] (None: the
    drafter gives none; 0 past ``proposed``); ``accepted`` and ``proposed`` int64 [n] with
    0 <= accepted <= proposed <= γ. ``draft_prob`` and ``accept_rate`` [n, γ], ``prompt_tokens`` and
    ``output_tokens`` [n] are optional.
    """

    meta: TraceMeta
    request_id: NDArray[np.int64]
    request_ids: tuple[str, ...]
    domain: NDArray[np.int64]
    domains: tuple[str, ...]
    position: NDArray[np.int64]
    confidence: NDArray[np.float32] | None
    accepted: NDArray[np.int64]
    proposed: NDArray[np.int64]
    draft_prob: NDArray[np.float32] | None = None
    accept_rate: NDArray[np.float32] | None = None
    prompt_tokens: NDArray[np.int64] | None = None
    output_tokens: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.accepted)

    @property
    def gamma(self) -> int:
        """Block length."""
        return self.meta.gamma

    def responses(self) -> NDArray[np.int64]:
        """Which response each row belongs to, int64 [n], counted from 0 in the order of the rows."""
        new = (np.diff(self.request_id) != 0) | (np.diff(self.domain) != 0)
        return np.concatenate([[0], np.cumsum(new)]).astype(np.int64)

    def confidences(self, calibrated: bool = True) -> NDArray[np.float32] | None:
        """c_k float32 [n, γ], NaN where no token was proposed; None where the drafter gives none.

        ``calibrated`` applies the trace's temperatures, where it has them.
        """
        if self.confidence is None:
            return None
        confidence = self.confidence
        if calibrated and self.meta.sts is not None:
            confidence = apply_sts(confidence, np.array(self.meta.sts)).astype(np.float32)
        return np.where(np.arange(self.gamma) < self.proposed[:, None], confidence, np.float32(np.nan))


def make_trace(meta: TraceMeta, columns: Mapping[str, Any], where: str = "block trace") -> Trace:
    """Check ``columns`` (arrays by the column names of the file format) and sort them into a Trace.

    Raises SpecsimError naming ``where``, the column and the row (0-based, as given).
    """
    _check_names(where, columns)
    n = len(columns["accepted"])
    if n == 0:
        raise SpecsimError(f"{where}: expected at least one row, got an empty trace")
    for name in columns:
        if columns[name] is not None and len(columns[name]) != n:
            raise SpecsimError(f"{where}: column {name!r}: expected {n} rows, got {len(columns[name])}")
    request, request_ids = _codes(columns["request_id"])
    domain, domains = _codes(columns["domain"])
    if TOTAL in domains:
        row = int(np.flatnonzero(domain == domains.index(TOTAL))[0])
        raise SpecsimError(f"{where}: column 'domain', row {row}: {TOTAL!r} is the name of the total, expected another")
    position, accepted, proposed = (_ints(where, columns, c) for c in ("position", "accepted", "proposed"))
    _bounds(where, "position", position, 0, None)
    _bounds(where, "proposed", proposed, 0, meta.gamma)
    _bounds(where, "accepted", accepted, 0, proposed)
    lists = {c: _block(where, c, columns.get(c), n, meta.gamma, proposed) for c in ("confidence", "draft_prob")}
    rate = columns.get("accept_rate")
    if rate is not None:
        # Past the first rejection there is no rate: NaN is the format's own word for it.
        rate = _block(where, "accept_rate", rate, n, meta.gamma, np.minimum(accepted + 1, proposed))
    if (lists["confidence"] is None) != (meta.confidence_source == "none"):
        given = "null" if lists["confidence"] is None else "numbers"
        raise SpecsimError(
            f"{where}: column 'confidence': {given}, but confidence_source says {meta.confidence_source!r}"
        )
    order = np.lexsort((position, request, domain))
    same = (np.diff(request[order]) == 0) & (np.diff(domain[order]) == 0)
    gap = np.diff(position[order])
    bad = same & ((gap != 1) if meta.kind == "dense" else (gap < 1))
    if bad.any():
        row = int(order[1:][bad][0])
        expected = "one more than the row before (dense)" if meta.kind == "dense" else "more than the row before"
        raise SpecsimError(
            f"{where}: column 'position', row {row}: expected {expected} within request "
            f"{request_ids[request[row]]!r}, got {position[row]} after {position[order[:-1][bad][0]]}"
        )
    if meta.sts is not None and len(meta.sts) != meta.gamma:
        raise SpecsimError(f"{where}: metadata sts: expected {meta.gamma} temperatures, got {len(meta.sts)}")

    def ordered(values: Any) -> Any:
        return None if values is None else values[order]

    def counts(name: str) -> Any:
        return ordered(_ints(where, columns, name)) if columns.get(name) is not None else None

    return Trace(
        meta=meta,
        request_id=ordered(request),
        request_ids=request_ids,
        domain=ordered(domain),
        domains=domains,
        position=ordered(position),
        confidence=ordered(lists["confidence"]),
        accepted=ordered(accepted),
        proposed=ordered(proposed),
        draft_prob=ordered(lists["draft_prob"]),
        accept_rate=ordered(rate),
        prompt_tokens=counts("prompt_tokens"),
        output_tokens=counts("output_tokens"),
    )


def read_trace(path: str | Path) -> Trace:
    """Read and check a block trace; SpecsimError names the file, the column and the row."""
    try:
        # A file alone, never a folder of them; ParquetFile, because read_table speaks of a "<Buffer>".
        with open(path, "rb") as file:
            table = pq.ParquetFile(file).read()
    except OSError as error:
        raise SpecsimError(f"{path}: cannot read: {error.strerror or str(error).splitlines()[0]}") from error
    except pa.ArrowException as error:
        raise SpecsimError(f"{path}: expected a parquet file: {str(error).splitlines()[0]}") from error
    raw = (table.schema.metadata or {}).get(b"specsim")
    if raw is None:
        raise SpecsimError(f"{path}: metadata key 'specsim' is missing: expected a specsim block trace")
    try:
        meta = TraceMeta.model_validate_json(raw)
    except ValidationError as error:
        raise SpecsimError(f"{path}: metadata {first_error(error)}") from error
    _check_names(str(path), dict.fromkeys(table.column_names))
    columns: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if name == "confidence" and column.null_count == len(column):
            columns[name] = None
            continue
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise SpecsimError(f"{path}: column {name!r}, row {row}: expected a value, got null")
        columns[name] = _to_numpy(f"{path}: column {name!r}", column, meta.gamma)
    return make_trace(meta, columns, str(path))


def write_trace(trace: Trace, path: str | Path, dtype: ListType | Mapping[str, ListType] = "float32") -> Path:
    """Write a block trace as parquet, whole or not at all; return the path.

    ``dtype`` is what the lists are stored as, all of them or by name (float32 where it names none). "float16"
    halves a list, and moves a probability by less than 0.0005; none that lies between 0 and 1 becomes either
    of them, since temperatures could not move it then. Above 0.9995 that leaves one value: of 120,000 blocks
    with 5 % of their confidences there, no ECE moved by more than 0.0005 and no AUC by more than 0.0001; with
    60 % there, by 0.04 and 0.03. Keep the confidences of a head as sure as that in float32.

    Raises SpecsimError for another ``dtype`` or list, or a path that cannot be written.
    """
    kinds: dict[str, str] = dict.fromkeys(_LISTS, "float32")
    kinds |= dict.fromkeys(_LISTS, dtype) if isinstance(dtype, str) else dtype
    for name, kind in kinds.items():
        if name not in _LISTS or kind not in get_args(ListType):
            raise SpecsimError(
                f"dtype: {name}: {kind!r}, expected {' or '.join(get_args(ListType))} of {', '.join(_LISTS)}"
            )
    n, gamma = len(trace), trace.meta.gamma

    def block(name: str) -> pa.Array:
        values = getattr(trace, name)
        if values is None:
            return pa.nulls(n, pa.list_(pa.type_for_alias(kinds[name]), gamma))
        return pa.FixedSizeListArray.from_arrays(pa.array(_stored(values, kinds[name]).ravel()), gamma)

    def words(codes: NDArray[np.int64], names: tuple[str, ...]) -> pa.Array:
        return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(names, pa.string()))

    columns = {
        "request_id": words(trace.request_id, trace.request_ids),
        "domain": words(trace.domain, trace.domains),
        "position": pa.array(trace.position, pa.int32()),
        "confidence": block("confidence"),
        "accepted": pa.array(trace.accepted, pa.int8()),
        "proposed": pa.array(trace.proposed, pa.int8()),
    }
    for name in ("draft_prob", "accept_rate"):
        if getattr(trace, name) is not None:
            columns[name] = block(name)
    for name in ("prompt_tokens", "output_tokens"):
        if (values := getattr(trace, name)) is not None:
            columns[name] = pa.array(values, pa.int32())
    meta = trace.meta.model_dump(mode="json", by_alias=True)
    table = pa.table(columns).replace_schema_metadata({"specsim": json.dumps(meta, sort_keys=True)})
    # 120,000 rows of γ = 7 with confidence and accept_rate: 5.8 MB at the defaults, 4.3 MB so, 2.0 MB in float16.
    # Probabilities hardly repeat: a dictionary of them costs more than it saves, and their exponents, split off
    # from the noise of the mantissas, are what can be compressed. Positions of a response differ by one.
    split = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in _LISTS if name in columns}
    options: dict[str, Any] = {
        "compression": "zstd",
        "compression_level": 9,
        "use_dictionary": [name for name in columns if name not in (*_LISTS, "position")],
        "column_encoding": {**split, "position": "DELTA_BINARY_PACKED"},
    }
    return write_atomic(path, lambda p: pq.write_table(table, p, **options))


def lossless_dtypes(trace: Trace) -> dict[str, ListType]:
    """The smallest type that keeps every digit of each list: float16 for what was read from float16."""
    types: dict[str, ListType] = {}
    for name in _LISTS:
        if (values := getattr(trace, name)) is not None:
            same = np.array_equal(_stored(values, "float16").astype(np.float32), values, equal_nan=True)
            types[name] = "float16" if same else "float32"
    return types


def _stored(values: NDArray[np.float32], kind: str) -> NDArray[np.floating]:
    if kind == "float32":
        return values.astype(np.float32)
    low, high = np.finfo(np.float16).smallest_subnormal, np.nextafter(np.float16(1), np.float16(0))
    half = values.astype(np.float16)
    return np.where((values > 0) & (values < 1), np.clip(half, low, high), half)


def _check_names(where: str, columns: Mapping[str, Any]) -> None:
    known = (*_REQUIRED, *_OPTIONAL)
    for name in _REQUIRED:
        if name not in columns:
            raise SpecsimError(f"{where}: column {name!r} is missing: expected {', '.join(_REQUIRED)}")
    for name in columns:
        if name not in known:
            raise SpecsimError(f"{where}: column {name!r} is not known: expected only {', '.join(known)}")


def _to_numpy(where: str, column: pa.Array, gamma: int) -> NDArray[Any]:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    elif pa.types.is_fixed_size_list(kind):
        if kind.list_size != gamma:
            raise SpecsimError(f"{where}: expected lists of gamma = {gamma}, got lists of {kind.list_size}")
        return np.asarray(column.flatten().to_numpy(zero_copy_only=False)).reshape(len(column), gamma)
    elif pa.types.is_nested(kind):
        raise SpecsimError(f"{where}: expected fixed_size_list[{gamma}], got {kind}")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _codes(values: Any) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Codes [n] and names in order of first appearance, so that nothing depends on a hash."""
    codes, names = pd.factorize(np.asarray(values, dtype=object))
    return codes.astype(np.int64), tuple(str(name) for name in names)


def _ints(where: str, columns: Mapping[str, Any], name: str) -> NDArray[np.int64]:
    values = np.asarray(columns[name])
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise SpecsimError(f"{where}: column {name!r}: expected whole numbers, got {values.dtype}")
    return values.astype(np.int64)


def _bounds(where: str, name: str, values: NDArray[np.int64], low: int, high: int | NDArray[np.int64] | None) -> None:
    bad = values < low
    if high is not None:
        bad |= values > high
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        top = "" if high is None else f"..{np.broadcast_to(high, values.shape)[row]}"
        expected = f"expected {low}{top}" if top else f"expected {low} or more"
        raise SpecsimError(f"{where}: column {name!r}, row {row}: {expected}, got {values[row]}")


def _block(
    where: str, name: str, values: Any, n: int, gamma: int, valid: NDArray[np.int64]
) -> NDArray[np.float32] | None:
    """Check probabilities [n, γ] up to column ``valid`` of each row; what lies beyond becomes 0."""
    if values is None:
        return None
    block = np.asarray(values)
    if block.shape != (n, gamma) or not np.issubdtype(block.dtype, np.floating):
        raise SpecsimError(f"{where}: column {name!r}: expected floats [{n}, gamma={gamma}], got {block.shape}")
    inside = np.arange(gamma) < valid[:, None]
    bad = inside & ~((block >= 0) & (block <= 1))
    if bad.any():
        row, k = (int(i) for i in np.argwhere(bad)[0])
        raise SpecsimError(f"{where}: column {name!r}, row {row}, position {k + 1}: expected 0..1, got {block[row, k]}")
    return np.where(inside, block, 0 if name != "accept_rate" else np.nan).astype(np.float32)
