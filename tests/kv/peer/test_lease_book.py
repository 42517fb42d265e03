"""A lease shows only final blocks under the right keys, and blocks of a closed lease are not read."""

from __future__ import annotations

import threading
import time

import pytest
from kv.peer_world import block_ids, key, keys, names

from stoker.kv.blocks.transfer import PeerUnavailable
from stoker.kv.peer.lease_book import LeaseBook

BLOCKS = block_ids(7, 3, 9, 1)


@pytest.fixture
def book() -> LeaseBook:
    return LeaseBook()


def after(seconds: float, do: object, *args: object) -> threading.Thread:
    thread = threading.Timer(seconds, do, args)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_only_ready_blocks_are_shown(book: LeaseBook) -> None:
    book.put("a", keys(4), BLOCKS, num_ready=2, complete=False, names=names(3))
    view = book.view("a", 0, keys(4), limit=10)
    assert (view.blocks, view.num_ready, view.complete) == (block_ids(7, 3), 2, False)
    assert view.names == names(2)
    assert book.view("a", 1, keys(3, first=1), limit=1).blocks == block_ids(3)
    assert book.view("a", 2, keys(2, first=2), limit=10).blocks == []
    book.put("a", keys(4), BLOCKS, num_ready=4, complete=True)
    assert book.view("a", 2, keys(2, first=2), limit=10).blocks == block_ids(9, 1)
    assert book.view("a", 4, keys(2, first=4), limit=10, wait_s=5).blocks == [], "there will be no more: no wait"


def test_other_keys_are_refused_but_keys_that_are_not_final_are_not_compared(book: LeaseBook) -> None:
    book.put("a", keys(4), BLOCKS, num_ready=2, complete=False)
    with pytest.raises(PeerUnavailable, match="other keys") as refused:
        book.view("a", 0, [key(0), key(8)], limit=10)
    assert refused.value.code == "kv_keys_differ"
    assert book.view("a", 0, [key(0), key(1), key(8)], limit=10).blocks == block_ids(7, 3)
    book.put("a", keys(4), BLOCKS, num_ready=4, complete=True)
    with pytest.raises(PeerUnavailable, match="other keys"):
        book.view("a", 0, [key(0), key(1), key(8)], limit=10)


def test_a_waiting_reader_wakes_when_the_lease_opens_grows_or_closes(book: LeaseBook) -> None:
    started = time.monotonic()
    # Each change waits until the one before was seen, so that a stalled machine cannot merge them.
    change = after(0.1, book.put, "a", keys(4), BLOCKS, 1, False)
    assert book.view("a", 0, keys(4), 10, wait_s=60).blocks == block_ids(7)
    change.join()
    change = after(0.1, book.put, "a", keys(4), BLOCKS, 3, False)
    assert book.view("a", 1, keys(3, first=1), 10, wait_s=60).blocks == block_ids(3, 9)
    change.join()
    change = after(0.1, book.close, "a")
    with pytest.raises(PeerUnavailable, match="closed"):
        book.view("a", 3, keys(1, first=3), 10, wait_s=60)
    change.join()
    assert time.monotonic() - started < 60, "woken, not timed out"


def test_a_wait_ends_at_its_deadline(book: LeaseBook) -> None:
    with pytest.raises(PeerUnavailable, match="no lease") as unknown:
        book.view("a", 0, keys(1), 10, wait_s=0.05)
    assert unknown.value.code == "kv_lease_unknown"
    book.put("a", keys(4), BLOCKS, num_ready=0, complete=False)
    assert book.view("a", 0, keys(1), 10, wait_s=0.05).blocks == []


def test_closing_waits_for_a_reader_and_lets_no_further_reader_begin(book: LeaseBook) -> None:
    book.put("a", keys(4), BLOCKS, 4, True)
    generation = book.view("a", 0, keys(4), 10).generation
    with book.reading("a", generation) as may_read:
        assert may_read
        assert not book.close("a")
        assert not book.holds("a", generation), "what is read from now on may be anything"
        with book.reading("a", generation) as may_also:
            assert not may_also
    assert book.close("a")
    assert book.close("a"), "closing again is no error"
    assert "a" not in book
    with book.reading("a", generation) as may_read:
        assert not may_read
    with pytest.raises(PeerUnavailable, match="closed"):
        book.view("a", 0, keys(4), 10, wait_s=5)
    book.put("a", keys(4), BLOCKS, 4, True)
    assert book.view("a", 0, keys(4), 10).generation != generation, "another lease of that name is another place"


def test_a_lease_that_moved_no_longer_holds_for_earlier_readers(book: LeaseBook) -> None:
    book.put("a", keys(4), BLOCKS, 2, False)
    generation = book.view("a", 0, keys(4), 10).generation
    book.put("a", keys(4), BLOCKS, 3, False)
    assert book.holds("a", generation), "more of the same is no move"
    book.put("a", keys(4), block_ids(7, 3, 8, 1), 3, False)
    assert not book.holds("a", generation)
    moved = book.view("a", 0, keys(4), 10).generation
    book.put("a", keys(4), block_ids(7, 3, 8, 1), 1, False)
    assert not book.holds("a", moved), "a preempted sequence has less"


def test_checksums_belong_to_a_placement_and_end_with_it(book: LeaseBook) -> None:
    assert book.next_unchecked(2, 0.0) is None
    book.put("L", keys(4), block_ids(5, 6, 7, 8), 3, False)
    first = book.next_unchecked(2, 0.0)
    assert first is not None
    assert (first.first, first.blocks) == (0, block_ids(5, 6))
    book.set_checksums(first, [50, 60])
    book.set_checksums(first, [50, 60])  # stored only once
    assert book.view("L", 0, None, 9).checksums == [50, 60]
    assert book.view("L", 1, None, 1).checksums == [60]
    book.put("L", keys(4), block_ids(5, 6, 7, 8), 4, True)
    second = book.next_unchecked(9, 0.0)
    assert second is not None
    assert (second.first, second.blocks) == (2, block_ids(7, 8))
    book.put("L", keys(4), block_ids(5, 6, 9, 8), 4, True)
    book.set_checksums(second, [70, 80])
    assert book.view("L", 0, None, 9).checksums == [], "its blocks are others now"
    again = book.next_unchecked(9, 0.0)
    assert again is not None
    book.close("L")
    book.set_checksums(again, [1, 2, 3, 4])
    assert book.next_unchecked(9, 0.0) is None


def test_the_checksum_thread_wakes_when_blocks_are_ready(book: LeaseBook) -> None:
    opening = after(0.1, book.put, "L", keys(1), block_ids(5), 1, True)
    found = book.next_unchecked(1, 60.0)
    assert found is not None
    assert found.blocks == block_ids(5)
    opening.join()
