"""A mixture of experts in place of a gated MLP: a router, and one weight each for gate_up and down of all experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stoker.kernels.cpu_int8 import Int8Kernel, Int8Weight
from stoker.kernels.moe import Experts, add_experts, to_kernel_layout
from stoker.kernels.moe_choice import MAX_GROUPS as MAX_GROUPS
from stoker.kernels.moe_choice import Router
from stoker.kernels.moe_choice import Routing as Routing
from stoker.kernels.moe_gate import Clamp as Clamp
from stoker.kernels.moe_gate import Gate
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
    bias: bool = False  # both matmuls of an expert have one
    clamp: Clamp | None = None  # limits gate and up; None: SiLU
    fused: bool = False  # the checkpoint has one tensor for all experts
    alternates: bool = False  # the outputs and biases of gate and up alternate in these tensors

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
        gate_up_parts, down_parts = (width, width) * num_experts, (hidden_size,) * num_experts
        if config.fused:
            gate_up_parts, down_parts = (sum(gate_up_parts),), (sum(down_parts),)
        self.gate_up = StoredWeight(hidden_size, gate_up_parts, gate_up)
        self.down = StoredWeight(width, down_parts, down)
        self.gate_up_bias = parameter(num_experts, 2 * width) if config.bias else None
        self.down_bias = parameter(num_experts, hidden_size) if config.bias else None
        self.shared = shared
        self._experts: Experts | None = None

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        gate_up, down = self.gate_up.ready(), self.down.ready()
        assert not isinstance(gate_up, Int8Weight)
        assert not isinstance(down, Int8Weight), "experts have no 8-bit kernels on a CPU"
        bias, correction = (None if extra is None else extra.data for extra in (self.router_bias, self.correction))
        router = Router(self.router.data, self._config.routing, bias, correction)
        gate_bias, down_bias = (None if bias is None else bias.data for bias in (self.gate_up_bias, self.down_bias))
        if gate_bias is not None and self._config.alternates:
            gate_bias = gate_bias.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
        gate = Gate(self._config.clamp, gate_bias)
        self._experts = to_kernel_layout(router, gate_up, down, exact, gate, down_bias)

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
