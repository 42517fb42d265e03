"""The host tier: one memory for several processes, which may die at any point, what they leave behind, and what does
not fit."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kv.forked import FORKED
from tier_writes import put

from stoker.base.errors import ConfigError
from stoker.base.ids import BlockKey
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import BlockName, TierUnavailable
from stoker.kv.store.tiers.host import host_memory as host_files
from stoker.kv.store.tiers.host.host_memory import host_stores, lock, remove_host_store
from stoker.kv.store.tiers.host.host_table import READY, WRITING
from stoker.kv.store.tiers.host.host_tier import HostTier
from stoker.kv.store.tiers.process_liveness import is_alive, started_at
from stoker.kv.store.tiers.tier import HostBytes, TierContext

LAYOUT = KvLayout.of(num_layers=1, num_heads=1, width=32, block_tokens=16, dtype="float32", dtype_bytes=4)
BLOCK = LAYOUT.block_bytes
SLOTS = 8
DEAD = (2**22 + 1, 1)  # no process has such a large pid


@pytest.fixture
def store() -> Iterator[str]:
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    remove_host_store(name)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock is waited for even if the machine stalls while it is held."""
    for name in ("host_tier", "host_memory"):
        monkeypatch.setattr(f"stoker.kv.store.tiers.host.{name}.LOCK_S", 60.0)


def make(name: str | None, slots: int = SLOTS, lost: list[BlockKey] | None = None, fingerprint: str = "f") -> HostTier:
    on_evicted = (lambda keys: None) if lost is None else lost.extend
    return HostTier(slots * BLOCK, TierContext(fingerprint, LAYOUT, on_evicted), name)


def name_of(number: int) -> BlockName:
    return BlockName(BlockKey(number.to_bytes(16, "big")), BlockKey(bytes(16)), tuple(range(16)), "")


def data_of(number: int) -> HostBytes:
    return np.random.default_rng(number).integers(0, 255, BLOCK, dtype=np.uint8)


def write(tier: HostTier, *numbers: int) -> list[bool]:
    return put(tier, [name_of(number) for number in numbers], [data_of(number) for number in numbers])


def read(tier: HostTier, *numbers: int) -> list[bool]:
    into = [np.empty(BLOCK, dtype=np.uint8) for _ in numbers]
    had = tier.read([name_of(number).key for number in numbers], into)
    assert all(np.array_equal(data, data_of(number)) for data, number, ok in zip(into, numbers, had, strict=True) if ok)
    return had


def slot_of(tier: HostTier, number: int) -> int:
    return int(tier._open().lookup(np.frombuffer(name_of(number).key, dtype="<u8").reshape(1, 2))[0])


def leave_half_written(tier: HostTier, number: int, owner: tuple[int, int]) -> int:
    with tier._locked_table() as table:
        slot = tier._take_slot(table, time.monotonic_ns(), [])
        assert slot is not None
        table.begin(slot, name_of(number), owner, time.monotonic_ns())
        return slot


def test_a_named_store_outlives_its_users(store: str) -> None:
    tier = make(store)
    write(tier, 1, 2)
    tier.close()
    assert [(one.name, one.in_use) for one in host_stores() if one.name == store] == [(store, False)]
    again = make(store)
    assert read(again, 1, 2, 3) == [True, True, False]
    assert [one.in_use for one in host_stores() if one.name == store] == [True]
    again.close()
    assert remove_host_store(store) == 1
    empty = make(store)
    assert read(empty, 1) == [False]
    empty.close()


def test_each_model_has_its_own_store(store: str) -> None:
    one, two = make(store), make(store, fingerprint="another")
    write(one, 1)
    assert read(two, 1) == [False]
    one.close()
    two.close()
    assert remove_host_store(store) == 2


def test_two_users_see_each_others_blocks_and_evictions(store: str) -> None:
    lost: list[BlockKey] = []
    one, two = make(store), make(store, lost=lost)
    assert write(one, *range(SLOTS)) == [True] * SLOTS
    assert read(two, *range(SLOTS)) == [True] * SLOTS
    read(one, *range(1, SLOTS))
    assert write(two, 100) == [True]
    assert lost == [name_of(0).key]
    assert read(one, 0, 100) == [False, True]
    one.close()
    two.close()


def test_memory_is_allocated_as_it_is_used(store: str) -> None:
    tier = make(store, slots=4096)
    (before,) = (one.used_bytes for one in host_stores() if one.name == store)
    write(tier, *range(10))
    (after,) = (one.used_bytes for one in host_stores() if one.name == store)
    assert after - before == 10 * BLOCK
    tier.close()


def test_another_size_is_refused_while_the_store_is_in_use_and_replaces_it_otherwise(store: str) -> None:
    tier = make(store, slots=8)
    with pytest.raises(ConfigError, match=r"for 8 blocks of 4096 bytes.*this worker needs 9 blocks of 4096 bytes"):
        make(store, slots=9)
    tier.close()
    larger = make(store, slots=9)
    assert write(larger, *range(9)) == [True] * 9
    larger.close()


def test_a_store_that_does_not_fit_is_refused_at_the_start(store: str) -> None:
    with pytest.raises(ConfigError, match=r"host_gib needs \d+\.\d\d GiB, but only .* GiB in /dev/shm are free"):
        make(store, slots=(4096 << 30) // BLOCK)
    with pytest.raises(ConfigError, match=r"of this machine's RAM are free"):
        make(None, slots=(4096 << 30) // BLOCK)
    assert [one for one in host_stores() if one.name == store] == []
    with pytest.raises(ConfigError, match="smaller than one block of 4096 bytes"):
        make(None, slots=0)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "x" * 65])
def test_an_invalid_store_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.name"):
        make(name)


def test_a_full_dev_shm_declines_blocks_instead_of_killing_the_process(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make(store)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    write(tier, 1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert write(tier, 2) == [True]  # replaces the oldest
    assert read(tier, 1, 2) == [False, True]
    assert tier.stats().errors == 1
    tier.close()


def test_a_slot_of_a_killed_writer_is_reused(store: str) -> None:
    tier = make(store)
    for number in range(SLOTS):
        leave_half_written(tier, number, DEAD)
    assert tier.find([name_of(number).key for number in range(SLOTS)]) == [False] * SLOTS
    assert write(tier, 3, 50) == [True, True]
    assert read(tier, 3, 50) == [True, True]
    assert write(tier, *range(60, 60 + SLOTS)) == [True] * SLOTS
    tier.close()


def test_a_slot_being_written_is_not_touched(store: str) -> None:
    tier = make(store)
    alive = (os.getppid(), started_at(os.getppid()))
    slots = {leave_half_written(tier, number, alive) for number in (1, 2)}
    assert write(tier, 1) == [False]
    assert write(tier, *range(10, 10 + SLOTS)) == [True] * (SLOTS - 2) + [False] * 2
    assert {slot for slot in slots if tier._open().states[slot] == WRITING} == slots
    tier.drop([name_of(1).key])
    assert tier._open().states[min(slots)] == WRITING
    tier.close()


def test_a_new_user_reclaims_slots_of_dead_writers(store: str) -> None:
    tier = make(store)
    slot = leave_half_written(tier, 1, DEAD)
    tier.close()
    again = make(store)
    assert again._open().states[slot] not in (WRITING, READY)
    again.close()


@pytest.mark.parametrize("damage", ["buckets", "counters", "doubled", "state"])
def test_a_crash_inside_a_change_is_repaired_from_the_slots(store: str, damage: str) -> None:
    """Whatever state a process leaves when it dies with the lock, the next one rebuilds the table."""
    one, two = make(store), make(store)
    write(one, 1, 2, 3)
    leave_half_written(one, 4, DEAD)
    table = one._open()
    table.is_dirty = True
    if damage == "buckets":
        table._buckets[:] = np.random.default_rng(1).integers(-5, 100, len(table._buckets))
    elif damage == "counters":
        table._header["num_free"] = 0
        table._header["num_fresh"] = 1
        table._header["num_tombstones"] = 10**6
    elif damage == "doubled":
        slot = slot_of(one, 1)
        other = 7
        table.keys[other], table.states[other] = table.keys[slot], READY
        table.last_use_ns[other] = 1
    else:
        table.states[slot_of(one, 3)] = 77
    here = [True, True, damage != "state"]
    write(two, 5)
    assert not table.is_dirty
    for tier in (one, two):
        assert read(tier, 1, 2, 3) == here
        assert read(tier, 4, 5) == [False, True]
    assert write(two, *range(10, 10 + SLOTS)) == [True] * SLOTS
    assert read(one, *range(10, 10 + SLOTS)) == [True] * SLOTS
    assert one.stats().corrupt == two.stats().corrupt == 0
    one.close()
    two.close()


def test_bytes_under_the_key_of_another_block_are_wrong(store: str) -> None:
    lost: list[BlockKey] = []
    tier = make(store, lost=lost)
    write(tier, 1, 2)
    table = tier._open()
    one, two = slot_of(tier, 1), slot_of(tier, 2)
    table.slab[[one, two]] = table.slab[[two, one]]
    table.checksums[[one, two]] = table.checksums[[two, one]]
    assert read(tier, 1, 2) == [False, False]
    assert tier.stats().corrupt == 2
    assert sorted(lost) == [name_of(1).key, name_of(2).key]
    tier.close()


def test_a_slot_that_changes_under_a_reader_is_a_miss_and_no_corruption(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow reader: between its lookup and its copy the slot is reused for another block."""
    tier = make(store)
    write(tier, 1)
    table, slot = tier._open(), slot_of(tier, 1)

    into = np.empty(BLOCK, dtype=np.uint8)
    real = table.block

    def block(number: int) -> HostBytes:
        if number == slot and table.states[slot] == READY:
            tier.drop([name_of(1).key])
            write(tier, 2)
        return real(number)

    monkeypatch.setattr(table, "block", block)
    assert tier.read([name_of(1).key], [into]) == [False]
    assert tier.stats().corrupt == 0
    assert read(tier, 2) == [True]
    tier.close()


def hold_lock(path: str, is_held: multiprocessing.synchronize.Event) -> None:
    fd = os.open(path, os.O_RDWR)
    assert lock(fd, 1.0)
    is_held.set()
    time.sleep(60)


def test_waiting_for_a_lock_times_out_and_the_lock_is_free_when_its_holder_dies(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make(store)
    write(tier, 1)
    (path,) = (one.path for one in host_stores() if one.name == store)
    is_held = FORKED.Event()
    process = FORKED.Process(target=hold_lock, args=(str(path), is_held))
    process.start()
    assert is_held.wait(60)
    monkeypatch.setattr("stoker.kv.store.tiers.host.host_tier.LOCK_S", 0.1)
    with pytest.raises(TierUnavailable, match="lock"):
        write(tier, 2)
    assert read(tier, 1) == [True]  # reading needs no lock
    process.kill()
    process.join()
    assert write(tier, 2) == [True]
    tier.close()


def test_eviction_is_least_recently_used_over_many_blocks() -> None:
    slots, news = 200, 60
    lost: list[BlockKey] = []
    tier = make(None, slots=slots, lost=lost)
    write(tier, *range(slots))
    order = np.random.default_rng(3).permutation(slots).tolist()
    for number in order:
        read(tier, number)
    kept = order[news // 2]
    for number in range(news):
        write(tier, 10_000 + number)
        if number == news // 3:
            read(tier, kept)
    assert lost == [name_of(number).key for number in order[: news + 1] if number != kept]
    tier.close()


def test_gone_buckets_are_cleaned_up() -> None:
    tier = make(None, slots=4)
    for number in range(500):
        write(tier, number)
    assert read(tier, 496, 497, 498, 499) == [True] * 4
    assert int(tier._open()._header["num_tombstones"][0]) <= tier._open().geometry.num_buckets // 4
    tier.close()


def test_users_that_start_at_the_same_time_make_one_store(store: str) -> None:
    tiers: list[HostTier] = []
    threads = [threading.Thread(target=lambda: tiers.append(make(store))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    write(tiers[0], 1)
    assert [read(tier, 1) for tier in tiers] == [[True]] * 8
    for tier in tiers:
        tier.close()


def test_a_store_whose_creator_was_killed_is_created_again(store: str) -> None:
    make(store).close()
    (path,) = (one.path for one in host_stores() if one.name == store)
    path.write_bytes(bytes(8192))
    tier = make(store)
    assert write(tier, 1) == [True]
    tier.close()


def test_a_file_of_another_user_is_refused(store: str) -> None:
    if os.getuid():
        pytest.skip("needs root to give a file away")
    make(store).close()
    (path,) = (one.path for one in host_stores() if one.name == store)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        make(store)


def test_a_block_whose_name_does_not_fit_is_declined() -> None:
    tier = make(None)
    odd = [replace(name_of(1), salt="x" * 65), replace(name_of(2), token_ids=tuple(range(17))), name_of(3)]
    assert put(tier, odd, [data_of(number) for number in (1, 2, 3)]) == [False, False, True]
    tier.close()


def test_processes_with_the_same_pid_are_distinguished_by_their_start() -> None:
    pid = os.getpid()
    assert is_alive(pid, started_at(pid))
    assert not is_alive(pid, started_at(pid) + 1)
    assert not is_alive(*DEAD)


def test_only_our_files_are_listed(store: str) -> None:
    make(store).close()
    assert all(one.path.parent == host_files.SHM == Path("/dev/shm") for one in host_stores())
