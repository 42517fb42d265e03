"""A pre-norm decoder: embedding, layers of attention and gated MLP or experts, norm, head. Model families configure it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor, nn

from stoker.kernels.attention_grid import GridSpans
from stoker.kernels.cpu_int8 import Int8Kernel
from stoker.kernels.moe_tile_model import check_experts
from stoker.layers.attention import Attention
from stoker.layers.batch import ForwardBatch, GroupInputs
from stoker.layers.embedding import Embedding
from stoker.layers.features import Tap
from stoker.layers.int8_layer import Int8Layer, Int8Matmul
from stoker.layers.linear import Linear, TiedLinear
from stoker.layers.mlp import GatedMlp
from stoker.layers.moe import MoeConfig, MoeMlp
from stoker.layers.norm import RMSNorm
from stoker.layers.quant import PLAIN, Stored
from stoker.layers.rope import Rope, RopeConfig


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoeConfig | None = None
    # how weights that are not plain are stored, by the name of their matmul
    stored: Mapping[str, Stored] = field(default_factory=dict)

    def stored_as(self, matmul: str) -> Stored:
        return self.stored.get(matmul, PLAIN)

    @property
    def active_weights(self) -> int:
        """Number of weights in the matmuls that one token passes through, without the head."""
        moe, num_sparse = self.moe, len(self.moe.layers) if self.moe is not None else 0
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        experts = 3 * self.hidden_size * moe.intermediate_size * moe.top_k if moe is not None else 0
        return self.num_layers * attention + (self.num_layers - num_sparse) * mlp + num_sparse * experts


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()
        moe = config.moe if config.moe is not None and number in config.moe.layers else None
        if moe is not None:
            shape = (moe.num_experts, moe.top_k, config.hidden_size, moe.intermediate_size)
            check_experts(f"layers.{number}.mlp", *shape, torch.get_default_device())
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_bias,
            config.norm_eps if config.qk_norm else None,
            config.stored_as(f"layers.{number}.attention.qkv"),
            config.stored_as(f"layers.{number}.attention.out"),
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        stored = [config.stored_as(f"layers.{number}.mlp.{matmul}") for matmul in ("gate_up", "down")]
        self.mlp: GatedMlp | MoeMlp
        if moe is not None:
            self.mlp = MoeMlp(config.hidden_size, moe, *stored)
        else:
            self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, config.mlp_bias, *stored)

    def forward(self, x: Tensor, where: GroupInputs, layer: int, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if isinstance(where.spans, GridSpans):
            return self.int8.run(x, where, where.spans, layer, cos, sin)
        x = self.attention(x, self.attention_norm, where, layer, positions, cos, sin)
        return self.mlp(x, self.mlp_norm)

    @cached_property
    def int8(self) -> Int8Layer:
        """The layer for 8-bit weights on a CPU. First used after `pack`."""
        attention, mlp = self.attention, self.mlp
        assert isinstance(mlp, GatedMlp), "experts have no 8-bit kernels on a CPU"

        def matmul(linear: Linear) -> Int8Matmul:
            assert linear.int8_weight is not None
            return Int8Matmul(linear.int8_weight, linear.bias)

        return Int8Layer(
            self.attention_norm.norm.grid,
            matmul(attention.qkv),
            attention.head_norms,
            matmul(attention.out),
            self.mlp_norm.norm.grid,
            matmul(mlp.gate_up),
            matmul(mlp.down),
            attention.num_kv_heads,
            attention.head_dim,
        )


class Decoder(nn.Module):
    """A decoder built on torch's default device and in its default dtype. It is empty until weights are loaded. All its
    layers are one KV group."""

    def __init__(self, config: DecoderConfig, num_positions: int) -> None:
        super().__init__()
        self.embedding = Embedding(config.vocab_size, config.hidden_size, config.stored_as("embedding"))
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = (
            TiedLinear(self.embedding)
            if config.tie_embeddings
            else Linear(config.hidden_size, config.vocab_size, stored=config.stored_as("head"))
        )
        self.rope = Rope(config.rope, config.head_dim, num_positions, self.norm.weight.device)

    def forward(self, batch: ForwardBatch, taps: Sequence[Tap] = ()) -> Tensor:
        """Return the hidden states [tokens, hidden], the input of the head. Each tap gets those of its layer; taps are
        ordered by their layers."""
        x = self.embedding(batch.token_ids)
        (where,) = batch.groups
        cos, sin = self.rope(batch.positions)
        if isinstance(where.spans, GridSpans):
            cos, sin = cos[:, None], sin[:, None]
        layers, first = enumerate(self.layers), 0

        def run(x: Tensor, count: int) -> Tensor:
            for number, layer in islice(layers, count):
                x = layer(x, where, number, batch.positions, cos, sin)
            return x

        for tap in taps:
            x = run(x, tap.layer - first)
            tap.take(x)
            first = tap.layer
        return run(x, len(self.layers) - first)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]"""
        return self.head(hidden, self.norm)

    @property
    def bytes_per_token(self) -> int:
        """Upper bound of a forward pass's memory per token, beside weights and KV: the residual stream and a copy of
        it, the rotary angles, and the widest part of a layer."""
        hidden_size = self.embedding.in_features
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        widest = max(max(layer.attention.width, layer.mlp.width) for layer in layers)
        angles = 2 * self.rope.cos.shape[1] * self.rope.cos.itemsize
        return (2 * hidden_size + widest) * self.norm.weight.itemsize + angles

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        """Convert the weights to the layout of the kernels. `int8` is the kernel for weights that may be requantised to
        8 bits; None: they are dequantised. `exact`: a token's result must not depend on the other tokens of a step."""
        for module in self.modules():  # in the order of the attributes: the embedding before a head that shares it
            if isinstance(module, Embedding):
                module.pack(int8)
            elif isinstance(module, Linear | TiedLinear):
                module.pack(int8, exact)
            elif isinstance(module, MoeMlp):
                module.pack(exact)
