"""The notebooks run, and what is stored in them is what running them gives."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
REFRESH = FOLDER / "refresh.py"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = [path.name for path in NOTEBOOKS]
MOST_BYTES = 300_000

needs_kernel = pytest.mark.skipif(
    not (find_spec("nbclient") and find_spec("ipykernel")), reason="nbclient and ipykernel are not installed"
)
has_torch = bool(find_spec("torch") and find_spec("transformers"))


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell):
    return "".join(cell["source"])


def code(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def check(*paths):
    """Run the script in a process of its own: kernels and event loops warn of what is not ours."""
    done = subprocess.run(
        [sys.executable, REFRESH, "--check", *paths], capture_output=True, text=True, check=False, timeout=600
    )
    return done.returncode, done.stderr


def test_the_five_are_there_and_the_readme_lists_them():
    assert [name[0] for name in NAMES] == list("12345")
    said = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((\w+\.ipynb)\)", said) == NAMES


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_it_runs_and_gives_what_is_stored(path):
    if "torch" in "".join(map(source, code(read(path)))) and not has_torch:
        pytest.skip("torch or transformers is not installed")
    returned, said = check(path)
    assert returned == 0, said


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_it_is_stored_as_it_was_run_small_and_without_traces_of_a_machine(path):
    assert path.stat().st_size < MOST_BYTES
    notebook = read(path)
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert source(notebook["cells"][0]).startswith("# ")
    for number, cell in enumerate(notebook["cells"], start=1):
        assert cell["id"] == f"cell-{number}"
        assert cell["metadata"] in ({}, {"tags": ["volatile"]})
    assert [cell["execution_count"] for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    outputs = [output for cell in code(notebook) for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)
    text = json.dumps([{k: v for k, v in o.items() if k != "data"} | {"d": o.get("data", {}).get("text/plain")}
                       for o in outputs])  # fmt: skip
    assert not re.search(r"/(tmp|home|root|Users)/|0x[0-9a-f]{6}", text)


# The check itself


def cell(text, *outputs, tags=()):
    printed = [{"output_type": "stream", "name": name, "text": said} for name, said in outputs]
    return {"cell_type": "code", "source": text, "outputs": printed, "metadata": {"tags": list(tags)}}


def figure(**data):
    return {"output_type": "execute_result", "data": {"text/plain": "<Figure>", **data}, "metadata": {}}


def differences(stored, fresh):
    return runpy.run_path(str(REFRESH))["differences"]({"cells": stored}, {"cells": fresh})


def test_other_text_is_named_by_cell_and_line():
    words = {"cell_type": "markdown", "source": "# Title", "metadata": {}}
    stored = [words, cell("print(1)\nprint(2)", ("stdout", "1\n2\n"))]
    assert differences(stored, stored) == []
    (line,) = differences(stored, [words, cell("print(1)\nprint(2)", ("stdout", "1\n3\n"))])
    assert line.startswith("cell 2 (print(1)): output line 2: stored '2', running it gives '3'")
    (line,) = differences(stored, [words, cell("print(1)\nprint(2)", ("stdout", "1\n"))])
    assert "output line 2: stored '2', running it gives nothing" in line


def test_an_output_that_is_not_stored_is_named_also_of_a_volatile_cell():
    for tags in ((), ("volatile",)):
        (line,) = differences([cell("f()", tags=tags)], [cell("f()", ("stdout", "1\n"), tags=tags)])
        assert line.startswith("cell 1 (f()): stored nothing, running it gives stdout")
    stored, fresh = cell("draw()"), cell("draw()")
    stored["outputs"], fresh["outputs"] = [figure()], [figure(**{"image/png": "bytes"})]
    (line,) = differences([stored], [fresh])
    assert "stored text/plain, running it gives image/png + text/plain" in line


def test_what_a_volatile_cell_prints_and_the_bytes_of_pictures_may_differ():
    stored, fresh = (cell("f()", ("stdout", text), tags=["volatile"]) for text in ("1.0 s\n", "1.1 s\n"))
    assert differences([stored], [fresh]) == []
    stored, fresh = cell("draw()"), cell("draw()")
    stored["outputs"], fresh["outputs"] = [figure(**{"image/png": "a"})], [figure(**{"image/png": "b"})]
    assert differences([stored], [fresh]) == []


def test_a_warning_is_named():
    fresh = cell("f()", ("stderr", "UserWarning: mind\n"))
    (line,) = differences([fresh], [fresh])
    assert line.startswith("cell 1 (f()): wrote to stderr: UserWarning: mind")


@needs_kernel
def test_a_cell_that_fails_is_named_and_nothing_is_written(tmp_path):
    path = tmp_path / "bad.ipynb"
    cells = [
        {"cell_type": "code", "id": f"c{i}", "source": text, "outputs": [], "metadata": {}, "execution_count": None}
        for i, text in enumerate(("import sys\nassert sys.executable == " + repr(sys.executable), "x = 1\nx / 0"))
    ]
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    before = path.read_bytes()
    returned, said = check(path)
    assert returned == 1
    assert said == "bad.ipynb, cell 2 (x = 1): ZeroDivisionError: division by zero\n"
    assert path.read_bytes() == before
