"""Cuts the work of attention into pieces of similar size: some tokens of one span, and some of the key blocks that they
attend to.

This runs once per step, on the host, for all layers. Where a few long contexts would keep only a few programs busy,
their keys are split, and the last piece to finish merges the partial results (paged.py). Pieces of split keys come
first, because only they need room for partial results.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# A piece: first token, number of tokens (0 is padding: nothing to do), first key block, end of its key blocks, number
# of its group's first piece, and number of pieces in the group.
FIELDS = 6


def cut_tokens(first: Ints, count: Ints, start: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Split spans, given by first token, token count and first position, so that none has more than `most` tokens."""
    tiles = -(-count // most)
    offset = (np.arange(int(tiles.sum())) - (tiles.cumsum() - tiles).repeat(tiles)) * most
    return (
        first.repeat(tiles) + offset,
        np.minimum(count.repeat(tiles) - offset, most),
        start.repeat(tiles) + offset,
    )


def cut_keys(first: Ints, count: Ints, start: Ints, block_tokens: int, wanted: int, min_blocks: int) -> Ints:
    """Return [pieces, FIELDS], the longest first.

    There are at most `wanted` pieces. If there are more than half that many spans, there may be one per span and
    `wanted` more. Fewer than twice `wanted` pieces are parts of split keys. Each part has at least about `min_blocks`
    key blocks.
    """
    blocks = (start + count - 1) // block_tokens + 1
    order = np.argsort(-blocks, kind="stable")
    blocks = blocks[order]
    each = max(min_blocks, -(-int(blocks.sum()) // wanted))
    parts = -(-blocks // each)
    # Rounding up may give more pieces than run at the same time: a few late ones would double the time.
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
