"""Kernels are planned on meta tensors and compiled before their first launch, on a machine without a GPU too."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from stoker.kernels.compiled.compile_ahead import KernelLaunch, compile_all


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_are_planned_compiled_and_packed_for_a_gpu() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-x", str(Path(__file__).with_name("compiled_ahead.py"))]
    said = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(command, env={**os.environ, **said}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


class FlakyKernel:
    """A kernel whose first compilations fail, as they do at times when several threads parse source code."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures

    def warmup(self, **options: object) -> FlakyKernel:
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise SystemError("AST constructor recursion depth mismatch")
        return self


def test_a_kernel_that_fails_is_compiled_a_second_time() -> None:
    kernels = [FlakyKernel(number) for number in (0, 1, 2)]
    ready: list[FlakyKernel] = []
    (error,) = compile_all([KernelLaunch(kernel, (), {}) for kernel in kernels], 2, ready.append)
    assert isinstance(error, SystemError)
    assert set(ready) == set(kernels[:2])
