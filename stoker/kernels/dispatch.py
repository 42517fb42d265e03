# mypy: allow-untyped-decorators
"""Whether a Triton kernel runs or its reference, and Triton itself where it can run.

Importing Triton takes most of a second, which a worker on a CPU would pay for nothing. Tests import it first, with
TRITON_INTERPRET=1 set, and call the launchers: then the kernels themselves run on a CPU.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class _Absent:
    """Stands where Triton would: kernels can be defined, and nobody calls them."""

    @staticmethod
    def jit(function: Any = None, **options: Any) -> Any:
        return function if function is not None else _Absent.jit


triton: Any = _Absent
tl: Any = _Absent
if torch.cuda.is_available() or "triton" in sys.modules:
    triton, tl = import_module("triton"), import_module("triton.language")


def use_triton(x: Tensor) -> bool:
    """float64 is for holding answers against each other: that is what references are for."""
    return x.is_cuda and x.dtype in _DTYPES


# As Triton's own, which take microseconds at every launch to look whether they are called by a kernel.
def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def is_power_of_2(number: int) -> bool:
    return number & (number - 1) == 0


def overlaps(x: Tensor) -> bool:
    """Whether a kernel may be launched while the one before it still runs (Hopper and later). It waits for what it reads."""
    return x.is_cuda and _is_hopper(x.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr) -> None:
    """Let the next kernel come up, and wait for all that the kernels before this one wrote. What lies before this call may
    read only what was there before the step."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
