"""Starts NVIDIA MPS for the processes of a test, with which kernels of several processes run on a GPU at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_STOP_S = 10.0


@contextmanager
def mps() -> Iterator[dict[str, str] | None]:
    """Yield the environment of processes that use MPS, or None where it does not start."""
    with tempfile.TemporaryDirectory(prefix="mps", ignore_cleanup_errors=True) as folder:
        env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        if shutil.which("nvidia-cuda-mps-control") is None:
            print("MPS: nvidia-cuda-mps-control is not installed", flush=True)
            yield None
            return
        os.mkdir(f"{folder}/pipe")
        os.mkdir(f"{folder}/log")
        # Files, not pipes: the daemon keeps them open.
        with open(f"{folder}/out", "w+") as out:
            started = subprocess.run(
                ["nvidia-cuda-mps-control", "-d"], env=env, stdout=out, stderr=out, timeout=20
            ).returncode
            out.seek(0)
            said = out.read().strip()
        if started != 0:
            print(f"MPS: exit code {started}: {said}", flush=True)
            yield None
            return
        time.sleep(1.0)
        try:
            yield env
        finally:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    ["nvidia-cuda-mps-control"],
                    input="quit -t 2\n",
                    text=True,
                    env=env,
                    capture_output=True,
                    timeout=_STOP_S,
                )
