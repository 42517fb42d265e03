"""RMSNorm with a learned weight. A layer that takes a normed input gets the norm as an argument and fuses it."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from stoker.kernels.linear import Norm
from stoker.kernels.norm import rms_norm


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self._eps)

    @cached_property
    def norm(self) -> Norm:
        """The kernels' view of this norm. First used after the weights are loaded."""
        return Norm(self.weight, self._eps)
