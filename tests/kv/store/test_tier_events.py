"""The tier events of a worker: their stored and removed blocks add up to what the tiers hold."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
import torch
from kv.peer_world import LAYOUT, wait_until
from kv.store.test_slow_tier import NoPeers
from tier_writes import put

from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import BlockName
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.store.block_io import block_io
from stoker.kv.store.buffer_pool import new_buffer
from stoker.kv.store.kv_store import KvStore, StoreContext, TierEvent
from stoker.kv.store.measured_tier import MeasuredTier
from stoker.kv.store.set_store import SetParts
from stoker.kv.store.tiers.disk.block_file import BlockFiles
from stoker.kv.store.tiers.disk.disk_tier import DiskTier
from stoker.kv.store.tiers.tier import TierContext

NUM_BLOCKS = 4


def name_of(number: int) -> BlockName:
    tokens = tuple(range(LAYOUT.block_tokens))
    return BlockName(BlockKey(number.to_bytes(16, "big")), BlockKey(b"r" * 16), tokens, "")


def write(tier: DiskTier, *numbers: int) -> None:
    buffers = [new_buffer(LAYOUT.block_bytes) for _ in numbers]
    assert all(put(tier, [name_of(number) for number in numbers], buffers))


def test_a_block_removed_during_the_listing_at_the_start_does_not_count_as_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: deque[TierEvent] = deque()
    context = TierContext("f", LAYOUT, lambda keys: events.append(TierEvent("disk", removed=tuple(keys))))
    tier = DiskTier(tmp_path, NUM_BLOCKS * (4096 + 4096 * -(-LAYOUT.block_bytes // 4096)), context)
    write(tier, *range(NUM_BLOCKS))
    real, listed = BlockFiles.read_name, []

    def read_name(files: BlockFiles, path: str, key: BlockKey) -> BlockName:
        listed.append(real(files, path, key))
        if len(listed) == NUM_BLOCKS:
            write(tier, 100, 101)  # the oldest two are evicted
        return listed[-1]

    monkeypatch.setattr(BlockFiles, "read_name", read_name)
    kv = DeviceKv(LAYOUT, 4, torch.device("cpu"))
    store = KvStore(
        [SetParts([MeasuredTier("disk", tier)], block_io(kv.sets[0]), LAYOUT.block_bytes)],
        NoPeers(),
        StoreContext("f", LAYOUT.block_tokens, False, lambda: None, lambda: None),
        events,
    )
    store.announce_held_blocks()
    held: set[BlockKey] = set()

    def adds_up() -> bool:
        for event in store.take_events():
            held.update(name.key for name in event.stored)
            held.difference_update(event.removed)
        return len(listed) == NUM_BLOCKS and held == {name_of(number).key for number in (0, 1)}

    wait_until(adds_up)
    store.close()
