"""Two workers share a store: the snapshot of one of them is right, also if the other removed blocks while the first
was idle or its engine was down."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from real import RealServer, serving_together, wait_for
from test_real_resume import FAST

from stoker.kv.store.tiers.host.host_memory import remove_host_store
from stoker.proto.events import BlockHash, BlockStored, decode_batch, read_replay, replay_request

TOKENS, BLOCKS, BLOCK_BYTES = 1024, 64, 8192  # per prompt
SHARED = ("CPU", "DISK")


@pytest.fixture(scope="module")
def two(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, RealServer]]:
    """Two workers whose store holds two prompts, in RAM and on disk."""
    folder = tmp_path_factory.mktemp("two")
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    store = ("--kv-store", name, "--kv-host-gib", "0.001", "--kv-disk", str(folder / "kv"), "--kv-disk-gib", "0.0015")
    try:
        with serving_together(tiny_folder, (folder / "0", FAST + store), (folder / "1", FAST + store)) as both:
            yield both[0], both[1]
    finally:
        remove_host_store(name)


def told(worker: RealServer) -> dict[str, set[BlockHash]]:
    """Return the blocks of a full replay, by medium."""
    replay = worker.send("/stoker/worker").json["replay"]
    held: dict[str, set[BlockHash]] = {medium: set() for medium in SHARED}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.RCVTIMEO, 20_000)
        socket.connect(replay)
        socket.send_multipart(replay_request(-1))
        while not (message := read_replay(socket.recv_multipart())).is_end:
            for event in decode_batch(message.payload).events:
                if isinstance(event, BlockStored) and event.medium in held:
                    held[event.medium] |= set(event.block_hashes)
    return held


def ask(worker: RealServer, number: int) -> None:
    """Send a prompt and wait until all of it is in the store."""
    before = written_bytes(worker)
    answer = worker.complete([100 + number] * TOKENS, max_tokens=1, temperature=0)
    assert answer.status == 200, answer.body
    wait_for(lambda: min(map(int.__sub__, written_bytes(worker), before)) >= BLOCKS * BLOCK_BYTES, 60.0)


def written_bytes(worker: RealServer) -> list[int]:
    figures = worker.metrics()
    return [int(figures.get(f'stoker_kv_tier_written_bytes_total{{tier="{tier}"}}', 0)) for tier in ("host", "disk")]


def test_a_snapshot_lacks_blocks_that_the_other_worker_removed(two: tuple[RealServer, RealServer]) -> None:
    one, other = two
    ask(one, 0)
    mine = told(one)
    assert {medium: len(keys) for medium, keys in mine.items()} == dict.fromkeys(SHARED, BLOCKS)
    for number in (1, 2, 3):
        ask(other, number)
    wait_for(lambda: not any(mine[medium] & told(one)[medium] for medium in SHARED), 30.0)


def test_a_snapshot_lacks_blocks_that_were_removed_while_the_engine_was_down(
    two: tuple[RealServer, RealServer],
) -> None:
    one, other = two
    ask(one, 4)
    mine = told(one)
    assert {medium: len(keys) for medium, keys in mine.items()} == dict.fromkeys(SHARED, BLOCKS)
    os.kill(one.engine_pid, signal.SIGKILL)
    for number in (5, 6, 7):
        ask(other, number)

    def is_right() -> bool:
        late, others = told(one), told(other)
        return all(len(late[medium]) >= BLOCKS and late[medium] <= others[medium] - mine[medium] for medium in SHARED)

    wait_for(is_right, 120.0)
