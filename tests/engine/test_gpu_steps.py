"""Runs gpu_interpreted.py and stages_interpreted.py: whole GPU steps in Triton's interpreter, on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("cases", ["gpu_interpreted.py", "stages_interpreted.py"])
def test_gpu_steps_give_the_tokens_of_the_references(cases: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-x", str(Path(__file__).with_name(cases))]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
