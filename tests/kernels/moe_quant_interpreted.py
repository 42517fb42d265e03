"""The Triton kernels of experts in 8 and 4 bits, on a CPU. Run by test_moe_kernels.py in a process of its own, as interpreted.py
is."""

from __future__ import annotations

import pytest
import torch
import triton  # before any kernel: else they are not defined
from kernels import moe_cases
from kernels.moe_cases import Shape

assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is to be set"
CPU = torch.device("cpu")
SMALL = Shape(64, 64, 5, 3, renormalises=False)
# Of 128 inputs, and of 256 of 4 bits, the last are not all there; and experts' rows begin in the middle of a block.
ODD = Shape(320, 96, 3, 2)
CASES = [(SMALL, form) for form in moe_cases.FORMS]
CASES += [(ODD, form) for form in ("fp8 channels", "fp8 blocks", "int4 groups of 32")]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(("shape", "form"), CASES, ids=str)
def test_few_tokens(shape, form):
    moe_cases.few_quantised(1, shape, form, CPU, torch.float32)


@pytest.mark.parametrize(("shape", "form"), CASES, ids=str)
def test_many_tokens(shape, form):
    moe_cases.many_quantised(19, shape, form, CPU, torch.float32)


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_one_weight_may_be_plain(num_tokens):
    moe_cases.one_quantised(num_tokens, SMALL, "int4 groups of 32", CPU, torch.float32)


@pytest.mark.parametrize("form", ["fp8 channels", "fp8 blocks"])
def test_both_sides_in_8_bits(form):
    moe_cases.many_in_codes(66, Shape(256, 128, 3, 2), form, CPU, torch.float32)
