"""Which bytes of a block ranks of different tensor-parallel sizes share, against plain slices of tensors."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from kv.peer_world import LAYOUT, contents, rank, raw

from stoker.kv.blocks.layout import KvLayout, head_slice
from stoker.kv.peer.block_bytes import runs_of

MLA = KvLayout(num_layers=3, num_heads=1, head_dim=72, block_tokens=16, dtype="float32", dtype_bytes=4)


@pytest.mark.parametrize(("src_tp", "dst_tp"), list(product((1, 2, 4), repeat=2)))
def test_head_slices_of_all_ranks_make_up_a_block(src_tp: int, dst_tp: int) -> None:
    for number in range(dst_tp):
        dst = rank(LAYOUT, number, dst_tp)
        block = np.zeros(dst.block_bytes, np.uint8)
        for other in range(src_tp):
            src = rank(LAYOUT, other, src_tp)
            first, end = max(src.first_head, dst.first_head), min(src.end_head, dst.end_head)
            if first < end:
                data = np.frombuffer(raw(contents(src, 1)), np.uint8)
                runs = runs_of(data, head_slice(src, first, end))
                part = head_slice(dst, first, end)
                runs_of(block, part)[:] = runs.reshape(part.count, part.num_bytes)
        assert block.tobytes() == raw(contents(dst, 1))


def test_all_heads_of_a_rank_are_one_run() -> None:
    for layout in (LAYOUT, rank(LAYOUT, 1, 2), MLA):
        part = head_slice(layout, layout.first_head, layout.end_head)
        assert (part.offset, part.num_bytes, part.count) == (0, layout.block_bytes, 1)


@pytest.mark.parametrize(("first", "end"), [(0, 4), (0, 1), (1, 3), (3, 4)])
def test_a_head_slice_has_the_heads_in_order(first: int, end: int) -> None:
    block = contents(LAYOUT, 1)[0]
    host = np.frombuffer(raw(block), np.uint8)
    expected = raw(block[:, :, first:end])
    part = head_slice(LAYOUT, first, end)
    assert runs_of(host, part).tobytes() == expected
    assert part.total_bytes == len(expected)
    assert (part.count == 1) == (end - first == LAYOUT.num_heads)


def test_identity_is_of_the_model_and_fingerprint_of_the_rank() -> None:
    assert LAYOUT.fingerprint == "kv1:float32:3x2x4x16x8"
    ranks = [LAYOUT, rank(LAYOUT, 0, 2), rank(LAYOUT, 1, 2)]
    assert len({one.identity for one in ranks}) == 1
    assert len({one.fingerprint for one in ranks}) == 3
    assert LAYOUT.identity != MLA.identity
    assert torch.Size(MLA.block_shape).numel() * 4 == MLA.block_bytes


def test_scales_follow_the_values_of_their_head() -> None:
    """So that ranks of another tensor-parallel size take both in one run."""
    layout = KvLayout(num_layers=2, num_heads=4, head_dim=8, block_tokens=16, dtype="int8", dtype_bytes=1)
    assert layout.head_bytes == 16 * (8 + 2)
    assert layout.block_bytes == 2 * 2 * 4 * layout.head_bytes
    block = np.random.default_rng(0).integers(0, 256, layout.block_bytes, np.uint8)
    expected = block.reshape(2, 2, 4, layout.head_bytes)[:, :, 1:3]
    assert runs_of(block, head_slice(layout, 1, 3)).tobytes() == expected.tobytes()
    assert head_slice(rank(layout, 1, 2), 2, 4).total_bytes == layout.block_bytes // 2
