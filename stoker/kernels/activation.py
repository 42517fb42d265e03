"""Gated SiLU.  gate_up [tokens, 2 * width] -> [tokens, width]"""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate).mul_(up)
