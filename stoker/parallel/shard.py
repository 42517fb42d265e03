"""Which part of a model a rank holds.

Ranks form a grid of `pp` stages of `tp` ranks each; rank 0 is the first rank of the first stage. A stage has some of the
layers. The ranks of a stage split each of its layers: attention by heads, an MLP by its inner width, experts by their number
(`ep` groups) and, within a group, by their inner width. The first stage also has the embedding and the head, split by
vocabulary. KV that is the same for all heads can be split by context: `cp` neighbouring ranks hold a part of each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Piece:
    """One of `of` equal parts."""

    index: int = 0
    of: int = 1

    def size_of(self, size: int, what: str) -> int:
        """Return the size of this part of something. Raises ConfigError if the parts would not be equal."""
        if size % self.of:
            divisors = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
            raise ConfigError(
                f"{what} {size} cannot be split into {self.of} equal parts; use a number of ranks that divides it: {divisors}"
            )
        return size // self.of

    @property
    def is_whole(self) -> bool:
        return self.of == 1


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How many ranks there are, and how they split the model."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.ep, self.cp) < 1:
            raise ConfigError(f"tp={self.tp}, pp={self.pp}, ep={self.ep}, cp={self.cp}: each must be at least 1")
        if self.tp % self.cp:
            raise ConfigError(
                f"cp={self.cp} does not divide tp={self.tp}: ranks of a stage split the context of their heads"
            )
        if self.tp % self.ep:
            raise ConfigError(
                f"ep={self.ep} does not divide tp={self.tp}: the groups of experts are formed within the ranks of a stage"
            )

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    def stage_of(self, rank: int) -> int:
        return rank // self.tp

    def __str__(self) -> str:
        return f"tp={self.tp} pp={self.pp} ep={self.ep} cp={self.cp}"


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one rank holds. The default is all of it."""

    tp_rank: int = 0
    tp: int = 1
    ep: int = 1
    layers: range | None = None  # those of its stage; None: all
    has_ends: bool = True  # the embedding, the last norm and the head
    cp: int = 1

    @property
    def piece(self) -> Piece:
        """This rank's part of each layer."""
        return Piece(self.tp_rank, self.tp)

    @property
    def context(self) -> Piece:
        """This rank's part of each KV block, if ranks split the context."""
        return Piece(self.tp_rank % self.cp, self.cp)

    @property
    def context_ranks(self) -> range:
        """The ranks of the stage, counted within it, that hold the parts of the same blocks."""
        first = self.tp_rank - self.tp_rank % self.cp
        return range(first, first + self.cp)

    @property
    def expert_piece(self) -> Piece:
        """This rank's part of each expert that it holds."""
        ranks = self.tp // self.ep
        return Piece(self.tp_rank % ranks, ranks)

    @property
    def is_partial(self) -> bool:
        """True if another rank of the stage adds the residual. This rank's layers then return partial sums alone."""
        return self.tp_rank > 0

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Piece, Piece]:
        """Return this rank's parts of the query heads and of the KV heads. If there are fewer KV heads than ranks, several
        ranks hold the same one."""
        self.piece.size_of(num_heads, f"tp={self.tp}: num_attention_heads")
        return self.piece, self.kv_heads(num_kv_heads)

    def kv_heads(self, num_kv_heads: int) -> Piece:
        """Return this rank's part of the KV heads."""
        if num_kv_heads % self.tp == 0:
            return self.piece
        if self.tp % num_kv_heads:
            raise ConfigError(
                f"tp={self.tp}: num_key_value_heads {num_kv_heads} must be a multiple of the number of ranks, or divide it"
            )
        return Piece(self.tp_rank * num_kv_heads // self.tp, num_kv_heads)

    def experts(self, num_experts: int) -> range:
        """Return the experts of this rank."""
        count = Piece(0, self.ep).size_of(num_experts, f"ep={self.ep}: the number of experts")
        group = self.tp_rank // (self.tp // self.ep)
        return range(group * count, (group + 1) * count)

    def vocabulary(self, vocab_size: int) -> range:
        """Return the tokens whose embeddings and logits this rank has. The parts of ranks may differ by one."""
        return range(vocab_size * self.tp_rank // self.tp, vocab_size * (self.tp_rank + 1) // self.tp)

    def layers_of(self, num_layers: int) -> range:
        return range(num_layers) if self.layers is None else self.layers


WHOLE = Shard()


def shards_of(layout: RankLayout, layer_bytes: Sequence[int], ends_bytes: int = 0) -> list[Shard]:
    """Return the shard of each rank. `layer_bytes` are the weights of each layer, `ends_bytes` those of embedding and head."""
    stages = split_layers(layer_bytes, layout.pp, ends_bytes)
    return [
        Shard(rank % layout.tp, layout.tp, layout.ep, None if layout.pp == 1 else stages[stage], stage == 0, layout.cp)
        for rank in range(layout.num_ranks)
        for stage in (layout.stage_of(rank),)
    ]


def split_layers(layer_bytes: Sequence[int], num_stages: int, ends_bytes: int = 0) -> list[range]:
    """Split layers into consecutive stages so that the largest stage is as small as possible. The first one also has the
    `ends_bytes` of embedding and head. Every stage has at least one layer."""
    num_layers = len(layer_bytes)
    if num_stages > num_layers:
        raise ConfigError(f"pp={num_stages}: the model has only {num_layers} layers; use --pp {num_layers} or less")
    sums = [0]
    for size in layer_bytes:
        sums.append(sums[-1] + size)
    # best[n] is the smallest possible largest stage of the first n layers in the stages so far, and the cuts.
    best: list[tuple[int, list[int]] | None] = [None] + [(sums[n] + ends_bytes, [n]) for n in range(1, num_layers + 1)]
    for _ in range(num_stages - 1):
        longer: list[tuple[int, list[int]] | None] = [None] * (num_layers + 1)
        for end in range(1, num_layers + 1):
            for first in range(1, end):
                before = best[first]
                if before is not None:
                    largest = max(before[0], sums[end] - sums[first])
                    current = longer[end]
                    if current is None or largest < current[0]:
                        longer[end] = (largest, [*before[1], end])
        best = longer
    found = best[num_layers]
    assert found is not None
    return [range(first, end) for first, end in zip([0, *found[1]], found[1], strict=False)]
