"""KV events from the pool to a subscriber that may start late, miss some, or outlive the worker's process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from waiting import LONG_S

from stoker.base.errors import ConfigError
from stoker.base.fleet_key import FleetKey
from stoker.base.ids import BlockKey, WorkerId
from stoker.engine.process.block_log import BlockLog
from stoker.kv.blocks.keys import block_keys, next_key, root_key, salt_hash
from stoker.proto.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    read_message,
    read_replay,
    replay_request,
)
from stoker.proto.messages import BlocksForgotten, BlocksNamed, KvEvents, WorkerReport
from stoker.worker.kv_mirror import KvMirror
from stoker.worker.report import Reporter

SIZE = 4


def name_chain(log: BlockLog, token_ids: list[int], salt: str = "", start: int = 0) -> list[BlockKey]:
    root = root_key("model", salt)
    keys = block_keys(token_ids, root, SIZE)
    for i in range(start, len(keys)):
        tokens = token_ids[i * SIZE : (i + 1) * SIZE]
        log.named(keys[i], keys[i - 1] if i else root, tokens, None if i else salt)
    return keys


class Follower:
    """The gateway's view of the events: blocks by their tokens from the root, independent of the worker's keys."""

    def __init__(self) -> None:
        self.prefixes: dict[Any, tuple[str | None, tuple[int, ...]]] = {}

    def read(self, events: list[Any]) -> Follower:
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.prefixes.clear()
                case BlockRemoved():
                    for key in event.block_hashes:
                        self.prefixes.pop(key, None)
                case BlockStored():
                    assert event.block_size == SIZE
                    assert len(event.token_ids) == SIZE * len(event.block_hashes)
                    if event.parent_block_hash is None:
                        salt = event.extra_keys[0][0] if event.extra_keys and event.extra_keys[0] else None
                        before: tuple[int, ...] = ()
                    else:
                        salt, before = self.prefixes[event.parent_block_hash]
                    for i, key in enumerate(event.block_hashes):
                        before += tuple(event.token_ids[i * SIZE : (i + 1) * SIZE])
                        self.prefixes[key] = (salt, before)
        return self


def test_blocks_of_one_chain_make_one_event() -> None:
    log = BlockLog()
    keys = name_chain(log, list(range(12)))
    log.forgot(keys[2])
    log.forgot(keys[1])
    other = name_chain(log, list(range(8)), salt="tenant")
    named, forgotten, salted = log.take()
    assert named == BlocksNamed(keys=keys, parent=None, token_ids=list(range(12)))
    assert forgotten == BlocksForgotten(keys=[keys[2], keys[1]])
    assert salted == BlocksNamed(keys=other, parent=None, token_ids=list(range(8)), salt=salt_hash("tenant"))
    assert log.take() == []
    name_chain(log, list(range(12)), start=1)
    (again,) = log.take()
    assert again == BlocksNamed(keys=keys[1:], parent=keys[0], token_ids=list(range(4, 12)))


def test_a_salt_itself_never_leaves_the_process() -> None:
    log = BlockLog()
    name_chain(log, [1, 2, 3, 4], salt="secret-tenant")
    public = KvMirror().apply(KvEvents(events=log.take()))
    assert b"secret-tenant" not in msgspec.msgpack.encode(public)
    assert isinstance(public[0], BlockStored)
    assert public[0].extra_keys == [[salt_hash("secret-tenant")]]
    assert salt_hash("") is None


def test_a_snapshot_equals_the_sum_of_all_events() -> None:
    rng = random.Random(4)
    log, mirror, follower = BlockLog(), KvMirror(), Follower()
    known: dict[BlockKey, int] = {}
    for _ in range(300):
        if known and rng.random() < 0.3:
            # The ends of chains are removed first, as in the pool.
            key = max(known, key=lambda key: (known[key], key))
            del known[key]
            log.forgot(key)
        else:
            salt = rng.choice(["", "a", "b"])
            token_ids = [rng.randrange(3) for _ in range(SIZE * rng.randint(1, 6))]
            parent = root_key("model", salt)
            for i in range(len(token_ids) // SIZE):
                tokens = token_ids[i * SIZE : (i + 1) * SIZE]
                key = next_key(parent, tokens)
                if key not in known:
                    known[key] = i
                    log.named(key, parent, tokens, None if i else salt)
                parent = key
        follower.read(mirror.apply(KvEvents(events=log.take())))
    assert set(follower.prefixes) == set(known)
    assert len(mirror) == len(known) > 50
    late = Follower().read([BlockStored(block_hashes=[b"x"], parent_block_hash=None, token_ids=[1] * 4, block_size=4)])
    assert late.read(list(mirror.snapshot())).prefixes == follower.prefixes


def test_a_long_chain_and_its_branches_fit_into_a_snapshot() -> None:
    log, mirror = BlockLog(), KvMirror()
    trunk = list(range(SIZE * 600))
    name_chain(log, trunk)
    for at in (1, 256, 257, 599):
        branch = trunk[: SIZE * at] + [7] * SIZE * 3
        name_chain(log, branch, start=at)
    follower = Follower().read(mirror.apply(KvEvents(events=log.take())))
    assert len(follower.prefixes) == 612
    assert Follower().read(list(mirror.snapshot())).prefixes == follower.prefixes


def report(number: int) -> WorkerReport:
    return WorkerReport(
        worker_id=WorkerId("w-1"),
        number=number,
        role="unified",
        ready=True,
        draining=False,
        waiting_sequences=1,
        waiting_tokens=2,
        running_sequences=3,
        free_blocks=4,
        num_blocks=5,
        block_tokens=16,
        prefill_tokens_per_s=None,
        step_s=0.5,
    )


class Listener:
    def __init__(self, reporter: Reporter, topic: bytes) -> None:
        self._context = zmq.asyncio.Context()
        self.events = self._context.socket(zmq.SUB)
        self.events.subscribe(topic)
        self.events.subscribe(b"load")
        self.events.connect(f"tcp://127.0.0.1:{reporter.events_port}")
        self.replays = self._context.socket(zmq.DEALER)
        self.replays.connect(f"tcp://127.0.0.1:{reporter.replay_port}")

    async def is_subscribed(self) -> None:
        """Wait until the subscription is active. Load reports come all the time, and their topic was subscribed last."""
        await self.events.recv_multipart()
        self.events.unsubscribe(b"load")

    async def replay(self, start: int) -> list[tuple[int, list[Any]]]:
        await self.replays.send_multipart(replay_request(start))
        got = []
        while True:
            message = read_replay(await self.replays.recv_multipart())
            if message.is_end:
                return got
            got.append((message.seq, decode_batch(message.payload).events))

    def close(self) -> None:
        self.events.close(linger=0)
        self.replays.close(linger=0)
        self._context.term()


def with_reporter(
    check: Callable[[Reporter, Listener], Awaitable[None]], topic: bytes = b"kv", kept_batches: int = 4
) -> None:
    async def main() -> None:
        reporter = Reporter("127.0.0.1", kept_batches=kept_batches)
        reporter.start(report)
        listener = Listener(reporter, topic)
        try:
            async with asyncio.timeout(60):
                await listener.is_subscribed()
                await check(reporter, listener)
        finally:
            listener.close()
            await reporter.stop()

    asyncio.run(main())


def test_events_are_numbered_and_can_be_replayed() -> None:
    async def check(reporter: Reporter, listener: Listener) -> None:
        log = BlockLog()
        for i in range(3):
            name_chain(log, list(range(i, i + 8)))
            reporter.blocks_changed(KvEvents(events=log.take()))
        got = [read_message(await listener.events.recv_multipart()) for _ in range(3)]
        assert [(message.topic, message.seq) for message in got] == [(b"kv", 1), (b"kv", 2), (b"kv", 3)]
        again = await listener.replay(2)
        assert [seq for seq, _ in again] == [2, 3]
        assert again[0][1] == decode_batch(got[1].payload).events
        assert await listener.replay(4) == [], "nothing was missed"
        everything = await listener.replay(0)
        assert [seq for seq, _ in everything] == [0, 1, 2, 3]
        assert everything[0][1] == [AllBlocksCleared()]

    with_reporter(check)


@pytest.mark.parametrize("start", [0, 3, 500], ids=["all", "too-old", "of-an-earlier-process"])
def test_a_replay_of_events_that_are_no_longer_stored_is_a_snapshot(start: int) -> None:
    async def check(reporter: Reporter, listener: Listener) -> None:
        log, follower = BlockLog(), Follower()
        for i in range(20):
            name_chain(log, list(range(i, i + 8)))
            changes = KvEvents(events=log.take())
            reporter.blocks_changed(changes)
            follower.read(KvMirror().apply(changes))
        told = await listener.replay(start)
        assert {seq for seq, _ in told} == {20}
        assert told[0][1][0] == AllBlocksCleared()
        assert Follower().read([event for _, events in told for event in events]).prefixes == follower.prefixes
        reporter.all_blocks_lost()
        assert await listener.replay(21) == [(21, [AllBlocksCleared()])]

    with_reporter(check)


def test_an_invalid_replay_request_does_not_affect_others() -> None:
    async def check(reporter: Reporter, listener: Listener) -> None:
        for frames in ([b"x"], [b"", b"short"], [b"", b"12345678", b"more"], [b"a", b"b", b"c", b"d"]):
            await listener.replays.send_multipart(frames)
        assert [seq for seq, _ in await listener.replay(0)] == [0]

    with_reporter(check)


def test_load_is_reported_a_few_times_a_second_and_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(reporter: Reporter, listener: Listener) -> None:
        decoder = msgspec.msgpack.Decoder(WorkerReport)
        got = []
        for _ in range(3):
            message = read_message(await listener.events.recv_multipart())
            assert message.topic == b"load"
            got.append(decoder.decode(message.payload))
            assert got[-1] == report(message.seq)
        assert [r.number - got[0].number for r in got] == [0, 1, 2]
        monkeypatch.setattr("stoker.worker.report._REPORT_EVERY_S", 3600.0)
        message = read_message(await listener.events.recv_multipart())  # the last one that arrives without a replay
        await asyncio.sleep(0.03)
        reporter.load_changed()
        assert read_message(await listener.events.recv_multipart()).seq == message.seq + 1

    with_reporter(check, topic=b"load")


def test_a_port_in_use_is_reported_at_once() -> None:
    async def main() -> None:
        first = Reporter("127.0.0.1")
        with pytest.raises(ConfigError, match="--events-port"):
            Reporter("127.0.0.1", first.events_port)
        await first.stop()

    asyncio.run(main())


def test_a_stranger_cannot_announce_a_large_message() -> None:
    async def main() -> None:
        reporter = Reporter("127.0.0.1", key=FleetKey("s" * 16))
        reporter.start(report)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
        command = b"\x06" + (1 << 30).to_bytes(8, "big")
        for port in (reporter.events_port, reporter.replay_port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(greeting + command + b"x" * 1000)
            async with asyncio.timeout(LONG_S / 2):  # ZMQ itself closes a connection without a handshake after 30 s
                with suppress(ConnectionError):
                    await reader.read()  # the reporter closes the connection
            writer.close()
        await reporter.stop()

    asyncio.run(main())
