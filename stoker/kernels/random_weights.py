"""Random weights of every kind on the GPU, to time kernels with."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.dispatch import cdiv
from stoker.kernels.quant import QuantWeight, fp8_weight, int4_weight


def make_weight(kind: str, num_outs: int, num_ins: int) -> Tensor | QuantWeight:
    """Return a weight of kind bf16, fp8 (one scale per output), blocks (fp8 with 128 x 128 scales) or int4 (groups of
    32)."""
    device = torch.device("cuda")
    if kind == "bf16":
        return torch.randn(num_outs, num_ins, device=device, dtype=torch.bfloat16) * 0.02
    if kind == "int4":
        words = torch.randint(0, 2**31 - 1, (num_outs, num_ins // 8), device=device, dtype=torch.int32)
        return int4_weight(words, torch.full((num_outs, num_ins // 32), 0.004, device=device))
    codes = torch.randn(num_outs, num_ins, device=device).mul_(50).to(torch.float8_e4m3fn)
    rows, cols = (1, num_ins) if kind == "fp8" else (128, 128)
    scale = torch.full((cdiv(num_outs, rows), cdiv(num_ins, cols)), 0.0004, device=device)
    return fp8_weight(codes, scale, rows, cols, True)


def bytes_of(weight: Tensor | QuantWeight) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.codes.nbytes + weight.scale.nbytes
