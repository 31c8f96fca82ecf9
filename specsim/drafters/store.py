"""Writing tensors so that no half file is left, and a full disk is one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from specsim.files import write_atomic


def write_tensors(path: Path, write: Callable[[Path], object]) -> Path:
    """``write_atomic`` for what safetensors and torch write: they have errors of their own for a disk that is full.

    Raises SpecsimError naming the path.
    """

    def checked(temporary: Path) -> None:
        try:
            write(temporary)
        except (SafetensorError, RuntimeError) as error:
            raise OSError(str(error).splitlines()[0]) from error

    return write_atomic(path, checked)
