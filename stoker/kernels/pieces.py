"""Attention's work cut into pieces of about one size: some tokens of one span, and some of the blocks of keys that they see.

Once a step, on the host, for all layers. Where a few long contexts would keep only a few programs busy their keys are split, and
the last piece to finish puts the parts together (paged.py). Pieces that are parts come first: only they need a place to leave them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# A piece: its first token, how many (0: padding, nothing is to be done), its first block of keys and the one behind its last,
# the number of its group's first piece, and how many pieces that group has.
FIELDS = 6


def cut_tokens(first: Ints, count: Ints, start: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Spans, by their first token, tokens and first position: the same, none with more than `most` tokens."""
    tiles = -(-count // most)
    offset = (np.arange(int(tiles.sum())) - (tiles.cumsum() - tiles).repeat(tiles)) * most
    return (
        first.repeat(tiles) + offset,
        np.minimum(count.repeat(tiles) - offset, most),
        start.repeat(tiles) + offset,
    )


def cut_keys(first: Ints, count: Ints, start: Ints, block_tokens: int, wanted: int, least_blocks: int) -> Ints:
    """[pieces, FIELDS], the longest first: at most `wanted`, or one for each span and `wanted` beyond where there are more spans
    than half of that. Fewer than twice `wanted` are parts, and none of these has less than about `least_blocks`."""
    blocks = (start + count - 1) // block_tokens + 1
    order = np.argsort(-blocks, kind="stable")
    blocks = blocks[order]
    each = max(least_blocks, -(-int(blocks.sum()) // wanted))
    parts = -(-blocks // each)
    # Rounded up, these may be more than run at a time: a few that come late would be as good as twice the work.
    while 2 * len(parts) <= wanted < parts.sum():
        each += each // 8 + 1
        parts = -(-blocks // each)
    group = parts.cumsum() - parts
    number = np.zeros_like(group)
    if blocks[0] > each:
        order, blocks, group, parts = (column.repeat(parts) for column in (order, blocks, group, parts))
        number = np.arange(len(group)) - group
    pieces = np.empty((len(group), FIELDS), dtype=np.int64)
    pieces[:, 0] = first[order]
    pieces[:, 1] = count[order]
    pieces[:, 2] = number * blocks // parts
    pieces[:, 3] = (number + 1) * blocks // parts
    pieces[:, 4] = group
    pieces[:, 5] = parts
    return pieces
