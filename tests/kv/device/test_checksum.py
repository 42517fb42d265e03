"""The checksum is the same on host bytes, in parts, while copying, on tensors and without its package, and any damage
changes it."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from stoker.kv.device import checksum as module
from stoker.kv.device.checksum import (
    PIECE_BYTES,
    HostBytes,
    PlainXxh3,
    RunningChecksum,
    checksum,
    checksums,
    copy_with_checksums,
    tensor_checksums,
)
from stoker.kv.device.helper_threads import HelperThreads

SIZES = [1, 7, 1023, 1024, 1032, PIECE_BYTES - 1024, PIECE_BYTES, PIECE_BYTES + 8, 3 * PIECE_BYTES + 5, 1 << 20]


def data_of(num_bytes: int, seed: int = 0) -> HostBytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def plain(data: bytes) -> int:
    """The definition of the checksum."""
    pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
    digests = [xxh3_64_intdigest(whole_kib(piece)) for piece in pieces]
    return xxh3_64_intdigest(whole_kib(struct.pack(f"<{len(digests) + 1}Q", *digests, len(data))))


def whole_kib(data: bytes) -> bytes:
    return data + bytes(-len(data) % 1024)


@pytest.fixture(params=["with the package", "without"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr(module, "xxh3_64", PlainXxh3)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("num_bytes", SIZES)
def test_every_implementation_matches_the_definition(num_bytes: int) -> None:
    data = data_of(num_bytes)
    expected = plain(data.tobytes())
    assert checksum(data) == expected
    threads, other = HelperThreads(2, "threads"), data_of(num_bytes, 2)
    copies = [np.zeros_like(data), np.zeros_like(data)]
    assert checksums(threads, [other, data])[1] == expected
    assert copy_with_checksums(threads, copies, [other, data])[1] == expected
    assert np.array_equal(copies, [other, data])
    threads.close()
    running = RunningChecksum()
    parts, at = random.Random(num_bytes), 0
    while at < num_bytes:
        size = parts.randint(1, 2 * PIECE_BYTES)
        running.add(data[at : at + size])
        at += size
    assert running.value() == expected
    both = torch.from_numpy(np.stack([data, data_of(num_bytes, 1)]))
    assert tensor_checksums(both) == [expected, plain(both[1].numpy().tobytes())]
    assert tensor_checksums(both[:0]) == []


def corruptions(data: HostBytes, rng: random.Random) -> Iterator[tuple[str, HostBytes]]:
    def changed(start: int, new: HostBytes) -> HostBytes:
        bad = data.copy()
        bad[start : start + len(new)] = new
        return bad

    for _ in range(200):
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        yield f"bit {bit} of byte {at}", changed(at, data[at : at + 1] ^ np.uint8(1 << bit))
    for unit in (1, 2, 4, 8, 64, 512, 4096, PIECE_BYTES):
        for _ in range(25):
            one, other = (rng.randrange(len(data) // unit) * unit for _ in range(2))
            bad = changed(one, data[other : other + unit])
            yield f"{unit} bytes at {one} as at {other}", bad.copy()
            bad[other : other + unit] = data[one : one + unit]
            yield f"{unit} bytes at {one} and {other} swapped", bad
            yield f"{unit} bytes at {one} lost", changed(one, np.zeros(unit, np.uint8))
            yield f"{unit} bytes at {one} random", changed(one, np.frombuffer(rng.randbytes(unit), np.uint8))
    for shift in (1, 8, 64, 4096):
        yield f"shifted by {shift}", np.roll(data, shift)
    for end in (0, 8, 1024, PIECE_BYTES, len(data) - 1024, len(data) - 1):
        yield f"cut at {end}", data[:end]
        yield f"zeros after {end}", changed(end, np.zeros(len(data) - end, np.uint8))


@pytest.mark.parametrize("kind", ["random", "halves of floats", "zeros"])
def test_damage_changes_the_checksum(kind: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    num_bytes = 3 * PIECE_BYTES
    data = {
        "random": data_of(num_bytes, seed),
        # bfloat16: half of all words' bits hardly differ.
        "halves of floats": torch.randn(num_bytes // 2).to(torch.bfloat16).view(torch.uint8).numpy(),
        "zeros": np.zeros(num_bytes, np.uint8),
    }[kind]
    good = checksum(data)
    for what, bad in corruptions(data, random.Random(seed)):
        assert np.array_equal(bad, data) or checksum(bad) != good, what
    assert checksum(np.zeros(64, np.uint8)) != checksum(np.zeros(72, np.uint8)), "zeros at the end count"


def test_other_threads_run_meanwhile() -> None:
    """A thread that only counts must make progress while large blocks are checksummed."""
    data, count, stop = data_of(64 << 20), 0, threading.Event()

    def run() -> None:
        nonlocal count
        while not stop.is_set():
            count += 1
            time.sleep(0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        # Several attempts: on a busy machine the other thread may not run in that time.
        for _ in range(5):
            before = count
            checksum(data)
            if count - before > 10:
                return
        pytest.fail("the lock of the interpreter was held")
    finally:
        stop.set()
        thread.join()
