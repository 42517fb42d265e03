"""The Mooncake tier when parts of the store die, hang, fill up or return wrong data: quick misses and declined blocks,
never wrong bytes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from kv.mooncake_worker import (
    FINGERPRINT,
    LAYOUT,
    PATIENCE_S,
    WorkerProcess,
    calls_take,
    chain,
    contents,
    finds,
    make_tier,
    read,
    reads,
    within,
    write,
    writes,
)
from stopping import stopped
from tier_writes import put

from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import BlockName, TierUnavailable
from stoker.kv.device.checksum import checksum
from stoker.kv.mooncake.master import INSTALL_HINT, MooncakeMaster, is_installed
from stoker.kv.store.tiers.mooncake.mooncake_object import ObjectFormat
from stoker.kv.store.tiers.mooncake.mooncake_tier import MooncakeTier

pytestmark = pytest.mark.skipif(not is_installed(), reason=f"Mooncake is not installed: {INSTALL_HINT}")

NOTICED_S = 0.5  # no call takes longer once the failure is known; the client library itself tries for seconds


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    with MooncakeMaster(tmp_path / "master.log", lease_ms=200, client_ttl_s=4) as running:
        yield running


def keys_of(names: Sequence[BlockName]) -> list[BlockKey]:
    return [name.key for name in names]


def seconds_of_all_calls(tier: MooncakeTier, names: list[BlockName], rounds: int = 5) -> float:
    """The time of the slowest of the three calls, which must find and take nothing. It is the median of several rounds
    with pauses, because a stalled machine is not slow every time."""
    keys, data = keys_of(names), [contents(name) for name in names]
    into = [np.empty_like(one) for one in data]
    slowest: list[float] = []
    for _ in range(rounds):
        taken_s: list[float] = []
        for call in (lambda: tier.find(keys), lambda: tier.read(keys, into), lambda: put(tier, names, data)):
            started_s = time.monotonic()
            with suppress(TierUnavailable):
                assert not any(call())
            taken_s.append(time.monotonic() - started_s)
        slowest.append(max(taken_s))
        time.sleep(0.3)
    return median(slowest)


def test_blocks_of_a_dead_owner_are_misses_and_can_be_written_again(tmp_path: Path) -> None:
    theirs, ours = chain(60), chain(20, seed=1)
    with (
        # The master lists dead workers for the whole test.
        MooncakeMaster(tmp_path / "master.log", lease_ms=200, client_ttl_s=60) as master,
        WorkerProcess(master.address, 1 / 16) as other,
    ):
        tier = make_tier(master.address, 1 / 16)
        assert other.has_all("write", 60)
        assert writes(tier, ours)
        assert reads(tier, theirs[:10])
        other.kill()
        assert within(PATIENCE_S, lambda: any(tier.find(keys_of(theirs)))), "the master does not know yet"
        started_s = time.monotonic()
        with suppress(TierUnavailable):
            assert not any(read(tier, theirs[:30]))
        assert time.monotonic() - started_s < 15, "the client tries for half a minute"
        # From now on nothing of that owner is read, not even blocks that were never requested before.
        assert within(PATIENCE_S, lambda: not any(tier.find(keys_of(theirs))))
        assert finds(tier, ours)
        assert reads(tier, ours), "the living are not made to wait"
        assert writes(tier, theirs)
        assert reads(tier, theirs)
        tier.close()


def test_a_caller_stops_waiting_for_a_call_that_hangs(master: MooncakeMaster) -> None:
    names, let_go, is_late = chain(4), threading.Event(), threading.Event()
    tier = make_tier(master.address, 1 / 16)
    assert writes(tier, names)
    real = tier._store_client._client

    class Hanging:
        def __getattr__(self, name: str) -> Callable[..., object]:
            def call(*args: object) -> object:
                if not let_go.wait(PATIENCE_S):
                    is_late.set()
                return getattr(real, name)(*args)

            return call

    for call in (lambda: tier.find(keys_of(names)), lambda: read(tier, names)):
        assert finds(tier, names)
        tier._store_client._client = Hanging()
        with suppress(TierUnavailable):
            assert not any(call())
        tier._store_client._client = real
    assert not is_late.is_set()
    let_go.set()
    tier.close()


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs first", "dies at once"])
def test_a_dead_master_is_noticed_once_and_hits_recover_after_its_restart(master: MooncakeMaster, hangs: bool) -> None:
    names, evicted, asked = chain(50), list[BlockKey](), list[BlockKey]()
    tier = make_tier(master.address, 1 / 16, evicted, forgotten=asked)
    assert writes(tier, names)
    assert master.pid is not None
    if hangs:  # the read ends at its deadline; otherwise the client may learn of the death first
        os.kill(master.pid, signal.SIGSTOP)
        with pytest.raises(TierUnavailable):
            read(tier, names)
    master.kill()
    with pytest.raises(TierUnavailable):
        read(tier, names)
    assert seconds_of_all_calls(tier, names) < NOTICED_S
    master.start()
    assert within(PATIENCE_S, lambda: len(asked) == len(names))
    assert set(asked) == set(evicted) == set(keys_of(names))
    assert list(tier.names()) == []
    assert writes(tier, names)
    assert finds(tier, names)
    assert reads(tier, names)
    tier.close()


def test_a_hanging_master_blocks_no_caller(master: MooncakeMaster) -> None:
    names = chain(20)
    tier = make_tier(master.address, 1 / 16)
    assert writes(tier, names)
    assert master.pid is not None
    with stopped(master.pid):
        assert seconds_of_all_calls(tier, names, rounds=3) < NOTICED_S
        with pytest.raises(TierUnavailable):
            read(tier, names)
    assert finds(tier, names)
    assert reads(tier, names)
    tier.close()


def test_a_full_store_evicts_or_declines_and_reports_evictions(master: MooncakeMaster) -> None:
    names, evicted = chain(1600), list[BlockKey]()  # 51 MiB into 32
    tier = make_tier(master.address, 1 / 32, evicted)
    taken: list[bool] = []
    for start in range(0, len(names), 64):
        some: list[bool] = []

        def goes_on(start: int = start, some: list[bool] = some) -> bool:
            some[:] = write(tier, names[start : start + 64])
            return any(some)

        assert within(PATIENCE_S, goes_on), "it goes on after a rest"
        taken += some
    assert taken.count(True) > 600
    found = tier.find(keys_of(names))
    right = read(tier, names)
    assert 300 < right.count(True) < 1100
    assert right.count(True) >= 0.9 * found.count(True)
    gone = {
        key for key, was_taken, is_there in zip(keys_of(names), taken, found, strict=True) if was_taken and not is_there
    }
    assert gone
    assert gone <= set(evicted)
    assert tier.stats().corrupt == 0
    tier.close()


def test_wrong_objects_are_dropped_counted_and_never_served(master: MooncakeMaster) -> None:
    right, bent_data, bent_header, short, long, swapped, foreign = chain(7)
    ours = ObjectFormat(FINGERPRINT, LAYOUT)

    def honest(name: BlockName, format: ObjectFormat = ours) -> bytearray:
        packed = format.pack(name, checksum(contents(name)))
        assert packed is not None
        return bytearray(packed.ljust(format.header_bytes, b"\0") + contents(name).tobytes())

    objects = {
        right: honest(right),
        bent_data: honest(bent_data),
        bent_header: honest(bent_header),
        short: honest(short)[:-1],
        long: honest(long) + b"x",
        swapped: honest(right),
        foreign: honest(foreign, ObjectFormat("another model", LAYOUT)),
    }
    objects[bent_data][-5] ^= 16
    objects[bent_header][30] ^= 1
    with calls_take(PATIENCE_S):
        tier = make_tier(master.address, 1 / 16)
    from mooncake.store import MooncakeDistributedStore

    bare = MooncakeDistributedStore()
    assert bare.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master.address) == 0
    for name, data in objects.items():
        assert bare.put(ours.store_key(name.key), bytes(data)) == 0
    names = list(objects)
    assert finds(tier, names)
    assert read(tier, names) == [name is right for name in names]
    assert tier.stats().corrupt == 6
    assert within(PATIENCE_S, lambda: tier.find(keys_of(names)) == [name is right for name in names])
    assert writes(tier, names)
    assert reads(tier, names)
    tier.close()
    bare.close()


def test_a_worker_starts_without_its_store_and_finds_it_later(tmp_path: Path) -> None:
    master = MooncakeMaster(tmp_path / "master.log")
    started_s = time.monotonic()
    tier = make_tier(master.address, 1 / 16)
    assert time.monotonic() - started_s < 20, "the client tries for a minute and a half"
    names = chain(5)
    assert seconds_of_all_calls(tier, names) < NOTICED_S
    with master:
        assert writes(tier, names)
        assert reads(tier, names)
        tier.close()


def test_a_process_ends_normally_whatever_is_dead(master: MooncakeMaster) -> None:
    """Without close(): while a read from a dead owner hangs, and without a master."""
    with (
        WorkerProcess(master.address, 1 / 16) as owner,
        WorkerProcess(master.address, 0.0) as reader,
        WorkerProcess(master.address, 1 / 16) as orphan,
    ):
        assert owner.has_all("write", 64)
        assert reader.has_all("read", 4)
        owner.kill()
        assert not any(reader.ask("read", 64))
        started_s = time.monotonic()
        assert reader.end() == 0
        assert time.monotonic() - started_s < 25
        master.kill()
        assert not any(orphan.ask("read", 64))
        started_s = time.monotonic()
        assert orphan.end() == 0
        assert time.monotonic() - started_s < 25


def test_bytes_differ_from_block_to_block() -> None:
    first, second = chain(2)
    assert not np.array_equal(contents(first), contents(second))
