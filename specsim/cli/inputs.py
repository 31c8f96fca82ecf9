"""From what is typed on the command line, or written in a scenario file, to a Scenario and policies."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import shlex
import sys
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import typer

from specsim import schedulers, zoo
from specsim.acceptance import WHAT, Drafter, load_drafter
from specsim.blocktrace import Trace
from specsim.engine import Policy
from specsim.files import PATHS
from specsim.synthesis import Synthetic
from specsim.types import SpecsimError

PATH_KEYS = ("profile", "trace", "arrivals")


def read_scenario(path: Path) -> dict[str, Any]:
    """The options in a TOML scenario file, by option name; its paths are relative to the file.

    ``closed = [1, 4, 16]`` and ``scheduler = ["NoSpec", "MTP1@mtp1.json"]`` stand for the flags of the
    same name; a flag typed on the command line wins.
    """
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecsimError(f"{path}: cannot read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecsimError(f"{path}: expected TOML: {error}") from error
    options = {key.replace("-", "_"): value for key, value in options.items()}
    for key in (option.removeprefix("--") for option in PATHS):
        if options.get(key) == "":
            raise SpecsimError(f"{path}: {key}: expected a path, got ''")
    for key in PATH_KEYS:
        if isinstance(options.get(key), str):
            options[key] = str(path.parent / options[key])
    if "scheduler" in options:
        texts = options["scheduler"] if isinstance(options["scheduler"], list) else [options["scheduler"]]
        options["scheduler"] = [_relative_policy(str(text), path.parent) for text in texts]
    for key, value in options.items():
        if isinstance(value, list) and key != "scheduler":
            options[key] = ",".join(str(item) for item in value)
        if isinstance(value, dict):
            options[key] = ",".join(f"{name}:{weight}" for name, weight in value.items())
    return options


def _relative_policy(text: str, folder: Path) -> str:
    name, trace, length = split_policy(text)
    if ".py:" in name or name.endswith(".py"):
        name = str(folder / name)
    end = "" if length is None else f":{length}"
    return name if trace is None else f"{name}@{folder / trace}{end}"


def parse_policies(
    texts: list[str], trace: Path | None, gamma: int | None, along: str | None = None
) -> tuple[Drafter | None, list[Policy]]:
    """The base drafter of ``--trace`` and the policies of ``--scheduler NAME(args)[@TRACE[:GAMMA]]``.

    A policy on the base drafter carries none of its own, so labels name only the others; ``gamma`` bounds
    the block length of all of them, and ``along`` (context:4096,32768) says where recorded acceptance changes.
    """
    base = _along(load_drafter(trace, gamma), along) if trace is not None else None
    drafters: dict[tuple[Path, int | None], Drafter] = {}
    policies = []
    for text in texts:
        name, file, length = split_policy(text)
        if file is not None and (file, length) not in drafters:
            drafters[file, length] = _along(_own_drafter(text, file, length, gamma), along)
        policies.append(Policy(parse_scheduler(name), None if file is None else drafters[file, length]))
    if along is not None and not any(d.edges for d in (base, *drafters.values()) if d is not None):
        raise SpecsimError("--acceptance-by: expected a recorded trace, whose rows can be told apart")
    return base, policies


def split_policy(text: str) -> tuple[str, Path | None, int | None]:
    """``NAME(args)[@TRACE[:GAMMA]]`` in its parts; SpecsimError where no trace follows ``@``."""
    where, colon, rest = text.rpartition(".py:")  # a folder may have an @ in its name
    name, at, own = rest.partition("@")
    file, ends, length = own.rpartition(":")
    if not (ends and length.isdecimal() and len(length) < 10):
        file, length = own, ""
    if at and not file:
        raise SpecsimError(f"scheduler {text!r}: expected a trace after @")
    return f"{where}{colon}{name}", Path(file) if at else None, int(length) if length else None


def _own_drafter(text: str, file: Path, length: int | None, gamma: int | None) -> Drafter:
    """The drafter of ``file``, of blocks of ``length`` tokens (None: its own, or ``gamma`` if that is less)."""
    drafter = load_drafter(file)
    usual, longest = min(drafter.gamma, gamma or drafter.gamma), drafter.gamma
    if length is None or length == usual:
        return replace(drafter, gamma=usual)
    if not 1 <= length <= longest:
        raise SpecsimError(
            f"scheduler {text!r}: expected blocks of 1 to {longest} tokens, as the trace has, after it, got {length}"
        )
    return replace(drafter, gamma=length, name=f"{drafter.name}:{length}")


def _along(drafter: Drafter, text: str | None) -> Drafter:
    """A recorded drafter with the edges of ``--acceptance-by``; a synthetic one has its own."""
    if text is None or isinstance(drafter.acceptance, Synthetic):
        return drafter
    by, colon, edges = text.partition(":")
    if by not in ("context", "position") or not colon:
        raise SpecsimError(f"--acceptance-by: expected context:TOKENS,.. or position:TOKENS,.., got {text!r}")
    tokens = [int(edge) for edge in parse_numbers("--acceptance-by", edges, whole=True)]
    if tokens != sorted(tokens):
        raise SpecsimError(f"--acceptance-by: expected increasing tokens, got {edges}")
    cut = replace(drafter, by="position" if by == "position" else "context", edges=tuple(tokens))
    blocks = cut.tape()
    if len(set(zip(blocks.first.tolist(), blocks.size.tolist(), strict=True))) <= len(blocks.domains):
        low, high = _reach(drafter, by)
        raise SpecsimError(
            f"--acceptance-by: trace {drafter.name}: its blocks lie at {low:,} to {high:,} tokens of {WHAT[cut.by]}, "
            f"expected edges among them, got {edges}"
        )
    return cut


def _reach(drafter: Drafter, by: str) -> tuple[int, int]:
    """The tokens of context or of the answer before the first and the last block of a recorded trace."""
    trace = drafter.acceptance
    assert isinstance(trace, Trace)
    before = trace.prompt_tokens if by == "context" and trace.prompt_tokens is not None else 0
    at = trace.position + before
    return int(at.min()), int(at.max())


def policy_files(text: str) -> list[Path]:
    """The files that ``NAME(args)[@TRACE]`` or ``file.py:NAME[@TRACE]`` names."""
    name, trace, _ = split_policy(text)
    where, colon, _ = name.rpartition(".py:")
    return [Path(f"{where}.py")] * bool(colon) + ([] if trace is None else [trace])


def parse_scheduler(text: str) -> Any:
    """A scheduler from ``Name``, ``Name(1, key=2)``, ``file.py:Name`` or ``file.py:Name(3)``.

    A class is called with the arguments; a plain function named without parentheses is used as it is.
    """
    where, colon, rest = text.rpartition(".py:")
    target = rest.strip() if colon else text.strip()
    if target.endswith(".py") or (colon and not target):
        path = Path(target or f"{where}.py")
        raise SpecsimError(f"scheduler {text!r}: expected {path}:NAME, NAME one of {_defined(_module(path))}")
    try:
        node = ast.parse(target, mode="eval").body
        call = node if isinstance(node, ast.Call) else None
        name = call.func if call else node
        if not isinstance(name, ast.Name):
            raise ValueError
        args = [_argument(a) for a in call.args] if call else []
        kwargs = {str(k.arg): _argument(k.value) for k in call.keywords} if call else {}
    except SpecsimError:
        raise
    except (SyntaxError, ValueError) as error:
        raise SpecsimError(
            f"scheduler {text!r}: expected Name, Name(arguments) or file.py:Name, such as 'StaticGamma(3)'"
        ) from error
    found = _from_file(Path(f"{where}.py"), name.id) if colon else _built_in(name.id)
    if call is None and not isinstance(found, type):
        return found
    try:
        return found(*args, **kwargs)
    except SpecsimError:
        raise
    except (Exception, SystemExit) as error:
        hint = " (a function that takes the view is named without parentheses)" if inspect.isfunction(found) else ""
        raise SpecsimError(f"scheduler {text!r}: {type(error).__name__}: {error}{hint}") from error


def _argument(node: ast.expr) -> Any:
    """A literal, or a built-in scheduler that another one takes: WrongCost(DSparkAsync(staleness=1))."""
    scheduler = isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id in _known())
    return parse_scheduler(ast.unparse(node)) if scheduler else ast.literal_eval(node)


def _known() -> dict[str, type]:
    """The schedulers that go by their name alone."""
    return {
        key: value
        for module in (schedulers, zoo)
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, schedulers.BuiltIn) and value is not schedulers.BuiltIn
    }


def _built_in(name: str) -> Any:
    known = _known()
    if name not in known:
        raise SpecsimError(f"scheduler {name!r}: not known, expected one of {', '.join(sorted(known))} or file.py:Name")
    return known[name]


def _from_file(path: Path, name: str) -> Any:
    module = _module(path)
    if not hasattr(module, name):
        raise SpecsimError(f"{path}: {name!r} is not defined in it, expected one of {_defined(module)}")
    found = getattr(module, name)
    if not callable(found) and not hasattr(found, "start"):
        kind = type(found).__name__
        raise SpecsimError(f"{path}: {name!r} is no scheduler but of type {kind}, expected one of {_defined(module)}")
    return found


def _module(path: Path) -> ModuleType:
    """What the Python file ``path`` defines; SpecsimError, with the line, where it cannot be run."""
    if not path.is_file():
        raise SpecsimError(f"{path}: cannot read: expected a Python file that defines a scheduler")
    module_name = path.stem
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a file that ends the program is a mistake, too
        line = _line_in(error, path)
        told = error.msg if isinstance(error, SyntaxError) and error.msg else error
        raise SpecsimError(f"{path}{line}: {type(error).__name__}: {told}") from error
    cloudpickle.register_pickle_by_value(module)  # worker processes have not run the file
    return module


def _defined(module: ModuleType) -> str:
    """The names of what ``module`` itself defines and can be called, for people."""
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (callable(value) or hasattr(value, "start"))
        and getattr(value, "__module__", "") == module.__name__
    ]
    return ", ".join(names) or "what it defines (nothing that can be called yet)"


def _line_in(error: BaseException, path: Path) -> str:
    """``, line N`` of ``path``, the last one that ran, or the one that is no Python; nothing where none is known."""
    full = os.path.abspath(path)  # what the importer names it by
    if isinstance(error, SyntaxError) and os.path.abspath(error.filename or "") == full:
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == full]
    return f", line {lines[-1]}" if lines else ""


def one_of(option: str, value: str | None, known: Sequence[str]) -> None:
    """SpecsimError, in the option's name, unless ``value`` is None or one of ``known``."""
    if value is not None and value not in known:
        raise SpecsimError(f"{option}: expected {', '.join(known[:-1])} or {known[-1]}, got {value!r}")


def check_filled(**texts: str | None) -> None:
    """SpecsimError, in the option's name, where a text was given and is empty."""
    for name, text in texts.items():
        if text is not None and not text.strip():
            raise SpecsimError(f"--{name.replace('_', '-')}: expected a text, got {text!r}")


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether the parameter of this name was typed on the command line."""
    return str(context.get_parameter_source(name)).endswith("COMMANDLINE")


def is_said(context: typer.Context, name: str) -> bool:
    """Whether the parameter of this name was typed, or is a scenario file's."""
    return not str(context.get_parameter_source(name)).endswith(".DEFAULT")


def typed_command(context: typer.Context) -> str:
    """The command line, as it could be typed again: verbs, arguments and options."""
    verbs: list[str] = []
    verb: Any = context
    while verb.parent is not None:
        verbs.insert(0, str(verb.info_name))
        verb = verb.parent
    arguments: list[str] = []
    options: list[str] = []
    for parameter in context.command.params:
        if not is_typed(context, str(parameter.name)):
            continue
        value = context.params[str(parameter.name)]
        for one in value if isinstance(value, list | tuple) else [value]:
            if parameter.param_type_name == "argument":
                arguments.append(str(one))
            elif isinstance(one, bool):
                options.append(parameter.opts[0] if one else parameter.secondary_opts[0])
            else:
                options += [parameter.opts[0], str(one)]
    return shlex.join(["specsim", *verbs, *arguments, *options])


def parse_numbers(option: str, text: str, whole: bool = False) -> list[float]:
    """Positive numbers from ``1,4,16``."""
    numbers = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            number = float("nan")
        if not 0 < number < float("inf") or (whole and number != int(number)):
            kind = "whole numbers" if whole else "numbers"
            raise SpecsimError(f"{option}: expected {kind} above 0, separated by commas, got {part.strip()!r}")
        if number in numbers:
            raise SpecsimError(f"{option}: {part.strip()} is given twice")
        numbers.append(number)
    return numbers


def parse_names(text: str | None) -> list[str]:
    """Names from ``prefix_caching,pause``; an option's hyphens are underscores."""
    return [part.strip().replace("-", "_") for part in text.split(",")] if text is not None else []


def parse_domains(text: str) -> dict[str, float]:
    """Domain weights from ``math:2,code:1,chat``; a name alone weighs 1."""
    domains: dict[str, float] = {}
    for part in text.split(","):
        name, colon, weight = part.strip().partition(":")
        try:
            domains[name] = float(weight) if colon else 1.0
        except ValueError:
            raise SpecsimError(f"--domains: {name}: expected a number for its weight, got {weight!r}") from None
        if not name or not text.strip():
            raise SpecsimError(f"--domains: expected names with weights such as math:2,code:1, got {text!r}")
    return domains
