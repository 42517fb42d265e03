"""Stored responses: creates them, continues them, and answers `/v1/responses/ID`.

A request that is not stored, continues nothing and does not run in the background goes straight to the proxy.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw

from stoker.base.errors import InvalidRequest, NotFound, Overloaded, StokerError
from stoker.base.log import EventLog
from stoker.base.long_task import TaskErrors
from stoker.gateway.admission.api_keys import ApiKeys, Caller
from stoker.gateway.api.client_body import EndpointKind, check_utf8, fields
from stoker.gateway.api.reply import JSON, Reply, json_reply, method_not_allowed
from stoker.gateway.http import Headers, HttpRequest, InternalRequest, RequestHead, internal_head
from stoker.gateway.objects import response_table as table
from stoker.gateway.objects.object_ids import is_object_id
from stoker.gateway.objects.object_settings import ResponsesSettings
from stoker.gateway.objects.pages import page_of, paged, small_number
from stoker.gateway.objects.quota import QUOTA_TABLES
from stoker.gateway.objects.response_events import EditedStream, ResponseEdits, events_beyond
from stoker.gateway.objects.response_input import PreviousNotFound, check_turns, listed_items, own_items, stateless_body
from stoker.gateway.objects.response_runs import Generate, ResponseRuns, status_of
from stoker.gateway.objects.response_table import RESPONSE_TABLES, StoredResponse
from stoker.gateway.objects.slow_clients import wait_for_room
from stoker.gateway.store.store import Transaction
from stoker.gateway.store.store_threads import StoreThreads
from stoker.proto.openai.decode import decode
from stoker.proto.openai.responses import ResponseObject, ResponsesRequest

PREFIX = b"/v1/responses/"
_SSE: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_POLL_S = 0.25  # how often a stream asks the store for the events of a response that another gateway runs
_CANCEL_S = 5.0  # how long a cancelled response may take to end

log = EventLog("responses")


class _StateFields(msgspec.Struct):
    """The fields of a Responses request that the gateway itself acts upon."""

    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    previous_response_id: str | None = None


class ForegroundSink:
    """Passes an answer on to the client, and keeps its end back until it is stored."""

    def __init__(self, client: HttpRequest, edits: ResponseEdits) -> None:
        self._client = client
        self._edits = edits
        self.stream = EditedStream(edits)
        self.headers: Headers = []
        self.response: bytes | None = None

    @property
    def paused(self) -> bool:
        return self._client.paused

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        if status != 200:
            self._client.respond(status, headers, body)
            return
        self.headers = headers
        self.response = self._edits.whole(body)

    def start(self, status: int, headers: Headers) -> None:
        self._client.start(status, headers)

    def write(self, data: bytes) -> None:
        self._client.write(b"".join(self.stream.push(data)))

    def finish(self) -> None:
        self.response = self.stream.response

    def deliver(self, response: bytes | None) -> None:
        """Send what was kept back. `response` is the stored object, which may differ in whether it was stored."""
        client = self._client
        if client.finished or client.gone:
            return
        if not client.started:
            if response is not None:
                client.respond(200, self.headers, response)
            return
        if response is not None and response != self.stream.response:
            client.write(self.stream.last_event.replace(b'"store":true', b'"store":false', 1))
        else:
            client.write(self.stream.last_event)
        client.finish()


class StoredResponses:
    """The Responses API with state. `open` must be called before the first request."""

    def __init__(
        self,
        store: StoreThreads,
        keys: ApiKeys,
        settings: ResponsesSettings,
        *,
        name: str,
        max_body_bytes: int,
        model_of: Callable[[str | None], str],
        unix_time: Callable[[], float] = time.time,
        errors: TaskErrors | None = None,
    ) -> None:
        """`model_of` returns the served model that a request names."""
        self._store = store
        self._keys = keys
        self._settings = settings
        self._max_body_bytes = max_body_bytes
        self._model_of = model_of
        self._unix_time = unix_time
        self._max_bytes = int(settings.max_mib * (1 << 20))
        self._max_tenant_bytes = int(settings.max_tenant_mib * (1 << 20))
        self.runs = ResponseRuns(store, keys, settings, name, unix_time, errors)
        store.store.declare(QUOTA_TABLES)
        store.store.declare(RESPONSE_TABLES)

    # ---- POST /v1/responses

    async def create(self, request: HttpRequest, generate: Generate) -> None:
        check_utf8(request.body)
        state = decode(_StateFields, request.body)
        wants_store = self._settings.store_default if state.store is None else state.store
        if state.background and not wants_store:
            raise InvalidRequest("'background' needs 'store' to be true.", param="background")
        if not wants_store and state.previous_response_id is None:
            await generate(request, EndpointKind.RESPONSES)
            return
        body, caller = fields(request.body), request.caller
        items = own_items(body)
        turns = await self._turns(caller, state.previous_response_id)
        row = self._row(caller, state, items)
        run = stateless_body(body, turns, items, streams=bool(state.background))
        if len(run) > self._max_body_bytes:
            raise InvalidRequest(
                f"The conversation with its earlier turns has {len(run)} bytes, more than the {self._max_body_bytes} allowed.",
                param="previous_response_id",
            )
        if state.background:
            await self._begin_background(request, state, row, _with_seed(run))
        elif wants_store:
            await self._run_foreground(request, row, run, turns, generate)
        else:
            await generate(_with_body(request, run), EndpointKind.RESPONSES)

    async def counted_body(self, caller: Caller, body: bytes) -> bytes:
        """Return the body of a request that counts input tokens, with the stored conversation that it continues."""
        check_utf8(body)
        state = decode(_StateFields, body)
        if state.previous_response_id is None:
            return body
        given = fields(body)
        turns = await self._turns(caller, state.previous_response_id)
        return stateless_body(given, turns, own_items(given), streams=False)

    def _row(self, caller: Caller, state: _StateFields, items: bytes) -> StoredResponse:
        now_s = self._unix_time()
        return StoredResponse(
            id=f"resp_{secrets.token_hex(24)}",
            tenant=caller.tenant,
            key_id=caller.key_id,
            created_s=now_s,
            expires_s=now_s + self._settings.retention_s,
            status="queued",
            previous_id=state.previous_response_id,
            is_background=bool(state.background),
            is_streamed=bool(state.background and state.stream),
            input=items,
            response=b"{}",
        )

    async def _turns(self, caller: Caller, previous_id: str | None) -> list[StoredResponse]:
        """Return the turns of the conversation that a request continues, the oldest first."""
        if previous_id is None:
            return []
        most = self._settings.max_turns
        if not is_object_id(previous_id):
            raise PreviousNotFound(previous_id)
        read = partial(
            table.chain,
            tenant=caller.tenant,
            response_id=previous_id,
            max_turns=most,
            max_bytes=self._max_body_bytes,
        )
        turns = await self._store.read(read)
        if isinstance(turns, int):
            raise InvalidRequest(
                f"This conversation has {turns} bytes, and a request may have {self._max_body_bytes}; begin a new one.",
                param="previous_response_id",
            )
        check_turns(turns, previous_id, most)
        return turns

    async def _run_foreground(
        self, client: HttpRequest, row: StoredResponse, run: bytes, turns: list[StoredResponse], generate: Generate
    ) -> None:
        """Run a response that its client waits for. If the client leaves, it is cancelled and not stored."""
        sink = ForegroundSink(client, ResponseEdits(row.id, row.previous_id, is_background=False))
        request = InternalRequest(client.head, run, client.caller, sink)
        _connect(client, request)
        if not client.gone:
            await generate(request, EndpointKind.RESPONSES)
        if sink.response is None:
            sink.deliver(None)
            return
        row.response, row.status = sink.response, status_of(sink.response)
        is_stored = await self._keep(row, turns)
        sink.deliver(row.response if is_stored else _not_stored(row.response))

    async def _keep(self, row: StoredResponse, turns: list[StoredResponse]) -> bool:
        """Store a finished response. Without the store, the client still gets its answer, which says that it is not stored."""
        num_bytes = len(row.input) + len(row.response)
        if num_bytes > self._max_bytes:
            log.warning(
                "response_not_stored", response=row.id, reason=f"{num_bytes} bytes", setting="responses.max_mib"
            )
            return False
        kept = [turn.id for turn in turns if turn.expires_s < row.expires_s - self._settings.retention_s / 2]

        def work(changes: Transaction) -> None:
            table.insert(changes, row, self._max_tenant_bytes)
            table.extend(changes, row.tenant, kept, row.expires_s)

        try:
            await self._store.write(work)
        except StokerError as error:
            log.warning("response_not_stored", response=row.id, reason=error.message)
            return False
        return True

    async def _begin_background(
        self, client: HttpRequest, state: _StateFields, row: StoredResponse, run: bytes
    ) -> None:
        body = decode(ResponsesRequest, run)
        response = ResponseObject.of(body, row.id, int(row.created_s), self._model_of(body.model))
        response.status, response.background, response.store = "queued", True, True
        response.previous_response_id = row.previous_id
        row.response, row.request = msgspec.json.encode(response), run
        row.owner, row.lease_s = self.runs.owner, self.runs.lease_end_s()
        if len(row.input) + len(run) > self._max_bytes:
            raise InvalidRequest(
                f"A background response may have {self._max_bytes} bytes of input, and this one has {len(run)}.",
                param="input",
            )

        def work(changes: Transaction) -> int:
            running = table.num_unfinished(changes, row.tenant)
            if running < self._settings.max_background:
                table.insert(changes, row, self._max_tenant_bytes)
            return running

        running = await self._store.write(work)
        if running >= self._settings.max_background:
            message = (
                f"This tenant has {running} background responses that have not ended, which is the limit; retry later."
            )
            raise Overloaded(message, retry_after_s=5.0, code="rate_limited")
        self.runs.start(row, client.caller, _renamed(client.head, row.id))
        if state.stream:
            await self._follow(client, row, -1)
        else:
            client.respond(200, [JSON], row.response)

    # ---- /v1/responses/ID

    async def answer(self, request: HttpRequest) -> Reply | None:
        """Answer a request for a stored response. None: the answer was streamed."""
        caller = self._keys.authenticate(request)
        response_id, _, part = request.path.removeprefix(PREFIX).decode("ascii").partition("/")
        match part, request.method:
            case "", b"GET":
                return await self._retrieve(request, caller, response_id)
            case "", b"DELETE":
                return await self._delete(caller, response_id)
            case "cancel", b"POST":
                return await self._cancel(caller, response_id)
            case "input_items", b"GET":
                row = await self._get(caller, response_id)
                return json_reply(paged(listed_items(row), page_of(request.query, default_order="desc")))
            case "", _:
                return method_not_allowed(request.path, request.method, [b"GET", b"DELETE"])
            case ("cancel" | "input_items") as known, _:
                return method_not_allowed(request.path, request.method, [b"POST" if known == "cancel" else b"GET"])
        raise NotFound(f"No such path: {request.path.decode('latin-1')}.", code="unknown_url")

    async def _retrieve(self, request: HttpRequest, caller: Caller, response_id: str) -> Reply | None:
        query = parse_qs(request.query.decode("ascii"))
        row = await self._get(caller, response_id)
        if query.get("stream", ["false"])[-1].lower() != "true":
            return Reply(200, [JSON], row.response)
        if not row.is_streamed:
            raise InvalidRequest(
                "Only a response that was created with 'background' and 'stream' can be streamed again.", param="stream"
            )
        given = query.get("starting_after", ["-1"])[-1]
        if (after := small_number(given)) is None:
            raise InvalidRequest(
                f"Invalid value for 'starting_after': {given[:40]!r}. Expected a number.", param="starting_after"
            )
        await self._follow(request, row, after)
        return None

    async def _delete(self, caller: Caller, response_id: str) -> Reply:
        await self._get(caller, response_id)
        await self._store.write(lambda changes: table.delete(changes, caller.tenant, [response_id]))
        self.runs.cancel(response_id)
        return json_reply({"id": response_id, "object": "response", "deleted": True})

    async def _cancel(self, caller: Caller, response_id: str) -> Reply:
        row = await self._get(caller, response_id)
        if not row.is_background:
            raise InvalidRequest("Only a response that was created with 'background' can be cancelled.")
        if not row.is_finished:
            await self._store.write(lambda changes: table.want_cancel(changes, caller.tenant, response_id))
            self.runs.cancel(response_id)
            deadline_s = time.monotonic() + _CANCEL_S
            while not row.is_finished and time.monotonic() < deadline_s:
                await self.runs.changed(response_id, _POLL_S)
                row = await self._get(caller, response_id)
        return Reply(200, [JSON], row.response)

    async def _get(self, caller: Caller, response_id: str) -> StoredResponse:
        read = partial(table.get, tenant=caller.tenant, response_id=response_id)
        row = await self._store.read(read) if is_object_id(response_id) else None
        if row is None:
            raise NotFound(f"Response with id '{response_id[:80]}' not found.", param="response_id", code="not_found")
        return row

    async def _follow(self, client: HttpRequest, row: StoredResponse, after: int) -> None:
        """Send the events of a background response after number `after`, as they are stored, to their end."""
        client.on_gone = client.task.cancel
        client.start(200, _SSE)
        try:
            while True:
                pieces, is_finished = await self._store.read(partial(_pieces, row=row, after=after))
                for last, events in pieces:
                    client.write(events_beyond(events, after))
                    after = last
                    await wait_for_room(client)
                if not pieces:
                    if is_finished:
                        break
                    await self.runs.changed(row.id, _POLL_S)
        except asyncio.CancelledError:
            if not client.gone:
                raise
            return
        client.finish()


def _pieces(reader: Transaction, row: StoredResponse, after: int) -> tuple[list[tuple[int, bytes]], bool]:
    return table.events_after(reader, row.id, after), table.is_finished(reader, row.tenant, row.id)


def _connect(client: HttpRequest, request: InternalRequest) -> None:
    """Pass the client's events on to the internal request that serves it."""

    def pause() -> None:
        if request.on_pause is not None:
            request.on_pause()

    def resume() -> None:
        if request.on_resume is not None:
            request.on_resume()

    client.on_gone, client.on_pause, client.on_resume = request.lose, pause, resume


def _with_body(request: HttpRequest, body: bytes) -> HttpRequest:
    request.body = body
    return request


def _with_seed(body: bytes) -> bytes:
    """Return a body that always gives the same answer, so that another gateway can continue it."""
    table = fields(body)
    given = table.get("seed")
    if given is None or bytes(given) == b"null":
        table["seed"] = Raw(b"%d" % secrets.randbits(53))
    return msgspec.json.encode(table)


def _renamed(head: RequestHead, request_id: str) -> RequestHead:
    """Return the head of a client's request with another request id: workers derive the ids of items from it."""
    others = [pair for pair in head.headers if pair[0] != b"x-request-id"]
    return internal_head(head.path, [*others, (b"x-request-id", request_id.encode())])


def _not_stored(response: bytes) -> bytes:
    return msgspec.json.encode(fields(response) | {"store": Raw(b"false")})
