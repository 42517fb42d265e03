"""The kernels of numerics=exact, in Triton's interpreter and compiled for a GPU that this machine lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(("name", "interprets"), [("exact_interpreted.py", "1"), ("exact_compiled.py", "0")])
def test_rows_do_not_depend_on_each_other(name: str, interprets: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-x", str(Path(__file__).with_name(name))]
    env = {**os.environ, "TRITON_INTERPRET": interprets, "TRITON_DEFAULT_FP_FUSION": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
