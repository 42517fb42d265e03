"""A tier that was too slow: nothing waits for it, and it is used again once it has got over that. And hints that nobody can keep
up with."""

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
from stoker.kv import store as store_module
from stoker.kv import tier_use
from stoker.kv.block_io import block_io
from stoker.kv.device import DeviceKv
from stoker.kv.store import KvStore, StoreContext
from stoker.kv.tier_use import TierUse
from stoker.kv.tiers.contract import HostBytes, TierStats
from stoker.kv.transfer import BlockName, KvLoad, KvTicket, LoadResult, PeerUnavailable

TOKENS = list(range(8 * LAYOUT.block_tokens))
TOKENS_PER_S = 1000.0  # computing a block takes 16 ms


class Stalling:
    """Has every block; while it stalls, no read comes back."""

    medium: ClassVar[str] = "DISK"
    shared = False

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()

    def find(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [True] * len(keys)

    def read(self, keys: Sequence[BlockKey], into: Sequence[HostBytes]) -> list[bool]:
        self.answers.wait(60)
        return [True] * len(keys)

    def write(self, names: Sequence[BlockName], data: Sequence[HostBytes]) -> list[bool]:
        return [True] * len(names)

    def drop(self, keys: Sequence[BlockKey]) -> None: ...

    def catch_up(self) -> None: ...

    def names(self) -> Iterator[BlockName]:
        return iter(())

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None: ...


class InRam(Stalling):
    medium: ClassVar[str] = "CPU"


class NoPeers:
    """All have ended; a hint for one takes as long as the test likes."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.num_hints = 0

    def pull(self, *args: Any) -> list[bool]:
        raise PeerUnavailable("it has ended")

    def read_ahead(self, *args: Any) -> int:
        self.num_hints += 1
        self.let_go.wait(60)
        return 0

    def release(self, ticket: KvTicket) -> None: ...

    def close(self) -> None: ...


class World:
    def __init__(self, tier: Stalling) -> None:
        self.tier, self.peers = tier, NoPeers()
        self.use = TierUse("slow", self.tier)
        kv = DeviceKv(LAYOUT, 16, torch.device("cpu"))
        context = StoreContext("f", LAYOUT.block_tokens, LAYOUT.block_bytes, False, lambda: TOKENS_PER_S, lambda: None)
        self.store = KvStore([self.use], self.peers, block_io(kv), context, deque())
        self.store.measure()

    def load(self, ticket: KvTicket | None) -> LoadResult:
        self.store.start(KvLoad(0, 0, keys(8), block_ids(*range(8)), 8, ticket))
        found: list[LoadResult] = []

        def is_filled() -> bool:
            found.extend(self.store.take_filled())
            return bool(found)

        wait_until(is_filled)
        return found[0]

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
    monkeypatch.setattr(tier_use, "_MEASURE_AGAIN_S", 0.1)
    assert world.num_worth == 8
    world.tier.answers.clear()
    assert world.load(None).num_loaded == 0
    assert world.num_worth == 0
    time.sleep(1.5)  # it is asked meanwhile, and does not answer
    assert world.num_worth == 0
    world.tier.answers.set()
    wait_until(lambda: world.num_worth == 8)
    assert world.load(None).num_loaded == 8


def test_a_ticket_does_not_make_anybody_wait_for_a_tier_that_stalls(world: World) -> None:
    ticket = KvTicket("e", "127.0.0.1:1", "L", len(TOKENS), 30.0)
    world.tier.answers.clear()
    world.load(ticket)
    started_s = time.monotonic()
    assert world.load(ticket) == LoadResult(0, 0, 0)
    assert time.monotonic() - started_s < 5, "computing it takes a tenth of a second"


def test_hints_beyond_what_can_be_kept_up_with_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MOST_HINTS", 4)
    world = World(InRam())
    for number in range(10):
        world.store.prefetch([], "", KvTicket("e", "127.0.0.1:1", f"L{number}", 0, 30.0))
    world.peers.let_go.set()
    wait_until(lambda: world.peers.num_hints == 4)
    world.store.prefetch([], "", KvTicket("e", "127.0.0.1:1", "later", 0, 30.0))
    wait_until(lambda: world.peers.num_hints == 5)
    world.close()
    assert world.peers.num_hints == 5
