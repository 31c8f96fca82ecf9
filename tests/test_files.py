"""Files: what was there stays until what is new is whole, and errors say what is wrong."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_blocks, make_profile
from pydantic import BaseModel, ConfigDict, Field

from specsim.blocktrace import write_trace
from specsim.files import (
    check_apart,
    check_folder,
    check_output,
    read_json,
    read_start,
    read_text,
    write_atomic,
    write_json,
    write_text,
)
from specsim.hardware import Profile, save_profile
from specsim.types import SpecsimError


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    numbers: tuple[float, ...] = ()
    inner: dict[str, list[int]] = {}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fails_midway(error: Exception):
    """A writer that leaves half a file and then fails."""

    def write(path: Path) -> None:
        path.write_text("half")
        raise error

    return write


# Writing


def test_a_new_file_is_there_under_its_name_alone(tmp_path):
    path = write_text(tmp_path / "new" / "deep" / "a.txt", "γ\nτ\n")
    assert path.read_bytes() == "γ\nτ\n".encode()
    assert names(path.parent) == ["a.txt"]


def test_a_writer_sees_a_temporary_name_of_the_same_folder_and_suffix(tmp_path):
    seen = []

    def write(path: Path) -> None:
        seen.append(path)
        assert not (tmp_path / "a.svg").exists()
        path.write_text("x")

    write_atomic(tmp_path / "a.svg", write)
    assert seen[0].parent == tmp_path
    assert seen[0].suffix == ".svg"
    assert names(tmp_path) == ["a.svg"]


def test_permissions_are_those_of_any_new_file(tmp_path):
    old = os.umask(0o027)
    try:
        path = write_text(tmp_path / "a.txt", "x")
        assert path.stat().st_mode & 0o777 == 0o640
        assert os.umask(0o027) == 0o027  # looking at the mask did not change it
    finally:
        os.umask(old)


@pytest.mark.parametrize("existed", [True, False])
def test_a_full_disk_leaves_what_was_there(tmp_path, existed):
    path = tmp_path / "a.txt"
    if existed:
        path.write_text("old")
    with pytest.raises(SpecsimError, match=r"a\.txt: cannot write: No space left on device") as error:
        write_atomic(path, fails_midway(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert str(error.value).startswith(f"{path}: ")
    assert names(tmp_path) == (["a.txt"] if existed else [])
    if existed:
        assert path.read_text() == "old"


@pytest.mark.parametrize("error", [RuntimeError("bug"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_whatever_else_goes_wrong_is_passed_on_and_cleaned_up(tmp_path, error):
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(type(error)):
        write_atomic(tmp_path / "a.txt", fails_midway(error))
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


REALLY_FULL = """
import resource, sys
from pathlib import Path
import numpy as np
from specsim.blocktrace import TraceMeta, make_trace, write_trace
from specsim.files import write_text
from specsim.types import SpecsimError

rng = np.random.default_rng(0)
n = 20_000
columns = {
    "request_id": ["r"] * n, "domain": ["d"] * n, "position": np.arange(n), "confidence": rng.random((n, 7)),
    "accepted": rng.integers(0, 8, n), "proposed": np.full(n, 7),
}
trace = make_trace(TraceMeta(drafter="d", target="t", gamma=7, kind="dense"), columns)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # Python ignores the signal that goes with it
for write in (lambda p: write_text(p, "x" * 100_000), lambda p: write_trace(trace, p)):
    try:
        write(Path(sys.argv[1]))
    except SpecsimError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_file_that_the_system_really_refuses(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_text("old")
    run = subprocess.run(
        [sys.executable, "-c", REALLY_FULL, str(path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
    said = run.stdout.splitlines()
    assert len(said) == 2
    assert all(line.startswith(f"{path}: cannot write: ") and "File too large" in line for line in said), said
    assert names(tmp_path) == ["a.parquet"]
    assert path.read_text() == "old"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_device_that_is_full(tmp_path):
    def write(path: Path) -> None:
        path.write_text("half")
        with open("/dev/full", "w") as full:
            full.write("x")
            full.flush()

    with pytest.raises(SpecsimError, match=r"a\.txt: cannot write: No space left on device"):
        write_atomic(tmp_path / "a.txt", write)
    assert names(tmp_path) == []


def removes_what_it_could_not_write(path: Path) -> None:
    """A writer as pyarrow's is."""
    os.remove(path)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["pipe", "link"])
def test_a_pipe_outlives_a_writer_that_removes_its_file(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(SpecsimError, match=f"{name}: cannot write: No space left on device"):
        write_atomic(tmp_path / name, removes_what_it_could_not_write)
    assert names(tmp_path) == ["link", "pipe"]
    assert (tmp_path / "link").is_fifo()


def test_a_device_outlives_a_trace_that_it_has_no_space_for(tmp_path):
    node = tmp_path / "full"
    try:
        os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(1, 7))
        node.open("w").close()
    except (AttributeError, OSError) as error:
        pytest.skip(f"needs to make and open a device: {error}")
    with pytest.raises(SpecsimError, match=r"full: cannot write: .*No space left on device"):
        write_trace(make_blocks([0, 1], 2), node)
    assert node.is_char_device()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert write_text(tmp_path / "pipe", "x") == tmp_path / "pipe"
        assert os.read(reader, 10) == b"x"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "a.txt", tmp_path / "file" / "deep" / "a.txt"):
        with pytest.raises(SpecsimError) as error:
            write_text(path, "x")
        assert str(error.value) == f"{path}: cannot write: {tmp_path / 'file'} is not a folder"
    for folder in (tmp_path / "file", tmp_path / "file" / "deep"):
        with pytest.raises(SpecsimError) as error:
            check_folder(folder)
        assert str(error.value) == f"{folder}: cannot write there: {tmp_path / 'file'} is not a folder"
    assert names(tmp_path) == ["file"]
    with pytest.raises(SpecsimError, match="cannot write"):
        save_profile(make_profile(), tmp_path / "file" / "p.json")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(SpecsimError, match=r"a\.txt: cannot write: Permission denied"):
        write_text(tmp_path / "locked" / "a.txt", "x")


def test_outputs_apart_from_each_other_and_from_inputs(tmp_path):
    one, two, link, hard = (tmp_path / name for name in ("one", "two", "link", "hard"))
    one.write_text("x")
    link.symlink_to(one)
    os.link(one, hard)
    missing = tmp_path / "no" / "file"
    check_apart({"--out": two, "--json": None, "--work": [tmp_path, missing]}, {"FILE": one, "--before": None})
    for outputs, inputs, says in [
        ({"--json": link}, {"FILE": one}, f"--json: {link}: is the input FILE, expected another path"),
        ({"--json": hard}, {"FILES": [two, one]}, f"--json: {hard}: is the input FILES, expected another path"),
        ({"--json": missing}, {"FILE": tmp_path / "no/../no/file"}, f"--json: {missing}: is the input FILE, "),
        ({"--out": [two, one], "--json": one}, {}, f"--json: {one}: is also written by --out, expected another path"),
    ]:
        with pytest.raises(SpecsimError) as error:
            check_apart(outputs, inputs)
        assert str(error.value).startswith(says)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_everything_may_go_to_one_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_apart({"--out": tmp_path / "pipe", "--json": tmp_path / "pipe"}, {"FILE": tmp_path / "pipe"})
    check_output("--out", tmp_path / "pipe")


def test_a_folder_in_place_of_a_file(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(SpecsimError, match="a: is a folder, expected a file name to write to"):
        write_text(tmp_path / "a", "x")
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("check", [lambda: check_output("--out", Path("-")), lambda: check_folder("-")])
def test_a_dash_names_no_file(check, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecsimError, match="expected a path, got '-': results are not written to standard output"):
        check()
    assert not any(tmp_path.iterdir())


# Reading


def test_text_comes_back(tmp_path):
    path = write_text(tmp_path / "a.txt", "γ\r\n\nτ")
    assert path.read_bytes() == "γ\r\n\nτ".encode()
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfabc")  # as some editors save it
    assert read_text(tmp_path / "b.txt") == "abc"


def test_text_that_cannot_be_read(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(SpecsimError, match=r"a\.txt: byte 3: expected UTF-8 text"):
        read_text(tmp_path / "a.txt")
    with pytest.raises(SpecsimError, match=r"b\.txt: cannot read: No such file or directory"):
        read_text(tmp_path / "b.txt")
    with pytest.raises(SpecsimError, match="cannot read: Is a directory"):
        read_text(tmp_path)
    with pytest.raises(SpecsimError, match=r"b\.txt: cannot read: No such file or directory"):
        read_start(tmp_path / "b.txt")


def test_the_start_of_a_file_is_what_follows_white_space(tmp_path):
    path = write_text(tmp_path / "a.txt", " \n {abc")
    assert read_start(path) == b"{abc"
    assert read_start(path, 4) == b"{"


def test_json_comes_back_and_lists_of_numbers_stand_on_one_line(tmp_path):
    model = Model(name="γ [1, 2]", numbers=(1.5, 2.0, 1e-9), inner={"a": [1, 2, 3], "b": []})
    path = write_json(tmp_path / "a.json", model)
    assert read_json(path, Model) == model
    text = path.read_text(encoding="utf-8")
    assert '"numbers": [1.5, 2.0, 1e-09]' in text
    assert '"a": [1, 2, 3]' in text
    assert '"name": "γ [1, 2]"' in text
    assert text.endswith("}\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"numbers": []}', "name: is missing"),
        ('{"name": 3}', "name: expected"),
        ('{"name": "x", "numbers": [1, "a"]}', r"numbers\.1: expected .*'a'"),
        ('{"name": "x", "inner": {"k": [1, 2.5]}}', r"inner\.k\.1: expected .*integer"),
        ('{"name": "x", "size": 3}', "size: is not a known field"),
        ("[]", "expected"),
        ("{", "expected JSON"),
        ("", "expected JSON"),
    ],
)
def test_json_that_is_wrong_is_told_in_one_line(tmp_path, text, says):
    path = write_text(tmp_path / "a.json", text)
    with pytest.raises(SpecsimError, match=says) as error:
        read_json(path, Model)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_profile_survives_an_interrupted_save(tmp_path, monkeypatch):
    path = save_profile(make_profile(), tmp_path / "p.json")

    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(SpecsimError, match="No space left"):
        save_profile(make_profile(gpus=7), path)
    assert read_json(path, Profile).gpus == 1
    assert names(tmp_path) == ["p.json"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "expected JSON: nested too deep"),
        ('{"name": "x", "name": "y"}', "expected JSON: the key 'name' stands twice in one object, expected each once"),
        ('{"name": "", "inner": {"k": [1]}}', "name: expected at least 1 character, got 0"),
        ('{"name": "x", "inner": {"k": []}}', r"inner\.k: expected at least 1 entry, got 0"),
    ],
)
def test_json_that_would_be_misread_or_break_the_reader_is_told_in_our_words(tmp_path, text, says):
    class Inner(BaseModel):
        k: tuple[int, ...] = Field(min_length=1)

    class Outer(BaseModel):
        name: str = Field(min_length=1)
        inner: Inner | None = None

    path = write_text(tmp_path / "a.json", text)
    with pytest.raises(SpecsimError, match=says) as error:
        read_json(path, Outer)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200 + len(str(path))
