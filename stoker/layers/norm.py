"""RMSNorm with a learned weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.kernels.norm import rms_norm


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self._eps)
