"""Every command and every Python block of the README runs as it stands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import specsim as ss

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(bash|python|json)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
COMMANDS = [
    line
    for kind, text in BLOCKS
    if kind == "bash"
    for line in text.replace("\\\n", " ").splitlines()
    if line.startswith("specsim ")
]
PROFILE = next(text for kind, text in BLOCKS if kind == "json")
PYTHON = [text for kind, text in BLOCKS if kind == "python"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like the checkout, and takes what the commands write."""
    for name in ("hw_profiles", "traces", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "out").mkdir()
    for text in PYTHON:
        if match := re.match(r"# (\w+\.py)\n", text):
            (tmp_path / match[1]).write_text(text)
    return tmp_path


def run(arguments: list[str], folder: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) >= 6
    assert len(PYTHON) >= 3


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[:50])
def test_command(command: str, checkout: Path) -> None:
    assert run(["-m", *shlex.split(command, comments=True)], checkout)


@pytest.mark.parametrize("text", PYTHON, ids=lambda t: t.splitlines()[0])
def test_python(text: str, checkout: Path) -> None:
    run(["-W", "error", "-c", text], checkout)


def test_the_profile_of_the_readme_loads(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(PROFILE)
    assert ss.load_profile(path).name == "mine"
