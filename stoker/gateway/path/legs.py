"""The legs of one attempt: sends requests to the workers of one Route, reads their responses, and cleans up.

Whichever way a `Legs` block is left, nothing stays open: a response that was not read to its end is aborted, so that its
worker stops generating. A worker's failure is reported to the fleet here, once, and raised as LegFailed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NoReturn, TypeVar

import msgspec

from stoker.base.log import EventLog
from stoker.gateway.api.client_body import EndpointKind
from stoker.gateway.http import (
    ConnectionPool,
    NoSocketLeft,
    ResponseAborted,
    ResponseLost,
    ResponseTimeout,
    ResponseTooLarge,
    Unreachable,
    WorkerResponse,
    header_block,
)
from stoker.gateway.path.cache_report import CACHE_HEADER, cache_report, wants_cache_report
from stoker.gateway.path.call import Call
from stoker.gateway.path.errors import AnswerLate, AnswerTooLarge, BadAnswer, LegFailed, Refused
from stoker.gateway.path.failure_kinds import NEEDS_SECOND_OPINION, OWN_ACCESS, kind_of, known_status
from stoker.gateway.path.moves import MovableLeg
from stoker.gateway.path.services import ProxyServices
from stoker.gateway.path.upstream import CancelOnLoss, Upstream
from stoker.gateway.records.running_usage import STATUS
from stoker.gateway.records.tracing import TraceSpan
from stoker.proto.internal_http import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH, ROUTE_HEADER
from stoker.proto.openai.not_honoured import IGNORED_HEADER
from stoker.proto.resume_notes import BadNotes, NotesTooLarge
from stoker.proto.work import WORK_HEADER, work_header
from stoker.routing.query import Leg, Route

PATHS = {
    EndpointKind.CHAT: CHAT_PATH.encode(),
    EndpointKind.COMPLETIONS: COMPLETIONS_PATH.encode(),
    EndpointKind.RESPONSES: RESPONSES_PATH.encode(),
    EndpointKind.MESSAGES: MESSAGES_PATH.encode(),
}
_ROUTE = ROUTE_HEADER.encode()
_IGNORED = IGNORED_HEADER.lower().encode()
_MAX_ERROR_BYTES = 1 << 20
# A request that is sent only to release a prefill worker's blocks is aborted on the decode worker after this time.
_RELEASE_S = 1.0

_MEASURED_TOKENS = 1024  # for a shorter prompt, most of the time is not spent on prefill
_EVENT_STREAM = b"text/event-stream"
_MAX_DETAIL = 200  # characters of a worker's data in a log line
# What the code that reads a worker's data raises if the data is not valid.
_TOO_LARGE = (AnswerTooLarge, NotesTooLarge)
_BAD_DATA = (BadAnswer, BadNotes, msgspec.DecodeError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")

log = EventLog("proxy")


class Legs:
    """One attempt's legs: `decode`, and `prefill` if the route has one. Use it as a context manager."""

    __slots__ = (
        "_early_pull",
        "_lease",
        "_loss_guard",
        "_open",
        "_prefill_began_s",
        "_prefilling",
        "_route",
        "_services",
        "_transfer",
        "_upstreams",
        "call",
        "decode",
        "has_handed_off",
        "prefill",
    )

    def __init__(self, call: Call, route: Route, services: ProxyServices, loss_guard: CancelOnLoss) -> None:
        self.call = call
        self.decode = route.decode
        self.prefill = route.prefill
        self._route = route
        self._services = services
        self._loss_guard = loss_guard
        self._upstreams = [services.upstreams.of(route.decode.worker)]
        if route.prefill is not None:
            self._upstreams.append(services.upstreams.of(route.prefill.worker))
        self._open: dict[WorkerResponse, TraceSpan] = {}
        self._lease: str | None = None  # transfer id under which prefill holds KV that decode has not pulled yet
        self._early_pull: asyncio.Task[None] | None = None
        self._prefilling: Upstream | None = None  # the worker that is computing the prompt
        # None: other prompts ran on this worker, so the time is not measured.
        self._prefill_began_s: float | None = None
        self._transfer: TraceSpan | None = None  # from the end of prefill to the first byte of decode
        self.has_handed_off = False

    def __enter__(self) -> Legs:
        for upstream in self._upstreams:
            upstream.loss_guards.add(self._loss_guard)
        return self

    def __exit__(self, *why: type[BaseException] | BaseException | TracebackType | None) -> None:
        for upstream in self._upstreams:
            upstream.loss_guards.discard(self._loss_guard)
        if self._prefilling is not None:
            self._prefilling.num_prefilling -= 1
        if self._early_pull is not None:
            self._early_pull.cancel()
        for answer, span in self._open.items():
            answer.abort()
            span.end("aborted")
        if self._lease is not None and self.prefill is not None:
            release_lease, upstream = self._services.hints.release_lease, self.upstream(self.prefill)
            self._services.cleanups.start(
                release_lease(self.prefill, upstream, self._lease, self.call.envelope.num_choices)
            )

    @property
    def now_s(self) -> float:
        return self._services.clock()

    def upstream(self, leg: Leg) -> Upstream:
        return self._upstreams[0 if leg is self.decode else 1]

    @property
    def max_event_bytes(self) -> int:
        return self._services.max_event_bytes

    @property
    def max_notes_bytes(self) -> int:
        return self._services.settings.max_notes_bytes

    @property
    def dropped_fields(self) -> dict[str, int]:
        """The counts of body fields that were not passed to a foreign engine."""
        return self._services.metrics.dropped_fields

    @property
    def media_hosts(self) -> tuple[str, ...]:
        return self._services.settings.media_hosts

    # ---- requests to workers

    def movable(self, leg: Leg) -> AbstractContextManager[MovableLeg]:
        """Let other workers take this leg's request over while the context is open."""
        return self._services.moves.open(leg.worker.worker_id, self.call.query.model)

    async def send(self, leg: Leg, body: bytes, headers: bytes = b"") -> WorkerResponse:
        """Send a leg's request and return the worker's response once its head has arrived.

        Raises Refused if the client must get the worker's error, and LegFailed if another worker may succeed.
        """
        call, settings = self.call, self._services.settings
        upstream = self.upstream(leg)
        if leg is (self.prefill or self.decode):
            self._begin_prefill(upstream)
        span = call.trace.begin("leg.prefill" if leg is self.prefill else "leg.decode")
        began_s = self._services.clock()
        if call.sent_s is None:
            call.sent_s = began_s
        try:
            answer = await upstream.pool.send(
                b"POST",
                PATHS[call.envelope.kind],
                call.headers_under(span, upstream.to_worker) + upstream.headers + headers,
                body,
                connect_s=settings.connect_s,
                head_s=settings.first_byte_s,
                idle_s=settings.idle_s,
            )
        except ResponseTimeout as error:
            span.end(error.code)
            self._time_out(leg, error, began_s)
        except (Unreachable, ResponseLost) as error:
            span.end(error.code)
            self.fail(leg, _kind(error), error.message)
        self._open[answer] = span
        if answer.status != 200:
            await self._refuse(leg, answer)
        if leg is self.decode:
            self._lease = None  # decode answers after it has pulled the KV and released the lease
        return answer

    def work_header(self, leg: Leg) -> bytes:
        """Return the header that tells a Stoker worker what it will tell the other gateways."""
        work = leg.reservation
        is_flex = self.call.envelope.is_flex
        value = work_header(self._services.gateway, work.prefill_tokens, work.output_tokens, is_flex=is_flex)
        return b"%s: %s\r\n" % (WORK_HEADER.encode(), value.encode())

    async def send_shielded(self, leg: Leg, body: bytes, headers: bytes = b"") -> WorkerResponse:
        """Like `send`, but deliver the request even if the client disconnects in the meantime.

        Some prefill workers keep a prompt's blocks until a decode worker has received the request and dropped it.
        """
        sending = self._services.cleanups.start(self.send(leg, body, headers))
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            self._services.cleanups.start(_abort_later(sending))
            raise

    def expect_lease(self, transfer_id: str) -> None:
        """Note that the prefill worker will hold its KV under a lease with this id.

        The decode worker gets a hint, so that it can pull blocks while they are computed. If decode does not answer, the
        lease is released when the attempt ends.
        """
        if self.prefill is not None:
            self._lease = transfer_id
            pull_early = self._services.hints.pull_early
            self._early_pull = pull_early(self.prefill, self.decode, self.upstream(self.decode), transfer_id)

    async def get(self, leg: Leg, pool: ConnectionPool, path: bytes) -> bytes:
        """Query a hand-off service of the leg's worker and return the response body."""
        seconds = self._services.settings.connect_s
        try:
            answer = await pool.send(b"GET", path, (), b"", connect_s=seconds, head_s=seconds)
            data = await answer.read(_MAX_ERROR_BYTES)
        except (Unreachable, ResponseLost) as error:
            self.fail(leg, _kind(error), error.message)
        if answer.status != 200:
            self.fail(leg, "status5xx", f"worker {leg.worker.worker_id}: status {answer.status} for {path.decode()}")
        return data

    # ---- responses from workers

    async def read(self, leg: Leg, answer: WorkerResponse) -> bytes:
        """Return the whole response body, which `parsed` must check then."""
        limit_bytes = self._services.max_answer_bytes
        data = answer.whole(limit_bytes)
        if data is None:
            try:
                data = await answer.read(limit_bytes)
            except ResponseTooLarge as error:
                self._report_failure(leg, "too_large", error.message)
                raise AnswerTooLarge(f"The worker's answer is larger than {limit_bytes} bytes.") from error
            except (ResponseLost, ResponseAborted) as error:
                self.fail(leg, _kind(error), error.message)
        return data

    def parsed(self, leg: Leg, answer: WorkerResponse, parse: Callable[[bytes], T], data: bytes) -> T:
        """Return `parse(data)` and mark the leg as successful, or as failed if the data is not valid."""
        try:
            result = parse(data)
        except _BAD_DATA as error:
            self.fail(leg, "invalid", f"worker {leg.worker.worker_id}: {str(error)[:_MAX_DETAIL]}")
        self.done(leg, answer)
        return result

    async def relay(self, leg: Leg, answer: WorkerResponse, push: Callable[[bytes], bytes]) -> None:
        """Stream the body to the client as it arrives, through `push`.

        The caller decides with `done` or `fail` whether the answer was complete: a worker may end an HTTP response properly
        although its engine stopped in the middle of the answer.
        """
        request = self.call.request
        write, has_begun, sent_bytes = request.write, False, 0
        clock, saw_gap, last_s = self._services.clock, self._services.metrics.itl_s.observe, self.call.last_piece_s

        def sink(data: bytes) -> None:
            nonlocal has_begun, sent_bytes, last_s
            shown = push(data)
            if shown:
                sent_bytes += len(shown)
                now = clock()
                if last_s is not None:
                    saw_gap(now - last_s)
                last_s = now
                if not has_begun:
                    has_begun = True
                    self.begin(answer)
                    self._services.fleet.saw_first_token(leg.worker.worker_id, now)
                write(shown)

        request.on_pause, request.on_resume = answer.pause, answer.resume
        if request.paused:
            answer.pause()
        try:
            await answer.relay(sink)
        except (ResponseLost, ResponseAborted) as error:
            self.fail(leg, _kind(error), error.message)
        except _TOO_LARGE as error:
            self._exceed(leg, error.message)
        except _BAD_DATA as error:
            self.fail(leg, "invalid", f"worker {leg.worker.worker_id}: {str(error)[:_MAX_DETAIL]}")
        finally:
            request.on_pause = request.on_resume = None
            self.call.sent_bytes += sent_bytes
            self.call.last_piece_s = last_s

    def done(self, leg: Leg, answer: WorkerResponse) -> None:
        """Mark a leg as successful."""
        self._open.pop(answer).end()
        self._services.fleet.saw_success(leg.worker.worker_id, self._services.clock())

    # ---- the response to the client

    def begin(self, answer: WorkerResponse) -> None:
        """Note the first bytes of this attempt, and send the response head if the client has none yet."""
        self._saw_first_token()
        if not self.call.request.started:
            self.call.status = answer.status
            self.call.request.start(answer.status, self._client_headers(answer))

    def respond(self, answer: WorkerResponse, body: bytes) -> None:
        self.call.status = self.call.running.cells[STATUS] = answer.status
        self.call.sent_bytes = len(body)
        headers = self._client_headers(answer)
        if wants_cache_report(self.call):
            headers += header_block([(CACHE_HEADER, self._cache_report())])
        self.call.request.respond(answer.status, headers, body)
        self._saw_first_token()  # bookkeeping comes after the response, so that the client does not wait for it

    def finish(self) -> None:
        """End a stream. A client that asked for the cache report gets it as a comment after the last event."""
        request = self.call.request
        if wants_cache_report(self.call):
            request.write(b": %b: %b\n\n" % (CACHE_HEADER, self._cache_report()))
        request.finish()

    def end_prefill(self, *, handed_off: bool = False) -> None:
        """Return the prefill worker's reservation: prefill is done, or was not needed."""
        if self.prefill is None:
            return
        now = self._services.clock()
        self.prefill.reservation.end(now)
        if handed_off:
            self.call.handed_off_s = now
            self._computed_prompt(now)
            self.has_handed_off = True
            self._transfer = self.call.trace.begin("transfer")
        else:
            self._lease = None

    def fail(self, leg: Leg, kind: str, detail: str, refused: Refused | None = None) -> NoReturn:
        """Report a worker's failure to the fleet and raise LegFailed."""
        self._report_failure(leg, kind, detail)
        raise LegFailed(leg.worker.worker_id, kind, detail, refused)

    # ---- internals

    def _client_headers(self, answer: WorkerResponse) -> bytes:
        call = self.call
        passed = self._upstreams[0].to_client.block_of(answer.head)
        headers = b"x-request-id: %b\r\n%b" % (call.request_id, passed)
        if call.ignored_fields:
            headers += header_block([(_IGNORED, ", ".join(call.ignored_fields).encode())])
        if call.explained is not None:
            headers += header_block([(_ROUTE, call.explained)])
        return headers

    def _cache_report(self) -> bytes:
        return cache_report(self._services.doctor, self.call)

    def _saw_first_token(self) -> None:
        call, now = self.call, self._services.clock()
        self._computed_prompt(now)
        self._route.first_token(now)
        if self._transfer is not None:
            self._transfer.end()
        if call.first_byte_s is None:
            call.first_byte_s = now
            call.on_first_byte()

    def _begin_prefill(self, upstream: Upstream) -> None:
        if self._prefilling is not None:  # the request is sent again
            self._prefilling.num_prefilling -= 1
        self._prefill_began_s = None if upstream.num_prefilling else self._services.clock()
        self._prefilling = upstream
        upstream.num_prefilling += 1

    def _computed_prompt(self, now: float) -> None:
        """Note the end of prefill. The time is a valid rate only if no other prompt ran on the worker."""
        upstream, began_s = self._prefilling, self._prefill_began_s
        if upstream is None:
            return
        upstream.num_prefilling -= 1
        self._prefilling = None
        leg = self.prefill or self.decode
        if began_s is not None and leg.reservation.prefill_tokens >= _MEASURED_TOKENS:
            self._services.fleet.saw_prefill(leg.worker.worker_id, leg.reservation.prefill_tokens, now - began_s)

    async def _refuse(self, leg: Leg, answer: WorkerResponse) -> NoReturn:
        try:
            body = await answer.read(_MAX_ERROR_BYTES)
        except (ResponseLost, ResponseAborted) as error:
            self.fail(leg, _kind(error), error.message)
        self._open.pop(answer).end(f"status_{answer.status}")
        status, detail = answer.status, f"worker {leg.worker.worker_id}: status {answer.status}"
        if status < 400:
            self.fail(leg, "invalid", detail)
        refused = Refused(known_status(status), self.upstream(leg).to_client.pairs(answer.headers), body)
        kind = kind_of(self.call, status, body, self._services.clock())
        if kind is not None:
            self.fail(leg, kind, detail, None if status in OWN_ACCESS else refused)
        raise refused

    def _exceed(self, leg: Leg, detail: str) -> NoReturn:
        """Handle a stream beyond a size limit, which the client may have caused. In mid-stream, another worker would meet it
        too."""
        if not self.call.request.started:
            self.fail(leg, "too_large", detail)
        self._report_failure(leg, "too_large", detail)
        raise AnswerTooLarge(
            "The worker's answer is larger than the gateway passes on; ask for less, such as fewer logprobs."
        )

    def _time_out(self, leg: Leg, error: ResponseTimeout, began_s: float) -> NoReturn:
        """Handle a response that did not begin in time. An answer that is not streamed may simply be too long."""
        if self.call.streams:
            self.fail(leg, "timeout", error.message)
        self._report_failure(leg, "timeout", error.message, began_s)
        seconds = self._services.settings.first_byte_s
        raise AnswerLate(
            f"The answer was not complete within {seconds:g} s. Set stream to true, or ask for fewer tokens."
        ) from error

    def _report_failure(self, leg: Leg, kind: str, detail: str, began_s: float | None = None) -> None:
        services, worker_id = self._services, leg.worker.worker_id
        services.metrics.upstream[worker_id, kind] += 1
        if kind != "busy":
            log.warning(
                "worker_failed", request=self.call.request_id.decode(), worker=worker_id, kind=kind, reason=detail
            )
        if kind not in NEEDS_SECOND_OPINION:
            services.fleet.saw_failure(worker_id, services.clock(), kind, began_s)


def is_event_stream(answer: WorkerResponse) -> bool:
    kind = answer.header(b"content-type")
    return kind is not None and kind.startswith(_EVENT_STREAM)


def _kind(error: Unreachable | ResponseLost | ResponseAborted) -> str:
    """Return the fleet's failure kind for an HTTP error."""
    if isinstance(error, Unreachable):
        return "connect"
    return "timeout" if isinstance(error, ResponseTimeout) else "lost"


async def _abort_later(sending: asyncio.Task[WorkerResponse]) -> None:
    try:
        answer = await asyncio.wait_for(sending, _RELEASE_S)
    except (TimeoutError, LegFailed, Refused, NoSocketLeft):
        return
    try:
        await asyncio.sleep(_RELEASE_S)
    finally:
        answer.abort()
