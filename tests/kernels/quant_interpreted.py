"""Runs the Triton kernels for 8-bit and 4-bit weights on a CPU. test_quant_kernels.py starts this in a process of its
own, like interpreted.py."""

from __future__ import annotations

import pytest
import torch
import triton  # before any kernel, otherwise they are not defined
from kernels import quant_cases

assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is to be set"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(("num_rows", "num_in", "num_out"), [(1, 64, 16), (33, 96, 34), (7, 320, 70)])
def test_matmuls(num_rows, num_in, num_out):
    quant_cases.products(num_rows, num_in, num_out, CPU, torch.float32)


@pytest.mark.parametrize(("num_in", "num_out"), [(64, 16), (96, 34), (320, 70)])
def test_dequantise(num_in, num_out):
    quant_cases.dequantised(num_in, num_out, CPU, torch.float32)


@pytest.mark.parametrize(("num_rows", "num_in", "group"), [(1, 96, 96), (5, 256, 128), (3, 384, 128)])
def test_quantise(num_rows, num_in, group):
    # The interpreter loses the carry where rounding up reaches the next power of two.
    quant_cases.quantised(num_rows, num_in, group, CPU, torch.float32, 0.05)
