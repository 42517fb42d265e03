"""A disk that hangs: callers do not wait long, only one thread is blocked, and the disk is used again once it answers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv.peer_world import PATIENCE_S, wait_until
from kv.store.test_disk_tier import Made, find, name_of, read, write

from stoker.kv.blocks.transfer import TierUnavailable
from stoker.kv.store.measured_tier import MeasuredTier
from stoker.kv.store.tiers.disk import disk_tier as disk_module
from stoker.kv.store.tiers.disk.disk_tier import DiskTier


class HangingJournal:
    """Replaces the journal by a FIFO, which blocks every open until there is a writer."""

    def __init__(self, root: Path) -> None:
        self._path = root / "journal"
        self._path.rename(root / "journal.away")
        os.mkfifo(self._path)

    def answers(self) -> None:
        writer = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)  # fails if no reader waits for it
        self._path.unlink()
        os.close(writer)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    monkeypatch.setattr(disk_module, "_LOOKUP_S", PATIENCE_S)
    made = Made(tmp_path / "kv")
    yield made
    made.close()


@pytest.fixture
def tier(make: Made) -> DiskTier:
    tier = make()
    assert write(tier, 1, 2) == [True, True]
    return tier


def stale(tier: DiskTier) -> None:
    """Let the next lookup access the disk, whenever the last one was."""
    tier._contents._caught_up_s = 0.0


def test_a_lookup_on_a_hanging_disk_times_out_and_the_disk_is_used_again_once_it_answers(
    make: Made, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = HangingJournal(make.root)
    monkeypatch.setattr(disk_module, "_LOOKUP_S", 0.1)
    stale(tier)
    with pytest.raises(TierUnavailable, match=r"did not answer within 0\.1 s"):
        find(tier, 1)
    num_threads = threading.active_count()
    monkeypatch.setattr(disk_module, "_LOOKUP_S", PATIENCE_S)  # a later waiter would wait this long
    started_s = time.monotonic()
    for _ in range(20):
        stale(tier)
        assert find(tier, 1, 2) == [False, False]
        assert write(tier, 3) == [False]
        with pytest.raises(TierUnavailable, match="has not answered for"):
            read(tier, 1)
        with pytest.raises(TierUnavailable, match="has not answered for"):
            tier.catch_up()
    assert time.monotonic() - started_s < PATIENCE_S / 2
    assert threading.active_count() == num_threads
    assert tier.stats().errors == 1
    journal.answers()
    wait_until(lambda: find(tier, 1, 2) == [True, True])
    assert read(tier, 1, 2) == [True, True]
    assert write(tier, 3) == [True]
    assert threading.active_count() == num_threads
    assert make.lost == []


def test_concurrent_lookups_time_out_too_and_no_call_is_made_twice(
    make: Made, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = HangingJournal(make.root)
    monkeypatch.setattr(disk_module, "_LOOKUP_S", 0.5)
    found: list[list[bool]] = []
    stale(tier)
    measured = MeasuredTier("disk", tier)  # as the store sees it: a tier that does not answer counts as empty
    callers = [threading.Thread(target=lambda: found.append(measured.find([name_of(1).key]))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(PATIENCE_S)
    assert found == [[False]] * 8
    assert 1 <= measured.counters.errors <= 8
    monkeypatch.setattr(disk_module, "_LOOKUP_S", PATIENCE_S)
    journal.answers()
    wait_until(lambda: measured.find([name_of(1).key]) == [True])


def test_before_the_scan_a_lookup_in_a_hanging_folder_times_out_too(
    make: Made, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier._contents.scanned.clear()
    answers = threading.Event()
    real = os.path.exists

    def hanging(path: str) -> bool:
        answers.wait(PATIENCE_S)
        return real(path)

    monkeypatch.setattr(os.path, "exists", hanging)
    monkeypatch.setattr(disk_module, "_LOOKUP_S", 0.1)
    with pytest.raises(TierUnavailable, match="did not answer"):
        find(tier, 99)
    assert find(tier, 1) == [False]
    answers.set()
    monkeypatch.setattr(disk_module, "_LOOKUP_S", PATIENCE_S)
    wait_until(lambda: find(tier, 1, 99) == [True, False])
