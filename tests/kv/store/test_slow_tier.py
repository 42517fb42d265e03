"""A tier that was too slow is not waited for, and is used again once it has recovered. Too many hints are dropped."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from kv.peer_world import LAYOUT, block_ids, keys, wait_until

from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import BlockName, KvLoad, KvTicket, LoadResult, OfferedBlock, PeerUnavailable
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.store import buffer_pool as buffer_pool_module
from stoker.kv.store import kv_store as store_module
from stoker.kv.store import loader as loads
from stoker.kv.store import measured_tier
from stoker.kv.store import tier_prefetcher as read_ahead
from stoker.kv.store.block_io import block_io
from stoker.kv.store.kv_store import KvStore, StoreContext
from stoker.kv.store.measured_tier import MeasuredTier
from stoker.kv.store.set_store import SetParts
from stoker.kv.store.tiers.tier import HostBytes, TierStats

TOKENS = list(range(8 * LAYOUT.block_tokens))
TOKENS_PER_S = 1000.0  # computing a block takes 16 ms


class Stalling:
    """Has every block. While it stalls, no read returns."""

    medium: ClassVar[str] = "DISK"
    shared_location: str | None = None

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.has = True
        self.takes = True

    def find(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [self.has] * len(keys)

    def read(self, keys: Sequence[BlockKey], into: Sequence[HostBytes]) -> list[bool]:
        self.answers.wait(120)
        return [True] * len(keys)

    def write(self, names: Sequence[BlockName], data: Sequence[HostBytes], checksums: Sequence[int]) -> list[bool]:
        return [self.takes] * len(names)

    def drop(self, keys: Sequence[BlockKey]) -> None: ...

    def catch_up(self) -> None: ...

    def names(self) -> Iterator[BlockName]:
        self.answers.wait(120)
        return iter(())

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None: ...


class InRam(Stalling):
    medium: ClassVar[str] = "CPU"


class Elsewhere(Stalling):
    medium: ClassVar[str] = "MOONCAKE"


class NoPeers:
    """All peers have ended. A hint for one blocks until the test continues, and so does a pull while they hang."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.hang = False
        self.num_hints = self.num_pulls = 0

    def pull(self, *args: Any) -> list[bool]:
        self.num_pulls += 1
        if self.hang:
            self.let_go.wait(60)
        raise PeerUnavailable("it has ended")

    def read_ahead(self, *args: Any) -> int:
        self.num_hints += 1
        self.let_go.wait(60)
        return 0

    def release(self, ticket: KvTicket) -> None: ...

    def close(self) -> None: ...


class World:
    def __init__(self, tier: Stalling, *others: Stalling) -> None:
        self.tier, self.peers = tier, NoPeers()
        self.measured = MeasuredTier("slow", self.tier)
        measured = [self.measured, *(MeasuredTier("other", other) for other in others)]
        kv = DeviceKv(LAYOUT, 16, torch.device("cpu"))
        context = StoreContext("f", LAYOUT.block_tokens, False, lambda: TOKENS_PER_S, lambda: None)
        parts = SetParts(measured, block_io(kv.sets[0]), LAYOUT.block_bytes)
        self.store = KvStore([parts], self.peers, context, deque())
        self.store.measure()

    def load(self, ticket: KvTicket | None, times: int = 1) -> LoadResult:
        """The last of them to end."""
        for number in range(times):
            self.store.start_load(KvLoad(number, 0, keys(8), block_ids(*range(8)), 8, ticket))
        found: list[LoadResult] = []

        def are_filled() -> bool:
            found.extend(self.store.take_finished_loads())
            return len(found) == times

        wait_until(are_filled)
        return found[-1]

    @property
    def num_worth(self) -> int:
        return self.store.num_worth_loading(TOKENS, "")

    def close(self) -> None:
        self.tier.answers.set()
        self.peers.let_go.set()
        self.store.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World(Stalling())
    yield made
    made.close()


def test_a_tier_that_stalled_once_is_used_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_tier, "_MEASURE_AGAIN_S", 0.1)
    assert world.num_worth == 8
    world.tier.answers.clear()
    assert world.load(None).num_loaded == 0
    assert world.num_worth == 0
    time.sleep(1.5)  # it is called meanwhile, and does not answer
    assert world.num_worth == 0
    world.tier.answers.set()
    wait_until(lambda: world.num_worth == 8)
    assert world.load(None).num_loaded == 8


def test_a_full_tier_that_stalled_once_is_used_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block can be written to measure its speed."""
    monkeypatch.setattr(measured_tier, "_MEASURE_AGAIN_S", 0.1)
    world.tier.takes = False
    world.measured.record_timeout(8, seconds=60.0)
    wait_until(lambda: world.num_worth == 8)


def test_a_load_with_a_ticket_does_not_wait_for_a_stalled_tier(world: World) -> None:
    ticket = KvTicket("e", "127.0.0.1:1", "L", len(TOKENS), 30.0)
    world.tier.answers.clear()
    world.load(ticket)
    started_s = time.monotonic()
    assert world.load(ticket) == LoadResult(0, 0, 0)
    assert time.monotonic() - started_s < 5, "computing it takes a tenth of a second"


def test_a_stalled_tier_does_not_block_another_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Stalling(), Elsewhere())
    world.tier.answers.clear()
    world.load(None, times=8)
    world.tier.has = False
    monkeypatch.setattr(loads, "_TIER_GRACE_S", 10.0)  # however busy the machine is
    assert world.load(None).num_loaded == 8
    world.close()


def test_a_silent_worker_does_not_block_the_tiers(world: World) -> None:
    world.peers.hang, world.tier.has = True, False
    for number in range(100, 108):
        ticket = KvTicket("e", "127.0.0.1:1", f"L{number}", len(TOKENS), 30.0)
        world.store.start_load(KvLoad(number, 0, keys(8), block_ids(*range(8)), 0, ticket))
    wait_until(lambda: world.peers.num_pulls == store_module._LOADERS)
    world.tier.has = True
    assert world.load(None).load_id == 0


def test_without_free_memory_blocks_are_declined_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(InRam())
    world.tier.has = False
    real = buffer_pool_module.new_buffer
    monkeypatch.setattr(buffer_pool_module, "_ALLOCATION_PAUSE_S", 0.0)

    def no_memory(*args: Any) -> HostBytes:
        raise RuntimeError("CUDA error: out of memory")

    offered = [
        OfferedBlock(BlockName(key, BlockKey(bytes(16)), (), ""), block)
        for block, key in zip(block_ids(0, 1, 2, 3), keys(4), strict=True)
    ]
    copied: list[OfferedBlock] = []

    def are_copied() -> bool:
        copied.extend(world.store.take_copied())
        return copied == offered

    for new_buffer in (no_memory, real):
        monkeypatch.setattr(buffer_pool_module, "new_buffer", new_buffer)
        world.store.offer(offered)
        wait_until(are_copied)
        copied.clear()
    assert world.measured.counters.declined == 4
    world.close()


def test_a_hint_does_not_block_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing the keys of a long conversation takes a tenth of a second. No step waits for that."""
    named_by: list[threading.Thread] = []
    real = store_module.block_keys

    def block_keys(*args: Any) -> list[BlockKey]:
        named_by.append(threading.current_thread())
        return real(*args)

    monkeypatch.setattr(store_module, "block_keys", block_keys)
    world = World(InRam())
    world.store.prefetch(TOKENS, "", None)
    wait_until(lambda: bool(named_by))
    assert threading.current_thread() not in named_by
    world.close()


def test_hints_do_not_wait_for_a_stalled_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_MOVE_S", 0.1)
    ram = InRam()
    world = World(Stalling(), ram)
    world.tier.answers.clear()
    ram.has = False
    world.store.prefetch(TOKENS, "", None)
    world.store.prefetch([], "", KvTicket("e", "127.0.0.1:1", "L", 0, 30.0))
    try:
        wait_until(lambda: world.peers.num_hints == 1)
    finally:
        world.close()
    assert world.measured.counters.errors == 1, "the blocks after the first are useless without it"


def test_hints_do_not_wait_for_the_listing_at_the_start() -> None:
    world = World(InRam())
    world.tier.answers.clear()
    world.store.announce_held_blocks()
    world.store.prefetch([], "", KvTicket("e", "127.0.0.1:1", "L", 0, 30.0))
    try:
        wait_until(lambda: world.peers.num_hints == 1)
    finally:
        world.close()


def test_too_many_hints_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MAX_HINTS", 4)
    world = World(InRam())
    for number in range(10):
        world.store.prefetch([], "", KvTicket("e", "127.0.0.1:1", f"L{number}", 0, 30.0))
    world.peers.let_go.set()
    wait_until(lambda: world.peers.num_hints == 4)
    world.store.prefetch([], "", KvTicket("e", "127.0.0.1:1", "later", 0, 30.0))
    wait_until(lambda: world.peers.num_hints == 5)
    world.close()
    assert world.peers.num_hints == 5
