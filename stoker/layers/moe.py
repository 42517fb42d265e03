"""A mixture of experts in place of a gated MLP: a router, and one weight each for gate_up and down of all experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stoker.kernels.cpu_int8 import Int8Kernel, Int8Weight
from stoker.kernels.moe import Experts, add_experts, to_kernel_layout
from stoker.kernels.moe_choice import MAX_GROUPS as MAX_GROUPS
from stoker.kernels.moe_choice import ExpertRouter
from stoker.kernels.moe_choice import Routing as Routing
from stoker.kernels.moe_gate import Clamp as Clamp
from stoker.kernels.moe_gate import Gate
from stoker.kernels.moe_tile_model import check_experts
from stoker.kernels.quant import QuantWeight
from stoker.layers.expert_storage import FusedExperts, Mxfp4Experts
from stoker.layers.mlp import GatedMlp, MlpConfig
from stoker.layers.norm import RMSNorm
from stoker.layers.quant import PLAIN, Stored, StoredAs, StoredWeight
from stoker.parallel.shard import WHOLE, Piece, Shard


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
    held: range | None = None  # the experts of this rank; None: all
    piece: Piece = WHOLE.expert_piece  # this rank's part of each expert that it holds
    partial: bool = False  # another rank adds the residual

    def build(self, hidden_size: int, stored: StoredAs, name: str) -> MoeMlp:
        """Build the experts of the layer `name`. Raises ModelFilesError for sizes that no kernel of the device serves."""
        shape = (self.num_experts, self.routing.top_k, hidden_size, self.intermediate_size)
        check_experts(name, *shape, torch.get_default_device())
        gate_up, down = stored(f"{name}.gate_up"), stored(f"{name}.down")
        if isinstance(gate_up, FusedExperts | Mxfp4Experts) and isinstance(down, FusedExperts | Mxfp4Experts):
            gate_up, down = (replace(one, num_experts=self.num_held) for one in (gate_up, down))
            if isinstance(gate_up, FusedExperts):
                gate_up = replace(gate_up, halves=not (self.alternates or self.piece.is_whole))
        shared = None if self.shared is None else self.shared.build(hidden_size, stored, f"{name}.shared")
        return MoeMlp(hidden_size, self, gate_up, down, shared)

    def sharded(self, shard: Shard) -> MoeConfig:
        """Return the experts of a rank: some of them, or a part of the inner width of each. Every rank has the router."""
        piece = shard.expert_piece
        width = piece.size_of(self.intermediate_size, f"tp={shard.tp}: moe_intermediate_size")
        held = shard.experts(self.num_experts)
        # The shared expert's part is added to the sum of the others.
        shared = None if self.shared is None else replace(self.shared.sharded(shard), partial=False)
        return replace(self, intermediate_size=width, held=held, shared=shared, piece=piece, partial=shard.is_partial)

    @property
    def has_down_bias(self) -> bool:
        """One of the ranks that have a part of the same experts adds the bias of their outputs."""
        return self.bias and self.piece.index == 0

    @property
    def num_held(self) -> int:
        return self.num_experts if self.held is None else len(self.held)

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
        num_experts, width, routing = config.num_held, config.intermediate_size, config.routing

        def parameter(*size: int, dtype: torch.dtype | None = None) -> nn.Parameter:
            return nn.Parameter(torch.empty(*size, dtype=dtype), requires_grad=False)

        # Checkpoints have the correction in float32: bfloat16 cannot distinguish experts whose scores are close.
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.router = parameter(config.num_experts, hidden_size)
        self.router_bias = parameter(config.num_experts) if routing.bias else None
        self.correction = parameter(config.num_experts, dtype=wide) if routing.correction else None
        gate_up_parts, down_parts = (width, width) * num_experts, (hidden_size,) * num_experts
        if config.fused:
            gate_up_parts, down_parts = (sum(gate_up_parts),), (sum(down_parts),)
        self.gate_up = StoredWeight(hidden_size, gate_up_parts, gate_up)
        self.down = StoredWeight(width, down_parts, down)
        self.gate_up_bias = parameter(num_experts, 2 * width) if config.bias else None
        self.down_bias = parameter(num_experts, hidden_size) if config.has_down_bias else None
        self.shared = shared
        self._experts: Experts | None = None

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        gate_up, down = self.gate_up.ready(), self.down.ready()
        assert not isinstance(gate_up, Int8Weight)
        assert not isinstance(down, Int8Weight), "experts have no 8-bit kernels on a CPU"
        bias, correction = (None if extra is None else extra.data for extra in (self.router_bias, self.correction))
        router = ExpertRouter(self.router.data, self._config.routing, bias, correction, self._config.held)
        gate_bias, down_bias = (None if bias is None else bias.data for bias in (self.gate_up_bias, self.down_bias))
        if gate_bias is not None and self._config.alternates:
            gate_bias = gate_bias.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
        gate = Gate(self._config.clamp, gate_bias)
        self._experts = to_kernel_layout(router, gate_up, down, exact, gate, down_bias, self._config.partial)

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
