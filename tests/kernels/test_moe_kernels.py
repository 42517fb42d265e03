"""The expert kernels also run on a CPU, in Triton's interpreter; what it cannot notice is compiled."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run(cases: str, interpreted: bool) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-x", str(Path(__file__).with_name(cases))]
    # The second variable is Triton's default; if it is unset, Triton 3.9 warns that the default will change.
    said = {"TRITON_INTERPRET": "1" if interpreted else "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(command, env={**os.environ, **said}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("cases", ["moe_interpreted.py", "moe_quant_interpreted.py"])
def test_the_kernels_of_experts_agree_with_their_references(cases: str) -> None:
    run(cases, interpreted=True)


@pytest.mark.slow
def test_the_kernels_of_quantised_experts_compile_for_a_gpu() -> None:
    run("moe_quant_compiled.py", interpreted=False)
