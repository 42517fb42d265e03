"""Which rank of a peer provides which part of a rank's blocks, however the two engines are split. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.kv.blocks.layout import BlockPart, KvLayout


def cover(ours: KvLayout, theirs: Sequence[KvLayout]) -> list[tuple[int, BlockPart]] | None:
    """Return the parts that the peer's ranks provide, with the place of each rank in `theirs`, or None if some of ours is
    missing.

    All layouts are of one KV set. The peer's ranks form stages with the same layers each, and the ranks of a stage have all
    heads and tokens together. If several ranks hold the same part, such as the latent of MLA, the first one provides it.
    """
    parts: list[tuple[int, BlockPart]] = []
    wanted = ours.whole_part
    missing = [len(layers) for layers in wanted.layers]
    for stage in dict.fromkeys(layout.whole_part.layers for layout in theirs):
        layers = tuple(_overlap(own, held) for own, held in zip(wanted.layers, stage, strict=True))
        if not any(layers):
            continue
        members = [(i, layout) for i, layout in enumerate(theirs) if layout.whole_part.layers == stage]
        found = _cover_stage(ours, members, layers)
        if found is None:
            return None
        parts += found
        missing = [left - len(some) for left, some in zip(missing, layers, strict=True)]
    return None if any(missing) else parts


def _cover_stage(
    ours: KvLayout, members: Sequence[tuple[int, KvLayout]], layers: tuple[range, ...]
) -> list[tuple[int, BlockPart]] | None:
    """Return the parts of the ranks of one stage, for these layers."""
    parts: list[tuple[int, BlockPart]] = []
    head = ours.first_head
    while head < ours.end_head:
        token, chosen = ours.tokens.start, []
        while token < ours.tokens.stop:
            holders = [
                (i, layout)
                for i, layout in members
                if layout.first_head <= head < layout.end_head and token in layout.tokens
            ]
            if not holders:
                return None
            end_token = min(holders[0][1].tokens.stop, ours.tokens.stop)
            chosen.append((*holders[0], range(token, end_token)))
            token = end_token
        end_head = min(ours.end_head, *(layout.end_head for _, layout, _ in chosen))
        for i, layout, tokens in chosen:
            is_all = len(tokens) == layout.block_tokens
            parts.append((i, BlockPart(head, end_head, layers, None if is_all else tokens)))
        head = end_head
    return parts


def _overlap(ours: range, theirs: range) -> range:
    """Return the common numbers of two ranges. If there are none, the empty range lies within `theirs`."""
    start = min(max(ours.start, theirs.start), theirs.stop)
    return range(start, max(start, min(ours.stop, theirs.stop)))
