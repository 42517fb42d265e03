"""The Mooncake tier beside Mooncake's bare API, in one run: GB/s of whole blocks, with all that a tier adds (header, checksums).

    python bench/kv_mooncake.py [--rounds 41] [--out OUT]

A master and a worker that owns a segment are processes of their own; this process has a bare client and a tier, both without
a segment, so that every byte crosses a socket. Both move the same blocks, in as many calls of the client, from and into the same
memory, which was touched before on both sides. Sizes are taken in turn, the two sides alternate within each round, and the medians
are what counts: of the rates, and of the rounds' own ratios, whose middle half is given too. Writes OUT.json and OUT.md, where
they are asked for.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np

from stoker.base.config import StoreSettings
from stoker.base.ids import BlockKey
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import BlockName
from stoker.kv.device.checksum import checksum
from stoker.kv.mooncake.master import MooncakeMaster
from stoker.kv.store.buffer_pool import HEADROOM_BYTES, new_buffer
from stoker.kv.store.tiers.mooncake.mooncake_tier import MooncakeTier
from stoker.kv.store.tiers.tier import TierContext
from stoker.loadgen.report import environment

BATCH_BYTES = 64 << 20
SEGMENT_GIB = 1.0
_TOUCHED = 0.9  # of the segment, before anything is measured


@dataclass(frozen=True, slots=True)
class Figure:
    block_mib: float
    what: str
    bare_gb_per_s: float
    tier_gb_per_s: float
    ratio: float
    middle_half: tuple[float, float]  # of the rounds' ratios


def own_a_segment(master: str) -> None:
    """What the other process does, until its stdin ends."""
    tier = make_tier(master, SEGMENT_GIB, 1 << 20)
    print("ready", flush=True)
    sys.stdin.read()
    tier.close()


def make_tier(master: str, segment_gib: float, block_bytes: int) -> MooncakeTier:
    layout = KvLayout(1, 1, block_bytes // 2 // 16 // 4, 16, "float32", 4)
    assert layout.block_bytes == block_bytes
    settings = StoreSettings(mooncake_master=master, mooncake_segment_gib=segment_gib)
    return MooncakeTier(
        settings, TierContext(f"bench {block_bytes}", layout, lambda keys: None, headroom_bytes=HEADROOM_BYTES)
    )


def measure(master: str, block_bytes: int, num_rounds: int) -> list[Figure]:
    tier = make_tier(master, 0.0, block_bytes)
    from mooncake.store import MooncakeDistributedStore

    bare = MooncakeDistributedStore()
    assert bare.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
    count = BATCH_BYTES // block_bytes
    blocks, back = ([new_buffer(block_bytes) for _ in range(count)] for _ in range(2))  # as the engine's are
    for buffer in blocks:
        buffer[:] = np.random.default_rng(0).integers(0, 256, block_bytes, dtype=np.uint8)
    for buffer in (*blocks, *back):
        assert bare.register_buffer(buffer.ctypes.data, block_bytes) == 0
    sizes = [block_bytes] * count
    checksums = [
        checksum(block) for block in blocks
    ]  # which the store makes once for all tiers, when it copies a block
    src, dst = ([buffer.ctypes.data for buffer in buffers] for buffers in (blocks, back))
    for put in (True, False):  # whoever writes first to a page of the segment waits for the kernel
        for i in range(int(SEGMENT_GIB * 2**30 * _TOUCHED) // BATCH_BYTES):
            keys = [f"touched/{i}/{j}" for j in range(count)]
            codes = bare.batch_put_from(keys, src, sizes) if put else bare.batch_remove(keys, True)
            assert not any(codes), codes
    seconds: dict[tuple[str, str], list[float]] = {}

    def timed(side: str, what: str, call: Callable[[], Sequence[int]], good: int) -> None:
        started_s = time.perf_counter()
        codes = call()
        seconds.setdefault((side, what), []).append(time.perf_counter() - started_s)
        assert all(code == good for code in codes), f"{side} {what}: {codes}"

    for i in range(num_rounds + 1):
        bare_keys = [f"bare/{i}/{j}" for j in range(count)]
        names = [BlockName(BlockKey(os.urandom(16)), BlockKey(bytes(16)), tuple(range(16))) for _ in range(count)]
        keys = [name.key for name in names]

        def bare_round(keys: list[str] = bare_keys) -> None:
            timed("bare", "write", lambda: bare.batch_put_from(keys, src, sizes), 0)
            timed("bare", "read", lambda: bare.batch_get_into(keys, dst, sizes), block_bytes)
            bare.batch_remove(keys, True)

        def tier_round(names: list[BlockName] = names, keys: list[BlockKey] = keys) -> None:
            timed("tier", "write", lambda: tier.write(names, blocks, checksums), True)
            timed("tier", "read", lambda: tier.read(keys, back), True)
            tier.drop(keys)

        for run in (bare_round, tier_round) if i % 2 else (tier_round, bare_round):
            for buffer in back:
                buffer[:] = 0
            run()
            assert all(map(np.array_equal, back, blocks))
        if i == 0:
            seconds.clear()  # connections were opened, pages touched
    tier.close()
    bare.close()
    figures = []
    for what in ("write", "read"):
        bare_rate, tier_rate = (BATCH_BYTES / statistics.median(seconds[side, what]) / 1e9 for side in ("bare", "tier"))
        rounds = zip(seconds["bare", what], seconds["tier", what], strict=True)
        low, ratio, high = statistics.quantiles(bare_s / tier_s for bare_s, tier_s in rounds)
        figures.append(Figure(block_bytes / 2**20, what, bare_rate, tier_rate, ratio, (low, high)))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--owner", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.owner:
        own_a_segment(arguments.owner)
        return
    with tempfile.TemporaryDirectory() as folder, MooncakeMaster(Path(folder) / "master.log") as master:
        command = [sys.executable, __file__, "--owner", master.address]
        owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdout.readline()
        figures = [
            figure for mib in (0.5, 2.0, 8.0) for figure in measure(master.address, int(mib * 2**20), arguments.rounds)
        ]
        owner.stdin.close()
        owner.wait(20)
    lines = ["| block | | bare API GB/s | tier GB/s | ratio | middle half |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {figure.block_mib:g} MiB | {figure.what} | {figure.bare_gb_per_s:.2f} | {figure.tier_gb_per_s:.2f} "
        f"| {figure.ratio:.2f} | {figure.middle_half[0]:.2f} to {figure.middle_half[1]:.2f} |"
        for figure in figures
    ]
    table = "\n".join(lines)
    print(table)
    if arguments.out is None:
        return
    arguments.out.with_suffix(".md").write_text(table + "\n")
    whole = {
        "environment": environment(),
        "rounds": arguments.rounds,
        "figures": [asdict(figure) for figure in figures],
    }
    arguments.out.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(whole)))


if __name__ == "__main__":
    main()
