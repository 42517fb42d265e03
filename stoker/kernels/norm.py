"""Root-mean-square norm over the last dimension.  x [..., width]   weight [width]"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32 at least, whatever x is: squares of bf16 values lose too much."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype) * weight
