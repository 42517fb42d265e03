"""Runs stored responses: those that a client waits for, and those in the background, which outlive it.

A background response belongs to one gateway, under a lease. Its events are stored before any client sees them, so every gateway
can continue the stream. If the gateway dies, another one takes over:

- A response that was not streamed runs again from its beginning.
- A streamed one continues after its last stored event: the tokens of the events are stored with them. Only if its worker is of
  another engine, which does not report tokens, the response ends as failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw

from stoker.base.errors import StokerError
from stoker.base.log import EventLog
from stoker.base.long_task import TaskErrors, repeat
from stoker.gateway.admission.api_keys import ApiKeys, Caller
from stoker.gateway.api.client_body import EndpointKind, fields
from stoker.gateway.http import Headers, HttpRequest, InternalRequest, RequestHead, internal_head
from stoker.gateway.objects import response_table as table
from stoker.gateway.objects.begun_streams import stored_stream
from stoker.gateway.objects.object_settings import ResponsesSettings
from stoker.gateway.objects.response_events import EditedStream, ResponseEdits, error_of, event_number, response_event
from stoker.gateway.objects.response_table import StoredResponse
from stoker.gateway.store.store import Transaction
from stoker.gateway.store.store_threads import StoreThreads
from stoker.proto.internal_http import RESPONSES_PATH
from stoker.proto.resume_notes import BegunStream

Generate = Callable[[HttpRequest, EndpointKind], Awaitable[None]]

_FLUSH_S = 0.05
_RETRIED = frozenset({429, 503})  # the fleet is busy: a background response waits
_RETRY_S = (0.5, 30.0)  # the least and the longest wait
_MAX_ATTEMPTS = 3
_EXPIRED_S = 1.0  # the end of a lease that was given up
_TAKE_OVER = 16  # responses at a time
# Errors of a stream that is to be continued, after which it is tried again. `no_worker`: this gateway may have just started.
_BUSY_CODES = frozenset(
    {"no_worker", "overloaded", "draining", "engine_starting", "queue_full", "queue_timeout", "rate_limited", "busy"}
)
_LOST = {"code": "server_error", "message": "The gateway that ran this response has stopped."}

log = EventLog("responses")


class BackgroundSink:
    """Collects the answer to a background response."""

    paused = False

    def __init__(self, edits: ResponseEdits, max_bytes: int) -> None:
        self.stream = EditedStream(edits)
        self.events: list[bytes] = []  # not stored yet
        self.refusal: tuple[int, bytes, float] | None = None  # status, body and Retry-After of an error
        self.failure: dict[str, Any] | None = None  # the error that ended the stream
        self.failure_code = ""
        self.is_done = False
        self.num_known = 0  # events that are stored already
        self.on_too_large: Callable[[], object] = lambda: None
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        pairs = [] if isinstance(headers, bytes) else headers
        retry_after = next((value for name, value in pairs if name == b"retry-after"), b"0")
        self.refusal = status, body, float(retry_after) if retry_after.isdigit() else 0.0

    def start(self, status: int, headers: Headers) -> None: ...

    def write(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            self.failure = {"code": "server_error", "message": "The response is larger than the gateway stores."}
            self.on_too_large()
            return
        for event in self.stream.push(data):
            if (error := error_of(event)) is None:
                if (event_number(event) or 0) >= self.num_known:
                    self.events.append(event)
            else:
                self.failure_code = _text(error.get("code"))
                message = msgspec.json.decode(error["message"]) if "message" in error else "The worker failed."
                self.failure = {"code": "server_error", "message": message}

    def finish(self) -> None: ...

    @property
    def was_refused(self) -> bool:
        """True if the fleet was too busy to begin, or to continue."""
        if self.refusal is not None:
            return self.refusal[0] in _RETRIED
        return self.failure_code in _BUSY_CODES


class ResponseRuns:
    """The background responses of this gateway."""

    def __init__(
        self,
        store: StoreThreads,
        keys: ApiKeys,
        settings: ResponsesSettings,
        owner: str,
        unix_time: Callable[[], float] = time.time,
        errors: TaskErrors | None = None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._settings = settings
        self.owner = owner
        self._unix_time = unix_time
        self._errors = errors or TaskErrors()
        self._generate: Generate | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, InternalRequest] = {}
        self._cancelled: dict[str, asyncio.Event] = {}  # set when a response is to stop, also if it waits to run again
        self._changed: dict[str, asyncio.Event] = {}  # set when something of a response was stored
        self._keeper: asyncio.Task[None] | None = None

    def open(self, generate: Generate) -> None:
        """Begin to keep leases, and to take over responses of gateways that died."""
        self._generate = generate
        self._keeper = asyncio.get_running_loop().create_task(
            repeat("response_leases", self._keep_leases, self._errors)
        )

    async def close(self) -> None:
        """Stop. Other gateways may take over at once what runs here."""
        tasks = [task for task in (self._keeper, *self._tasks.values()) if task is not None]
        ids = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if ids:
            with suppress(StokerError):  # otherwise the leases expire by themselves
                await self._store.write(partial(table.renew, owner=self.owner, ids=ids, lease_s=_EXPIRED_S))

    def lease_end_s(self) -> float:
        return self._unix_time() + self._settings.lease_s

    def start(
        self, row: StoredResponse, caller: Caller, head: RequestHead, on_end: Callable[[], object] = lambda: None
    ) -> None:
        """Run a background response that this gateway owns. `on_end` is called when it no longer runs here."""
        task = asyncio.get_running_loop().create_task(self._run(row, caller, head))
        self._tasks[row.id] = task
        self._cancelled[row.id] = asyncio.Event()
        self._changed[row.id] = asyncio.Event()
        task.add_done_callback(lambda _: self._ended(row.id))
        task.add_done_callback(lambda _: on_end())

    def cancel(self, response_id: str) -> None:
        """Cancel a response if it runs here. It ends as cancelled."""
        if response_id in self._cancelled:
            self._cancelled[response_id].set()
        running = self._running.get(response_id)
        if running is not None:
            running.lose()

    async def changed(self, response_id: str, timeout_s: float) -> None:
        """Wait until more of a response is stored. Of one that runs elsewhere, only `timeout_s` passes."""
        event = self._changed.get(response_id)
        if event is None:
            await asyncio.sleep(timeout_s)
            return
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            pass

    def _ended(self, response_id: str) -> None:
        self._tasks.pop(response_id, None)
        self._running.pop(response_id, None)
        self._cancelled.pop(response_id, None)
        self._notify(response_id, last=True)

    def _notify(self, response_id: str, *, last: bool = False) -> None:
        event = self._changed.pop(response_id, None)
        if event is not None:
            event.set()
            if not last:
                self._changed[response_id] = asyncio.Event()

    # ---- one response

    async def _run(self, row: StoredResponse, caller: Caller, head: RequestHead) -> None:
        try:
            await self._attempts(row, caller, head)
        except* StokerError as failed:
            # The lease expires, and a gateway that reaches the store takes over.
            log.warning("background_response_lost", response=row.id, reason=str(failed.exceptions[0]))
        except* Exception as failed:
            self._errors.note("background_response", failed)

    async def _attempts(self, row: StoredResponse, caller: Caller, head: RequestHead) -> None:
        assert self._generate is not None
        response = with_values(row.response, status="in_progress")
        if not await self._store.write(lambda changes: table.begin(changes, row.id, self.owner, response)):
            return
        edits = ResponseEdits(row.id, row.previous_id, is_background=True, created_s=row.created_s)
        deadline_s, cancelled = time.monotonic() + self._settings.background_s, self._cancelled[row.id]
        while True:
            sink = BackgroundSink(edits, int(self._settings.max_mib * (1 << 20)))
            request = InternalRequest(head, row.request or b"", caller, sink, row.id)
            sink.on_too_large = request.lose
            self._running[row.id] = request
            async with asyncio.TaskGroup() as group:
                if row.is_streamed:
                    begun = await self._store.read(lambda reader: stored_stream(reader, row.id))
                    if begun is None:  # another attempt of this gateway has stored something that cannot be continued
                        sink.failure = _LOST
                        break
                    _continue_after(begun, request, sink)
                    group.create_task(self._flush_often(row, sink, begun))
                await self._generate(request, EndpointKind.RESPONSES)
                sink.is_done = True
            if not sink.was_refused or sink.events or time.monotonic() > deadline_s:
                break
            least_s, most_s = _RETRY_S
            wait_s = sink.refusal[2] if sink.refusal is not None else 0.0
            with suppress(TimeoutError):
                async with asyncio.timeout(min(max(wait_s, least_s), most_s)):
                    await cancelled.wait()
            if cancelled.is_set():
                break
        has_stopped = request.gone or cancelled.is_set()
        await self._finish(row, response, sink, is_cancelled=has_stopped and sink.failure is None)

    async def _flush_often(self, row: StoredResponse, sink: BackgroundSink, begun: BegunStream) -> None:
        """Store the events of a stream, in their order, until it has ended. Their tokens are stored with them."""
        num_stored = begun.notes.num_bytes
        while not sink.is_done:
            await asyncio.sleep(_FLUSH_S)
            if sink.events:
                events, sink.events = sink.events, []
                notes = begun.notes.after(num_stored)
                num_stored += len(notes)
                await self._store.write(partial(self._add, response_id=row.id, events=events, notes=notes))
                self._notify(row.id)

    def _add(self, changes: Transaction, response_id: str, events: list[bytes], notes: bytes = b"") -> bool:
        if not events:
            return True
        first, last = event_number(events[0]) or 0, event_number(events[-1]) or 0
        return table.add_events(changes, response_id, self.owner, first, last, b"".join(events), notes)

    async def _finish(self, row: StoredResponse, response: bytes, sink: BackgroundSink, *, is_cancelled: bool) -> None:
        stream = sink.stream
        events = sink.events
        if stream.response is not None:
            final, status = stream.response, status_of(stream.response)
            last = [stream.last_event]
        else:
            status = "cancelled" if is_cancelled else "failed"
            error = None if is_cancelled else msgspec.json.encode(sink.failure or refusal_error(sink.refusal))
            final = with_values(response, status=status, error=error)
            last = (
                []
                if is_cancelled
                else [response_event("response.failed", final, max(stream.num_events, sink.num_known))]
            )

        def work(changes: Transaction) -> None:
            if row.is_streamed:
                self._add(changes, row.id, [*events, *last])
            table.finish(changes, row.id, self.owner, status, final)

        await self._store.write(work)

    # ---- leases

    async def _keep_leases(self) -> None:
        try:
            mine = partial(table.renew, owner=self.owner, ids=list(self._tasks), lease_s=self.lease_end_s())
            for one in await self._store.write(mine):
                self.cancel(one)
            taken = partial(
                table.take_over,
                owner=self.owner,
                now_s=self._unix_time(),
                lease_s=self.lease_end_s(),
                limit=_TAKE_OVER,
            )
            for row in await self._store.write(taken):
                await self._continue(row)
        except StokerError as error:
            log.warning("responses_not_renewed", reason=error.message)
        await asyncio.sleep(self._settings.lease_s / 3)

    async def _continue(self, row: StoredResponse) -> None:
        """Continue a response whose gateway died: run it again, or end it."""
        caller = self._keys.caller(row.key_id)
        begun = await self._store.read(lambda reader: stored_stream(reader, row.id))
        can_run = begun is not None and row.attempts <= _MAX_ATTEMPTS and not row.wants_cancel
        if caller is not None and caller.tenant == row.tenant and can_run:
            log.warning("response_taken_over", response=row.id, attempt=row.attempts)
            head = internal_head(RESPONSES_PATH.encode(), [(b"x-request-id", row.id.encode())])
            self.start(row, caller, head)
            return
        number = await self._store.read(lambda reader: table.last_number(reader, row.id))
        status = "cancelled" if row.wants_cancel else "failed"
        error = None if row.wants_cancel else msgspec.json.encode(_LOST)
        final = with_values(row.response, status=status, error=error)
        log.warning("response_given_up", response=row.id, attempt=row.attempts, status=status)

        def work(changes: Transaction) -> None:
            if row.is_streamed and not row.wants_cancel:
                self._add(changes, row.id, [response_event("response.failed", final, number + 1)])
            table.finish(changes, row.id, self.owner, status, final)

        await self._store.write(work)


def _continue_after(begun: BegunStream, request: InternalRequest, sink: BackgroundSink) -> None:
    """Let a request continue a stream. Without notes it begins again, and the events that are stored are left out."""
    request.begun = begun
    sink.num_known = begun.num_events
    if begun.notes:
        sink.stream.num_events = begun.num_events
        request.start(200, [])  # its client has the first events
    else:
        begun.num_events = 0


def _text(value: Raw | None) -> str:
    found = None if value is None else msgspec.json.decode(value)
    return found if isinstance(found, str) else ""


def with_values(response: bytes, *, status: str, error: bytes | None = None) -> bytes:
    """Return a response object with another status and error."""
    values = {"status": Raw(msgspec.json.encode(status)), "error": Raw(error or b"null")}
    return msgspec.json.encode(fields(response) | values)


def status_of(response: bytes) -> str:
    status = msgspec.json.decode(fields(response).get("status", Raw(b'"completed"')))
    return status if isinstance(status, str) else "completed"


def refusal_error(refusal: tuple[int, bytes, float] | None) -> dict[str, Any]:
    """Return the `error` of a response whose request was refused."""
    error = {"code": "server_error", "message": "The response could not be generated."}
    if refusal is None:
        return error
    try:
        message = str(msgspec.json.decode(refusal[1])["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return error
    code = "rate_limit_exceeded" if refusal[0] in _RETRIED else "invalid_prompt"
    return {"code": code if refusal[0] < 500 or refusal[0] in _RETRIED else "server_error", "message": message}
