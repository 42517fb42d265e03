"""Runs the Triton kernels of experts on a CPU. test_moe_kernels.py starts this in a process of its own, like
interpreted.py."""

from __future__ import annotations

import pytest
import torch
import triton  # before any kernel, otherwise they are not defined
from kernels import moe_cases
from kernels.moe_cases import Shape

from stoker.kernels.moe_many import PairTile

assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is to be set"
CPU = torch.device("cpu")
SHAPES = [
    Shape(72, 40, 5, 3, renormalises=False),
    Shape(100, 20, 11, 6, granule=4),
    Shape(32, 16, 3, 3, granule=16),
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 19])
def test_routing(num_tokens, shape):
    moe_cases.routing(num_tokens, shape, CPU, torch.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_few_tokens(num_tokens, shape):
    moe_cases.few(num_tokens, shape, CPU, torch.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 35])
def test_many_tokens(num_tokens, shape):
    moe_cases.many(num_tokens, shape, CPU, torch.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts(shape):
    tile = PairTile(rows=32, outs=16, ins=32, num_warps=4, num_stages=2)
    moe_cases.prompt(60, shape, CPU, torch.float32, tile, tile)
