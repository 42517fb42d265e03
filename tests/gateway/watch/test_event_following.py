"""KV events over real sockets: whatever is lost, late or restarted, the index ends up equal to the pool."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import uvloop
import zmq
import zmq.asyncio
from waiting import LONG_S, until

from stoker.base.ids import BlockId, BlockKey, WorkerId
from stoker.engine.process.block_log import BlockLog
from stoker.fleet.prefix_index import PrefixIndex
from stoker.gateway.prefix.prefix_keys import root_key, token_keys
from stoker.gateway.watch.kv_events import FollowSettings, KvFollower, LoadListener
from stoker.gateway.watch.rekey import Rekeyer, WorkerIndex
from stoker.kv.blocks.keys import block_keys, salt_hash
from stoker.kv.blocks.keys import root_key as engine_root
from stoker.kv.blocks.pool import BlockPool
from stoker.proto.events import PublishedMessage, message_frames
from stoker.proto.messages import KvEvents, WorkerReport
from stoker.worker.report import Reporter

SIZE = 4
W = WorkerId("w")
SALTS = ("", "a")


@dataclass
class Engine:
    """The real pool under random work, published by a worker's own code."""

    rng: random.Random
    reporter: Reporter
    pool: BlockPool = field(init=False)
    log: BlockLog = field(default_factory=BlockLog)
    chains: dict[BlockKey, int] = field(default_factory=dict)  # block key -> prefix key
    running: list[list[BlockId]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(60, self.log)

    def step(self) -> None:
        if self.running and (self.rng.random() < 0.5 or self.pool.num_free < 12):
            self.pool.release(self.running.pop(self.rng.randrange(len(self.running))))
        elif self.pool.num_free >= 12:
            self._admit()
        self.pool.check()
        events = self.log.take()
        if events:
            self.reporter.blocks_changed(KvEvents(events=events))

    def _admit(self) -> None:
        salt = self.rng.choice(SALTS)
        tokens = [self.rng.randrange(2) for _ in range(SIZE * self.rng.randint(1, 10))]
        root = engine_root("model", salt)
        keys = block_keys(tokens, root, SIZE)
        ours = token_keys(array("I", tokens), root_key(salt_hash(salt)), SIZE)
        self.chains.update(zip(keys, ours, strict=True))
        hits = self.pool.match(keys)
        self.pool.hold(hits)
        blocks = hits + self.pool.take(len(keys) - len(hits))
        for i in range(len(hits), len(keys)):
            parent, tokens_here = (keys[i - 1] if i else root), tokens[i * SIZE : (i + 1) * SIZE]
            self.pool.name(blocks[i], keys[i], parent, tokens_here, None if i else salt)
        self.running.append(blocks)

    def present(self) -> set[int]:
        return {ours for key, ours in self.chains.items() if self.pool.match([key])}

    def truth(self) -> set[int]:
        """Prefix keys that can be found: a block whose parent is gone cannot."""
        found = set()
        for key, ours in self.chains.items():
            if self.pool.match([key]) and self._is_rooted(key):
                found.add(ours)
        return found

    def _is_rooted(self, key: BlockKey) -> bool:
        roots = {engine_root("model", salt) for salt in SALTS}
        while key not in roots:
            blocks = self.pool.match([key])
            name = self.pool._names[blocks[0]] if blocks else None
            if name is None:
                return False
            key = name.parent
        return True


class Lossy(KvFollower):
    """Loses published messages, and replays from a random message on, like a broken connection. Counts gaps and resyncs."""

    def __init__(self, *args: Any, loss: Callable[[], bool], **more: Any) -> None:
        self._loss = loss
        self._broken: object = None
        self.num_gaps = 0
        self.num_resyncs = 0
        super().__init__(*args, **more)

    @property
    def is_current(self) -> bool:
        """True if no known message is missing."""
        return self._replay is None and self._retry_timer is None and self._next is not None

    def resync(self) -> None:
        self.num_resyncs += 1
        super().resync()

    def _take(self, message: PublishedMessage) -> None:
        self.num_gaps += self._next is not None and message.seq > self._next
        super()._take(message)

    def _on_frames(self, frames: list[bytes]) -> None:
        if not self._loss():
            super()._on_frames(frames)

    def _on_replay(self, frames: list[bytes]) -> None:
        if self._loss():
            self._broken = self._replay
        if self._broken is not self._replay:
            super()._on_replay(frames)


@dataclass
class Listening:
    index: PrefixIndex
    follower: Lossy
    reports: list[bytes]

    def agrees(self, engine: Engine) -> bool:
        """The index has all keys that can be found and none that the pool lacks; orphans may be known or not."""
        held = set(self.index._holders[W].held[0]) if W in self.index._holders else set()
        return engine.truth() <= held <= engine.present()


@asynccontextmanager
async def listening(
    reporter_url: tuple[str, str | None], loss: Callable[[], bool] = lambda: False, snapshots: bool = True, **more: Any
) -> AsyncIterator[Listening]:
    index = PrefixIndex()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    rekeyer = Rekeyer(WorkerIndex(W, [index]), SIZE, hashes_salts=not snapshots)
    settings = FollowSettings(**{"replay_s": LONG_S, "first_wait_s": 0.01, "max_wait_s": 0.2, **more})
    reports: list[bytes] = []
    follower = Lossy(
        "w",
        context,
        *reporter_url,
        rekeyer,
        snapshots=snapshots,
        on_report=reports.append,
        settings=settings,
        loss=loss,
    )
    try:
        yield Listening(index, follower, reports)
    finally:
        follower.close()
        context.term()


def urls(reporter: Reporter) -> tuple[str, str]:
    return f"tcp://127.0.0.1:{reporter.events_port}", f"tcp://127.0.0.1:{reporter.replay_port}"


def report(number: int) -> WorkerReport:
    return WorkerReport(
        worker_id=W,
        number=number,
        role="unified",
        ready=True,
        draining=False,
        waiting_sequences=0,
        waiting_tokens=0,
        running_sequences=0,
        free_blocks=1,
        num_blocks=2,
        block_tokens=SIZE,
        prefill_tokens_per_s=None,
        step_s=None,
    )


def run(main: Any) -> None:
    uvloop.run(main)


async def settled(engine: Engine, listener: Listening) -> None:
    """A lost last message is noticed with the next one, so publish another."""

    def agrees() -> bool:
        engine.reporter.blocks_changed(KvEvents(events=[]))
        return listener.follower.is_current and listener.agrees(engine)

    await until(agrees, every_s=0.02)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kept", [10_000, 5])
def test_a_lost_event_heals(seed: int, kept: int) -> None:
    """With `kept` 5, gaps are soon older than the messages that the worker keeps, so it answers with snapshots."""

    async def main() -> None:
        rng = random.Random(seed)
        reporter = Reporter("127.0.0.1", kept_batches=kept)
        reporter.start(report)
        engine = Engine(rng, reporter)
        for _ in range(50):  # before the first subscription
            engine.step()
        lossy = True
        async with listening(urls(reporter), lambda: lossy and rng.random() < 0.1, replay_s=0.3) as listener:
            follower = listener.follower

            def steps() -> bool:
                for _ in range(20):
                    engine.step()
                return follower.num_gaps + follower.num_resyncs > 1

            for _ in range(20):
                steps()
                await asyncio.sleep(0.002)
            await until(steps)  # even if subscribing took long
            lossy = False
            await settled(engine, listener)
            assert len(engine.truth()) > 10
            await until(lambda: bool(listener.reports))
        await reporter.stop()

    run(main())


def test_without_a_gap_there_is_no_second_replay() -> None:
    async def main() -> None:
        reporter = Reporter("127.0.0.1")
        reporter.start(report)
        engine = Engine(random.Random(1), reporter)
        async with listening(urls(reporter)) as listener:
            await until(lambda: listener.follower.is_current)
            for _ in range(200):
                engine.step()
                await asyncio.sleep(0)
            await settled(engine, listener)
            assert listener.follower.num_gaps <= 1  # the subscription may have begun after the snapshot
            assert listener.follower.num_resyncs == 1
        await reporter.stop()

    run(main())


@pytest.mark.parametrize("steps_before", [3, 300])
def test_a_worker_restarted_on_the_same_port_is_resynced(steps_before: int) -> None:
    async def main() -> None:
        first = Reporter("127.0.0.1")
        first.start(report)
        engine = Engine(random.Random(1), first)
        where = urls(first)
        async with listening(where, replay_s=0.3) as listener:
            for _ in range(100):
                engine.step()
            await settled(engine, listener)
            assert engine.truth()
            await first.stop()
            second: Reporter | None = None
            while second is None:  # the port is free a moment after the socket is closed
                try:
                    second = _reporter_at(where)
                except Exception:
                    await asyncio.sleep(0.01)
            second.start(report)
            anew = Engine(random.Random(2), second)
            for _ in range(steps_before):
                anew.step()
            await settled(anew, listener)
            assert anew.truth()
            await second.stop()

    run(main())


def _reporter_at(where: tuple[str, str]) -> Reporter:
    """Start on the ports of a reporter that ended."""
    from stoker.worker import report as module

    ports = [int(url.rsplit(":", 1)[1]) for url in where]
    bind, module._bind = module._bind, lambda socket, host, port: bind(socket, host, ports.pop(0))
    try:
        return Reporter("127.0.0.1")
    finally:
        module._bind = bind


# ---- foreign engines


class Foreign:
    """Publishes and replays as vLLM (with topic) or SGLang (without) does, and keeps only its last messages."""

    def __init__(self, kept: int, with_topic: bool, replays: bool = True) -> None:
        self._context = zmq.asyncio.Context()
        self._publisher = zmq.Context(self._context).socket(zmq.XPUB)  # a PUB socket that sees subscriptions
        self._replayer = self._context.socket(zmq.ROUTER)
        self.port = self._publisher.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._replayer.bind_to_random_port("tcp://127.0.0.1")
        self._kept, self._with_topic, self._replays = kept, with_topic, replays
        self._sent: list[tuple[int, bytes]] = []
        self._task = asyncio.create_task(self._answer())

    def url(self) -> tuple[str, str | None]:
        return f"tcp://127.0.0.1:{self.port}", f"tcp://127.0.0.1:{self.replay_port}" if self._replays else None

    async def subscribed(self) -> None:
        """Wait until the subscription is active."""
        await until(lambda: self._publisher.poll(0) != 0)

    def publish(self, *events: Any, lost: bool = False) -> None:
        seq = self._sent[-1][0] + 1 if self._sent else 0
        payload = msgspec.msgpack.encode([1.0, list(events), 0])
        self._sent = [*self._sent, (seq, payload)][-self._kept :]
        if not lost:
            self._publisher.send_multipart(message_frames(b"kv-events" if self._with_topic else b"", seq, payload))

    async def _answer(self) -> None:
        while True:
            asker, empty, start = await self._replayer.recv_multipart()
            topic = [b"kv-events"] if self._with_topic else []
            for seq, payload in self._sent:
                if seq >= int.from_bytes(start, "big"):
                    await self._replayer.send_multipart([asker, empty, *topic, seq.to_bytes(8, "big"), payload])
            end = (-1).to_bytes(8, "big", signed=True)
            await self._replayer.send_multipart([asker, empty, *topic, end, b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._publisher.close(0)
        self._replayer.close(0)
        self._context.term()


def stored(block_hash: int, tokens: Sequence[int], parent: int | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [block_hash],
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def held(listener: Listening, tokens: Sequence[int]) -> int:
    match = listener.index.match(token_keys(array("I", tokens), root_key(None), SIZE)).get(W)
    return match.blocks if match else 0


TOKENS = list(range(1, 1 + 8 * SIZE))


def block(i: int) -> list[int]:
    return TOKENS[i * SIZE : (i + 1) * SIZE]


@pytest.mark.parametrize("with_topic", [True, False])
def test_a_gap_of_a_foreign_engine_is_filled_from_its_replay(with_topic: bool) -> None:
    async def main() -> None:
        engine = Foreign(100, with_topic)
        engine.publish(stored(0, block(0)))
        async with listening(engine.url(), snapshots=False) as listener:
            await until(lambda: held(listener, TOKENS) == 1)  # published before the subscription
            await engine.subscribed()
            engine.publish(stored(1, block(1), 0))
            await until(lambda: held(listener, TOKENS) == 2)
            engine.publish(stored(2, block(2), 1), lost=True)
            engine.publish(["BlockStored", [3], 2, block(3), SIZE])
            await until(lambda: held(listener, TOKENS) == 4)
            assert listener.follower.num_gaps == 1
            engine.publish(["BlockRemoved", [3]], lost=True)
            engine.publish(["AllBlocksCleared"])
            await until(lambda: held(listener, TOKENS) == 0)
        await engine.close()

    run(main())


@pytest.mark.parametrize("replays", [True, False])
def test_blocks_that_a_foreign_engine_cannot_replay_are_dropped(replays: bool) -> None:
    async def main() -> None:
        engine = Foreign(2, True, replays)
        async with listening(engine.url(), snapshots=False) as listener:
            await engine.subscribed()
            await until(
                lambda: listener.follower.num_resyncs == 1
            )  # it has noticed the new connection and dropped all blocks
            engine.publish(stored(0, block(0)))
            engine.publish(stored(1, block(1), 0))
            await until(lambda: held(listener, TOKENS) == 2)
            for _ in range(5):
                engine.publish({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}, lost=True)
            engine.publish(stored(7, [9] * SIZE))
            await until(lambda: held(listener, [9] * SIZE) == 1)
            assert held(listener, TOKENS) == 0  # it may still be cached, but that is unknown
            await until(lambda: listener.follower.is_current)
        await engine.close()

    run(main())


def test_nonsense_is_no_end_of_listening() -> None:
    async def main() -> None:
        engine = Foreign(100, True)
        async with listening(engine.url(), snapshots=False) as listener:
            await engine.subscribed()
            engine._publisher.send_multipart([b"kv-events", b"short", b""])
            engine._publisher.send_multipart([b"one"])
            engine._sent.append((0, b"\xc1\xc1"))
            engine._publisher.send_multipart(message_frames(b"kv-events", 0, b"\xc1\xc1"))
            engine.publish(stored(1, block(0)))
            await until(lambda: held(listener, TOKENS) == 1)
        await engine.close()

    run(main())


@pytest.mark.parametrize("limit", [{"max_held": 10}, {"max_held_bytes": 1000}], ids=str)
def test_a_worker_that_never_answers_is_retried_elsewhere_after_the_timeout(limit: dict[str, int]) -> None:
    async def main() -> None:
        reporter = Reporter("127.0.0.1")  # not started: its replay socket is not served
        engine = Engine(random.Random(3), reporter)
        async with listening(urls(reporter), replay_s=0.05, **limit) as listener:
            await until(lambda: listener.follower.num_resyncs > 2)
            for _ in range(100):
                engine.step()
            await until(lambda: len(listener.follower._held) > 0)
            assert listener.follower._held_bytes == sum(len(one.payload) for one in listener.follower._held)
            assert listener.follower._held_bytes <= limit.get("max_held_bytes", 1 << 20)
            reporter.start(report)
            await settled(engine, listener)
        await reporter.stop()

    run(main())


def test_a_foreign_engine_cannot_fill_the_memory_with_one_message() -> None:
    async def main() -> None:
        engine = Foreign(100, True)
        async with listening(engine.url(), snapshots=False, max_foreign_bytes=4096) as listener:
            await engine.subscribed()
            await until(lambda: listener.follower.num_resyncs == 1)
            engine._publisher.send_multipart(message_frames(b"kv-events", 0, b"x" * (1 << 20)))
            await until(lambda: listener.follower.num_resyncs >= 2)  # the connection was closed
            while held(listener, TOKENS) == 0:  # what is published before it has subscribed again is lost
                engine.publish(stored(0, block(0)))
                await asyncio.sleep(0.05)
        await engine.close()

    run(main())


def test_a_bad_replay_address_costs_only_the_replays() -> None:
    async def main() -> None:
        engine = Foreign(100, True)
        async with listening((engine.url()[0], "tcp://no port"), snapshots=False) as listener:
            await engine.subscribed()
            await until(lambda: listener.follower.num_resyncs == 1)
            engine.publish(stored(0, block(0)))
            await until(lambda: held(listener, TOKENS) == 1)
        await engine.close()

    run(main())


def test_load_reports_alone() -> None:
    async def main() -> None:
        reporter = Reporter("127.0.0.1")
        reporter.start(report)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        heard: list[bytes] = []
        listener = LoadListener(context, urls(reporter)[0], heard.append)
        await until(lambda: len(heard) > 1)
        assert msgspec.msgpack.decode(heard[0], type=WorkerReport).num_blocks == 2
        listener.close()
        context.term()
        await reporter.stop()

    run(main())
