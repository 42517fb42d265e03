"""Which bytes of a block ranks of models that are split in different ways share, against plain slices of tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from kv.peer_world import LAYOUT, contents, rank, raw

from stoker.kv.blocks.layout import BlockPart, KvGroup, KvLayout, block_slice
from stoker.kv.device.device_kv import DeviceKv, draft_block_bytes
from stoker.kv.peer.block_bytes import gather, scatter
from stoker.kv.peer.rank_cover import cover

MLA = KvLayout.of(num_layers=3, num_heads=1, width=72, block_tokens=16, dtype="float32", dtype_bytes=4)
# Pages of 160 and 96 values, so that neither size divides the other's block.
TWO_GROUPS = KvLayout((KvGroup(2, 4, 10), KvGroup(1, 8, 6)), block_tokens=16, dtype="float32", dtype_bytes=4)


def bytes_of(block: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(raw(block), np.uint8)


# Two groups whose borders of stages differ.
THREE_STAGES = KvLayout((KvGroup(4, 4, 10), KvGroup(3, 8, 6)), block_tokens=16, dtype="float32", dtype_bytes=4)


def ranks_of(layout: KvLayout, tp: int, pp: int) -> list[KvLayout]:
    return [rank(layout, number, tp, pp) for number in range(tp * pp)]


@pytest.mark.parametrize("layout", [LAYOUT, THREE_STAGES], ids=["one group", "two groups"])
def test_ranks_of_any_two_splits_make_up_each_other(layout: KvLayout) -> None:
    splits = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (4, 3)]
    for (src_tp, src_pp), (dst_tp, dst_pp) in product(splits, repeat=2):
        theirs = ranks_of(layout, src_tp, src_pp)
        for dst in ranks_of(layout, dst_tp, dst_pp):
            parts = cover(dst, theirs)
            assert parts is not None
            block = np.zeros(dst.block_bytes, np.uint8)
            for number, part in parts:
                there = block_slice(theirs[number], part)
                data = np.zeros(there.total_bytes, np.uint8)
                gather(bytes_of(contents(theirs[number], 1)), there, data)
                scatter(data, block_slice(dst, part), block)
            assert block.tobytes() == raw(contents(dst, 1))
            assert sum(block_slice(dst, part).total_bytes for _, part in parts) == dst.used_bytes, "once"


LATENT = KvLayout((KvGroup(5, 1, 6, "latent"),), block_tokens=16, dtype="float32", dtype_bytes=4)
CONTEXT_SPLITS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (8, 2)]


def context_ranks(layout: KvLayout, cp: int, pp: int) -> list[KvLayout]:
    return [replace(rank(layout, stage, 1, pp), part=part, num_parts=cp) for stage in range(pp) for part in range(cp)]


def latent_bytes(layout: KvLayout, arrays: list[np.ndarray[Any, Any]]) -> bytes:
    """The block of a rank: the values, the wide values and the scales of its tokens, layer by layer."""
    (group,), own = layout.groups, layout.tokens
    return b"".join(array[layer, own.start : own.stop].tobytes() for layer in group.layers for array in arrays)


@pytest.mark.parametrize(("dtype", "dtype_bytes", "wide"), [("float32", 4, 2), ("int8", 1, 0), ("int8", 1, 2)])
def test_ranks_that_split_the_context_make_up_each_other(dtype: str, dtype_bytes: int, wide: int) -> None:
    group = replace(LATENT.groups[0], wide=wide)
    layout = replace(LATENT, groups=(group,), dtype=dtype, dtype_bytes=dtype_bytes)
    rng = np.random.default_rng(1)
    sizes = (24,) if dtype == "float32" else (6 - wide, 2 * wide, 2)
    whole = [rng.integers(0, 256, (5, 16, size), np.uint8) for size in sizes]
    for (src_cp, src_pp), (dst_cp, dst_pp) in product(CONTEXT_SPLITS, repeat=2):
        theirs = context_ranks(layout, src_cp, src_pp)
        for dst in context_ranks(layout, dst_cp, dst_pp):
            parts = cover(dst, theirs)
            assert parts is not None
            block = np.zeros(dst.block_bytes, np.uint8)
            for number, part in parts:
                there = block_slice(theirs[number], part)
                data = np.zeros(there.total_bytes, np.uint8)
                gather(np.frombuffer(latent_bytes(theirs[number], whole), np.uint8), there, data)
                scatter(data, block_slice(dst, part), block)
            assert block.tobytes() == latent_bytes(dst, whole), (src_cp, src_pp, dst_cp, dst_pp)
            assert sum(block_slice(dst, part).total_bytes for _, part in parts) == dst.used_bytes, "once"


def test_a_missing_part_of_the_context_is_noticed() -> None:
    theirs = context_ranks(LATENT, 4, 1)
    del theirs[2]
    assert cover(LATENT, theirs) is None
    assert cover(replace(LATENT, part=1, num_parts=2), theirs) is None
    assert cover(replace(LATENT, part=0, num_parts=2), theirs) is not None


def test_a_split_block_is_one_run_unless_it_has_scales() -> None:
    half = replace(LATENT, part=1, num_parts=2)
    assert block_slice(half, half.whole_part).is_one_run
    scaled = replace(half, dtype="int8", dtype_bytes=1)
    assert block_slice(scaled, scaled.whole_part).total_bytes == scaled.used_bytes


@pytest.mark.parametrize("tokens", [None, range(16), range(7, 9), range(8, 8), range(8, 17), range(9, 8)])
def test_a_rank_does_not_hold_tokens_of_other_ranks(tokens: range | None) -> None:
    half = replace(LATENT, part=1, num_parts=2)
    assert not replace(half.whole_part, tokens=tokens).is_held_by(half)
    assert replace(half.whole_part, tokens=range(15, 16)).is_held_by(half)


@pytest.mark.parametrize("lost", range(4))
def test_a_missing_rank_is_noticed(lost: int) -> None:
    theirs = ranks_of(LAYOUT, 2, 2)
    del theirs[lost]
    assert cover(LAYOUT, theirs) is None
    assert cover(rank(LAYOUT, lost, 2, 2), theirs) is None
    assert cover(rank(LAYOUT, 3 - lost, 2, 2), theirs) is not None


def test_some_layers_with_all_heads_are_one_run() -> None:
    part = block_slice(LAYOUT, rank(LAYOUT, 1, 1, 3).whole_part)
    assert part.is_one_run
    assert (part.runs[0].offset, part.total_bytes) == (LAYOUT.used_bytes // 3, LAYOUT.used_bytes // 3)


def test_all_heads_of_a_rank_are_one_run() -> None:
    for layout in (LAYOUT, rank(LAYOUT, 1, 2), MLA, TWO_GROUPS):
        part = block_slice(layout, layout.whole_part)
        assert part.is_one_run
        assert (part.runs[0].offset, part.total_bytes) == (0, layout.used_bytes)
        assert layout is TWO_GROUPS or layout.used_bytes == layout.block_bytes


@pytest.mark.parametrize(("first", "end"), [(0, 4), (0, 1), (1, 3), (3, 4)])
def test_a_slice_has_the_heads_in_order(first: int, end: int) -> None:
    block = contents(LAYOUT, 1)[0]
    expected = raw(block.view(3, 2, 4, 16, 8)[:, :, first:end])
    part = block_slice(LAYOUT, BlockPart(first, end, (range(3),)))
    found = np.zeros(part.total_bytes, np.uint8)
    gather(bytes_of(block), part, found)
    assert found.tobytes() == expected
    assert part.is_one_run == (end - first == 4)


def test_identity_is_of_the_model_and_fingerprint_of_the_rank() -> None:
    """The strings are parts of file names and handshakes: they stay the same in every release."""
    assert LAYOUT.identity == LAYOUT.fingerprint == "kv1:float32:3x2x4x16x8"
    assert rank(LAYOUT, 1, 2).fingerprint == "kv1:float32:3x2x2x16x8@2/4"
    ranks = [LAYOUT, rank(LAYOUT, 0, 2), rank(LAYOUT, 1, 2)]
    assert len({one.identity for one in ranks}) == 1
    assert len({one.fingerprint for one in ranks}) == 3
    stages = ranks_of(LAYOUT, 2, 2)
    assert {one.identity for one in stages} == {LAYOUT.identity}
    assert len({one.fingerprint for one in stages}) == 4
    assert stages[3].fingerprint == "kv1:float32:3x2x2x16x8@2/4#1-3"
    assert LAYOUT.identity != MLA.identity
    assert MLA.block_bytes == 3 * 2 * 16 * 72 * 4
    assert TWO_GROUPS.identity == "kv1:float32:2x2x4x16x10+1x2x8x16x6"
    assert rank(TWO_GROUPS, 3, 4).fingerprint == "kv1:float32:2x2x1x16x10+1x2x2x16x6@3/4"


def test_wide_values_are_a_part_of_the_identity_only_where_they_change_the_bytes() -> None:
    wide = replace(LATENT, groups=(replace(LATENT.groups[0], wide=2),))
    assert wide.identity == LATENT.identity == "kv1:float32:latent-5x1x1x16x6"
    assert wide.block_bytes == LATENT.block_bytes
    narrow, before = (replace(layout, dtype="int8", dtype_bytes=1) for layout in (wide, LATENT))
    assert narrow.identity == "kv1:int8:latent2-5x1x1x16x6" != before.identity
    assert narrow.block_bytes == 5 * 16 * (4 + 2 * 2 + 2)


def test_groups_that_no_rank_could_share_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[4, 6\] heads"):
        KvLayout((KvGroup(2, 4, 8), KvGroup(2, 6, 8)), 16, "float32", 4)


def test_scales_follow_the_values_of_their_head() -> None:
    """So that ranks of another tensor-parallel size take both in one run."""
    layout = KvLayout.of(num_layers=2, num_heads=4, width=8, block_tokens=16, dtype="int8", dtype_bytes=1)
    page_bytes = layout.places[0].page_bytes
    assert page_bytes == 16 * (8 + 2)
    assert layout.block_bytes == 2 * 2 * 4 * page_bytes
    block = np.random.default_rng(0).integers(0, 256, layout.block_bytes, np.uint8)
    expected = block.reshape(2, 2, 4, page_bytes)[:, :, 1:3]
    part = block_slice(layout, BlockPart(1, 3, (range(2),)))
    found = np.zeros(part.total_bytes, np.uint8)
    gather(block, part, found)
    assert found.tobytes() == expected.tobytes()
    half = rank(layout, 1, 2)
    assert block_slice(half, half.whole_part).total_bytes == layout.block_bytes // 2


@pytest.mark.parametrize("layout", [TWO_GROUPS, rank(TWO_GROUPS, 1, 2)], ids=["all heads", "half of the heads"])
def test_the_pages_of_each_group_are_its_part_of_every_block(layout: KvLayout) -> None:
    kv = DeviceKv(layout, 3, torch.device("cpu"))
    kv.blocks.copy_(contents(layout, 3))
    first = 0
    for place, group in zip(layout.places, kv.groups, strict=True):
        shape = (place.group.num_layers, 2, place.num_heads, 16, place.group.width)
        size = place.num_bytes // 4
        expected = kv.blocks[:, first : first + size].reshape(3, *shape)
        first += size
        for block, layer, head in product(range(3), range(shape[0]), range(place.num_heads)):
            page = block * group.pages_per_block + head
            pages = group.pages(layer)
            assert torch.equal(pages[page], expected[block, layer, 0, head].flatten())
            assert torch.equal(pages[page + group.num_heads], expected[block, layer, 1, head].flatten())


def test_a_draft_group_follows_its_block_and_is_no_part_of_it() -> None:
    draft = KvGroup(1, 2, 4)
    kv = DeviceKv(LAYOUT, 4, torch.device("cpu"), draft=draft)
    assert kv.layout.fingerprint == LAYOUT.fingerprint
    assert kv.draft is not None
    assert draft_block_bytes(draft, LAYOUT) == 4 * kv.draft.pages(0)[: kv.draft.pages_per_block].numel()
    kv.blocks.fill_(1.0)
    kv.draft.all_pages.copy_(torch.arange(16.0)[:, None].expand(16, 64))  # 4 pages per block: K and V of 2 heads
    kv.copy([1], [3])
    assert kv.draft.all_pages[12:, 0].tolist() == [4.0, 5.0, 6.0, 7.0]
    kv.clear([0])
    assert not kv.draft.all_pages[:4].any()
    assert not kv.blocks[0].any()
    kv.clear_draft([1])
    assert not kv.draft.all_pages[4:8].any()
    assert kv.blocks[1].all(), "a load fills the other groups"
