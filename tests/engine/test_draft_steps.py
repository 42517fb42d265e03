"""Runs draft_interpreted.py in a process of its own: Triton decides at its import whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_draft_model_in_gpu_steps_drafts_like_the_references() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-x", str(Path(__file__).with_name("draft_interpreted.py"))]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
