"""The measuring part of `mooncake_tier`.

python -m bench.kv._mooncake_tier MASTER_ADDRESS      # the process that owns a segment, until its stdin ends
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.contract import Report, Result
from bench.support.processes import environment, python_module
from stoker.base.config import StoreSettings
from stoker.base.ids import BlockKey
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import BlockName
from stoker.kv.device.checksum import checksum
from stoker.kv.mooncake.master import MooncakeMaster
from stoker.kv.store.buffer_pool import HEADROOM_BYTES, new_buffer
from stoker.kv.store.tiers.mooncake.mooncake_tier import MooncakeTier
from stoker.kv.store.tiers.tier import TierContext

BATCH_BYTES = 64 << 20
SEGMENT_GIB = 1.0
_TOUCHED_SHARE = 0.9  # of the segment, written once before the measurement


@dataclass(frozen=True, slots=True)
class TierBandwidth:
    block_mib: float
    action: str
    bare_gb_per_s: float
    tier_gb_per_s: float
    ratio: float
    middle_half: tuple[float, float]  # of the rounds' ratios


def own_a_segment(master: str) -> None:
    """Own a segment until stdin ends."""
    tier = make_tier(master, SEGMENT_GIB, 1 << 20)
    print("ready", flush=True)
    sys.stdin.read()
    tier.close()


def make_tier(master: str, segment_gib: float, block_bytes: int) -> MooncakeTier:
    layout = KvLayout.of(1, 1, block_bytes // 2 // 16 // 4, 16, "float32", 4)
    assert layout.block_bytes == block_bytes
    settings = StoreSettings(mooncake_master=master, mooncake_segment_gib=segment_gib)
    return MooncakeTier(
        settings, TierContext(f"bench {block_bytes}", layout, lambda keys: None, headroom_bytes=HEADROOM_BYTES)
    )


def measure(master: str, block_bytes: int, num_rounds: int) -> list[TierBandwidth]:
    tier = make_tier(master, 0.0, block_bytes)
    from mooncake.store import MooncakeDistributedStore

    bare = MooncakeDistributedStore()
    assert bare.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
    count = BATCH_BYTES // block_bytes
    blocks, back = (
        [new_buffer(block_bytes) for _ in range(count)] for _ in range(2)
    )  # page-aligned, as the engine's are
    for buffer in blocks:
        buffer[:] = np.random.default_rng(0).integers(0, 256, block_bytes, dtype=np.uint8)
    for buffer in (*blocks, *back):
        assert bare.register_buffer(buffer.ctypes.data, block_bytes) == 0
    sizes = [block_bytes] * count
    # The store computes these once for all tiers, when it copies a block out of the pool.
    checksums = [checksum(block) for block in blocks]
    src, dst = ([buffer.ctypes.data for buffer in buffers] for buffers in (blocks, back))
    for put in (True, False):  # the first write to a page of the segment is slow: the kernel allocates it
        for i in range(int(SEGMENT_GIB * 2**30 * _TOUCHED_SHARE) // BATCH_BYTES):
            touched = [f"touched/{i}/{j}" for j in range(count)]
            codes = bare.batch_put_from(touched, src, sizes) if put else bare.batch_remove(touched, True)
            assert not any(codes), codes
    seconds: dict[tuple[str, str], list[float]] = {}

    def timed(side: str, action: str, call: Callable[[], Sequence[int]], good: int) -> None:
        started_s = time.perf_counter()
        codes = call()
        seconds.setdefault((side, action), []).append(time.perf_counter() - started_s)
        assert all(code == good for code in codes), f"{side} {action}: {codes}"

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
            seconds.clear()  # the first round opens connections
    tier.close()
    bare.close()
    found = []
    for action in ("write", "read"):
        bare_rate, tier_rate = (
            BATCH_BYTES / statistics.median(seconds[side, action]) / 1e9 for side in ("bare", "tier")
        )
        rounds = zip(seconds["bare", action], seconds["tier", action], strict=True)
        low, ratio, high = statistics.quantiles(bare_s / tier_s for bare_s, tier_s in rounds)
        found.append(TierBandwidth(block_bytes / 2**20, action, bare_rate, tier_rate, ratio, (low, high)))
    return found


def measure_all(num_rounds: int) -> Report:
    with tempfile.TemporaryDirectory() as folder, MooncakeMaster(Path(folder) / "master.log") as master:
        command = python_module("bench.kv._mooncake_tier", master.address)
        owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdout.readline()
        found = [one for mib in (0.5, 2.0, 8.0) for one in measure(master.address, int(mib * 2**20), num_rounds)]
        owner.stdin.close()
        owner.wait(20)
    results = [
        Result(
            f"Mooncake tier, {one.block_mib:g} MiB blocks", one.action, "GB/s", one.tier_gb_per_s, "higher",
            "Mooncake Store, bare API", one.bare_gb_per_s, "baseline",
            f"{one.ratio:.0%} by rounds, middle half {one.middle_half[0]:.0%} to {one.middle_half[1]:.0%}; target 90%",
        )
        for one in found
    ]  # fmt: skip
    return Report(results, [asdict(one) for one in found])


if __name__ == "__main__":
    own_a_segment(sys.argv[1])
