# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Root-mean-square norm over the last dimension.  x [..., width]   weight [width]"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.dispatch import next_power_of_2, overlaps, tl, triton, use_triton, wait_for_inputs

MAX_WIDTH = 1 << 16  # one program has a whole row in its registers


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Sum the squares in float64 and round the result to float32. The order of the additions may depend on the number
    of rows, and it changes the last bits of float64 only."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True, dtype=torch.float64)
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_().to(wide.dtype)
    return (wide * scale).to(x.dtype) * weight


@triton.jit
def _rms_norm(x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    learned = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    wide = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
    tl.store(out + start + column, (wide * scale * learned).to(out.dtype.element_ty), mask=inside)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    grid, overlap = (x.numel() // width,), overlaps(x)
    block = next_power_of_2(width)
    _rms_norm[grid](x, weight, out, eps, WIDTH=width, BLOCK=block, OVERLAP=overlap, num_warps=4, launch_pdl=overlap)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (rms_norm_triton if use_triton(x) else rms_norm_ref)(x, weight, eps)
