"""A mixture of experts in place of a gated MLP: a router, and one weight each for gate_up and down of all experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stoker.base.errors import ConfigError
from stoker.kernels.cpu_int8 import Int8Kernel, Int8Weight
from stoker.kernels.moe import Experts, add_experts, to_kernel_layout
from stoker.kernels.moe_tile_model import check_experts
from stoker.kernels.quant import QuantWeight
from stoker.layers.norm import RMSNorm
from stoker.layers.quant import PLAIN, Stored, StoredAs, StoredWeight
from stoker.parallel.shard import Shard


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Experts in place of a layer's MLP."""

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalises: bool  # the weights of the chosen experts add up to one
    held: range | None = None  # the experts of this rank; None: all
    partial: bool = False  # another rank adds the residual

    def build(self, hidden_size: int, stored: StoredAs, name: str) -> MoeMlp:
        """Build the experts of the layer `name`. Raises ModelFilesError for sizes that no kernel of the device serves."""
        shape = (self.num_experts, self.top_k, hidden_size, self.intermediate_size)
        check_experts(name, *shape, torch.get_default_device())
        if self.held is not None and len(self.held) < self.num_experts and torch.get_default_device().type == "cuda":
            raise ConfigError(
                "ep: the GPU kernels compute all experts of a layer; use --ep 1, which splits the width of each expert"
            )
        return MoeMlp(hidden_size, self, stored(f"{name}.gate_up"), stored(f"{name}.down"))

    def sharded(self, shard: Shard) -> MoeConfig:
        """Return the experts of a rank: some of them, or a part of the inner width of each. Every rank has the router."""
        width = shard.expert_piece.size_of(self.intermediate_size, f"tp={shard.tp}: moe_intermediate_size")
        held = shard.experts(self.num_experts)
        return replace(self, intermediate_size=width, held=held, partial=shard.is_partial)

    @property
    def num_held(self) -> int:
        return self.num_experts if self.held is None else len(self.held)

    def active_weights(self, hidden_size: int) -> int:
        """Number of weights in the matmuls that one token passes through."""
        return 3 * hidden_size * self.intermediate_size * self.top_k


class MoeMlp(nn.Module):
    """A mixture-of-experts MLP. The experts are stacked in the rows of each weight in the order of loading: gate of
    expert 0, up of expert 0, gate of expert 1, and so on."""

    def __init__(self, hidden_size: int, config: MoeConfig, gate_up: Stored = PLAIN, down: Stored = PLAIN) -> None:
        super().__init__()
        self._config = config
        num_experts, width = config.num_held, config.intermediate_size
        self.router = nn.Parameter(torch.empty(config.num_experts, hidden_size), requires_grad=False)
        self.gate_up = StoredWeight(hidden_size, (width, width) * num_experts, gate_up)
        self.down = StoredWeight(width, (hidden_size,) * num_experts, down)
        self._experts: Experts | None = None

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        config = self._config
        gate_up, down = self.gate_up.ready(), self.down.ready()
        assert not isinstance(gate_up, Int8Weight)
        assert not isinstance(down, Int8Weight), "experts have no 8-bit kernels on a CPU"
        sizes = (config.top_k, config.renormalises)
        held = config.held or range(config.num_experts)
        self._experts = to_kernel_layout(self.router.data, gate_up, down, *sizes, exact, held, config.partial)

    @property
    def width(self) -> int:
        """Values held per token at the same time: the normed token, its entries in the expert lists, and for each of
        its experts the input of the down projection (perhaps also in 8 bits, with scales) and its output."""
        config, (num_experts, hidden_size) = self._config, self.router.shape
        lists, inner = 4 * num_experts, config.intermediate_size
        if self._ready.exact:
            lists *= 5  # the router's logits are split for any number of tokens
        down = self._ready.down
        if isinstance(down, QuantWeight) and down.quantises_inputs:
            inner += -(-inner * 33 // 64)
        return hidden_size + lists + config.top_k * (inner + hidden_size)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Return x + experts(norm(x)). The memory of x is reused."""
        return add_experts(x, norm.norm, self._ready)

    @property
    def _ready(self) -> Experts:
        assert self._experts is not None, "pack() comes first"
        return self._experts
