"""The number of known blocks in Mooncake is bounded. A block that is no longer tracked is reported as removed."""

from __future__ import annotations

import pytest

from stoker.base.ids import BlockKey
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import BlockName
from stoker.kv.store.tiers.mooncake import mooncake_known_blocks as mooncake_known
from stoker.kv.store.tiers.mooncake.mooncake_known_blocks import KnownBlocks
from stoker.kv.store.tiers.mooncake.mooncake_object import ObjectFormat

LAYOUT = KvLayout.of(num_layers=1, num_heads=1, width=32, block_tokens=16, dtype="float32", dtype_bytes=4)


def name_of(number: int) -> BlockName:
    return BlockName(BlockKey(number.to_bytes(16, "big")), BlockKey(bytes(16)), tuple(range(16)), "")


def test_the_blocks_known_longest_are_dropped_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_known, "_MAX_BLOCKS", 3)
    reported: list[BlockKey] = []
    known = KnownBlocks(ObjectFormat("f", LAYOUT), reported.extend)
    for number in (1, 2, 3, 1, 4, 5):  # the first is written again, so it is the youngest
        known.add(name_of(number))
    assert reported == [name_of(2).key, name_of(3).key]
    assert sorted(name.key for name in known.names()) == [name_of(number).key for number in (1, 4, 5)]
    assert known.num_evicted == 0, "they may still be there"
