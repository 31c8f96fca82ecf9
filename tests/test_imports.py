"""The floors of the package: imports go downward or stay on their floor, and never in a circle."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "specsim"
TOP = 9

# A package stands for all that is in it. A new module must be given its floor here.
FLOORS = {
    "types": 0, "files": 0, "kv": 0, "parallel": 0, "rules": 1,
    "hardware": 1, "acceptance": 1, "synthesis": 1, "blocktrace": 1, "calibration": 1,
    "workload": 1, "lengths": 1, "request_table": 1, "workload_file": 1,
    "importers": 2, "views": 2, "asking": 2, "schedulers": 2, "zoo": 2, "trace_calibration": 2, "trace_stats": 2,
    "step_fit": 2,
    "ledger": 3, "batch": 3, "feeds": 3, "replica": 3, "stepping": 3, "routing": 3, "engine": 3, "marginal": 3,
    "metrics": 4, "pareto": 4, "sweep": 4, "replay": 4, "validate": 4, "plan": 4, "compare": 4, "baseline": 4,
    "audit": 4, "tiers": 4, "trial": 4, "capacity": 4, "leaders": 4, "offers": 4, "plan_answer": 4,
    "plan_words": 4, "sensitivity": 4, "checkup": 4, "steady": 4, "paired": 4, "likeness": 4, "crossovers": 4,
    "plots": 5, "plots_trace": 5, "plots_profile": 5, "plots_validate": 5, "plots_live": 5, "plots_compare": 5,
    "report": 5, "drafters": 5, "measure": 5, "live": 5,
    "cli": TOP, "__main__": TOP,
}  # fmt: skip


def modules() -> dict[str, Path]:
    """Every module below specsim, by its dotted name without the "specsim." in front."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def imported(name: str, path: Path, known: set[str]) -> Iterator[tuple[str, int]]:
    """The specsim modules that ``path`` imports, at any depth of its code, with their lines; "" is the package."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ["specsim", *package.split(".")] if package else ["specsim"]
                above = above[: len(above) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # "from specsim import files" means the module, "from specsim.files import read_text" its content.
            targets = [
                f"{base}.{alias.name}" if f"{base}.{alias.name}".removeprefix("specsim.") in known else base
                for alias in node.names
            ]
        else:
            continue
        for target in targets:
            if target == "specsim" or target.startswith("specsim."):
                yield target.removeprefix("specsim").removeprefix("."), node.lineno


def edges() -> list[tuple[str, str, int]]:
    """Every import of one specsim module by another: importer, imported, line."""
    found = modules()
    known = set(found)
    return [(name, target, line) for name, path in found.items() for target, line in imported(name, path, known)]


def floor(name: str) -> int:
    return FLOORS[name.partition(".")[0]]


def test_every_module_has_a_floor():
    assert len(modules()) > 15  # the walk finds the package at all
    unplaced = [name for name in modules() if name.partition(".")[0] not in FLOORS]
    assert not unplaced, f"give these modules a floor in {Path(__file__).name}: {unplaced}"


def test_imports_go_downward_or_stay_on_their_floor():
    found = edges()
    assert ("engine", "schedulers") in {(importer, target) for importer, target, _ in found}
    upward = [
        f"{importer}:{line} imports {target or 'specsim itself'}"
        for importer, target, line in found
        if (TOP if target == "" else floor(target)) > floor(importer)
    ]
    assert not upward


def test_imports_make_no_circle():
    below: dict[str, set[str]] = {name: set() for name in modules()}
    for importer, target, _ in edges():
        if target and target != importer:
            below[importer].add(target)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"imports in a circle: {' -> '.join((*path, name))}"
        if name not in done:
            for target in sorted(below[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in below:
        visit(name, ())


def test_the_package_takes_in_plots_only_when_asked():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    eager = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    eager |= {f"specsim.{a.name}" for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    eager |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert "specsim.engine" in eager
    assert not eager & {
        "specsim.plots",
        "specsim.report",
        "specsim.cli",
        "specsim.drafters",
        "specsim.live",
        "matplotlib",
    }


def test_the_walk_sees_every_form_of_import(tmp_path):
    """The checks above are worth as much as this walk."""
    path = tmp_path / "x.py"
    path.write_text(
        "import specsim.a\nfrom specsim import b, SLO\nfrom specsim.c import d\nfrom . import e\n"
        "from .f import g\nfrom .. import h\ndef late():\n    from specsim.i import j\nimport numpy\n"
    )
    known = set("abcdefghij") | {"p.e", "p.f", "p.x"}
    assert list(imported("p.x", path, known)) == [
        ("a", 1), ("b", 2), ("", 2), ("c", 3), ("p.e", 4), ("p.f", 5), ("h", 6), ("i", 8),
    ]  # fmt: skip


def test_importing_specsim_stays_light():
    code = "import sys, specsim; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "specsim.engine" in loaded
    assert not {"torch", "matplotlib", "scipy.stats", "typer", "httpx"} & set(loaded)


def test_the_command_loads_what_is_slow_only_where_it_is_needed():
    code = "import sys, specsim.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "specsim.cli" in loaded
    assert not {"torch", "matplotlib", "scipy.stats", "scipy.optimize", "httpx"} & set(loaded)


@pytest.mark.parametrize("folder", ["experiments", "benchmarks", "notebooks"])
def test_scripts_import_what_is_there(folder):
    """Most of them run for minutes, and no test runs those."""
    for path in sorted((PACKAGE.parent / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "specsim":
                found = importlib.import_module(str(node.module))
                for alias in node.names:
                    assert hasattr(found, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}"), path


def test_the_names_at_the_top_are_there():
    import specsim

    for name in (
        "simulate", "sweep", "pareto", "paired", "plot_pareto", "plot_reliability", "plot_acceptance", "summarize",
        "Scenario", "Policy", "StepView", "LogNormal", "half_width", "calibrate",
    ):  # fmt: skip
        assert hasattr(specsim, name), name
    with pytest.raises(AttributeError, match="no_such_name"):
        specsim.no_such_name  # noqa: B018
