"""Experts in the place of a gated MLP: a router, and gate, up and down of all experts as one weight each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stoker.kernels.moe import Experts, add_experts, as_kernels_want
from stoker.kernels.quant import QuantWeight
from stoker.layers.norm import RMSNorm
from stoker.layers.quant import PLAIN, Stored, StoredWeight


@dataclass(frozen=True, slots=True)
class MoeConfig:
    num_experts: int
    top_k: int
    intermediate_size: int
    renormalises: bool  # the chosen experts' weights add up to one
    layers: frozenset[int]  # those that have experts; the others have a dense MLP


class MoeMlp(nn.Module):
    """Experts stand one below the other in the rows of a weight, as the loader fills them: gate of the first, up of the first,
    gate of the second, and so on. How the weights are stored is theirs to know."""

    def __init__(self, hidden_size: int, config: MoeConfig, gate_up: Stored = PLAIN, down: Stored = PLAIN) -> None:
        super().__init__()
        self._config = config
        num_experts, width = config.num_experts, config.intermediate_size
        self.router = nn.Parameter(torch.empty(num_experts, hidden_size), requires_grad=False)
        self.gate_up = StoredWeight(hidden_size, (width, width) * num_experts, gate_up)
        self.down = StoredWeight(width, (hidden_size,) * num_experts, down)
        self._experts: Experts | None = None

    def pack(self) -> None:
        config = self._config
        weights = (self.router.data, self.gate_up.ready(), self.down.ready())
        self._experts = as_kernels_want(*weights, config.top_k, config.renormalises)

    @property
    def width(self) -> int:
        """Values held for each token at a time: the normed token, its place in lists of experts, and for each expert that it
        has, what goes into its last product, perhaps once more in 8 bits and with scales, and what comes out."""
        config, (num_experts, hidden_size) = self._config, self.router.shape
        lists, inner = 4 * num_experts, config.intermediate_size
        down = self._ready.down
        if isinstance(down, QuantWeight) and down.quantises_inputs:
            inner += -(-inner * 33 // 64)
        return hidden_size + lists + config.top_k * (inner + hidden_size)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x + the experts of the normed x; x is spent."""
        return add_experts(x, norm.norm, self._ready)

    @property
    def _ready(self) -> Experts:
        assert self._experts is not None, "pack() comes first"
        return self._experts
