"""Experts in the place of a gated MLP: a router, and gate, up and down of all experts as one parameter each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stoker.kernels.moe import Experts, add_experts, weave
from stoker.kernels.moe_prompt import GRANULE, fits
from stoker.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class MoeConfig:
    num_experts: int
    top_k: int
    intermediate_size: int
    renormalises: bool  # the chosen experts' weights add up to one
    layers: frozenset[int]  # those that have experts; the others have a dense MLP


class MoeMlp(nn.Module):
    """Experts stand one below the other in the rows of a parameter, as the loader fills them."""

    def __init__(self, hidden_size: int, config: MoeConfig) -> None:
        super().__init__()
        self._hidden_size, self._config = hidden_size, config
        num_experts, width = config.num_experts, config.intermediate_size
        self.router = nn.Parameter(torch.empty(num_experts, hidden_size), requires_grad=False)
        self.gate_up = nn.Parameter(torch.empty(num_experts * 2 * width, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(num_experts * hidden_size, width), requires_grad=False)
        self._granule = width  # as it is loaded: all of gate, then all of up

    def pack(self) -> None:
        if fits(self._gate_up):
            self._granule = GRANULE
            weave(self._gate_up, GRANULE)

    @property
    def _gate_up(self) -> Tensor:
        return self.gate_up.data.view(self._config.num_experts, -1, self._hidden_size)

    @property
    def width(self) -> int:
        """Values held for each token at a time: the normed token, its place in lists of experts, and for each expert that it
        has, what goes into its last product and what comes out."""
        config = self._config
        lists = 4 * config.num_experts
        return self._hidden_size + lists + config.top_k * (config.intermediate_size + self._hidden_size)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x + the experts of the normed x; x is spent."""
        config = self._config
        down = self.down.view(config.num_experts, self._hidden_size, -1)
        experts = Experts(self.router, self._gate_up, down, self._granule, config.top_k, config.renormalises)
        return add_experts(x, norm.norm, experts)
