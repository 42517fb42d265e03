"""A pre-norm decoder: embedding, layers of attention and gated MLP or experts, norm, head. Model families configure it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stoker.kernels.attention_grid import GridSpans
from stoker.kernels.cpu_int8 import Int8Kernel
from stoker.layers.attention import Attention
from stoker.layers.batch import ForwardBatch, GroupInputs
from stoker.layers.embedding import Embedding
from stoker.layers.features import Tap
from stoker.layers.int8_layer import Int8Layer, Int8Matmul
from stoker.layers.linear import Linear, TiedLinear
from stoker.layers.mla import LatentAttention
from stoker.layers.mlp import GatedMlp
from stoker.layers.norm import RMSNorm
from stoker.layers.packing import pack_layers
from stoker.layers.quant import PLAIN, Stored, StoredAs
from stoker.layers.rope import Rope, RopeConfig
from stoker.parallel.mesh import ALONE, Mesh
from stoker.parallel.shard import WHOLE, Shard


class PartModule(Protocol):
    """The attention or the MLP of a layer, an nn.Module.

    Attention is called with (x, norm, where, layer, positions, cos, sin), an MLP with (x, norm). Both return x plus
    their output for norm(x), and may reuse the memory of x. On a rank whose configuration is `partial`, they return this
    rank's part of the output alone: another rank adds x, and the mesh adds up the parts.
    """

    def __call__(self, *inputs: Any) -> Tensor: ...

    @property
    def width(self) -> int:
        """Values held per token at the same time, beside the residual stream."""


class PartConfig(Protocol):
    """The shape of a layer's attention (AttentionConfig) or MLP (MlpConfig, MoeConfig)."""

    def build(self, hidden_size: int, stored: StoredAs, name: str) -> PartModule:
        """Build the part `name` of the model on torch's default device. It is an nn.Module."""

    def sharded(self, shard: Shard) -> PartConfig:
        """Return a rank's part of it. Raises ConfigError if it cannot be split like this."""

    def active_weights(self, hidden_size: int) -> int:
        """Number of weights in the matmuls that one token passes through."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The shape of one layer. `group` is its KV group, counted in ModelFamily.kv_groups."""

    attention: PartConfig
    mlp: PartConfig
    group: int = 0

    def sharded(self, shard: Shard) -> LayerConfig:
        return replace(self, attention=self.attention.sharded(shard), mlp=self.mlp.sharded(shard))


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
    shard: Shard = WHOLE  # what `layers` are of the model

    def sharded(self, shard: Shard) -> DecoderConfig:
        """Return a rank's part of the whole model."""
        numbers = shard.layers_of(len(self.layers))
        return replace(self, layers=tuple(self.layers[i].sharded(shard) for i in numbers), shard=shard)

    @property
    def first_layer(self) -> int:
        """The number that the first of `layers` has in the model."""
        return 0 if self.shard.layers is None else self.shard.layers.start

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
        layer, name = config.layers[number], f"layers.{config.first_layer + number}"
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = layer.attention.build(config.hidden_size, config.stored_as, f"{name}.attention")
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = layer.mlp.build(config.hidden_size, config.stored_as, f"{name}.mlp")
        self.mesh: Mesh = ALONE

    def forward(self, x: Tensor, where: GroupInputs, layer: int, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run the layer. `layer` counts within the KV group."""
        if isinstance(where.spans, GridSpans):
            return self.int8.run(x, where, where.spans, layer, cos, sin)
        x = self.mesh.combine(self.attention(x, self.attention_norm, where, layer, positions, cos, sin))
        return self.mesh.combine(self.mlp(x, self.mlp_norm))

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
            return Int8Matmul(linear.int8_weight, linear.bias, linear.is_partial)

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
            self.mesh,
        )


class Decoder(nn.Module):
    """A decoder built on torch's default device and in its default dtype. It is empty until weights are loaded.

    It may be a rank's part of a model (`DecoderConfig.sharded`). Then `join` gives it the other ranks.
    """

    def __init__(self, config: DecoderConfig, num_positions: int) -> None:
        super().__init__()
        self._vocab_size, self._hidden_size = config.vocab_size, config.hidden_size
        self._itemsize = torch.get_default_dtype().itemsize
        self._mesh: Mesh = ALONE
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(len(config.layers)))
        groups = [layer.group for layer in config.layers]
        # Each layer's KV group, and its number within the group.
        self._places = [(group, groups[:i].count(group)) for i, group in enumerate(groups)]
        if config.shard.has_ends:
            self._add_ends(config)
        self.rope = Rope(config.rope, config.rope_width, num_positions, torch.get_default_device())

    def _add_ends(self, config: DecoderConfig) -> None:
        """Add the parts before and after the layers, which only the first stage has."""
        held = config.shard.vocabulary(config.vocab_size)
        self.embedding = Embedding(config.vocab_size, config.hidden_size, config.stored_as("embedding"), held)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = (
            TiedLinear(self.embedding)
            if config.tie_embeddings
            else Linear(config.hidden_size, len(held), stored=config.stored_as("head"))
        )

    def join(self, mesh: Mesh) -> None:
        """Give the model the other ranks, before its first step."""
        self._mesh = mesh
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.mesh = mesh
            if isinstance(layer.attention, LatentAttention | Attention):
                layer.attention.join(mesh)

    def forward(self, batch: ForwardBatch, taps: Sequence[Tap] = (), entering: Tensor | None = None) -> Tensor:
        """Return the hidden states [tokens, hidden] that leave the last layer. Each tap gets those of its layer; taps are
        ordered by their layers. `entering` are those of the stage before; None: this is the first stage."""
        x = self._mesh.combine(self.embedding(batch.token_ids)) if entering is None else entering
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
        return self._mesh.gather_logits(self.head(hidden, self.norm), self._vocab_size)

    @property
    def bytes_per_token(self) -> int:
        """Upper bound of a forward pass's memory per token, beside weights and KV: the residual stream and a copy of
        it, the rotary angles, and the widest part of a layer."""
        hidden_size = self._hidden_size
        widest = max(layer.width for layer in self.layers if isinstance(layer, DecoderLayer))
        return (2 * hidden_size + widest) * self._itemsize + self.rope.bytes_per_token

    @property
    def has_sinks(self) -> bool:
        return any(isinstance(module, Attention) and module.sinks is not None for module in self.modules())

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        """Convert the weights to the layout of the kernels. `int8` is the kernel for weights that may be requantised to
        8 bits; None: they are dequantised. `exact`: a token's result must not depend on the other tokens of a step."""
        pack_layers(self, int8, exact)
