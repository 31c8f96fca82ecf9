"""Reading and writing files so that nothing is lost and no half file is left."""

from __future__ import annotations

import csv
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from specsim.types import SpecsimError

Model = TypeVar("Model", bound=BaseModel)

Named = Mapping[str, Path | Sequence[Path] | None]
"""What options or arguments name: a path, several, or nothing."""

PATHS = ("--out", "--work", "--record", "--profile", "--trace", "--arrivals", "--results", "--scenario")
"""Options that name a file or a folder: an empty name would be the folder that we are in."""


def write_atomic(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Call ``write(temporary path)`` in the folder of ``path``, then rename the result onto ``path``.

    Missing folders are made. Whatever goes wrong (no permission, disk full), the temporary file
    is removed, an older file at ``path`` stays as it was, and a SpecsimError says why. A device or
    a pipe, onto which nothing can be renamed, is written to as it is.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        if _is_device(path):
            with tempfile.TemporaryDirectory() as folder:
                # pyarrow removes what it could not finish: then the link goes, not the device.
                link = Path(folder, path.name)
                link.symlink_to(path.absolute())
                write(link)
            return path
        if path.is_symlink():
            path = path.resolve()  # the link stays, what it points to is replaced
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise SpecsimError(f"{path}: is a folder, expected a file name to write to")
        # The suffix is kept because writers such as matplotlib choose the format by it.
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise SpecsimError(f"{path}: cannot write: {_reason(error, path.parent)}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return path


def check_folder(folder: str | Path, option: str = "folder") -> Path:
    """See that a file can be written in ``folder``, which ``option`` gave: before the work.

    A folder that is missing could be made: it was, and is gone again, so that work that stops leaves none behind.
    """
    folder = Path(folder)
    _check_no_dash(option, folder)
    missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SpecsimError(f"{folder}: cannot write there: {_reason(error, folder)}") from error
    finally:
        for place in missing:
            with suppress(OSError):  # not made, or another has put something there by now
                place.rmdir()
    return folder


def check_no_empty(arguments: Sequence[str]) -> None:
    """SpecsimError for ``--out ""`` on a command line: as a path it would become the folder that we are in."""
    for option, value in zip_longest(arguments, arguments[1:]):
        name, sign, given = option.partition("=")
        if name in PATHS and (given if sign else value) == "":
            raise SpecsimError(f"{name}: expected a path, got ''")


def check_output(option: str, path: Path | None) -> None:
    """See that a file can be written to ``path``, which ``option`` gave: before the work, not after it."""
    if path is None or _is_device(path):
        return
    _check_no_dash(option, path)
    check_folder(path.parent)
    if path.is_dir():
        raise SpecsimError(f"{option}: expected a file name, got the folder {path}")


def check_apart(outputs: Named, inputs: Named) -> None:
    """See that no output would be written over an input or another output: before the work, not after it.

    Both are by the option that names them. Devices and pipes hold nothing that could be lost.
    """
    written, read = _named_paths(outputs), _named_paths(inputs)
    for i, (option, path) in enumerate(written):
        for name, other in read:
            if _is_same(path, other):
                raise SpecsimError(f"{option}: {path}: is the input {name}, expected another path")
        for name, other in written[:i]:
            if _is_same(path, other):
                raise SpecsimError(f"{option}: {path}: is also written by {name}, expected another path")


def write_text(path: str | Path, text: str) -> Path:
    """Write ``text`` to ``path`` atomically, with UTF-8 and Unix line ends."""
    return write_atomic(path, lambda p: p.write_text(text, encoding="utf-8", newline="\n"))


def read_text(path: str | Path) -> str:
    """Return the text of ``path``; a missing, unreadable or non-UTF-8 file is a SpecsimError."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SpecsimError(f"{path}: cannot read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SpecsimError(f"{path}: byte {error.start}: expected UTF-8 text") from error


def read_start(path: str | Path, size: int = 4096) -> bytes:
    """Return the first bytes of ``path`` without leading white space, to tell formats apart by."""
    try:
        with open(path, "rb") as file:
            return file.read(size).lstrip()
    except OSError as error:
        raise SpecsimError(f"{path}: cannot read: {error.strerror or error}") from error


class KeyTwiceError(ValueError):
    """A JSON object holds a key twice, of which a reader would silently keep the last."""


def parse_json(text: str) -> Any:
    """The one JSON value that ``text`` holds.

    Raises ValueError with a short reason where it is none, nested too deep, or has a key twice (KeyTwiceError).
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_json(path: str | Path, model: type[Model]) -> Model:
    """Return the JSON file ``path`` checked against a pydantic ``model``.

    The first thing wrong with it becomes a SpecsimError: "FILE: field.path: what was expected".
    """
    text = read_text(path)
    try:
        data = parse_json(text)
    except ValueError as error:
        raise SpecsimError(f"{path}: expected JSON: {error}") from error
    return as_model(path, text, data, model)


def as_model(path: str | Path, text: str, data: Any, model: type[Model]) -> Model:
    """Return the JSON ``text`` of ``path``, which :func:`parse_json` made ``data`` of, as ``read_json`` does."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise SpecsimError(f"{path}: {first_error(error, data)}") from error


def csv_rows(path: str | Path, lines: Iterable[str], **dialect: Any) -> Iterator[tuple[int, list[str]]]:
    """Each row of CSV ``lines`` with the number of the line it ends on; what CSV cannot be is a SpecsimError.

    ``dialect``: as csv.reader takes it (delimiter, skipinitialspace).
    """
    reader = csv.reader(lines, **dialect)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise SpecsimError(f"{path}: line {reader.line_num}: expected CSV: {error}") from error


def write_json(path: str | Path, model: BaseModel) -> Path:
    """Write a pydantic ``model`` as JSON, one line a field and a list of numbers on one line."""
    text = json.dumps(model.model_dump(mode="json", by_alias=True), indent=1, ensure_ascii=False)
    compact = re.sub(
        r"\[[^\[\]{}\"]*\]", lambda m: re.sub(r"\s+", " ", m[0]).replace("[ ", "[").replace(" ]", "]"), text
    )
    return write_text(path, compact + "\n")


def first_error(error: ValidationError, data: Any = None) -> str:
    """Say the first of pydantic's findings in one line: "field.path: expected ..., got ...".

    With the ``data`` that was checked, the path holds its own keys alone, not the names of union members.
    """
    first = error.errors(include_url=False)[0]
    where = []
    for step in first["loc"]:
        inside = isinstance(data, dict | list) and _has(data, step)
        if data is None or inside or (first["type"] == "missing" and step == first["loc"][-1]):
            where.append(str(step))
        if inside:
            data = data[step]
    kind, message = first["type"], first["msg"]
    if kind == "missing":
        message = "is missing"
    elif kind == "extra_forbidden":
        message = "is not a known field"
    elif kind == "union_tag_not_found":
        message = "type: is missing"
    elif kind == "union_tag_invalid":
        message = f"type: expected one of {first['ctx']['expected_tags']}, got {first['ctx']['tag']!r}"
    elif kind in ("too_short", "string_too_short"):
        least = first["ctx"]["min_length"]
        message = f"expected at least {least} {'character' if kind == 'string_too_short' else 'entry'}"
        message = re.sub("y$", "ies", message) if least != 1 else message
        message += f", got {first['ctx'].get('actual_length', 0)}"
    else:
        message = re.sub("^(Value error, |Input )", "", message)
        message = re.sub("^should (be|have) (a |an )?", "expected ", message)
        given = first.get("input")
        if isinstance(given, str | int | float | bool | None) and "got " not in message:
            message += f", got {given!r}"
    path = ".".join(where)
    return f"{path}: {message}" if path else message


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise KeyTwiceError(f"the key {twice!r:.60} stands twice in one object, expected each once")
    return found


def _has(data: dict[Any, Any] | list[Any], step: str | int) -> bool:
    return step in data if isinstance(data, dict) else isinstance(step, int) and step < len(data)


def _reason(error: OSError, folder: Path) -> str:
    """Why nothing could be written in ``folder``: the file that stands in its way, or what the system says."""
    for place in (folder, *folder.parents):
        if os.path.lexists(place) and not os.path.isdir(place):
            return f"{place} is not a folder"
    return error.strerror or str(error)


def _named_paths(named: Named) -> list[tuple[str, Path]]:
    """One pair of option and path for each path but devices."""
    listed = {name: [given] if isinstance(given, Path) else given or [] for name, given in named.items()}
    return [(name, path) for name, paths in listed.items() for path in paths if not _is_device(path)]


def _is_same(one: Path, other: Path) -> bool:
    if os.path.exists(one) and os.path.exists(other):
        return os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


def _is_device(path: Path) -> bool:
    """Whether ``path`` is there and is neither a file nor a folder: a device, a pipe."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _check_no_dash(option: str, path: Path) -> None:
    """SpecsimError for ``-``, by which other programs mean standard output; it would become a file of that name."""
    if str(path) == "-":
        raise SpecsimError(f"{option}: expected a path, got '-': results are not written to standard output")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
