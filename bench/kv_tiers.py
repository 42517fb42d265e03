"""The KV tiers beside their raw media: GB/s of reading and writing blocks of 0.5, 2 and 8 MiB.

    python bench/kv_tiers.py OUT.json [--dir DIR] [--mib 256] [--rounds 5] [--only host disk]

Each medium is a function that yields named measurements; in each round a tier's is taken right after that of its raw medium, and
their ratio is the median of the rounds' own. Host: one copy from memory to memory (one thread), which is all that a read of
shared memory must do. Disk: reads of one plain file, written beforehand, past the page cache and through it with nothing
cached, by as many threads and in pieces as large as the tier's; for writes, the same the other way. Buffers are on page
borders, as the engine's are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table

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
class Measurement:
    """`run` moves all blocks once. `raw`: the measurement that this one is compared with."""

    name: str
    run: Callable[[], None]
    before: Callable[[], None] = lambda: None
    raw: Measurement | None = None

    def seconds(self) -> float:
        self.before()
        started = time.perf_counter()
        self.run()
        return time.perf_counter() - started


@dataclass(frozen=True)
class Blocks:
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


def make_blocks(block_mib: float, total_mib: int) -> Blocks:
    layout = KvLayout(
        num_layers=int(block_mib * 4), num_heads=8, head_dim=128, block_tokens=64, dtype="bfloat16", dtype_bytes=2
    )
    assert layout.block_bytes == block_mib * 2**20
    count = int(total_mib / block_mib)
    rng = np.random.default_rng(0)
    names = [BlockName(BlockKey(rng.bytes(16)), BlockKey(bytes(16)), tuple(range(64)), "") for _ in range(count)]
    return Blocks(layout, names, pages(count, layout.block_bytes, rng), pages(count, layout.block_bytes, rng))


def pages(count: int, size: int, rng: np.random.Generator) -> list[HostBytes]:
    memory = np.frombuffer(mmap(-1, count * size), dtype=np.uint8)
    memory.reshape(-1, 1 << 19)[:] = rng.integers(0, 255, 1 << 19, dtype=np.uint8)
    return [memory[at * size : (at + 1) * size] for at in range(count)]


def made(tier_name: str, settings: StoreSettings, blocks: Blocks) -> Tier:
    tier = build_tier(tier_name, settings, TierContext("bench", blocks.layout, lambda keys: None))
    assert tier is not None
    return tier


def of_tier(
    medium: str, tier: Tier, blocks: Blocks, raw_read: Measurement, raw_write: Measurement
) -> list[Measurement]:
    checksums = [
        checksum(block) for block in blocks.source
    ]  # which the store makes once for all tiers, when it copies a block

    def write() -> None:
        assert all(tier.write(blocks.names, blocks.source, checksums))

    def read() -> None:
        assert all(tier.read(blocks.keys, blocks.target))

    return [
        Measurement(f"{medium} write", write, before=lambda: tier.drop(blocks.keys), raw=raw_write),
        Measurement(f"{medium} read", read, raw=raw_read),
    ]


def host(blocks: Blocks, folder: Path) -> Iterator[list[Measurement]]:
    name = f"bench-{os.getpid()}"
    tier = made("host", StoreSettings(name=name, host_gib=1.05 * blocks.num_bytes / 2**30), blocks)

    def copy() -> None:
        for source, target in zip(blocks.source, blocks.target, strict=True):
            np.copyto(target, source)

    memcpy = Measurement("memcpy", copy)
    yield of_tier("host", tier, blocks, memcpy, memcpy)
    tier.close()
    remove_host_store(name)


def disk(blocks: Blocks, folder: Path) -> Iterator[list[Measurement]]:
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

    def forget() -> None:
        fd = os.open(plain, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    new = os.O_WRONLY | os.O_CREAT
    all_of(plain, new | os.O_DIRECT, os.pwritev, blocks.source)()
    settings = StoreSettings(host_gib=1.0, disk_dir=str(folder / "kv"), disk_gib=1.05 * blocks.num_bytes / 2**30)
    tier = made("disk", settings, blocks)
    raw_read = Measurement("raw read", all_of(plain, os.O_RDONLY | os.O_DIRECT, os.preadv, blocks.target))
    raw_write = Measurement(
        "raw write",
        all_of(written, new | os.O_DIRECT, os.pwritev, blocks.source),
        before=lambda: written.unlink(missing_ok=True),
    )
    buffered = Measurement("raw read, buffered", all_of(plain, os.O_RDONLY, os.preadv, blocks.target), before=forget)
    yield [buffered, *of_tier("disk", tier, blocks, raw_read, raw_write)]
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
            if round_ == 0:  # for warming up
                seconds.clear()
                ratios.clear()
        for medium in making:
            next(medium, None)
    figures = {name: {"gb_per_s": blocks.num_bytes / statistics.median(some) / 1e9} for name, some in seconds.items()}
    for name, some in ratios.items():
        figures[name]["of_raw"] = statistics.median(some)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--mib", type=int, default=256, help="moved in each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=sorted(MEDIA), default=sorted(MEDIA))
    args = parser.parse_args()
    results = {f"{size:g}": measure(size, args.mib, args.rounds, args.only, args.dir) for size in BLOCK_MIB}
    report = {"mib": args.mib, "rounds": args.rounds, "disk_threads": THREADS, "gb_per_s_by_block_mib": results}
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    table = Table("GB/s (of raw)", *(f"{size:g} MiB" for size in BLOCK_MIB))
    for name in results[f"{BLOCK_MIB[0]:g}"]:
        cells = (results[f"{size:g}"][name] for size in BLOCK_MIB)
        table.add_row(
            name, *(f"{c['gb_per_s']:.2f}" + (f" ({c['of_raw']:.0%})" if "of_raw" in c else "") for c in cells)
        )
    Console().print(table)


if __name__ == "__main__":
    main()
