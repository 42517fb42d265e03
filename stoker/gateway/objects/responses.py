"""Stored responses: creates them, continues them, and answers `/v1/responses/ID`.

A request that is not stored, continues nothing and does not run in the background goes straight to the proxy.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw

from stoker.base.errors import InvalidRequest, NotFound, Overloaded, StokerError
from stoker.base.log import EventLog
from stoker.base.long_task import TaskErrors
from stoker.gateway.admission.admission import rate_limited
from stoker.gateway.admission.api_keys import ApiKeys, Caller
from stoker.gateway.api.client_body import EndpointKind, check_num_values, check_utf8, client_fields, fields
from stoker.gateway.api.reply import JSON, Reply, json_reply, method_not_allowed
from stoker.gateway.http import BodyBudget, HttpRequest, InternalRequest, RequestHead, internal_head
from stoker.gateway.objects import response_table as table
from stoker.gateway.objects.foreground_sink import ForegroundSink, connect
from stoker.gateway.objects.object_ids import is_object_id
from stoker.gateway.objects.object_settings import ResponsesSettings
from stoker.gateway.objects.pages import page_of, small_number
from stoker.gateway.objects.quota import QUOTA_TABLES
from stoker.gateway.objects.response_events import ResponseEdits
from stoker.gateway.objects.response_input import PreviousNotFound, check_turns, listed_items, own_items, stateless_body
from stoker.gateway.objects.response_runs import Generate, ResponseRuns, status_of
from stoker.gateway.objects.response_streams import ResponseStreams
from stoker.gateway.objects.response_table import RESPONSE_TABLES, StoredResponse
from stoker.gateway.store.store import Transaction
from stoker.gateway.store.store_threads import StoreThreads
from stoker.proto.openai.decode import decode
from stoker.proto.openai.responses import ResponseObject, ResponsesRequest

PREFIX = b"/v1/responses/"
_POLL_S = 0.25  # between two checks whether a cancelled response has ended
_CANCEL_S = 5.0  # how long a cancelled response may take to end

log = EventLog("responses")


class _StateFields(msgspec.Struct):
    """The fields of a Responses request that the gateway itself acts upon."""

    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    previous_response_id: str | None = None


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
        max_held_bytes: int,
        model_of: Callable[[str | None], str],
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
        errors: TaskErrors | None = None,
    ) -> None:
        """`model_of` returns the served model that a request names.

        `max_held_bytes` bounds the bodies that the gateway holds besides those that clients have sent: conversations from
        the store, and background responses.
        """
        self._store = store
        self._keys = keys
        self._settings = settings
        self._max_body_bytes = max_body_bytes
        self._held = BodyBudget(max_held_bytes)
        self._model_of = model_of
        self._clock = clock
        self._unix_time = unix_time
        self._max_bytes = int(settings.max_mib * (1 << 20))
        self._max_tenant_bytes = int(settings.max_tenant_mib * (1 << 20))
        self.runs = ResponseRuns(store, keys, settings, name, unix_time, errors)
        self._streams = ResponseStreams(store, self.runs, settings.max_background)
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
        given, caller = client_fields(request.body), request.caller
        items = own_items(given)
        if state.previous_response_id is not None:
            self._check_limits(caller)
        async with self._conversation(caller, state.previous_response_id) as turns:
            row = self._row(caller, state, items)
            run = stateless_body(given, turns, items, streams=bool(state.background))
            if len(run) > self._max_body_bytes:
                raise InvalidRequest(
                    f"The conversation with its earlier turns has {len(run)} bytes, more than the {self._max_body_bytes} allowed.",
                    param="previous_response_id",
                )
            kept = [(turn.id, turn.expires_s) for turn in turns]
            turns.clear()  # the run has their text
            if state.background:
                await self._begin_background(request, state, row, _with_seed(run))
            elif wants_store:
                await self._run_foreground(request, row, run, kept, generate)
            else:
                await generate(_with_body(request, run), EndpointKind.RESPONSES)
        if state.background and state.stream:
            await self._streams.follow(request, row, -1)

    @asynccontextmanager
    async def _conversation(self, caller: Caller, previous_id: str | None) -> AsyncIterator[list[StoredResponse]]:
        """Yield the turns of the conversation that a request continues, the oldest first.

        Its size counts until the request has ended: a short request may continue a long conversation.
        """
        if previous_id is None:
            yield []
            return
        if not is_object_id(previous_id):
            raise PreviousNotFound(previous_id)
        tenant, most = caller.tenant, self._settings.max_turns
        num_bytes = await self._store.read(lambda reader: table.chain_bytes(reader, tenant, previous_id, most))
        if num_bytes > self._max_body_bytes:
            raise InvalidRequest(
                f"This conversation has {num_bytes} bytes, and a request may have {self._max_body_bytes}; begin a new one.",
                param="previous_response_id",
            )
        self._hold(caller, num_bytes)
        try:
            turns = await self._store.read(lambda reader: table.chain(reader, tenant, previous_id, most))
            check_turns(turns, previous_id, most)
            yield turns
        finally:
            self._held.give_back(tenant, num_bytes)

    def _check_limits(self, caller: Caller) -> None:
        """Refuse a request of a key above its limits before its conversation is read, which may be long."""
        if not caller.limiter.unlimited and (limit := caller.limiter.refusal(self._clock())) is not None:
            raise rate_limited(limit)

    def _hold(self, caller: Caller, num_bytes: int) -> None:
        if not self._held.take(caller.tenant, num_bytes):
            raise Overloaded("This gateway holds too many long conversations now; retry later.")

    async def counted_body(self, caller: Caller, body: bytes) -> bytes:
        """Return the body of a request that counts input tokens, with the stored conversation that it continues."""
        check_utf8(body)
        state = decode(_StateFields, body)
        if state.previous_response_id is None:
            return body
        given = client_fields(body)
        async with self._conversation(caller, state.previous_response_id) as turns:
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

    async def _run_foreground(
        self,
        client: HttpRequest,
        row: StoredResponse,
        run: bytes,
        turns: Sequence[tuple[str, float]],
        generate: Generate,
    ) -> None:
        """Run a response that its client waits for. If the client leaves, it is cancelled and not stored.

        `turns` are the ids of the earlier responses of its conversation, and when they expire.
        """
        sink = ForegroundSink(client, ResponseEdits(row.id, row.previous_id, is_background=False))
        request = InternalRequest(client.head, run, client.caller, sink)
        connect(client, request)
        if not client.gone:
            await generate(request, EndpointKind.RESPONSES)
        if sink.response is None:
            sink.deliver(None)
            return
        row.response, row.status = sink.response, status_of(sink.response)
        is_stored = await self._keep(row, turns)
        sink.deliver(row.response if is_stored else _not_stored(row.response))

    async def _keep(self, row: StoredResponse, turns: Sequence[tuple[str, float]]) -> bool:
        """Store a finished response. Without the store, the client still gets its answer, which says that it is not stored."""
        num_bytes = len(row.input) + len(row.response)
        if num_bytes > self._max_bytes:
            log.warning(
                "response_not_stored", response=row.id, reason=f"{num_bytes} bytes", setting="responses.max_mib"
            )
            return False
        soon_s = row.expires_s - self._settings.retention_s / 2
        kept = [turn_id for turn_id, expires_s in turns if expires_s < soon_s]

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
        check_num_values(run, "input")
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

        if state.stream:
            self._streams.check(row.tenant)
        num_bytes = len(row.input) + len(run)
        self._hold(client.caller, num_bytes)
        give_back = partial(self._held.give_back, client.caller.tenant, num_bytes)
        try:
            running = await self._store.write(work)
            if running >= self._settings.max_background:
                message = f"This tenant has {running} background responses that have not ended, which is the limit; retry later."
                raise Overloaded(message, retry_after_s=5.0, code="rate_limited")
        except BaseException:
            give_back()
            raise
        self.runs.start(row, client.caller, _renamed(client.head, row.id), give_back)
        if not state.stream:
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
                return json_reply(listed_items(row, page_of(request.query, default_order="desc")))
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
        self._streams.check(row.tenant)
        await self._streams.follow(request, row, after)
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
