"""Multi-head latent attention (MLA): k and v of all heads are expanded from one small latent per token, which is what the
KV cache holds. The projections of q and of the latent from the hidden state are one matmul."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stoker.kernels.attention_grid import GridSpans
from stoker.kernels.cpu_int8 import Int8Kernel, Int8Weight
from stoker.kernels.head_matmul import head_matmul
from stoker.kernels.latent_write import latent_write
from stoker.kernels.mla import LatentShape, expanded, expanded_heads, mla_attention
from stoker.kernels.mla_split import SplitSpans, split_attention
from stoker.kernels.paged import PagedSpans
from stoker.kernels.quant import QuantWeight, dequantise
from stoker.kv.blocks.layout import KvGroup
from stoker.layers.batch import GroupInputs
from stoker.layers.linear import Linear
from stoker.layers.norm import RMSNorm
from stoker.layers.quant import Stored, StoredAs, StoredWeight
from stoker.layers.rope import half_order
from stoker.parallel.context_group import WHOLE_CONTEXT, ContextGroup
from stoker.parallel.mesh import Mesh
from stoker.parallel.shard import Shard

# Values of the queries of all ranks that are exchanged at a time, if ranks split the context.
_EXCHANGED_VALUES = 1 << 24


@dataclass(frozen=True, slots=True)
class MlaConfig:
    num_heads: int
    q_rank: int | None  # of the low-rank projection of q; None: q is projected from the hidden state
    latent: int
    nope: int
    rope: int
    value: int
    scale: float  # of the scores
    bias: bool = False
    interleaved: bool = True  # the two values of a rotated pair are neighbours in the checkpoint
    partial: bool = False  # another rank adds the residual and the bias of the output
    norm_eps: float = 1e-6  # of the norms on the low-rank q and on the latent, whatever that of the other norms is

    @property
    def shape(self) -> LatentShape:
        return LatentShape(self.num_heads, self.nope, self.rope, self.value, self.latent)

    @property
    def q_size(self) -> int:
        return self.num_heads * (self.nope + self.rope)

    def build(self, hidden_size: int, stored: StoredAs, name: str, in_features: int | None = None) -> LatentAttention:
        """Build the attention of the layer `name`. `in_features` is the width of the input, by default `hidden_size`,
        which is that of the output."""
        return LatentAttention(self, hidden_size, in_features or hidden_size, stored, name)

    def kv_group(self, num_layers: int) -> KvGroup:
        """Return the KV of layers with this attention."""
        return KvGroup(num_layers, 1, self.shape.width, "latent", wide=self.rope)

    def sharded(self, shard: Shard) -> MlaConfig:
        """Return the attention of a rank: some of the heads. Every rank has the latent."""
        num_heads = shard.piece.size_of(self.num_heads, f"tp={shard.tp}: num_attention_heads")
        return replace(self, num_heads=num_heads, partial=shard.is_partial)

    @property
    def num_kv_heads(self) -> int:
        """Heads of k and v after the expansion."""
        return self.num_heads

    def active_weights(self, hidden_size: int) -> int:
        """Number of weights in the matmuls that one token passes through."""
        into = hidden_size * (self.latent + self.rope)
        into += hidden_size * self.q_size if self.q_rank is None else self.q_rank * (hidden_size + self.q_size)
        return into + self.num_heads * ((self.nope + self.value) * self.latent + self.value * hidden_size)


def exchanged_bytes(width: int, num_ranks: int, itemsize: int, num_tokens: int) -> int:
    """Return the memory of a step that `num_ranks` ranks need to exchange queries of `width` values and their results: the
    results, and those that are sent and received."""
    return 0 if num_ranks == 1 else 3 * max(_EXCHANGED_VALUES, num_tokens * width * num_ranks) * itemsize


class ExpandingWeight(StoredWeight):
    """The weight that expands a latent to k and v of all heads. Both forms of attention use this one copy, in the
    model's dtype: absorbed into the query it is no matmul over its rows."""

    def __init__(self, shape: LatentShape, stored: Stored) -> None:
        super().__init__(shape.latent, (shape.num_heads * (shape.nope + shape.value),), stored)
        self._num_heads = shape.num_heads
        self._expanding: Tensor | None = None

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        weight = self.ready()
        assert not isinstance(weight, Int8Weight)
        if isinstance(weight, QuantWeight):
            plain = weight.codes.new_empty(weight.shape, dtype=self._dtype)
            weight = plain if plain.is_meta else dequantise(weight, self._dtype)  # no kernel runs on meta tensors
            self.drop()
            self.get_parameter(self._names[0]).data = weight
        self._expanding = weight.view(self._num_heads, -1, self.in_features)

    @property
    def expanding(self) -> Tensor:
        """[heads, nope + value, latent]"""
        assert self._expanding is not None, "pack() comes first"
        return self._expanding


class LatentAttention(nn.Module):
    def __init__(self, config: MlaConfig, hidden_size: int, in_features: int, stored: StoredAs, name: str) -> None:
        super().__init__()
        self.config, self.shape = config, config.shape
        self._context: ContextGroup = WHOLE_CONTEXT
        self._q_width = config.q_rank or config.q_size
        self._exact = False
        parts = (self._q_width, self.shape.width)
        self.into = Linear(in_features, parts, config.bias, stored(f"{name}.into"))
        self.q_norm: RMSNorm | None = None
        self.q_up: Linear | None = None
        if config.q_rank is not None:
            self.q_norm = RMSNorm(config.q_rank, config.norm_eps)
            self.q_up = Linear(config.q_rank, config.q_size, stored=stored(f"{name}.q_up"))
        self.latent_norm = RMSNorm(config.latent, config.norm_eps)
        self.kv_up = ExpandingWeight(self.shape, stored(f"{name}.kv_up"))
        has_bias, values = config.bias and not config.partial, config.num_heads * config.value
        self.out = Linear(values, hidden_size, has_bias, stored(f"{name}.out"), partial=config.partial)

    def join(self, mesh: Mesh) -> None:
        """Give the attention the ranks that hold the other parts of its KV."""
        self._context = mesh.context

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        """Bring the rotated values of q and k into the order in which the kernels rotate them. The layers inside are
        packed after this."""
        self._exact = exact
        config, q_up = self.config, self.into if self.q_up is None else self.q_up
        if not config.interleaved:
            return
        order, width = half_order(config.rope, config.rope, True), config.nope + config.rope
        head = [*range(config.nope), *(config.nope + value for value in order)]
        q_rows = [first + value for first in range(0, config.q_size, width) for value in head]
        first = self._q_width + config.latent
        kv_rows = [*range(self._q_width, first), *(first + value for value in order)]
        if self.q_up is None:
            q_up.reorder([*q_rows, *kv_rows])
        else:
            q_up.reorder(q_rows)
            self.into.reorder([*range(self._q_width), *kv_rows])

    @property
    def width(self) -> int:
        """Values held per token at the same time: the first projection and copies of its parts, q, the entries of the KV
        cache, and then either the absorbed query and attention's output, or the expanded k and v of some heads (of a
        prompt, as many keys as tokens); padded, for the GPU's attention."""
        shape, config = self.shape, self.config
        held = 2 * self.into.out_features + config.q_size + shape.width
        head = 3 * (shape.nope + shape.rope) + shape.nope + 2 * shape.value
        expanded = expanded_heads(1 << 13, shape) * head
        return held + max(shape.num_heads * (2 * shape.latent + shape.value), expanded) + shape.num_heads * shape.value

    def forward(
        self, x: Tensor, norm: RMSNorm, where: GroupInputs, layer: int, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Return x + attention(norm(x)). `layer` counts within the KV group. The memory of x is reused."""
        return self.add_attended(x, self.into(x, norm), where, layer, positions, cos, sin)

    def project(self, x: Tensor) -> Tensor:
        """Return what `add_attended` takes, without a norm."""
        return self.into.plain(x)

    def add_attended(
        self, total: Tensor, into: Tensor, where: GroupInputs, layer: int, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Return total + attention, from the first projection. The memory of `total` is reused."""
        assert not isinstance(where.spans, GridSpans), "MLA has no 8-bit kernels on a CPU"
        q, kv = into.split([self._q_width, self.shape.width], 1)
        q, kv = q.contiguous(), kv.contiguous()
        if self.q_up is not None:
            assert self.q_norm is not None
            q = self.q_up(q, self.q_norm)
        heads = q.view(len(into), self.shape.num_heads, -1)
        pages = where.kv.pages(layer)
        entries = latent_write(heads, kv, self.latent_norm.norm, cos, sin, positions, pages, where.slots)
        if self._context.num_ranks > 1:
            found = self._attend_split(heads, entries, pages, where)
        else:
            assert not isinstance(where.spans, SplitSpans)
            given = (heads, entries, pages, where.spans, self.kv_up.expanding, self.shape, self.config.scale)
            found = mla_attention(*given, self._exact)
        return self.out.add_to(total, found.view(len(total), -1))

    def _attend_split(self, q: Tensor, entries: Tensor, pages: Tensor, where: GroupInputs) -> Tensor:
        """Attention over a context that ranks split. New prompts need no other rank's keys."""
        spans, shape, scale, weight = where.spans, self.shape, self.config.scale, self.kv_up.expanding
        assert isinstance(spans, SplitSpans | PagedSpans)
        out = q.new_empty(*q.shape[:2], shape.value)
        if isinstance(spans, SplitSpans):
            whole, dtype = spans.whole, spans.dtype
            if len(spans.rest):
                out[spans.rest] = self._merged(q[spans.rest], pages, where)
        else:
            whole, dtype = tuple(slice(first, first + count) for first, count in spans.whole), q.dtype
            if whole != (slice(0, len(q)),):
                out = self._merged(q, pages, where)
        for tokens in whole:
            wide = (q[tokens].to(dtype), entries[tokens].to(dtype), weight.to(dtype))
            out[tokens] = expanded(*wide, shape, scale, None, True).to(q.dtype)
        return out

    def _merged(self, q: Tensor, pages: Tensor, where: GroupInputs) -> Tensor:
        """Attention of tokens whose keys are on several ranks. Some heads of each rank at a time, so that the memory for
        exchanging them is bounded."""
        spans, shape, context = where.spans, self.shape, self._context
        assert isinstance(spans, SplitSpans | PagedSpans)
        key_weight, value_weight = self.kv_up.expanding.split([shape.nope, shape.value], 1)
        query = torch.cat([head_matmul(q[..., : shape.nope], key_weight, self._exact), q[..., shape.nope :]], -1)
        found = query.new_empty(*query.shape[:2], shape.latent)
        at_once = max(1, _EXCHANGED_VALUES // (len(q) * shape.width * context.num_ranks))
        for heads in (slice(first, first + at_once) for first in range(0, shape.num_heads, at_once)):
            options = (pages, spans, where.kv.split, shape, self.config.scale)
            found[:, heads] = context.merge(*split_attention(context.gather_heads(query[:, heads]), *options))
        return head_matmul(found, value_weight.transpose(1, 2), self._exact)
