"""Runs the Triton kernels of 8-bit and 4-bit experts on a CPU. test_moe_kernels.py starts this in a process of its own,
like interpreted.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton  # before any kernel, otherwise they are not defined
from kernels import moe_cases
from kernels.moe_cases import Shape

assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is to be set"
CPU = torch.device("cpu")
SMALL = Shape(64, 64, 5, 3, renormalises=False)
# The last group of 128 inputs, or of 256 4-bit inputs, is incomplete, and experts' rows begin in the middle of a block.
ODD = Shape(320, 96, 3, 2)
CASES = [(SMALL, form) for form in moe_cases.FORMS]
CASES += [(ODD, form) for form in ("fp8 channels", "fp8 blocks", "int4 groups of 32", "mxfp4")]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def nothing_is_zero():
    """Fill new memory with NaN, so that a kernel cannot read what none has written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("shape", "form"), CASES, ids=str)
def test_few_tokens(shape, form):
    moe_cases.few_quantised(1, shape, form, CPU, torch.float32)


@pytest.mark.parametrize(("shape", "form"), CASES, ids=str)
def test_many_tokens(shape, form):
    moe_cases.many_quantised(19, shape, form, CPU, torch.float32)


@pytest.mark.parametrize("routing", moe_cases.ROUTINGS)
def test_routings(routing):
    shape = moe_cases.routed(Shape(64, 64, 12, 5), routing)
    moe_cases.few_quantised(1, shape, "fp8 blocks", CPU, torch.float32)
    if shape.expert_bias:
        moe_cases.many_quantised(9, shape, "fp8 channels", CPU, torch.float32)


@pytest.mark.parametrize("form", ["fp8 channels", "fp8 blocks", "int4 groups of 32", "mxfp4"])
def test_a_rank_computes_the_experts_that_it_holds(form, nothing_is_zero):
    shape = replace(SMALL, renormalises=True, first=2, held=3, expert_bias=form == "mxfp4")
    moe_cases.few_quantised(2, shape, form, CPU, torch.float32)
    moe_cases.many_quantised(5, shape, form, CPU, torch.float32)


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_one_weight_may_be_plain(num_tokens):
    moe_cases.one_quantised(num_tokens, SMALL, "int4 groups of 32", CPU, torch.float32)


@pytest.mark.parametrize("form", ["fp8 channels", "fp8 blocks"])
def test_both_sides_in_8_bits(form):
    moe_cases.many_in_codes(66, Shape(256, 128, 3, 2), form, CPU, torch.float32)
