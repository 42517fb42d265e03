"""The legs of one try: what is sent to the workers of one Route, what comes back, and what of it is still open.

A `Legs` is left by any road with nothing open: an answer that was not read to its end is aborted, which is how a worker
learns that nobody wants it. What a worker did wrong is told to the fleet here, once, and becomes LegFailed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, NoReturn

from stoker.fleet.fleet import Fleet
from stoker.gateway.api.client_body import Kind
from stoker.gateway.config import ProxySettings
from stoker.gateway.http import (
    Answer,
    AnswerAborted,
    AnswerLate,
    AnswerLost,
    AnswerTooLarge,
    NoSocketLeft,
    Pool,
    Unreachable,
    header_block,
)
from stoker.gateway.path.call import Call
from stoker.gateway.path.errors import LegFailed, Refused
from stoker.gateway.path.handoff_notes import HandoffNotes
from stoker.gateway.path.upstream import Lifeline, Upstream, Upstreams
from stoker.gateway.records.metrics import GatewayMetrics
from stoker.gateway.records.tracing import Span
from stoker.proto.internal_http import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH, ROUTE_HEADER
from stoker.routing.query import Leg, Route

PATHS = {
    Kind.CHAT: CHAT_PATH.encode(),
    Kind.COMPLETIONS: COMPLETIONS_PATH.encode(),
    Kind.RESPONSES: RESPONSES_PATH.encode(),
}
_ROUTE = ROUTE_HEADER.encode()
MAX_ANSWER_BYTES = 256 << 20  # a whole answer, held until it is complete
_MAX_ERROR_BYTES = 1 << 20
_RELEASE_S = 1.0  # how long a decode worker may take to see a request that is sent only to free its prefill worker

_TRY_ELSEWHERE = {429: "busy", 502: "status5xx", 503: "busy", 504: "status5xx"}
_MEASURED_TOKENS = 1024  # of a shorter prompt the time is mostly other things than computing it
_EVENT_STREAM = b"text/event-stream"
_STATUSES = frozenset(HTTPStatus)


class Cleanups:
    """Tasks that outlive their request, for as short as they can; the proxy owns them and waits for them when it stops."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Tools:
    """What running a route needs besides the route: one set for a gateway."""

    fleet: Fleet
    upstreams: Upstreams
    settings: ProxySettings
    metrics: GatewayMetrics
    cleanups: Cleanups
    clock: Callable[[], float]
    notes: HandoffNotes = field(default_factory=HandoffNotes)


class Legs:
    __slots__ = (
        "_early_pull",
        "_lent",
        "_lifeline",
        "_open",
        "_prefill_began_s",
        "_prefilling",
        "_route",
        "_tools",
        "_transfer",
        "_upstreams",
        "call",
        "decode",
        "has_handed_off",
        "prefill",
    )

    def __init__(self, call: Call, route: Route, tools: Tools, lifeline: Lifeline) -> None:
        self.call = call
        self.decode = route.decode
        self.prefill = route.prefill
        self._route = route
        self._tools = tools
        self._lifeline = lifeline
        self._upstreams = [tools.upstreams.of(route.decode.worker)]
        if route.prefill is not None:
            self._upstreams.append(tools.upstreams.of(route.prefill.worker))
        self._open: dict[Answer, Span] = {}
        self._lent: str | None = None  # under which name prefill keeps KV that decode has not taken
        self._early_pull: asyncio.Task[None] | None = None
        self._prefilling: Upstream | None = None  # where the prompt is being computed
        self._prefill_began_s: float | None = None  # None: among others, so that the time says nothing
        self._transfer: Span | None = None  # from prefill's end to decode's first byte
        self.has_handed_off = False

    def __enter__(self) -> Legs:
        for upstream in self._upstreams:
            upstream.lifelines.add(self._lifeline)
        return self

    def __exit__(self, *why: type[BaseException] | BaseException | TracebackType | None) -> None:
        for upstream in self._upstreams:
            upstream.lifelines.discard(self._lifeline)
        if self._prefilling is not None:
            self._prefilling.num_prefilling -= 1
        if self._early_pull is not None:
            self._early_pull.cancel()
        for answer, span in self._open.items():
            answer.abort()
            span.end("aborted")
        if self._lent is not None and self.prefill is not None:
            give_back, upstream = self._tools.notes.give_back, self.upstream(self.prefill)
            self._tools.cleanups.start(give_back(self.prefill, upstream, self._lent, self.call.envelope.num_choices))

    def upstream(self, leg: Leg) -> Upstream:
        return self._upstreams[0 if leg is self.decode else 1]

    # ---- to a worker

    async def send(self, leg: Leg, body: bytes, headers: bytes = b"") -> Answer:
        """The worker's answer, once its head is there. Refused: the client must hear it; LegFailed: another may do it."""
        call, settings = self.call, self._tools.settings
        upstream = self.upstream(leg)
        if leg is (self.prefill or self.decode):
            self._begin_prefill(upstream)
        span = call.trace.begin("leg.prefill" if leg is self.prefill else "leg.decode")
        try:
            answer = await upstream.pool.send(
                b"POST",
                PATHS[call.envelope.kind],
                call.headers_under(span, upstream.to_worker) + upstream.headers + headers,
                body,
                connect_s=settings.connect_s,
                head_s=settings.first_byte_s,
            )
        except (Unreachable, AnswerLost) as error:
            span.end(error.code)
            self.fail(leg, _kind(error), error.message)
        self._open[answer] = span
        if answer.status >= 400:
            await self._refuse(leg, answer)
        if leg is self.decode:
            self._lent = None  # it answers with what came after the KV, and has given that back
        return answer

    async def send_surely(self, leg: Leg, body: bytes, headers: bytes = b"") -> Answer:
        """As `send`, but the worker gets the request even if the client leaves meanwhile: some prefill workers keep a
        prompt's blocks until a decode worker has seen the request and dropped it."""
        sending = self._tools.cleanups.start(self.send(leg, body, headers))
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            self._tools.cleanups.start(_let_go(sending))
            raise

    def lend(self, transfer_id: str) -> None:
        """Prefill's worker keeps its KV under this name from now on. Decode's may take it meanwhile, block after block; if
        decode does not answer, it is given back."""
        if self.prefill is not None:
            self._lent = transfer_id
            pull_early = self._tools.notes.pull_early
            self._early_pull = pull_early(self.prefill, self.decode, self.upstream(self.decode), transfer_id)

    async def get(self, leg: Leg, pool: Pool, path: bytes) -> bytes:
        """A side question about a hand-off; the answer's body."""
        seconds = self._tools.settings.connect_s
        try:
            answer = await pool.send(b"GET", path, (), b"", connect_s=seconds, head_s=seconds)
            data = await answer.read(_MAX_ERROR_BYTES)
        except (Unreachable, AnswerLost) as error:
            self.fail(leg, _kind(error), error.message)
        if answer.status != 200:
            self.fail(leg, "status5xx", f"worker {leg.worker.worker_id}: status {answer.status} for {path.decode()}")
        return data

    # ---- from a worker

    async def read(self, leg: Leg, answer: Answer) -> bytes:
        """The whole body."""
        data = answer.whole(MAX_ANSWER_BYTES)
        if data is None:
            try:
                data = await answer.read(MAX_ANSWER_BYTES)
            except AnswerTooLarge:
                raise
            except (AnswerLost, AnswerAborted) as error:
                self.fail(leg, "lost", error.message)
        self.done(leg, answer)
        return data

    async def relay(self, leg: Leg, answer: Answer, push: Callable[[bytes], bytes]) -> None:
        """The body as it comes, through `push`, to the client. Whether it was an answer to its end is for `push`'s owner to
        say, with `done` or `fail`: a worker may end in good order a stream that its engine did not."""
        request = self.call.request
        write, has_begun = request.write, False

        def sink(data: bytes) -> None:
            nonlocal has_begun
            shown = push(data)
            if shown:
                if not has_begun:
                    has_begun = True
                    self.begin(answer)
                    self._tools.fleet.saw_first_token(leg.worker.worker_id, self._tools.clock())
                write(shown)

        request.on_pause, request.on_resume = answer.pause, answer.resume
        if request.paused:
            answer.pause()
        try:
            await answer.relay(sink)
        except (AnswerLost, AnswerAborted) as error:
            self.fail(leg, "lost", error.message)
        finally:
            request.on_pause = request.on_resume = None

    def done(self, leg: Leg, answer: Answer) -> None:
        """The worker did its part."""
        self._open.pop(answer).end()
        self._tools.fleet.saw_success(leg.worker.worker_id, self._tools.clock())

    # ---- to the client

    def begin(self, answer: Answer) -> None:
        """The first bytes of this try are there; where they are the client's first, it has a status from now on."""
        self._saw_first_token()
        if not self.call.request.started:
            self.call.status = answer.status
            self.call.request.start(answer.status, self._client_headers(answer))

    def respond(self, answer: Answer, body: bytes) -> None:
        self.call.status = answer.status
        self.call.request.respond(answer.status, self._client_headers(answer), body)
        self._saw_first_token()  # told when the answer is on its way: nobody waits for our accounts

    def end_prefill(self, *, handed_off: bool = False) -> None:
        """The prefill worker is done, or was not needed: its reservation goes back."""
        if self.prefill is None:
            return
        now = self._tools.clock()
        self.prefill.reservation.end(now)
        if handed_off:
            self._computed_prompt(now)
            self.has_handed_off = True
            self._transfer = self.call.trace.begin("transfer")
        else:
            self._lent = None

    def fail(self, leg: Leg, kind: str, message: str, refused: Refused | None = None) -> NoReturn:
        """The worker did not do its part: the fleet is told, and whoever runs the route."""
        self._tell(leg, kind)
        raise LegFailed(leg.worker.worker_id, kind, message, refused)

    # ---- inside

    def _client_headers(self, answer: Answer) -> bytes:
        call = self.call
        passed = self._upstreams[0].to_client.block_of(answer.head)
        headers = b"x-request-id: %b\r\n%b" % (call.request_id, passed)
        if call.explained is not None:
            headers += header_block([(_ROUTE, call.explained)])
        return headers

    def _saw_first_token(self) -> None:
        call, now = self.call, self._tools.clock()
        self._computed_prompt(now)
        self._route.first_token(now)
        if self._transfer is not None:
            self._transfer.end()
        if call.first_byte_s is None:
            call.first_byte_s = now
            call.on_first_byte()

    def _begin_prefill(self, upstream: Upstream) -> None:
        if self._prefilling is not None:  # it is sent once more
            self._prefilling.num_prefilling -= 1
        self._prefill_began_s = None if upstream.num_prefilling else self._tools.clock()
        self._prefilling = upstream
        upstream.num_prefilling += 1

    def _computed_prompt(self, now: float) -> None:
        """Only a prompt that had its worker to itself says how fast the worker is."""
        upstream, began_s = self._prefilling, self._prefill_began_s
        if upstream is None:
            return
        upstream.num_prefilling -= 1
        self._prefilling = None
        leg = self.prefill or self.decode
        if began_s is not None and leg.reservation.prefill_tokens >= _MEASURED_TOKENS:
            self._tools.fleet.saw_prefill(leg.worker.worker_id, leg.reservation.prefill_tokens, now - began_s)

    async def _refuse(self, leg: Leg, answer: Answer) -> NoReturn:
        try:
            body = await answer.read(_MAX_ERROR_BYTES)
        except (AnswerLost, AnswerAborted) as error:
            self.fail(leg, "lost", error.message)
        self._open.pop(answer).end(f"status_{answer.status}")
        refused = Refused(_known_status(answer.status), self.upstream(leg).to_client.pairs(answer.headers), body)
        kind = _TRY_ELSEWHERE.get(answer.status)
        if kind is None and answer.status >= 500 and self.prefill is not None:
            kind = "status5xx"  # a hand-off went wrong, whoever says so: without one the request may do well
        if kind is not None:
            self.fail(leg, kind, f"worker {leg.worker.worker_id}: status {answer.status}", refused)
        if answer.status >= 500:
            self._tell(leg, "status5xx")
        raise refused

    def _tell(self, leg: Leg, kind: str) -> None:
        worker_id = leg.worker.worker_id
        self._tools.fleet.saw_failure(worker_id, self._tools.clock(), kind)
        self._tools.metrics.upstream[worker_id, kind] += 1


def is_event_stream(answer: Answer) -> bool:
    kind = answer.header(b"content-type")
    return kind is not None and kind.startswith(_EVENT_STREAM)


def _kind(error: Unreachable | AnswerLost) -> str:
    """As the fleet calls it."""
    if isinstance(error, Unreachable):
        return "connect"
    return "timeout" if isinstance(error, AnswerLate) else "lost"


def _known_status(status: int) -> int:
    """A server may answer with a number of its own, such as 529; its class says enough."""
    return status if status in _STATUSES else 503 if status >= 500 else 400


async def _let_go(sending: asyncio.Task[Answer]) -> None:
    try:
        answer = await asyncio.wait_for(sending, _RELEASE_S)
    except (TimeoutError, LegFailed, Refused, NoSocketLeft):
        return
    try:
        await asyncio.sleep(_RELEASE_S)
    finally:
        answer.abort()
