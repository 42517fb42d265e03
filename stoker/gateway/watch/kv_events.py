"""Subscribes to one worker's publications: KV events go to the prefix index, load reports to a callback.

Messages are numbered. A gap is filled from the worker's replay socket. If the worker no longer keeps the missing messages,
or was restarted, the state is read again: Stoker workers answer with a snapshot, other engines with the messages that they
still keep, and everything else is dropped from the index. Later messages wait until a gap is filled. So the index may lag
for a short time, but does not stay wrong.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from stoker.base import log as logs
from stoker.base.errors import StokerError
from stoker.gateway.watch.rekey import Rekeyer
from stoker.gateway.watch.zmq_reader import ZmqReader
from stoker.proto.event_keys import EventSecurity, OpenEvents
from stoker.proto.events import (
    LOAD_TOPIC,
    AllBlocksCleared,
    BadEvents,
    PublishedMessage,
    decode_batch,
    read_message,
    read_replay,
    replay_request,
)

log = logs.EventLog("kv_events")

_OPEN = OpenEvents()
_WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


@dataclass(frozen=True, slots=True)
class FollowSettings:
    """Deadlines and bounds of a KvFollower."""

    replay_s: float = 5.0  # a running replay that sends no message for this time has failed
    first_wait_s: float = 0.05  # backoff before a resync; doubles while resyncs fail
    max_wait_s: float = 10.0
    max_held: int = 10_000  # messages that may wait for a replay
    max_held_bytes: int = 256 << 20
    # Foreign engines do not authenticate, so what their sockets queue is bounded. An engine's step is far below 16 MiB.
    max_foreign_bytes: int = 16 << 20  # of one message; the connection of an engine that sends more is closed
    max_foreign_queued: int = 32  # messages; the engine's own socket keeps the others


class BadEventsAddress(StokerError):
    """ZMQ cannot connect to an address that a worker or the operator gave."""

    code = "bad_events_address"


class LoadListener:
    """Receives only the load reports of a worker. Used while the model's tokenizer is unknown, so blocks have no keys."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        events_url: str,
        on_report: Callable[[bytes], None],
        security: EventSecurity = _OPEN,
    ) -> None:
        socket = context.socket(zmq.SUB)
        security.secure_client(socket)
        socket.set(zmq.IPV6, 1)
        socket.subscribe(LOAD_TOPIC)
        try:
            socket.connect(events_url)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise BadEventsAddress(f"{events_url}: {error.strerror}") from error
        self._reader = ZmqReader(socket, lambda frames: on_report(frames[-1]))

    def close(self) -> None:
        self._reader.close()


class KvFollower:
    """Applies one worker's KV events to a Rekeyer.

    `snapshots` is True for Stoker workers: they answer a full replay request with a snapshot, other engines with the oldest
    messages that they keep.
    """

    def __init__(
        self,
        name: str,
        context: zmq.Context[zmq.Socket[bytes]],
        events_url: str,
        replay_url: str | None,
        rekeyer: Rekeyer,
        *,
        snapshots: bool,
        on_report: Callable[[bytes], None] = lambda payload: None,
        settings: FollowSettings | None = None,
        security: EventSecurity = _OPEN,
    ) -> None:
        self._name = name
        self._context = context
        self._replay_url = replay_url
        self._rekeyer = rekeyer
        self._snapshots = snapshots
        self._on_report = on_report
        self._settings = settings or FollowSettings()
        self._security = security
        self._loop = asyncio.get_running_loop()
        self._next: int | None = None  # the expected sequence number; None accepts any
        self._last_heard = -1  # last number on the subscription; a smaller one means that the worker restarted
        self._held: deque[PublishedMessage] = deque()
        self._held_bytes = 0
        self._replay: _ReplayRun | None = None
        self._retry_timer: asyncio.TimerHandle | None = None
        self._events_url = events_url
        self._reconnect_timer: asyncio.TimerHandle | None = None
        self._wait_s = self._settings.first_wait_s
        self._resynced_s = -self._settings.max_wait_s

        socket = context.socket(zmq.SUB)
        socket.set(zmq.RCVHWM, 0)  # no silent loss in the socket; `max_held` bounds the memory instead
        self._prepare(socket)
        socket.subscribe(b"")
        self._monitor = ZmqReader(socket.get_monitor_socket(_WATCHED), self._on_monitor)
        self._reader = ZmqReader(socket, self._on_frames)
        self._socket = socket
        try:
            socket.connect(events_url)
        except zmq.ZMQError as error:
            self.close()
            raise BadEventsAddress(f"{events_url}: {error.strerror}") from error

    def _prepare(self, socket: zmq.Socket[bytes]) -> None:
        self._security.secure_client(socket)
        socket.set(zmq.IPV6, 1)
        if not self._snapshots:
            socket.set(zmq.MAXMSGSIZE, self._settings.max_foreign_bytes)
            socket.set(zmq.RCVHWM, self._settings.max_foreign_queued)

    def resync(self) -> None:
        """Request the full state now."""
        self._resynced_s = self._loop.time()
        self._cancel_retry()
        self._held.clear()
        self._held_bytes = 0
        self._last_heard = -1
        if not self._snapshots:
            self._rekeyer.clear()
        self._begin_replay(-1 if self._snapshots else 0)

    def close(self) -> None:
        self._cancel_retry()
        self._cancel_reconnect()
        self._end_replay()
        self._socket.disable_monitor()
        self._monitor.close()
        self._reader.close()

    # ---- the subscription

    def _on_monitor(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        self._cancel_reconnect()
        if event == zmq.EVENT_CONNECTED:
            # Messages published while there was no connection are lost, and the worker may be a new process.
            self.resync()
        elif event == zmq.EVENT_DISCONNECTED:
            # ZMQ connects again by itself, and says so at once, except after a message that is not valid or too large.
            self._reconnect_timer = self._loop.call_later(self._settings.max_wait_s, self._reconnect)

    def _reconnect(self) -> None:
        self._reconnect_timer = None
        log.warning("kv_events_reconnected", worker=self._name, reason="its last message was not valid or too large")
        with suppress(zmq.ZMQError):
            self._socket.disconnect(self._events_url)
        self._socket.connect(self._events_url)

    def _cancel_reconnect(self) -> None:
        if self._reconnect_timer is not None:
            self._reconnect_timer.cancel()
            self._reconnect_timer = None

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            message = read_message(frames)
        except BadEvents as wrong:
            log.warning("bad_kv_message", worker=self._name, reason=wrong.message)
            return
        if message.topic == LOAD_TOPIC:
            self._on_report(message.payload)
            return
        if message.seq <= self._last_heard:
            self.resync()
        self._last_heard = message.seq
        if self._replay is not None or self._retry_timer is not None:
            self._hold(message)
        else:
            self._take(message)

    def _hold(self, message: PublishedMessage) -> None:
        self._held.append(message)
        self._held_bytes += len(message.payload)
        settings = self._settings
        while len(self._held) > settings.max_held or self._held_bytes > settings.max_held_bytes:
            self._take_held()  # detected as a gap when the next message is taken

    def _take_held(self) -> PublishedMessage:
        message = self._held.popleft()
        self._held_bytes -= len(message.payload)
        return message

    def _take(self, message: PublishedMessage) -> None:
        if self._next is not None and message.seq < self._next:
            return  # already replayed
        if self._next is not None and message.seq > self._next:
            self._hold(message)
            if self._replay_url is None:
                self._start_over(message.seq)
            else:
                self._begin_replay(self._next)
            return
        self._apply(message)

    def _start_over(self, seq: int) -> None:
        """Drop all known blocks: the missing messages cannot be replayed, so any of them may have been removed."""
        self._rekeyer.clear()
        self._next = seq
        self._flush()

    def _apply(self, message: PublishedMessage) -> None:
        self._next = message.seq + 1
        try:
            whole = self._rekeyer.apply(decode_batch(message.payload).events)
        except (BadEvents, OverflowError) as wrong:
            log.warning("bad_kv_events", worker=self._name, seq=message.seq, reason=str(wrong))
            whole = False
        if not whole and (self._snapshots and self._replay is None):
            self._resync_later()

    def _flush(self) -> None:
        while self._held and self._replay is None and self._retry_timer is None:
            self._take(self._take_held())

    # ---- replays

    def _begin_replay(self, start: int) -> None:
        self._end_replay()
        if self._replay_url is None:
            self._next = None
            self._flush()
            return
        socket = self._context.socket(zmq.DEALER)
        self._prepare(socket)
        try:
            socket.connect(self._replay_url)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            log.warning("bad_replay_address", worker=self._name, address=self._replay_url, reason=error.strerror)
            self._replay_url = None
            self._begin_replay(start)
            return
        reader = ZmqReader(socket, self._on_replay)
        timer = self._loop.call_later(self._settings.replay_s, self._replay_timed_out)
        self._replay = _ReplayRun(start, reader, timer)
        reader.send(replay_request(start))

    def _on_replay(self, frames: list[bytes]) -> None:
        replay = self._replay
        assert replay is not None
        try:
            message = read_replay(frames)
        except BadEvents as wrong:
            log.warning("bad_kv_replay", worker=self._name, reason=wrong.message)
            self._end_replay()
            self._resync_later()
            return
        replay.timer.cancel()
        if message.is_end:
            self._replay_ended(replay)
            return
        replay.timer = self._loop.call_later(self._settings.replay_s, self._replay_timed_out)
        if message.seq < replay.start:
            return
        if not self._continues(replay, message):
            log.warning("kv_replay_has_gaps", worker=self._name, seq=message.seq, last=replay.last, start=replay.start)
            self._replay_timed_out()
            return
        replay.last = message.seq
        self._apply(message)

    def _continues(self, replay: _ReplayRun, message: PublishedMessage) -> bool:
        """Return True if this message continues the replay: the requested number, the next one, or a new snapshot."""
        if replay.last is not None:
            return message.seq <= replay.last + 1  # the parts of a snapshot have the same number
        if message.seq == replay.start:
            return True
        if not self._snapshots:
            self._rekeyer.clear()  # the worker no longer keeps the requested messages
            return True
        return _is_snapshot(message.payload)

    def _replay_ended(self, replay: _ReplayRun) -> None:
        self._end_replay()
        if replay.last is None and replay.start <= 0:
            self._next = None  # the worker has published nothing yet; accept its first message
        elif replay.last is None and self._held:
            self._start_over(self._held[0].seq)
            return
        self._flush()

    def _replay_timed_out(self) -> None:
        self._end_replay()
        self._resync_later()

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.timer.cancel()
            self._replay.reader.close()
            self._replay = None

    def _resync_later(self) -> None:
        """Schedule a resync, with a backoff that grows while resyncs fail."""
        if self._retry_timer is not None:
            return
        now, settings = self._loop.time(), self._settings
        if now - self._resynced_s > settings.max_wait_s:
            self._wait_s = settings.first_wait_s
        self._retry_timer = self._loop.call_later(self._wait_s, self.resync)
        self._wait_s = min(2 * self._wait_s, settings.max_wait_s)

    def _cancel_retry(self) -> None:
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None


@dataclass(slots=True, eq=False)
class _ReplayRun:
    start: int
    reader: ZmqReader
    timer: asyncio.TimerHandle
    last: int | None = None


def _is_snapshot(payload: bytes) -> bool:
    """Return True for the first part of a snapshot, which begins by clearing all blocks."""
    try:
        events = decode_batch(payload).events
    except BadEvents:
        return False
    return bool(events) and isinstance(events[0], AllBlocksCleared)
