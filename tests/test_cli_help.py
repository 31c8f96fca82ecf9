"""What --help prints."""

import runpy
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from rich.text import Text

from specsim.cli import app, main


def verbs(group=None, words=()):
    """Every command of the command line with the words that call it."""
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, (*words, name))
        else:
            yield (*words, name), command


@pytest.mark.parametrize(("words", "command"), [pytest.param(*verb, id=" ".join(verb[0])) for verb in verbs()])
def test_no_brackets_are_lost_in_the_help(words, command):
    """Help is rich's markup: what stands in brackets is a style, unless it is escaped."""
    for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
        assert Text.from_markup(text or "").plain == (text or "").replace("\\[", "[")


def test_without_arguments_the_help_shows_and_the_version_is_told(run, capsys, monkeypatch):
    """It was a traceback once: what no test called."""
    code, out, err = run()
    assert (code, err) == (2, "")
    assert "Usage: specsim" in out
    monkeypatch.setattr("sys.argv", ["specsim"])  # as a shell calls it
    with pytest.raises(SystemExit):
        main()
    assert "Usage: specsim" in capsys.readouterr().out
    assert run("--version")[:2] == (0, f"specsim {version('specsim')}\n")


def test_the_help_names_the_extra_that_an_import_needs(run):
    code, printed, _ = run("profile", "import", "--help")
    assert code == 0
    assert "pip install 'specsim[silicon]'" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("script", "arguments", "code", "words"),
    [
        ("profile_eval.py", ["--help"], 0, "usage: profile_eval.py"),
        ("profile_eval.py", [], 2, "the following arguments are required: PROFILE.json"),
        ("profile_eval.py", ["none.json"], 2, "error: none.json: cannot read"),
        ("bench.py", ["--help"], 0, "usage: bench.py"),
        ("bench.py", ["--repeat", "0"], 2, "--repeat: expected 1 or more, got 0"),
    ],
)
def test_benchmarks_say_how_they_are_called(monkeypatch, capsys, script, arguments, code, words):
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / script), run_name="__main__")
    assert stop.value.code == code
    assert words in "".join(capsys.readouterr())
