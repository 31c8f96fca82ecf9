"""Run the notebooks and keep what they print, or check that what they keep is what they print.

    python notebooks/refresh.py [NOTEBOOK ...]            # run, and store the outputs in place
    python notebooks/refresh.py --check [NOTEBOOK ...]    # run, compare, write nothing; exit code 1 if they differ

Needs nbclient and ipykernel (the extra ``dev``). Without names it takes all notebooks beside this file. Each runs from
its own folder under the Python that runs this. What is stored holds no times and no versions, so that the same code
leaves the same bytes. Cells tagged ``volatile`` print what depends on the machine (its speed, its build of torch): of
them only the kinds of output are compared.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TIMEOUT = 300
"""Seconds that one cell may take."""

KERNEL = ("-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}", "--IPKernelApp.log_level=40")
"""How a kernel is started; it need not warn that code and outputs pass a local port."""

Cell = Mapping[str, Any]
Notebook = Mapping[str, Any]


class Failed(Exception):
    """A notebook that does not run; its text names the notebook, the cell and what went wrong."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="all of them, unless named")
    parser.add_argument("--check", action="store_true", help="compare with what is stored, write nothing")
    asked = parser.parse_args()
    import nbformat

    wrong = []
    for path in asked.notebooks or sorted(HERE.glob("*.ipynb")):
        stored = nbformat.read(path, as_version=4)
        try:
            fresh = run(path, stored)
        except Failed as failed:
            wrong.append(str(failed))
            continue
        if asked.check:
            wrong += [f"{path.name}, {line}" for line in differences(stored, fresh)]
        else:
            wrong += [f"{path.name}, {line}" for line in complaints(fresh)]
            nbformat.write(fresh, path)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def run(path: Path, notebook: Any) -> Any:
    """A copy of ``notebook``, run from the folder of ``path``, as it is stored. Raises Failed."""
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, DeadKernelError

    class ThisPython(AsyncKernelManager):
        """Starts the Python that runs this, whatever kernels are installed."""

        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(argv=[sys.executable, *KERNEL], display_name="Python 3", language="python")

    fresh = copy.deepcopy(notebook)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        fresh, timeout=TIMEOUT, kernel_manager_class=ThisPython, record_timing=False,
        resources={"metadata": {"path": str(path.resolve().parent)}},
    )  # fmt: skip
    try:
        client.execute()
    except (CellControlSignal, DeadKernelError, RuntimeError) as error:
        raise Failed(f"{path.name}, {_where(fresh)}: {_told(fresh) or error}") from error
    return tidy(fresh)


def tidy(notebook: Any) -> Any:
    """Leave out of a notebook that was run what differs from run to run, in place."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells, start=1):
        cell["id"] = f"cell-{number}"
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: Sequence[Any]) -> list[Any]:
    """What was printed in several messages, however it was cut, as one output; pictures without their metadata."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last is not None and output["output_type"] == "stream" and last.get("name") == output["name"]:
            last["text"] += output["text"]
            continue
        if "metadata" in output:
            output["metadata"] = {}
        joined.append(output)
    return joined


def complaints(fresh: Notebook) -> list[str]:
    """A line for each cell that wrote to stderr: warnings have no place in a notebook that others read."""
    return [
        f"{_name(number, cell)}: wrote to stderr: {output['text'].strip().splitlines()[0]}"
        for number, cell in _code(fresh)
        for output in cell["outputs"]
        if output["output_type"] == "stream" and output["name"] == "stderr"
    ]


def differences(stored: Notebook, fresh: Notebook) -> list[str]:
    """A line for each code cell whose stored outputs are not those of running it, by what a reader reads of them.

    Compared are the kinds of output and the texts printed; pictures only as being there, and of cells tagged
    ``volatile`` the kinds alone.
    """
    found = complaints(fresh)
    for (number, old), (_, new) in zip(_code(stored), _code(fresh), strict=True):
        kept, made = [_kind(o) for o in old["outputs"]], [_kind(o) for o in new["outputs"]]
        if kept != made:
            found.append(f"{_name(number, old)}: stored {_listed(kept)}, running it gives {_listed(made)}")
        elif "volatile" not in old["metadata"].get("tags", ()):
            before, after = (_lines(cell) for cell in (old, new))
            if before != after:
                at = next(
                    (i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]),
                    min(len(before), len(after)),
                )
                was, now = (repr(lines[at]) if at < len(lines) else "nothing" for lines in (before, after))
                found.append(f"{_name(number, old)}: output line {at + 1}: stored {was}, running it gives {now}")
    return [f"{line} (make notebooks stores it anew)" for line in found]


def _code(notebook: Notebook) -> list[tuple[int, Cell]]:
    """The code cells, with their numbers among all cells."""
    return [(i, cell) for i, cell in enumerate(notebook["cells"], start=1) if cell["cell_type"] == "code"]


def _name(number: int, cell: Cell) -> str:
    lines = "".join(cell["source"]).splitlines() or [""]
    return f"cell {number} ({lines[0]})"


def _where(notebook: Any) -> str:
    """The cell that failed, or the first without a sign of having ended."""
    for number, cell in _code(notebook):
        if any(output["output_type"] == "error" for output in cell["outputs"]):
            return _name(number, cell)
    for number, cell in _code(notebook):
        if cell["execution_count"] is None:
            return _name(number, cell)
    return "the kernel"


def _told(notebook: Any) -> str:
    """The error of the cell that failed, in a line."""
    for _, cell in _code(notebook):
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                return f"{output['ename']}: {output['evalue']}"
    return ""


def _kind(output: Cell) -> str:
    if output["output_type"] == "stream":
        return str(output["name"])
    return " + ".join(sorted(output.get("data", {"error": 0})))


def _listed(kinds: Sequence[str]) -> str:
    return ", ".join(kinds) or "nothing"


def _lines(cell: Cell) -> list[str]:
    """What a cell printed or showed as text, line by line, without spaces at the ends of lines."""
    lines: list[str] = []
    for output in cell["outputs"]:
        text = output["text"] if output["output_type"] == "stream" else output.get("data", {}).get("text/plain", "")
        lines += [line.rstrip() for line in "".join(text).splitlines()]
    return lines


if __name__ == "__main__":
    sys.exit(main())
