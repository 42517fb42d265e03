"""A pre-norm decoder: embedding, layers of attention and gated MLP or experts, norm, head. Model families configure it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

from torch import Tensor, nn

from stoker.kernels.attention_grid import GridSpans
from stoker.kernels.cpu_int8 import Int8Kernel
from stoker.layers.attention import Attention
from stoker.layers.batch import ForwardBatch, GroupInputs
from stoker.layers.embedding import Embedding
from stoker.layers.features import Tap
from stoker.layers.int8_layer import Int8Layer, Int8Matmul
from stoker.layers.linear import Linear, TiedLinear
from stoker.layers.mlp import GatedMlp
from stoker.layers.norm import RMSNorm
from stoker.layers.packing import pack_layers
from stoker.layers.quant import PLAIN, Stored, StoredAs
from stoker.layers.rope import Rope, RopeConfig


class PartModule(Protocol):
    """The attention or the MLP of a layer, an nn.Module.

    Attention is called with (x, norm, where, layer, positions, cos, sin), an MLP with (x, norm). Both return x plus
    their output for norm(x), and may reuse the memory of x.
    """

    def __call__(self, *inputs: Any) -> Tensor: ...

    @property
    def width(self) -> int:
        """Values held per token at the same time, beside the residual stream."""


class PartConfig(Protocol):
    """The shape of a layer's attention (AttentionConfig) or MLP (MlpConfig, MoeConfig)."""

    def build(self, hidden_size: int, stored: StoredAs, name: str) -> PartModule:
        """Build the part `name` of the model on torch's default device. It is an nn.Module."""

    def active_weights(self, hidden_size: int) -> int:
        """Number of weights in the matmuls that one token passes through."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The shape of one layer. `group` is its KV group, counted in ModelFamily.kv_groups."""

    attention: PartConfig
    mlp: PartConfig
    group: int = 0


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    rope: RopeConfig
    rope_width: int  # values of a head that the rotary embedding is applied to
    max_positions: int
    tie_embeddings: bool
    # how weights that are not plain are stored, by the name of their matmul
    stored: Mapping[str, Stored] = field(default_factory=dict)

    def stored_as(self, matmul: str) -> Stored:
        return self.stored.get(matmul, PLAIN)

    @property
    def active_weights(self) -> int:
        """Number of weights in the matmuls that one token passes through, without the head."""
        parts = [part for layer in self.layers for part in (layer.attention, layer.mlp)]
        return sum(part.active_weights(self.hidden_size) for part in parts)


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()
        layer, name = config.layers[number], f"layers.{number}"
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = layer.attention.build(config.hidden_size, config.stored_as, f"{name}.attention")
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = layer.mlp.build(config.hidden_size, config.stored_as, f"{name}.mlp")

    def forward(self, x: Tensor, where: GroupInputs, layer: int, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run the layer. `layer` counts within the KV group."""
        if isinstance(where.spans, GridSpans):
            return self.int8.run(x, where, where.spans, layer, cos, sin)
        x = self.attention(x, self.attention_norm, where, layer, positions, cos, sin)
        return self.mlp(x, self.mlp_norm)

    @property
    def width(self) -> int:
        """Values held per token at the same time, beside the residual stream."""
        return max(self.attention.width, self.mlp.width)

    @cached_property
    def int8(self) -> Int8Layer:
        """The layer for 8-bit weights on a CPU. First used after `pack`."""
        attention, mlp = self.attention, self.mlp
        assert isinstance(attention, Attention)
        assert attention.is_plain, "these heads have no 8-bit kernels on a CPU"
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
    """A decoder built on torch's default device and in its default dtype. It is empty until weights are loaded."""

    def __init__(self, config: DecoderConfig, num_positions: int) -> None:
        super().__init__()
        self.embedding = Embedding(config.vocab_size, config.hidden_size, config.stored_as("embedding"))
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(len(config.layers)))
        groups = [layer.group for layer in config.layers]
        # Each layer's KV group, and its number within the group.
        self._places = [(group, groups[:i].count(group)) for i, group in enumerate(groups)]
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = (
            TiedLinear(self.embedding)
            if config.tie_embeddings
            else Linear(config.hidden_size, config.vocab_size, stored=config.stored_as("head"))
        )
        self.rope = Rope(config.rope, config.rope_width, num_positions, self.norm.weight.device)

    def forward(self, batch: ForwardBatch, taps: Sequence[Tap] = ()) -> Tensor:
        """Return the hidden states [tokens, hidden], the input of the head. Each tap gets those of its layer; taps are
        ordered by their layers."""
        x = self.embedding(batch.token_ids)
        cos, sin = self.rope(batch.positions)
        if isinstance(batch.groups[0].spans, GridSpans):
            cos, sin = cos[:, None], sin[:, None]
        layers, first = zip(self.layers, self._places, strict=True), 0

        def run(x: Tensor, count: int) -> Tensor:
            for layer, (group, number) in islice(layers, count):
                x = layer(x, batch.groups[group], number, batch.positions, cos, sin)
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
        widest = max(layer.width for layer in self.layers if isinstance(layer, DecoderLayer))
        angles = 2 * self.rope.cos.shape[1] * self.rope.cos.itemsize
        return (2 * hidden_size + widest) * self.norm.weight.itemsize + angles

    @property
    def has_sinks(self) -> bool:
        return any(isinstance(module, Attention) and module.sinks is not None for module in self.modules())

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        """Convert the weights to the layout of the kernels. `int8` is the kernel for weights that may be requantised to
        8 bits; None: they are dequantised. `exact`: a token's result must not depend on the other tokens of a step."""
        pack_layers(self, int8, exact)
