"""A worker's Mooncake tier in a process of its own: `python mooncake_worker.py MASTER SEGMENT_GIB`, then one line per
command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from unittest.mock import patch

import numpy as np

from stoker.base.config import StoreSettings
from stoker.base.ids import BlockKey
from stoker.kv.blocks.keys import next_key, root_key
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import BlockName, TierUnavailable
from stoker.kv.device.checksum import checksum
from stoker.kv.store.tiers.mooncake.mooncake_tier import MooncakeTier
from stoker.kv.store.tiers.tier import HostBytes, TierContext

FINGERPRINT = "tiny"
PATIENCE_S = 60.0  # for events that happen soon, however busy the machine is
LAYOUT = KvLayout.of(num_layers=2, num_heads=4, width=32, block_tokens=16, dtype="float32", dtype_bytes=4)
ROOT = root_key(FINGERPRINT)


def chain(count: int, seed: int = 0) -> list[BlockName]:
    """The blocks of one prompt, in order."""
    names: list[BlockName] = []
    parent = ROOT
    for i in range(count):
        token_ids = tuple(range(seed * 100_000 + 16 * i, seed * 100_000 + 16 * i + 16))
        names.append(BlockName(next_key(parent, token_ids), parent, token_ids, None if i else ""))
        parent = names[-1].key
    return names


def contents(name: BlockName) -> HostBytes:
    """The bytes of the block with this name, the same in every process."""
    seed = int.from_bytes(name.key[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.block_bytes, dtype=np.uint8)


def make_tier(
    master: str,
    segment_gib: float,
    evicted: list[BlockKey] | None = None,
    ssd_dir: Path | None = None,
    forgotten: list[BlockKey] | None = None,
) -> MooncakeTier:
    ssd = None if ssd_dir is None else str(ssd_dir)
    settings = StoreSettings(mooncake_master=master, mooncake_segment_gib=segment_gib, mooncake_ssd_dir=ssd)
    reported = [[] if keys is None else keys for keys in (evicted, forgotten)]
    return MooncakeTier(settings, TierContext(FINGERPRINT, LAYOUT, reported[0].extend, reported[1].extend))


def write(tier: MooncakeTier, names: list[BlockName]) -> list[bool]:
    data = [contents(name) for name in names]
    return tier.write(names, data, [checksum(block) for block in data])


def read(tier: MooncakeTier, names: list[BlockName]) -> list[bool]:
    """Return which blocks could be read, and check their bytes."""
    into = [np.full(LAYOUT.block_bytes, 0xEE, dtype=np.uint8) for _ in names]
    right = tier.read([name.key for name in names], into)
    for name, data, is_right in zip(names, into, right, strict=True):
        assert not is_right or np.array_equal(data, contents(name)), f"block {name.key.hex()} is wrong"
    return right


def within(deadline_s: float, holds: Callable[[], bool]) -> bool:
    give_up = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def calls_take(seconds: float) -> Iterator[None]:
    """Let calls of tiers made here take `seconds` before they count as a miss, so that a stalled machine does not fail
    a test."""
    with (
        patch("stoker.kv.store.tiers.mooncake.mooncake_tier._FIND_S", seconds),
        patch("stoker.kv.store.tiers.mooncake.mooncake_tier._CALL_S", seconds),
        patch("stoker.kv.store.tiers.mooncake.mooncake_suspect_blocks._LOOKUP_S", seconds),
        patch("stoker.kv.store.tiers.mooncake.mooncake_client._FIRST_WAIT_S", seconds),
    ):
        yield


def finds(tier: MooncakeTier, names: list[BlockName]) -> bool:
    """Return True if all are found soon. On a busy machine one call may time out."""
    return within(PATIENCE_S, lambda: all(tier.find([name.key for name in names])))


def reads(tier: MooncakeTier, names: list[BlockName]) -> bool:
    def came() -> bool:
        try:
            return all(read(tier, names))
        except TierUnavailable:
            return False

    return within(PATIENCE_S, came)


def writes(tier: MooncakeTier, names: list[BlockName]) -> bool:
    return within(PATIENCE_S, lambda: all(write(tier, names)))


class WorkerProcess:
    """Several start at once. The first command waits until the process is up."""

    def __init__(self, master: str, segment_gib: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, master, str(segment_gib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._is_up = False

    def ask(self, command: str, count: int, seed: int = 0) -> list[bool]:
        """Let the process find, read or write the blocks of a chain."""
        assert self._process.stdin is not None
        if not self._is_up:
            self._answer()
            self._is_up = True
        print(command, count, seed, file=self._process.stdin, flush=True)
        return self._answer()

    def has_all(self, command: str, count: int, seed: int = 0) -> bool:
        return within(PATIENCE_S, lambda: all(self.ask(command, count, seed)))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Let the process end normally, and return its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(PATIENCE_S)

    def _answer(self) -> list[bool]:
        assert self._process.stdout is not None
        answer: list[bool] = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def main() -> None:
    tier = make_tier(sys.argv[1], float(sys.argv[2]))
    print("[]", flush=True)
    for line in sys.stdin:
        command, count, seed = line.split()
        names = chain(int(count), int(seed))
        try:
            match command:
                case "find":
                    result = tier.find([name.key for name in names])
                case "read":
                    result = read(tier, names)
                case _:
                    result = write(tier, names)
        except TierUnavailable:
            result = [False] * len(names)
        print(json.dumps(result), flush=True)
    # No close(): the end of the process must suffice.


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
