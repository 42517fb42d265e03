# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Gated SiLU.  gate_up [tokens, 2 * width] -> [tokens, width]"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.dispatch import cdiv, overlaps, tl, triton, use_triton, wait_for_inputs

_BLOCK = 1024
_ONE = torch.tensor(1)  # of any dtype, as a tensor: for one row, adding a number takes twice as long


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """torch's silu is not used: it has another formula for the last elements of a thread's part than for the others,
    so that a value would depend on its place. These operators give the same bits everywhere."""
    gate, up = gate_up.chunk(2, -1)
    wide = gate if gate.dtype in (torch.float32, torch.float64) else gate.float()
    divisor = wide.neg().exp_().add_(_ONE)
    return torch.div(wide, divisor, out=divisor).to(gate.dtype).mul_(up)


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + token * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    found = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + token * WIDTH + column, found.to(out.dtype.element_ty), mask=inside)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    assert gate_up.is_contiguous()
    num_tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    grid, overlap = (num_tokens, cdiv(width, _BLOCK)), overlaps(gate_up)
    _silu_mul[grid](gate_up, out, WIDTH=width, BLOCK=_BLOCK, OVERLAP=overlap, num_warps=4, launch_pdl=overlap)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    return (silu_mul_triton if use_triton(gate_up) else silu_mul_ref)(gate_up)
