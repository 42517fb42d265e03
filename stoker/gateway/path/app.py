"""The gateway's URL routes, the steps of a generating request, and the one place where errors become responses.

    limits of the key -> envelope -> session, prefix keys -> admission -> proxy (route, legs, retries, resume)

The request was authenticated when its head arrived (`front_gate.py`).

A request above its key's limits is refused before its body is parsed. However a generating request ends, its admission slot
is returned and its one usage row is written.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable
from functools import partial

from stoker.base.errors import NotFound
from stoker.base.log import EventLog
from stoker.fleet.spec import Role
from stoker.gateway.admission.admission import AdmittedRequest
from stoker.gateway.api.client_body import EndpointKind, RequestEnvelope, parse
from stoker.gateway.api.reply import Reply, error_reply, json_reply, method_not_allowed
from stoker.gateway.doctor.miss_parts import as_text
from stoker.gateway.http import HttpRequest
from stoker.gateway.insight.insight_endpoint import INSIGHT_PATHS
from stoker.gateway.insight.live_stream import STREAM_PATH
from stoker.gateway.insight.request_digest import RequestTimes
from stoker.gateway.objects.tenant_objects import OBJECT_PREFIXES
from stoker.gateway.path.billing import billed_usage
from stoker.gateway.path.cache_report import miss_parts
from stoker.gateway.path.call import Call, RequestIds, body_changes, given_request_id, requested_model
from stoker.gateway.path.cors import cors_headers, preflight_reply
from stoker.gateway.path.embeddings import PATHS as EMBEDDINGS_PATHS
from stoker.gateway.path.errors import WorkerFailure, error_event, has_used_worker, is_unexpected, reply_of, shaped_for
from stoker.gateway.path.exchange import Exchange
from stoker.gateway.path.gateway_parts import GatewayParts
from stoker.gateway.path.legs import PATHS
from stoker.gateway.path.model_aliases import rename
from stoker.gateway.path.models_endpoint import ModelsEndpoint
from stoker.gateway.path.resume import TokenMemory
from stoker.gateway.path.rewrite import UsageCounts
from stoker.gateway.path.tokenize import PATHS as TOKENIZE_PATHS
from stoker.gateway.prefix.conversation_keys import ConversationKeys
from stoker.gateway.prefix.session import SessionKeys, session_of
from stoker.gateway.records.tracing import TraceSpan
from stoker.gateway.records.usage_tables import run_id
from stoker.proto.internal_http import REGISTER_PATH
from stoker.routing.query import RouteQuery

_GENERATING = {path: kind for kind, path in PATHS.items()}
_REGISTER = REGISTER_PATH.encode()
_RESPONSES = EndpointKind.RESPONSES  # faster than enum attribute access
_ANSWERING = frozenset({Role.UNIFIED, Role.DECODE})
_PROBES = frozenset({b"/health", b"/ready"})
_YES = frozenset({b"1", b"true", b"yes"})

log = EventLog("gateway")


class Gateway:
    """Handles every HTTP request of the gateway."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        self._ids = RequestIds()
        self._models = ModelsEndpoint(parts.fleet, parts.keys, parts.aliases, parts.max_model_tokens)

    def handle(self, request: HttpRequest) -> Awaitable[None]:
        """Answer one request. The HTTP server awaits the result in the request's task."""
        if self._parts.cors:
            request.more_headers = cors_headers(self._parts.cors, request.head)
        kind = _GENERATING.get(request.path)
        if kind is None or request.method != b"POST":
            return self._reply(request)
        if kind is _RESPONSES:
            return self._create_response(request)
        return self.generate(request, kind)

    def count_bad_request(self, peer: str, reason: str) -> None:
        """Count and log bytes that the HTTP server refused because they are not a valid request."""
        self._parts.metrics.bad_requests["malformed"] += 1
        log.warning("bad_request", peer=peer, reason=reason)

    # ---- generating requests

    async def _create_response(self, request: HttpRequest) -> None:
        """Run a request of the Responses API, which may have state."""
        try:
            await self._parts.objects.create_response(request, self.generate)
        except Exception as error:
            reply = self._reply_to(error, request)
            if not request.started:
                request.respond(reply.status, reply.headers, reply.body)
            elif not request.finished:
                request.write(error_event(error, _RESPONSES))
                request.finish()

    async def generate(self, request: HttpRequest, kind: EndpointKind) -> None:
        """Run a generating request to its end. Errors become its response."""
        parts, header = self._parts, request.head.by_name.get
        row_id = self._ids.new()
        request_id = given_request_id(header(b"x-request-id")) or row_id.encode()
        if request.answer_name:
            row_id = run_id(request.answer_name, row_id)
        trace = parts.tracing.request(
            header(b"traceparent"), header(b"tracestate"), request_id=request_id.decode(), endpoint=kind
        )
        exchange = Exchange(request, kind, row_id, request_id, parts.clock(), time.time(), trace)
        # When the client disconnects, cancel its task. The cancellation ends every leg and wait and returns all reservations.
        request.on_gone = request.task.cancel
        parts.state.began()
        try:
            if request.gone:  # before this task began: with TLS, the close can arrive together with the request
                exchange.client_left()
            else:
                await self._run(exchange)
        except asyncio.CancelledError:
            exchange.client_left()
            if not request.gone:
                raise  # the gateway is stopping
        except Exception as error:
            exchange.failed(error)
            self._fail(exchange, error)
        finally:
            parts.state.ended()
            self._record(exchange)

    async def run_line(self, request: HttpRequest) -> None:
        """Answer the request of a batch's line. It is not stored, whatever its path."""
        kind = _GENERATING.get(request.path)
        await (self._reply(request) if kind is None else self.generate(request, kind))

    async def _run(self, exchange: Exchange) -> None:
        parts, request = self._parts, exchange.request
        caller = exchange.caller = request.caller  # FrontGate has authenticated it
        await parts.admission.prepare(caller)
        admitted = parts.admission.claim(caller)
        keeps_charge = False
        try:
            envelope = parse(exchange.kind, request.body)
            session = session_of(request.head.by_name, envelope, caller.tenant)
            exchange.session = session.session
            model = exchange.model = requested_model(envelope.model, parts.fleet, parts.aliases, session.session)
            began_s = parts.clock()
            put, drop = body_changes(envelope, caller)
            rename(envelope, model, put)
            conversation = parts.key_makers.keys_now(model, envelope, envelope.salt)
            if conversation is None:
                conversation = await parts.key_makers.keys(model, envelope, envelope.salt, caller.tenant)
            parts.metrics.keys_s.observe(parts.clock() - began_s)
            if caller.budgets.limits_sessions:
                await parts.admission.charge_session(admitted, session.session)
            query = _query(model, envelope, session, conversation)
            arrived_s, trace = exchange.arrived_s, exchange.trace
            seed, tenant = random.getrandbits(53), caller.tenant
            call = Call(request, envelope, query, exchange.request_id, put, drop, arrived_s, seed, trace, tenant)
            exchange.call = call
            if (begun := request.begun) is not None:
                call.memory = TokenMemory(begun.notes, num_events=begun.num_events)
                call.num_billed_tokens = begun.num_tokens
                call.status = 200 if request.started else 0
            entering = trace.begin("admission")
            if envelope.is_flex:
                await self._run_flex(exchange, call, admitted, entering)
                return
            lane = parts.flex.interactive_began(model)
            try:
                await parts.admission.enter(
                    admitted,
                    self._uncached_tokens(query),
                    lane=model,
                    reject_if_busy=_rejects_if_busy(request, envelope),
                    priority=envelope.priority if isinstance(envelope.priority, int) else None,
                )
                entering.end()
                self._begin_usage(exchange, call, admitted)
                await parts.proxy.run(call)
            finally:
                parts.flex.interactive_ended(lane)
        except Exception as error:
            if exchange.call is not None and not exchange.call.has_added:
                exchange.call.running.update(0, 0, 0)  # the client got nothing, so nothing is billed
                exchange.call.usage = UsageCounts()
                keeps_charge = has_used_worker(error)
            raise
        finally:
            try:
                usage = None if exchange.call is None else self._settled_usage(exchange.call)
                if usage is not None and not keeps_charge:
                    uncached = usage.prompt_tokens - usage.cached_tokens
                    admitted.done(uncached, usage.completion_tokens, usage.cached_tokens)
            finally:
                admitted.done()

    async def _run_flex(self, exchange: Exchange, call: Call, admitted: AdmittedRequest, entering: TraceSpan) -> None:
        """Run a request that uses only idle capacity, at the lowest priority of its key."""
        parts, priority = self._parts, admitted.caller.lowest_priority
        call.put["priority"] = b"%d" % priority
        uncached_tokens, on_preempt = partial(self._uncached_tokens, call.query), exchange.request.on_preempt
        slot = await parts.admission.enter_idle(admitted, uncached_tokens, parts.flex, on_preempt, lane=exchange.model)
        try:
            entering.end()
            self._begin_usage(exchange, call, admitted)
            await parts.proxy.run(call)
        finally:
            slot.end()

    def _begin_usage(self, exchange: Exchange, call: Call, admitted: AdmittedRequest) -> None:
        """Write the ledger's row of an admitted request ahead."""
        exchange.running = call.running = self._parts.meter.open(exchange.head())
        if admitted.waited_s:
            exchange.queued_s = admitted.waited_s
            call.query.matches = None  # outdated: other requests were routed in the meantime
        call.on_first_byte = admitted.first_token
        if admitted.tracks_output:
            admitted.output_tokens = partial(self._output_tokens, call, self._parts.clock())

    def _output_tokens(self, call: Call, admitted_s: float) -> int:
        """Return how many tokens a running request has produced. For an answer that is not streamed it is an estimate."""
        if call.streams:
            return call.running.completion_tokens
        fleet, envelope = self._parts.fleet, call.envelope
        member = None if call.worker_id is None else fleet.member(call.worker_id)
        if member is None:
            return 0
        tokens = int((self._parts.clock() - admitted_s) / fleet.step_s(member))
        limit = envelope.max_new_tokens
        return (tokens if limit is None else min(tokens, limit)) * max(1, envelope.n or 1)

    def _settled_usage(self, call: Call) -> UsageCounts | None:
        """Replace the usage that the workers reported by the one to bill. Return None if nothing was reported or sent."""
        call.usage, wrong = billed_usage(call, self._parts.hidden_tokens)
        if call.usage is not None and call.num_billed_tokens:
            call.usage.completion_tokens = max(0, call.usage.completion_tokens - call.num_billed_tokens)
        if wrong is not None:
            worker = call.worker_id or ""
            if not self._parts.metrics.wrong_usage[worker]:
                log.warning("wrong_usage", worker=worker, request=call.request_id.decode(), reason=wrong)
            self._parts.metrics.wrong_usage[worker] += 1
        return call.usage

    def _uncached_tokens(self, query: RouteQuery) -> int:
        """Return how many prompt tokens the worker with the longest cached prefix would still have to compute.

        The matches are kept in the query, so that the router need not look them up again.
        """
        index = self._parts.indexes.get(query.model)
        if index is None or not query.keys:
            return query.num_tokens
        query.matches = index.match(query.keys)
        held = query.matches.most_blocks
        return max(1, query.num_tokens - held * query.block_tokens)

    def _record(self, exchange: Exchange) -> None:
        parts = self._parts
        row = exchange.row(parts.clock(), self._misses(exchange))
        if exchange.running is not None:
            parts.meter.settle(exchange.running, row)
        exchange.trace.end(row.status, row.error)
        parts.metrics.ended(row)
        parts.request_log.record(row)
        if exchange.running is None and row.error is not None:
            parts.metrics.refusals[row.error] += 1
        call = exchange.call
        if call is None:
            parts.insight.ended(row, None, None, RequestTimes(exchange.arrived_s), 0)
        else:
            times = RequestTimes(call.arrived_s, call.sent_s, call.handed_off_s, call.first_byte_s, call.streams)
            parts.insight.ended(row, call.route, call.query, times, call.num_retries)
            parts.twin.ended(call)
            if not call.envelope.is_flex:  # these wait for idle workers
                parts.canaries.ended(call.envelope.model, row)
            if row.ttft_ms is not None:
                counts = (row.prompt_tokens, row.cached_tokens, row.completion_tokens)
                parts.recorder.answered(call.route, parts.clock(), *counts, row.ttft_ms * 1e-3)

    def _misses(self, exchange: Exchange) -> str:
        """Explain and count the uncached tokens of a request. Return the explanation for its row."""
        call, caller = exchange.call, exchange.caller
        if call is None or call.usage is None or not call.usage.prompt_tokens:
            return ""
        prompt, cached = call.usage.prompt_tokens, call.usage.cached_tokens
        found = miss_parts(self._parts.doctor, call, prompt, cached, call.usage.completion_tokens)
        self._parts.misses.add(caller.key_id, caller.tenant, exchange.model, prompt, cached, found)
        return as_text(found)

    # ---- all other paths

    async def _reply(self, request: HttpRequest) -> None:
        try:
            reply = await self._other(request)
        except Exception as error:
            reply = shaped_for(request.path, self._reply_to(error, request))
        if reply is not None and not request.started:
            request.respond(reply.status, reply.headers, reply.body)
        elif not request.finished:
            request.abort()  # a stream that failed, so that the client sees an incomplete response

    async def _other(self, request: HttpRequest) -> Reply | None:
        """Return the reply to any other request. None: it was sent as a stream."""
        path, parts = request.path, self._parts
        if parts.cors and (preflight := preflight_reply(parts.cors, request.head)) is not None:
            return preflight
        if path in _PROBES:
            if request.method == b"TRACE":
                return method_not_allowed(path, request.method, [b"GET"])
            return self._health() if path == b"/health" else self._ready()
        if path == b"/metrics":
            return await parts.metrics_page.answer(request)
        if path in INSIGHT_PATHS:
            return await parts.insight_pages.answer(request)
        if path == STREAM_PATH:
            return await parts.live.answer(request)
        if path == b"/ui" or path.startswith(b"/ui/"):
            return await parts.pages.answer(request)
        if path.startswith(b"/admin/"):
            return await parts.admin.answer(request)
        if path == b"/v1/usage":
            return await parts.usage.answer(request)
        if path == _REGISTER:
            return await parts.registration.answer(request)
        if path in TOKENIZE_PATHS:
            return await parts.tokenize.answer(request, parts.objects.counted_body)
        if path in EMBEDDINGS_PATHS:
            return await parts.embeddings.answer(request)
        if path.startswith(OBJECT_PREFIXES):
            return await parts.objects.answer(request)
        if path == b"/v1/models" or path.startswith(b"/v1/models/"):
            return await self._models.answer(request)
        if path in _GENERATING:
            return method_not_allowed(path, request.method, [b"POST"])
        raise NotFound(f"No such path: {path.decode('latin-1')}.", code="unknown_url")

    def _health(self) -> Reply:
        """Return 200 while the gateway serves. Without its store it does: usage rows wait in their files."""
        return json_reply({"status": "ok", "store": "ok" if self._parts.store_works() else "unavailable"})

    def _ready(self) -> Reply:
        parts, now = self._parts, self._parts.clock()
        if parts.state.leaving:
            return error_reply(503, "The gateway is draining.", code="draining", kind="overloaded_error")
        answering = [member for member in parts.fleet.members() if member.spec.role in _ANSWERING]
        if not any(parts.fleet.in_service(member, now) for member in answering):
            message = "No worker can accept requests; see GET /admin/fleet."
            return error_reply(503, message, code="no_worker", kind="overloaded_error")
        return json_reply({"status": "ready"})

    # ---- errors

    def _fail(self, exchange: Exchange, error: Exception) -> None:
        request = exchange.request
        reply = shaped_for(request.path, self._reply_to(error, request, exchange.request_id), exchange.request_id)
        if request.finished or request.gone:
            return
        if not request.started:
            request.respond(reply.status, [*reply.headers, (b"x-request-id", exchange.request_id)], reply.body)
            return
        request.write(error_event(error, exchange.kind))
        request.finish()

    def _reply_to(self, error: Exception, request: HttpRequest, request_id: bytes = b"") -> Reply:
        """Return the error's reply, and log what the client must not see: tracebacks and workers' addresses."""
        name = request_id.decode()
        if is_unexpected(error):
            path = request.path.decode("latin-1")
            log.error("request_failed", exc_info=True, path=path, peer=request.peer, request=name)
        elif isinstance(error, WorkerFailure):
            log.warning("worker_failed", request=name, worker=error.worker_id, reason=error.detail)
        return reply_of(error)


def _query(model: str, envelope: RequestEnvelope, session: SessionKeys, conversation: ConversationKeys) -> RouteQuery:
    return RouteQuery(
        model=model,
        keys=conversation.keys,
        block_tokens=conversation.block_tokens,
        num_tokens=conversation.num_tokens,
        max_output_tokens=envelope.max_new_tokens,
        session=session.session,
        parent_session=session.parent,
    )


def _rejects_if_busy(request: HttpRequest, envelope: RequestEnvelope) -> bool:
    header = request.head.by_name.get(b"x-reject-if-busy")
    return envelope.reject_if_busy is True or (header is not None and header.lower() in _YES)
