"""Which rank of a peer provides which part of a rank's blocks, however the two engines are split. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.kv.blocks.layout import BlockPart, KvLayout


def cover(ours: KvLayout, theirs: Sequence[KvLayout]) -> dict[int, BlockPart] | None:
    """Return the part that each of the peer's ranks provides, by its place in `theirs`, or None if some of ours is missing.

    All layouts are of one KV set. The peer's ranks form stages with the same layers each, and the ranks of a stage have all
    heads together. If several ranks hold the same part, such as the latent of MLA, the first one provides it.
    """
    parts: dict[int, BlockPart] = {}
    wanted = ours.whole_part
    missing = [len(layers) for layers in wanted.layers]
    for stage in dict.fromkeys(layout.whole_part.layers for layout in theirs):
        layers = tuple(_overlap(own, held) for own, held in zip(wanted.layers, stage, strict=True))
        if not any(layers):
            continue
        head = wanted.first_head
        while head < wanted.end_head:
            holders = [
                i
                for i, layout in enumerate(theirs)
                if layout.whole_part.layers == stage and layout.first_head <= head < layout.end_head
            ]
            if not holders:
                return None
            end_head = min(theirs[holders[0]].end_head, wanted.end_head)
            parts[holders[0]] = BlockPart(head, end_head, layers)
            head = end_head
        missing = [left - len(found) for left, found in zip(missing, layers, strict=True)]
    return None if any(missing) else parts


def _overlap(ours: range, theirs: range) -> range:
    """Return the common numbers of two ranges. If there are none, the empty range lies within `theirs`."""
    start = min(max(ours.start, theirs.start), theirs.stop)
    return range(start, max(start, min(ours.stop, theirs.stop)))
