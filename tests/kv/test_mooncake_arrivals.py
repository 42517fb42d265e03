"""Checksums of blocks while they come: in any order, in parts, too early, wrong or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from stoker.kv.checksum import PIECE_BYTES, HostBytes, checksum
from stoker.kv.crew import Crew
from stoker.kv.tiers.mooncake_arrivals import Arrivals

SIZES = [3, 1000, PIECE_BYTES, 2 * PIECE_BYTES + 5]


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew(2, "arrivals")
    yield crew
    crew.close()


def some_blocks(count: int, num_bytes: int) -> list[HostBytes]:
    return list(np.random.default_rng(num_bytes).integers(0, 256, (count, num_bytes), dtype=np.uint8))


def coming(blocks: list[HostBytes]) -> tuple[list[HostBytes], dict[int, int]]:
    """Where they go to, and what is expected."""
    return [np.zeros_like(block) for block in blocks], {at: checksum(block) for at, block in enumerate(blocks)}


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("step", [1, -1])
def test_what_comes_in_any_order_is_right(num_bytes: int, step: int, crew: Crew) -> None:
    blocks = some_blocks(40, num_bytes)
    buffers, expected = coming(blocks)
    arrivals, call = Arrivals(buffers), Future[None]()

    def fill() -> None:
        for buffer, block in zip(buffers[::step], blocks[::step], strict=True):
            for start in range(0, num_bytes, 100_000):
                buffer[start : start + 100_000] = block[start : start + 100_000]
        call.set_result(None)

    filling = threading.Thread(target=fill)
    filling.start()
    arrivals.follow(call, time.monotonic() + 60)
    filling.join()
    assert arrivals.right(crew, expected) == set(expected)
    assert all(map(np.array_equal, buffers, blocks))


@pytest.mark.parametrize("num_bytes", SIZES)
def test_one_wrong_byte_is_noticed(num_bytes: int, crew: Crew) -> None:
    blocks = some_blocks(8, num_bytes)
    buffers, expected = coming(blocks)
    arrivals, call = Arrivals(buffers), Future[None]()
    for at, (buffer, block) in enumerate(zip(buffers, blocks, strict=True)):
        buffer[:] = block
        buffer[(at * num_bytes) // 8] ^= at % 2  # in every second one
    call.set_result(None)
    arrivals.follow(call, time.monotonic() + 60)
    assert arrivals.right(crew, expected) == {0, 2, 4, 6}


def test_a_piece_whose_end_came_first_is_looked_at_again(crew: Crew) -> None:
    blocks = some_blocks(2, 2 * PIECE_BYTES)
    buffers, expected = coming(blocks)
    arrivals, call = Arrivals(buffers), Future[None]()
    for buffer, block in zip(buffers, blocks, strict=True):
        buffer[PIECE_BYTES - 100 :] = block[PIECE_BYTES - 100 :]
    arrivals.follow(call, time.monotonic() + 0.05)  # sums up what is not there
    for buffer, block in zip(buffers, blocks, strict=True):
        buffer[:] = block
    assert arrivals.right(crew, expected) == {0, 1}


def test_a_call_that_brings_nothing_is_followed_for_so_long(crew: Crew) -> None:
    buffers, expected = coming(some_blocks(3, PIECE_BYTES))
    arrivals, started_s = Arrivals(buffers), time.monotonic()
    arrivals.follow(Future[None](), started_s + 0.05)
    assert time.monotonic() >= started_s + 0.05
    assert arrivals.right(crew, expected) == frozenset()


def test_bytes_that_are_the_mark_itself_are_right(crew: Crew) -> None:
    """Nobody sees them come."""
    buffers, _ = coming(some_blocks(2, PIECE_BYTES))
    arrivals, call = Arrivals(buffers), Future[None]()
    call.set_result(None)
    arrivals.follow(call, time.monotonic() + 60)
    assert arrivals.right(crew, {at: checksum(buffer) for at, buffer in enumerate(buffers)}) == {0, 1}
