"""Kernels are planned on meta tensors and compiled before their first launch, on a machine without a GPU too."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_are_planned_compiled_and_packed_for_a_gpu() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-x", str(Path(__file__).with_name("compiled_ahead.py"))]
    said = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(command, env={**os.environ, **said}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
