# mypy: allow-untyped-decorators
"""Chooses between a Triton kernel and its reference, and imports Triton where it can run.

Importing Triton takes most of a second, and a CPU worker has no use for it. Tests import it first, with
TRITON_INTERPRET=1, and call the launchers: then the kernels themselves run on a CPU.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class _NoTriton:
    """Takes Triton's place where it is not imported: kernels can be defined, but are never called."""

    @staticmethod
    def jit(function: Any = None, **options: Any) -> Any:
        return function if function is not None else _NoTriton.jit


triton: Any = _NoTriton
tl: Any = _NoTriton
if torch.cuda.is_available() or "triton" in sys.modules:
    triton, tl = import_module("triton"), import_module("triton.language")


def on_gpu(x: Tensor) -> bool:
    """Return True for a tensor on a GPU, and for a meta tensor where Triton is imported: kernels are compiled ahead with
    meta tensors in place of those on the GPU (compiled/compile_ahead.py)."""
    return x.is_cuda or (x.is_meta and triton is not _NoTriton)


def use_triton(x: Tensor) -> bool:
    """Return True if the Triton kernel should run. float64 always takes the reference, since it is used to compare
    results."""
    return on_gpu(x) and x.dtype in _DTYPES


# Triton's own versions take microseconds per launch to find out whether a kernel calls them.
def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def is_power_of_2(number: int) -> bool:
    return number & (number - 1) == 0


def overlaps(x: Tensor) -> bool:
    """Return True if a kernel may be launched while the one before it still runs (Hopper and later). The kernel itself
    waits for its inputs."""
    return on_gpu(x) and _is_hopper(x.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    if device.type == "meta":
        return bool(triton.runtime.driver.active.get_current_target().arch >= 90)
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr) -> None:
    """Let the next kernel start, and wait for everything that the kernels before this one wrote. Code before this call
    may read only what existed before the step."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
