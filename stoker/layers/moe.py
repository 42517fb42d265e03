"""A mixture of experts in place of a gated MLP: a router, and one weight each for gate_up and down of all experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stoker.kernels.cpu_int8 import Int8Kernel, Int8Weight
from stoker.kernels.moe import Experts, add_experts, to_kernel_layout
from stoker.kernels.moe_choice import MAX_GROUPS as MAX_GROUPS
from stoker.kernels.moe_choice import ExpertRouter
from stoker.kernels.moe_choice import Routing as Routing
from stoker.kernels.moe_tile_model import check_experts
from stoker.kernels.quant import QuantWeight
from stoker.layers.mlp import GatedMlp, MlpConfig
from stoker.layers.norm import RMSNorm
from stoker.layers.quant import PLAIN, Stored, StoredAs, StoredWeight


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Experts in place of a layer's MLP. Every token also goes through the shared expert, if there is one."""

    num_experts: int
    intermediate_size: int
    routing: Routing
    shared: MlpConfig | None = None

    def build(self, hidden_size: int, stored: StoredAs, name: str) -> MoeMlp:
        """Build the experts of the layer `name`. Raises ModelFilesError for sizes that no kernel of the device serves."""
        shape = (self.num_experts, self.routing.top_k, hidden_size, self.intermediate_size)
        check_experts(name, *shape, torch.get_default_device())
        shared = None if self.shared is None else self.shared.build(hidden_size, stored, f"{name}.shared")
        return MoeMlp(hidden_size, self, stored(f"{name}.gate_up"), stored(f"{name}.down"), shared)

    def active_weights(self, hidden_size: int) -> int:
        """Number of weights in the matmuls that one token passes through."""
        shared = 0 if self.shared is None else self.shared.active_weights(hidden_size)
        return 3 * hidden_size * self.intermediate_size * self.routing.top_k + shared


class MoeMlp(nn.Module):
    """A mixture-of-experts MLP. The experts are stacked in the rows of each weight in the order of loading: gate of
    expert 0, up of expert 0, gate of expert 1, and so on."""

    def __init__(
        self,
        hidden_size: int,
        config: MoeConfig,
        gate_up: Stored = PLAIN,
        down: Stored = PLAIN,
        shared: GatedMlp | None = None,
    ) -> None:
        super().__init__()
        self._config = config
        num_experts, width, routing = config.num_experts, config.intermediate_size, config.routing

        def parameter(*size: int, dtype: torch.dtype | None = None) -> nn.Parameter:
            return nn.Parameter(torch.empty(*size, dtype=dtype), requires_grad=False)

        # Checkpoints have the correction in float32: bfloat16 cannot distinguish experts whose scores are close.
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.router = parameter(num_experts, hidden_size)
        self.router_bias = parameter(num_experts) if routing.bias else None
        self.correction = parameter(num_experts, dtype=wide) if routing.correction else None
        self.gate_up = StoredWeight(hidden_size, (width, width) * num_experts, gate_up)
        self.down = StoredWeight(width, (hidden_size,) * num_experts, down)
        self.shared = shared
        self._experts: Experts | None = None

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        gate_up, down = self.gate_up.ready(), self.down.ready()
        assert not isinstance(gate_up, Int8Weight)
        assert not isinstance(down, Int8Weight), "experts have no 8-bit kernels on a CPU"
        bias, correction = (None if extra is None else extra.data for extra in (self.router_bias, self.correction))
        router = ExpertRouter(self.router.data, self._config.routing, bias, correction)
        self._experts = to_kernel_layout(router, gate_up, down, exact)

    @property
    def width(self) -> int:
        """Values held per token at the same time: the normed token, its entries in the expert lists, and for each of
        its experts the input of the down projection (perhaps also in 8 bits, with scales) and its output; before and
        after that, the shared expert's."""
        config, (num_experts, hidden_size) = self._config, self.router.shape
        lists, inner = 4 * num_experts, config.intermediate_size
        if self._ready.exact:
            lists *= 5  # the router's logits are split for any number of tokens
        down = self._ready.down
        if isinstance(down, QuantWeight) and down.quantises_inputs:
            inner += -(-inner * 33 // 64)
        routed = hidden_size + lists + config.routing.top_k * (inner + hidden_size)
        return routed if self.shared is None else max(routed + self.shared.gate_up.out_features, self.shared.width)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Return x + experts(norm(x)). The memory of x is reused."""
        if self.shared is None:
            return add_experts(x, norm.norm, self._ready)
        gate_up = self.shared.gate_up(x, norm)  # before the experts change x
        return self.shared.down.add_gated_to(add_experts(x, norm.norm, self._ready), gate_up)

    @property
    def _ready(self) -> Experts:
        assert self._experts is not None, "pack() comes first"
        return self._experts
