"""A load that fails in part brings the longest prefix that all KV sets have, in the blocks where the scheduler expects it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch
from kv.peer_world import LAYOUT, block_ids, keys, wait_until
from kv.store.test_slow_tier import NoPeers

from stoker.base.ids import BlockKey
from stoker.kv.blocks.reach import KvReach
from stoker.kv.blocks.transfer import BlockName, KvLoad, KvTicket, LoadResult, LocalLoad
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.store.block_io import block_io
from stoker.kv.store.kv_store import KvStore, StoreContext
from stoker.kv.store.measured_tier import MeasuredTier
from stoker.kv.store.set_store import SetParts
from stoker.kv.store.tiers.tier import HostBytes, TierStats

SIZE = LAYOUT.block_tokens
NUM_BLOCKS = 12  # of the prompt
KEYS = keys(NUM_BLOCKS)


class Holding:
    """A tier that fills block i with the number i + 1. `torn` blocks are found, and are gone after the first read."""

    medium: ClassVar[str] = "CPU"
    shared_location: str | None = None

    def __init__(self, held: Sequence[int] = (), torn: Sequence[int] = ()) -> None:
        self.held, self.torn = {KEYS[i] for i in (*held, *torn)}, {KEYS[i] for i in torn}

    def find(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self.held for key in keys]

    def read(self, keys: Sequence[BlockKey], into: Sequence[HostBytes]) -> list[bool]:
        right = [key in self.held and key not in self.torn for key in keys]
        for key, buffer, is_right in zip(keys, into, right, strict=True):
            if key in KEYS:
                buffer[:] = KEYS.index(key) + 1 if is_right else 255
            if key in self.torn:
                self.held.discard(key)
        return right

    def write(self, names: Sequence[BlockName], data: Sequence[HostBytes], checksums: Sequence[int]) -> list[bool]:
        return [False] * len(names)

    def drop(self, keys: Sequence[BlockKey]) -> None: ...

    def catch_up(self) -> None: ...

    def names(self) -> Iterator[BlockName]:
        return iter(())

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None: ...


class World:
    """Layers that see everything, and for each of `reaches` layers that do not. Each KV set has a tier."""

    def __init__(self, main: Holding, *local: tuple[KvReach, Holding]) -> None:
        tiers = [main, *(tier for _, tier in local)]
        self.reaches = [reach for reach, _ in local]
        self.kv = [DeviceKv(LAYOUT, 20, torch.device("cpu")) for _ in tiers]
        context = StoreContext("f", SIZE, False, lambda: 1.0, lambda: None)
        reaches = [KvReach(), *self.reaches]
        parts = [
            SetParts([MeasuredTier("held", tier)], block_io(kv.sets[0]), LAYOUT.block_bytes, reach)
            for tier, kv, reach in zip(tiers, self.kv, reaches, strict=True)
        ]
        self.store = KvStore(parts, NoPeers(), context, deque())
        self.first = 0

    def load(self, first: int = 0, ticket: KvTicket | None = None) -> LoadResult:
        """Load the prompt's blocks from `first` on. Block i of the prompt gets block i + 3 of the first set, and in the others
        the blocks from 5 on are used."""
        self.first, end = first, NUM_BLOCKS * SIZE
        local = []
        for number, reach in enumerate(self.reaches, 1):
            start = max(first, reach.first_block(end, SIZE))
            local.append(LocalLoad(number, 0, KEYS[start:], block_ids(*range(5, 5 + NUM_BLOCKS - start))))
        blocks = block_ids(*range(first + 3, NUM_BLOCKS + 3))
        self.store.start_load(KvLoad(0, first, KEYS[first:], blocks, NUM_BLOCKS - first, ticket, local))
        found: list[LoadResult] = []
        wait_until(lambda: bool(found.extend(self.store.take_finished_loads()) or found))
        self.store.close()
        return found[0]

    def contents(self, kv_set: int, blocks: Sequence[int]) -> list[int]:
        raw = self.kv[kv_set].sets[0].host_blocks()
        assert raw is not None
        for block in blocks:
            assert (raw[block] == raw[block, 0]).all(), "torn"
        return [int(raw[block, 0]) for block in blocks]

    def check(self, count: int) -> None:
        """The first `count` loaded blocks are there, and in the other sets what the token after them sees."""
        last = self.first + count
        assert self.contents(0, range(self.first + 3, last + 3)) == list(range(self.first + 1, last + 1))
        for number, reach in enumerate(self.reaches, 1):
            start = max(self.first, reach.first_block(last * SIZE, SIZE))
            assert self.contents(number, range(5, 5 + last - start)) == list(range(start + 1, last + 1))


WINDOW, CHUNK = KvReach("window", 2 * SIZE + 1), KvReach("chunk", 4 * SIZE)
ALL = range(NUM_BLOCKS)


def test_a_whole_load_brings_everything() -> None:
    world = World(Holding(ALL), (WINDOW, Holding(ALL)), (CHUNK, Holding(ALL)))
    assert world.load() == LoadResult(0, NUM_BLOCKS, 0, True)
    world.check(NUM_BLOCKS)


@pytest.mark.parametrize("first", [0, 3])
def test_a_missing_block_of_the_first_set_leaves_the_prefix_before_it(first: int) -> None:
    """The tiers have the windows before two ends: after 5 and after 8 blocks."""
    world = World(Holding([*range(9), 10, 11], torn=[9]), (WINDOW, Holding([3, 4, 6, 7, 10, 11])))
    assert world.load(first) == LoadResult(0, 8 - first, 0, True)
    world.check(8 - first)


def test_a_torn_window_leaves_the_prefix_of_an_earlier_window() -> None:
    world = World(Holding(ALL), (WINDOW, Holding([3, 4, 10], torn=[7, 11])))
    assert world.load() == LoadResult(0, 5, 0, True)
    world.check(5)


def test_all_sets_must_have_what_the_prefix_needs() -> None:
    """After 8 blocks, a chunk begins, and nothing before it is needed. After 6 blocks, two of a chunk are needed, and the load
    has no block for them, because it ends where a chunk begins."""
    main = Holding(ALL[:-1])
    world = World(main, (WINDOW, Holding([2, 3, 4, 5, 6])), (CHUNK, Holding(ALL)))
    assert world.load() == LoadResult(0, 4, 0, True)
    world.check(4)


@pytest.mark.parametrize("window", [[], [3], [10, 11]])
def test_without_any_window_a_load_brings_nothing(window: list[int]) -> None:
    world = World(Holding(range(9)), (WINDOW, Holding(window)))
    assert world.load() == LoadResult(0, 0, 0, False)


def test_blocks_that_the_sequence_has_are_a_part_of_the_window() -> None:
    world = World(Holding(range(5)), (WINDOW, Holding([4])))
    assert world.load(first=4) == LoadResult(0, 1, 0, True)
    world.check(1)
    assert np.unique(world.contents(1, [6, 7])).tolist() == [0], "it wrote into blocks that it did not need"
