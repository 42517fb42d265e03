"""The requests of the Mooncake transport: every byte of a block once, to its own place. Needs no Mooncake."""

from __future__ import annotations

from ctypes import memmove
from dataclasses import replace

import pytest
import torch

from stoker.base.ids import BlockId
from stoker.kv.blocks.layout import BlockPart, KvLayout, block_slice
from stoker.kv.device.checksum import checksum
from stoker.kv.device.device_kv import SetKv
from stoker.kv.mooncake.transfer_engine import REQUEST_BYTES
from stoker.kv.peer.block_bytes import sink_of
from stoker.kv.peer.transports.mooncake import MooncakeLink

CPU = torch.device("cpu")
MIB = 1 << 20


class Engine:
    """Moves bytes within this process."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def batch_transfer_async_read(self, segment: str, ours: list[int], theirs: list[int], lengths: list[int]) -> int:
        for dst, src, size in zip(ours, theirs, lengths, strict=True):
            memmove(dst, src, size)
        self.sizes += lengths
        return 1

    def transfer_check_status(self, job: int) -> int:
        return 1

    def get_batch_transfer_status(self, jobs: list[int]) -> int:
        return 0


def a_layout(mib: float, num_heads: int = 2, first_head: int = 0) -> KvLayout:
    head_dim = int(mib * MIB) // (2 * 2 * 2 * 4 * 4)  # 2 layers of 2 heads, K and V, 4 tokens, float32
    return replace(KvLayout.of(2, 2, head_dim, 4, "float32", 4), first_head=first_head, held_heads=num_heads)


@pytest.mark.parametrize(
    ("there", "here", "sizes"),
    [
        (a_layout(0.5), a_layout(0.5), {MIB // 2}),
        (a_layout(2), a_layout(2), {2 * MIB}),
        (a_layout(8), a_layout(8), {REQUEST_BYTES}),
        (a_layout(5), a_layout(5), {5 * MIB}),  # not a whole number of requests
        (a_layout(16), a_layout(16, 1, 1), {2 * MIB}),  # one head of two: many runs on the peer, one here
        (a_layout(16, 1, 0), a_layout(16), {2 * MIB}),
    ],
)
def test_blocks_are_read_completely_in_requests_of_one_size(there: KvLayout, here: KvLayout, sizes: set[int]) -> None:
    src, dst = SetKv(there, 3, CPU), SetKv(here, 4, CPU)
    src.blocks.normal_()
    first, end = max(there.first_head, here.first_head), min(there.end_head, here.end_head)
    part = BlockPart(first, end, there.whole_part.layers)
    theirs, ours = block_slice(there, part), block_slice(here, part)
    wanted, into = [BlockId(2), BlockId(0)], [BlockId(1), BlockId(3)]
    shape = (2, 2, -1, 4, there.groups[0].width)
    expected = [
        src.blocks[one].view(shape)[:, :, first - there.first_head : end - there.first_head].contiguous()
        for one in wanted
    ]
    checksums = [checksum(block.view(-1).view(torch.uint8).numpy()) for block in expected]
    engine = Engine()
    link = MooncakeLink(engine, "there", src.blocks.data_ptr(), src.num_blocks, there, dst)

    right = link.copy(wanted, theirs, checksums, sink_of(dst, into, ours, lambda stream: None), 0)

    assert right == [True, True]
    assert set(engine.sizes) == sizes
    for block, one in zip(expected, into, strict=True):
        assert torch.equal(dst.blocks[one].view(shape)[:, :, first - here.first_head : end - here.first_head], block)
    assert not dst.blocks[[0, 2]].any(), "blocks that were not requested"
