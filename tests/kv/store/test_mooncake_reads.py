"""Reads through Mooncake's Transfer Engine: how many at a time, how they end, and which objects use them. Needs no
Mooncake."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stoker.kv.blocks.layout import KvLayout
from stoker.kv.device.checksum import checksum
from stoker.kv.mooncake.transfer_engine import REQUEST_BYTES, RemoteRanges, read_in_order
from stoker.kv.store.buffer_pool import HEADROOM_BYTES, new_buffer
from stoker.kv.store.tiers.mooncake.mooncake_client import TRANSFER_FAILED
from stoker.kv.store.tiers.mooncake.mooncake_object import ObjectFormat
from stoker.kv.store.tiers.mooncake.mooncake_object_buffers import ObjectBuffers
from stoker.kv.store.tiers.mooncake.mooncake_reads import fetch
from stoker.kv.store.tiers.tier import HostBytes


@dataclass
class Engine:
    """A job must be polled `looks` times before it has ended. Requests to `dead` segments fail."""

    looks: int = 3
    dead: tuple[str, ...] = ()
    lost: tuple[int, ...] = ()  # jobs that fail
    refused: tuple[str, ...] = ()
    jobs: dict[int, tuple[str, list[int], list[int], list[int]]] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    most: int = 0
    lengths: list[int] = field(default_factory=list)

    def batch_transfer_async_read(self, segment: str, ours: list[int], theirs: list[int], lengths: list[int]) -> int:
        if segment in self.refused:
            return 0
        job = len(self.asked) + 1
        self.jobs[job], self.asked[job] = (segment, ours, theirs, lengths), 0
        self.most = max(self.most, len(self.jobs))
        self.lengths += lengths
        return job

    def transfer_check_status(self, job: int) -> int:
        assert len(self.jobs[job][1]) == 1, "it tells of a job's first request alone"
        self.asked[job] += 1
        return 0 if self.asked[job] < self.looks else self._end(job)

    def get_batch_transfer_status(self, jobs: list[int]) -> int:
        ended = [self._end(job) for job in jobs]
        return 0 if ended == [1] * len(jobs) else -1

    def _end(self, job: int) -> int:
        segment, ours, theirs, lengths = self.jobs.pop(job)
        if segment in self.dead or job in self.lost:
            return -1
        for dst, src, size in zip(ours, theirs, lengths, strict=True):
            memmove(dst, src, size)
        return 1


def blocks(count: int, size: int) -> list[HostBytes]:
    rng = np.random.default_rng(count)
    made = [new_buffer(size) for _ in range(count)]
    for block in made:
        block[:] = rng.integers(0, 256, size, dtype=np.uint8)
    return made


def runs(segment: str, ours: Sequence[HostBytes], theirs: Sequence[HostBytes]) -> RemoteRanges:
    return RemoteRanges(
        segment, [one.ctypes.data for one in ours], [one.ctypes.data for one in theirs], [len(one) for one in ours]
    )


@pytest.mark.parametrize("each", [1, 3])
def test_a_few_reads_are_in_flight_and_all_bytes_arrive(each: int) -> None:
    src, dst, engine = blocks(60, 512), blocks(61, 512)[:60], Engine()
    parts = [runs("there", dst[at : at + each], src[at : at + each]) for at in range(0, 60, each)]
    assert list(read_in_order(engine, parts)) == [True] * len(parts)
    assert all(map(np.array_equal, dst, src))
    assert not engine.jobs
    assert engine.most == (8 if each == 1 else 16), "a read of several runs is two jobs"


def test_closing_early_waits_for_all_reads_in_flight() -> None:
    src, dst, engine = blocks(30, 512), blocks(30, 512), Engine()
    reads = read_in_order(engine, [runs("there", [d], [s]) for d, s in zip(dst, src, strict=True)])
    assert next(reads)
    assert engine.jobs
    reads.close()
    assert not engine.jobs, "the engine may still write"
    assert len(engine.asked) < 30, "and no more was asked for"


def test_a_read_that_fails_or_does_not_start_does_not_affect_the_others() -> None:
    src, dst = blocks(4, 512), blocks(4, 512)
    engine = Engine(dead=("dead",), refused=("nowhere",))
    segments = ["there", "dead", "nowhere", "there"]
    parts = [runs(segment, [d], [s]) for segment, d, s in zip(segments, dst, src, strict=True)]
    assert list(read_in_order(engine, parts)) == [True, False, False, True]


def test_a_failed_segment_is_not_read_again() -> None:
    src, dst, engine = blocks(40, 512), blocks(40, 512), Engine(dead=("dead",))
    segments = ["dead", "there"] * 20
    parts = [runs(segment, [d], [s]) for segment, d, s in zip(segments, dst, src, strict=True)]
    assert list(read_in_order(engine, parts)) == [False, True] * 20
    assert len(engine.asked) == 20 + 4, "those that were under way when the first one failed"


def test_reads_in_flight_have_their_own_results() -> None:
    src, dst, engine = blocks(20, 512), blocks(20, 512), Engine(lost=(3,))
    parts = [runs("there", [d], [s]) for d, s in zip(dst, src, strict=True)]
    assert list(read_in_order(engine, parts)) == [True] * 2 + [False] + [True] * 7 + [False] * 10


# ---- the store's objects

NOT_FOUND = -704
HERE = "127.0.0.1:1"


@dataclass
class RawClient:
    """Objects in RAM: key -> location and bytes."""

    objects: dict[str, tuple[str, HostBytes]]
    copies: dict[str, str] = field(default_factory=dict)  # its second location
    asked: list[str] = field(default_factory=list)

    def get_hostname(self) -> str:
        return HERE

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
        known = {key: self.objects[key] for key in keys if key in self.objects}
        return {
            key: [_replica(place, data) for place in (where, self.copies.get(key)) if place]
            for key, (where, data) in known.items()
        }

    def batch_get_into_multi_buffers(
        self, keys: list[str], places: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self.asked += keys
        codes = []
        for key, where, lengths in zip(keys, places, sizes, strict=True):
            if key not in self.objects:
                codes.append(NOT_FOUND)
                continue
            at, data = 0, self.objects[key][1]
            for place, length in zip(where, lengths, strict=True):
                memmove(place, data.ctypes.data + at, min(length, len(data) - at))
                at += length
            codes.append(len(data))
        return codes


def _replica(endpoint: str, data: HostBytes) -> Any:
    place = SimpleNamespace(transport_endpoint=endpoint, buffer_address=data.ctypes.data, size=len(data))
    is_disk = endpoint == "disk"
    return SimpleNamespace(
        is_memory_replica=lambda: not is_disk, get_memory_descriptor=lambda: SimpleNamespace(buffer_descriptor=place)
    )


@pytest.mark.parametrize("mib", [0.5, 2, 8])
@pytest.mark.parametrize("headroom_bytes", [0, HEADROOM_BYTES])
def test_remote_objects_are_read_by_the_engine_and_others_by_the_client(mib: float, headroom_bytes: int) -> None:
    layout = KvLayout.of(1, 1, int(mib * 2**20) // 2 // 16 // 4, 16, "float32", 4)
    format = ObjectFormat("test", layout)
    whole = dict(zip("abcdef", blocks(6, format.object_bytes), strict=True))
    short = whole["e"][:-512]
    client = RawClient(
        {
            "a": ("10.0.0.1:1", whole["a"]),
            "b": (HERE, whole["b"]),
            "c": ("disk", whole["c"]),
            "d": ("10.0.0.2:1", whole["d"]),
            "e": ("10.0.0.1:1", short),
            "f": ("10.0.0.3:1", whole["f"]),
        }
    )
    keys = ["a", "missing", "b", "c", "d", "e", "f"]
    into = [new_buffer(format.block_bytes) for _ in keys]
    engine = Engine(dead=("10.0.0.2:1",))

    fetched = fetch(client, engine, keys, objects := ObjectBuffers(format, into, headroom_bytes))

    size = format.object_bytes
    assert fetched.codes == [size, NOT_FOUND, size, size, TRANSFER_FAILED, size - 512, size]
    assert client.asked == ["missing", "b", "c", "e"]
    assert sorted(fetched.checksums) == [0, 2, 3, 6]
    for at, of_bytes in fetched.checksums.items():
        expected = whole[keys[at]]
        assert np.array_equal(into[at], expected[format.header_bytes :])
        assert objects.header(at) == expected[: format.header_bytes].tobytes()
        assert of_bytes == checksum(into[at])
    assert not engine.jobs
    assert max(engine.lengths) < REQUEST_BYTES * 1.5


def test_a_copy_in_our_own_segment_is_read_by_the_client() -> None:
    layout = KvLayout.of(1, 1, 64, 16, "float32", 4)
    format = ObjectFormat("test", layout)
    [data] = blocks(1, format.object_bytes)
    client, engine = RawClient({"a": ("10.0.0.1:1", data)}, copies={"a": HERE}), Engine()
    fetched = fetch(client, engine, ["a"], ObjectBuffers(format, [new_buffer(format.block_bytes)], 0))
    assert (fetched.codes, client.asked, engine.asked) == ([format.object_bytes], ["a"], {})
