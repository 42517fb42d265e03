"""The measuring part of `tier_bandwidth`."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import numpy as np

from bench.contract import Report, Result
from stoker.base.config import StoreSettings
from stoker.base.ids import BlockKey
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import BlockName
from stoker.kv.device.checksum import checksum
from stoker.kv.store.tiers.disk.disk_tier import THREADS
from stoker.kv.store.tiers.host.host_memory import remove_host_store
from stoker.kv.store.tiers.tier import HostBytes, Tier, TierContext, build_tier

BLOCK_MIB = (0.5, 2.0, 8.0)


@dataclass(frozen=True)
class TimedCopy:
    """`run` moves all blocks once. `raw` is the copy that this one is compared with."""

    name: str
    run: Callable[[], None]
    before: Callable[[], None] = lambda: None
    raw: TimedCopy | None = None

    def seconds(self) -> float:
        self.before()
        started = time.perf_counter()
        self.run()
        return time.perf_counter() - started


@dataclass(frozen=True)
class BlockSet:
    layout: KvLayout
    names: list[BlockName]
    source: list[HostBytes]
    target: list[HostBytes]

    @property
    def num_bytes(self) -> int:
        return len(self.names) * self.layout.block_bytes

    @property
    def keys(self) -> list[BlockKey]:
        return [name.key for name in self.names]


def make_blocks(block_mib: float, total_mib: int) -> BlockSet:
    layout = KvLayout.of(
        num_layers=int(block_mib * 4), num_heads=8, width=128, block_tokens=64, dtype="bfloat16", dtype_bytes=2
    )
    assert layout.block_bytes == block_mib * 2**20
    count = int(total_mib / block_mib)
    rng = np.random.default_rng(0)
    names = [BlockName(BlockKey(rng.bytes(16)), BlockKey(bytes(16)), tuple(range(64)), "") for _ in range(count)]
    return BlockSet(layout, names, pages(count, layout.block_bytes, rng), pages(count, layout.block_bytes, rng))


def pages(count: int, size: int, rng: np.random.Generator) -> list[HostBytes]:
    memory = np.frombuffer(mmap(-1, count * size), dtype=np.uint8)
    memory.reshape(-1, 1 << 19)[:] = rng.integers(0, 255, 1 << 19, dtype=np.uint8)
    return [memory[at * size : (at + 1) * size] for at in range(count)]


def make_tier(tier_name: str, settings: StoreSettings, blocks: BlockSet) -> Tier:
    tier = build_tier(tier_name, settings, TierContext("bench", blocks.layout, lambda keys: None))
    assert tier is not None
    return tier


def tier_copies(
    medium: str, tier: Tier, blocks: BlockSet, raw_read: TimedCopy, raw_write: TimedCopy
) -> list[TimedCopy]:
    # The store computes these once for all tiers, when it copies a block out of the pool.
    checksums = [checksum(block) for block in blocks.source]

    def write() -> None:
        assert all(tier.write(blocks.names, blocks.source, checksums))

    def read() -> None:
        assert all(tier.read(blocks.keys, blocks.target))

    return [
        TimedCopy(f"{medium} write", write, before=lambda: tier.drop(blocks.keys), raw=raw_write),
        TimedCopy(f"{medium} read", read, raw=raw_read),
    ]


def host(blocks: BlockSet, folder: Path) -> Iterator[list[TimedCopy]]:
    name = f"bench-{os.getpid()}"
    tier = make_tier("host", StoreSettings(name=name, host_gib=1.05 * blocks.num_bytes / 2**30), blocks)

    def copy() -> None:
        for source, target in zip(blocks.source, blocks.target, strict=True):
            np.copyto(target, source)

    memcpy = TimedCopy("memcpy", copy)
    yield tier_copies("host", tier, blocks, memcpy, memcpy)
    tier.close()
    remove_host_store(name)


def disk(blocks: BlockSet, folder: Path) -> Iterator[list[TimedCopy]]:
    size = blocks.layout.block_bytes
    plain, written = folder / "plain", folder / "written"
    pool = ThreadPoolExecutor(THREADS)

    def all_of(path: Path, flags: int, move: Callable[..., int], buffers: list[HostBytes]) -> Callable[[], None]:
        def run() -> None:
            fd = os.open(path, flags, 0o600)
            done = list(pool.map(lambda at: move(fd, [buffers[at]], at * size), range(len(buffers))))
            os.close(fd)
            assert done == [size] * len(buffers)

        return run

    def drop_from_page_cache() -> None:
        fd = os.open(plain, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    new = os.O_WRONLY | os.O_CREAT
    all_of(plain, new | os.O_DIRECT, os.pwritev, blocks.source)()
    settings = StoreSettings(host_gib=1.0, disk_dir=str(folder / "kv"), disk_gib=1.05 * blocks.num_bytes / 2**30)
    tier = make_tier("disk", settings, blocks)
    raw_read = TimedCopy("raw read", all_of(plain, os.O_RDONLY | os.O_DIRECT, os.preadv, blocks.target))
    raw_write = TimedCopy(
        "raw write",
        all_of(written, new | os.O_DIRECT, os.pwritev, blocks.source),
        before=lambda: written.unlink(missing_ok=True),
    )
    buffered = TimedCopy(
        "raw read, buffered", all_of(plain, os.O_RDONLY, os.preadv, blocks.target), before=drop_from_page_cache
    )
    yield [buffered, *tier_copies("disk", tier, blocks, raw_read, raw_write)]
    tier.close()
    pool.shutdown()


MEDIA = {medium.__name__: medium for medium in (host, disk)}


def measure(
    block_mib: float, total_mib: int, rounds: int, media: list[str], folder: Path
) -> dict[str, dict[str, float]]:
    blocks = make_blocks(block_mib, total_mib)
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        making = [MEDIA[medium](blocks, Path(inner)) for medium in media]
        measurements = [one for medium in making for one in next(medium)]
        seconds: dict[str, list[float]] = {}
        ratios: dict[str, list[float]] = {}
        for round_ in range(rounds + 1):
            for one in measurements:
                for each in [one.raw, one] if one.raw else [one]:
                    seconds.setdefault(each.name, []).append(each.seconds())
                if one.raw:
                    ratios.setdefault(one.name, []).append(seconds[one.raw.name][-1] / seconds[one.name][-1])
            if round_ == 0:  # the first round warms up
                seconds.clear()
                ratios.clear()
        for medium in making:
            next(medium, None)
    found = {name: {"gb_per_s": blocks.num_bytes / statistics.median(some) / 1e9} for name, some in seconds.items()}
    for name, some in ratios.items():
        found[name]["of_raw"] = statistics.median(some)
    return found


def measure_all(total_mib: int, rounds: int, media: list[str], folder: Path) -> Report:
    report = Report(details={"mib": total_mib, "rounds": rounds, "disk_threads": THREADS})
    raw_of = {"host write": "memcpy", "host read": "memcpy", "disk write": "raw write", "disk read": "raw read"}
    for size in BLOCK_MIB:
        found = report.details[f"{size:g}"] = measure(size, total_mib, rounds, media, folder)
        for name, raw in raw_of.items():
            if name in found:
                rate, raw_rate = found[name]["gb_per_s"], found[raw]["gb_per_s"]
                notes = f"{found[name]['of_raw']:.0%} of {raw} by rounds; target 80%"
                medium, _, action = name.partition(" ")
                case = f"{medium} tier, {size:g} MiB blocks"
                report.results.append(Result(case, action, "GB/s", rate, "higher", raw, raw_rate, "baseline", notes))
    return report
