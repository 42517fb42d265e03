"""Runs gpu_interpreted.py: a whole GPU step in Triton's interpreter, on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_gpu_steps_give_the_tokens_of_the_references() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-x", str(Path(__file__).with_name("gpu_interpreted.py"))]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
