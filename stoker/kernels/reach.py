# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Which keys a token sees: all before it, those of a sliding window, or those of its chunk.

The keys that a token sees are always consecutive and end with its own. So a reach is the first of them, by the token's
position. Blocks in which no token of a span sees a key are never read: they may belong to another sequence by now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.kernels.dispatch import tl, triton


@dataclass(frozen=True, slots=True)
class Reach:
    """`window`: the last `window` tokens, the token itself included. `chunk`: the tokens whose position // chunk is the
    same. 0: no such limit; a reach has at most one of them."""

    window: int = 0
    chunk: int = 0

    @classmethod
    def of(cls, kind: str, extent: int) -> Reach:
        """Return the reach of a KV group's kind (kv/blocks/layout.py)."""
        return cls(window=extent if kind == "window" else 0, chunk=extent if kind == "chunk" else 0)

    @property
    def is_local(self) -> bool:
        return bool(self.window or self.chunk)

    def first_key(self, position: int) -> int:
        """Return the position of the first key that the token at `position` sees."""
        if self.window:
            return max(0, position - self.window + 1)
        return position // self.chunk * self.chunk if self.chunk else 0

    def first_keys(self, positions: Any) -> Any:
        """Do the same for an array or tensor of positions that are not negative."""
        if self.window:
            return (positions - (self.window - 1)).clip(min=0)
        return positions // self.chunk * self.chunk if self.chunk else positions * 0


FULL = Reach()


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first key that each position sees. For a local reach and positions of at least -1."""
    if WINDOW > 0:
        return tl.maximum(position - (WINDOW - 1), 0)
    else:
        return tl.maximum(position, 0) // CHUNK * CHUNK


@triton.jit
def share_blocks(first, last, part, num_parts, BLOCK: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Share the key blocks from the one with key `first` to the one with key `last` among the parts of a group.

    Return the first block of the part, the end of its blocks, and the number of parts that have any. The host has cut
    the whole context into parts, and does not know the positions exactly."""
    begin, end = first // BLOCK, (last + BLOCK) // BLOCK
    count = tl.maximum(end - begin, 0)
    used = tl.maximum(tl.minimum(num_parts, (count + MIN_BLOCKS - 1) // MIN_BLOCKS), 1)
    return begin + part * count // used, begin + (part + 1) * count // used, used
