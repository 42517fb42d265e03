"""Publishes a worker's KV events and load reports on ZMQ.

Publishing never waits. A subscriber that is too slow misses messages, notices it by their numbers, and requests them
again. If they are no longer stored, it gets a snapshot of all blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from stoker.base import log as logs
from stoker.base.address import join_address
from stoker.base.errors import ConfigError
from stoker.base.fleet_key import FleetKey
from stoker.proto.event_keys import ZAP_ADDRESS, event_security, zap_answer
from stoker.proto.events import (
    KV_TOPIC,
    LOAD_TOPIC,
    BadEvents,
    EventBatch,
    KvEvent,
    encode_batch,
    message_frames,
    read_replay_request,
    replay_end_frames,
    replay_frames,
)
from stoker.proto.messages import KvEvents, WorkerReport
from stoker.proto.work import WorkChange
from stoker.worker.kv_mirror import KvMirror
from stoker.worker.open_work import OpenWork

_REPORT_EVERY_S = 0.25
_REPORT_AT_MOST_EVERY_S = 0.02
_LIST_WORK_EVERY_S = 1.0
_KEPT_BATCHES = 10_000
_QUEUED_MESSAGES = 10_000  # per subscriber
_MAX_REQUEST_BYTES = 1 << 16
_SNAPSHOT_EVENTS = 16  # per batch

log = logs.EventLog("report")


class NoReporter:
    """Publishes nothing."""

    events_port: int | None = None
    replay_port: int | None = None

    def start(self, report: Callable[[int], WorkerReport]) -> None: ...

    async def stop(self) -> None: ...

    def blocks_changed(self, events: KvEvents) -> None: ...

    def all_blocks_lost(self) -> None: ...

    def load_changed(self) -> None: ...

    def follow(self, work: OpenWork) -> None: ...


class Reporter:
    """An `EngineListener` that publishes. Its ports are bound at once, so that a port in use fails before the model loads.

    `host` is a numeric address of this machine. With a key, only subscribers of the same fleet may connect.
    """

    def __init__(
        self, host: str, events_port: int = 0, kept_batches: int = _KEPT_BATCHES, key: FleetKey | None = None
    ) -> None:
        self._context = zmq.asyncio.Context()
        self._publisher = zmq.Context(self._context).socket(zmq.PUB)
        self._replayer = self._context.socket(zmq.ROUTER)
        self._authenticator = self._context.socket(zmq.REP)
        self._security = event_security(key)
        self._publisher.set(zmq.SNDHWM, _QUEUED_MESSAGES)
        self._replayer.set(zmq.SNDHWM, 0)  # no limit: a ROUTER drops messages above it, and a snapshot is bounded
        self._authenticator.bind(ZAP_ADDRESS)  # before the others: without it libzmq accepts every client
        for socket in (self._publisher, self._replayer):
            # Also before a subscriber has authenticated. All that one sends are subscriptions and requests of a few bytes.
            socket.set(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        self._security.secure_server(self._publisher)
        self._security.secure_server(self._replayer)
        try:
            self.events_port = _bind(self._publisher, host, events_port)
            self.replay_port = _bind(self._replayer, host, events_port + 1 if events_port else 0)
        except ConfigError:
            self._close()
            raise
        self._mirror = KvMirror()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept_batches)
        self._next_seq = 0
        self._report: Callable[[int], WorkerReport] | None = None
        self._num_reports = 0
        self._reported_s = self._listed_s = 0.0
        self._work: OpenWork | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._publish(self._mirror.clear())  # for subscribers of an earlier process on this port

    def start(self, report: Callable[[int], WorkerReport]) -> None:
        """Start publishing. `report(number)` returns a load report."""
        self._report = report
        self._tasks = [
            asyncio.create_task(self._keep_reporting(), name="load-reports"),
            asyncio.create_task(self._keep_replaying(), name="kv-replays"),
            asyncio.create_task(self._keep_admitting(), name="kv-subscribers"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close()

    # ---- from the engine

    def blocks_changed(self, events: KvEvents) -> None:
        self._publish(self._mirror.apply(events))

    def all_blocks_lost(self) -> None:
        """Clear all media, also those that outlive the engine: their blocks may change, and the next engine reports them."""
        self._publish(self._mirror.clear())

    def load_changed(self) -> None:
        now = time.monotonic()
        if self._report is None or now - self._reported_s < _REPORT_AT_MOST_EVERY_S:
            return
        self._reported_s = now
        report = self._report(self._num_reports)
        if self._work is not None and now - self._listed_s >= _LIST_WORK_EVERY_S:
            self._listed_s = now
            report = msgspec.structs.replace(report, open_work=self._work.snapshot())
        self._send_report(report)

    def follow(self, work: OpenWork) -> None:
        """Publish every change of the open requests at once."""
        self._work = work
        work.publish = self._work_changed

    def _work_changed(self, change: WorkChange) -> None:
        if self._report is not None:
            self._send_report(msgspec.structs.replace(self._report(self._num_reports), changes=[change]))

    def _send_report(self, report: WorkerReport) -> None:
        self._send(message_frames(LOAD_TOPIC, self._num_reports, self._encoder.encode(report)))
        self._num_reports += 1

    def _publish(self, events: list[KvEvent]) -> None:
        payload = _batch(events)
        self._kept.append((self._next_seq, payload))
        self._send(message_frames(KV_TOPIC, self._next_seq, payload))
        self._next_seq += 1

    def _send(self, frames: list[bytes]) -> None:
        with suppress(zmq.Again):
            self._publisher.send_multipart(frames, zmq.NOBLOCK)

    async def _keep_reporting(self) -> None:
        while True:
            self.load_changed()
            await asyncio.sleep(_REPORT_EVERY_S)

    # ---- from subscribers

    async def _keep_replaying(self) -> None:
        while True:
            frames = await self._replayer.recv_multipart()
            try:
                sender, start = read_replay_request(frames)
            except BadEvents as wrong:
                log.warning("bad_replay_request", reason=wrong.message)
                continue
            for seq, payload in await self._since(start):
                await self._replayer.send_multipart(replay_frames(sender, KV_TOPIC, seq, payload))
            await self._replayer.send_multipart(replay_end_frames(sender))

    async def _keep_admitting(self) -> None:
        while True:
            frames = await self._authenticator.recv_multipart()
            await self._authenticator.send_multipart(zap_answer(frames, self._security))

    async def _since(self, start: int) -> list[tuple[int, bytes]]:
        """Return the messages from `start` on, or a snapshot if `start` is no longer stored or in the future."""
        if self._kept[0][0] <= start <= self._next_seq:
            return [(seq, payload) for seq, payload in self._kept if seq >= start]
        last = self._next_seq - 1
        snapshot = self._mirror.snapshot()
        payloads = await asyncio.to_thread(lambda: list(map(_batch, _grouped(snapshot, _SNAPSHOT_EVENTS))))
        log.event("kv_snapshot", requested_from=start, kept_from=self._kept[0][0], blocks=len(self._mirror))
        # All have the number of the last message that they replace, so the next published message follows them.
        return [(last, payload) for payload in payloads] + [kept for kept in self._kept if kept[0] > last]

    def _close(self) -> None:
        self._publisher.close(linger=0)
        self._authenticator.close(linger=0)
        self._replayer.close(linger=0)
        self._context.term()


def _batch(events: list[KvEvent]) -> bytes:
    return encode_batch(EventBatch(time.time(), events))


def _grouped(events: Iterator[KvEvent], count: int) -> Iterator[list[KvEvent]]:
    while group := list(islice(events, count)):
        yield group


def _bind(socket: zmq.Socket[Any], host: str, port: int) -> int:
    if ":" in host:
        socket.set(zmq.IPV6, 1)
    try:
        socket.bind(f"tcp://{join_address(host, port or '*')}")
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot publish events on {host}:{port}: {error.strerror}; choose another --events-port"
        ) from error
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
