"""One checksum: the same on host bytes, in parts, while copying and on tensors; and changed by whatever can go wrong."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch

from stoker.kv.checksum import CHUNK_BYTES, ROW_BYTES, RunningChecksum, checksum, copy_checksummed, tensor_checksums

SIZES = [1, 7, 8, 9, 4096, ROW_BYTES - 8, ROW_BYTES, ROW_BYTES + 8, 3 * ROW_BYTES + 5, CHUNK_BYTES + 24, 1 << 20]
MASK = (1 << 64) - 1


def data_of(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def splitmix(x: int) -> int:
    x = x * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return (x ^ x >> 31) | 1


def plain(data: bytes) -> int:
    """The definition, word by word."""
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
    total = len(data) * 0x9E3779B97F4A7C15
    for row in range(0, len(words), 1024):
        row_sum = sum(splitmix(1 + at) * word for at, word in enumerate(words[row : row + 1024])) & MASK
        total += (row_sum ^ row_sum >> 32) * splitmix((1 << 40) + row // 1024)
    return total & MASK


@pytest.mark.parametrize("num_bytes", SIZES)
def test_every_way_gives_the_number_of_the_definition(num_bytes: int) -> None:
    data = data_of(num_bytes)
    expected = plain(data.tobytes())
    assert checksum(data) == expected
    copy = np.zeros_like(data)
    assert copy_checksummed(copy, data) == expected
    assert np.array_equal(copy, data)
    running = RunningChecksum(num_bytes)
    for start in range(0, num_bytes, 2 * ROW_BYTES):
        running.add(data[start : start + 2 * ROW_BYTES])
    assert running.value() == expected
    both = torch.from_numpy(np.stack([data, data_of(num_bytes, 1)]))
    assert tensor_checksums(both) == [expected, plain(both[1].numpy().tobytes())]


def test_tensors_of_more_than_fits_at_once_and_of_none() -> None:
    blocks = torch.from_numpy(data_of(70 << 20).reshape(35, -1))
    assert tensor_checksums(blocks) == [checksum(block.numpy()) for block in blocks]
    assert tensor_checksums(blocks[:0]) == []


def test_what_can_go_wrong_changes_it() -> None:
    rng = random.Random(3)
    data = data_of(5 * ROW_BYTES)
    good = checksum(data)
    for _ in range(300):
        bad = data.copy()
        at, bit = rng.randrange(len(bad)), rng.randrange(8)
        bad[at] ^= 1 << bit
        assert checksum(bad) != good, f"bit {bit} of byte {at}"
    for unit in (1, 2, 4, 8, 64, 4096, ROW_BYTES):
        for _ in range(50):
            one, other = (rng.randrange(len(data) // unit) * unit for _ in range(2))
            bad = data.copy()
            bad[one : one + unit], bad[other : other + unit] = data[other : other + unit], data[one : one + unit]
            assert np.array_equal(bad, data) or checksum(bad) != good, f"{unit} bytes at {one} and {other} swapped"
            bad = data.copy()
            bad[one : one + unit] = 0
            assert np.array_equal(bad, data) or checksum(bad) != good, f"{unit} bytes at {one} lost"
    for end in (0, 8, ROW_BYTES, len(data) - 1, len(data) - 8):
        assert checksum(data[:end]) != good
    assert checksum(np.zeros(64, np.uint8)) != checksum(np.zeros(72, np.uint8)), "zeros at the end count"


def test_other_threads_run_meanwhile() -> None:
    """A thread that only counts must get on while large blocks are summed up."""
    data, count, stop = data_of(64 << 20), 0, threading.Event()

    def run() -> None:
        nonlocal count
        while not stop.is_set():
            count += 1
            time.sleep(0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        before = count
        checksum(data)
        assert count - before > 10, "the lock of the interpreter was held"
    finally:
        stop.set()
        thread.join()
