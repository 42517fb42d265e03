"""The kernels that exchange tensors between ranks: their results in Triton's interpreter, and their code for a GPU that this
machine lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("command", "interprets"),
    [
        ([str(HERE / "rank_exchange_interpreted.py")], "1"),
        (["-m", "pytest", "-q", "-n0", "-x", str(HERE / "rank_exchange_compiled.py")], "0"),
    ],
)
def test_ranks_exchange_tensors(command: list[str], interprets: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": interprets, "TRITON_DEFAULT_FP_FUSION": "1"}
    run = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=420)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
