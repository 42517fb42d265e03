"""One client's request on its way: what every try and every leg of it needs to know, and what it came to."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from msgspec import UNSET

from stoker.base.ids import WorkerId
from stoker.gateway.admission.api_keys import Caller
from stoker.gateway.api.client_body import Envelope, edit
from stoker.gateway.http import HeaderFilter, Request, header_block
from stoker.gateway.path.resume import TokenMemory
from stoker.gateway.path.rewrite import Usage
from stoker.gateway.records.tracing import RequestTrace, Span
from stoker.routing.query import RouteQuery

_NOTHING: Mapping[str, bytes] = {}

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
_TRACEPARENT = re.compile(rb"^traceparent:.*\r\n", re.MULTILINE)


class Call(msgspec.Struct, eq=False):
    """A struct, like the rest that is made for every request: it takes a fraction of a dataclass's time to make."""

    request: Request
    envelope: Envelope
    query: RouteQuery
    request_id: bytes
    put: dict[str, bytes]  # what every leg's body must have, as JSON
    drop: Sequence[str]  # what no leg's body may have
    arrived_s: float
    seed: int
    trace: RequestTrace
    on_first_byte: Callable[[], None] = lambda: None

    memory: TokenMemory = msgspec.field(default_factory=TokenMemory)
    usage: Usage | None = None
    status: int = 0
    first_byte_s: float | None = None
    num_retries: int = 0
    num_resumes: int = 0
    worker_id: WorkerId | None = None  # who decodes it, the last one if there were more
    policy: str = ""
    ended: bool = False  # the client had all of a stream when its try was cancelled
    explained: bytes | None = None  # for `x-stoker-route`

    @property
    def streams(self) -> bool:
        return bool(self.envelope.stream)

    def headers_under(self, span: Span, passes: HeaderFilter) -> bytes:
        """What of the client's headers a leg's worker may see, the request's id, and the leg's own place in the trace."""
        block = b"%bx-request-id: %b\r\n" % (passes.block_of(self.request.head), self.request_id)
        traceparent = span.traceparent
        if traceparent is None:
            return block
        return _TRACEPARENT.sub(b"", block) + header_block([(b"traceparent", traceparent)])

    def body(
        self, put: Mapping[str, bytes] = _NOTHING, drop: Sequence[str] = (), may_add: Collection[str] = ()
    ) -> bytes:
        """The client's body as a worker gets it, with a leg's own changes. What of the gateway's fields is not in
        `may_add` is only corrected where the client used it: a foreign worker may refuse a field that it does not know."""
        if not (self.put or self.drop or put or drop):
            return self.envelope.raw
        if self.put:
            ours = {k: v for k, v in self.put.items() if k in may_add or getattr(self.envelope, k) is not UNSET}
            put = {**ours, **put}
        return edit(self.envelope, put, [*self.drop, *drop])


class RequestIds:
    """Names that no other request of this or another gateway has: a random start, then counting. They sort as they come: the
    ledger's tree grows at its end."""

    def __init__(self) -> None:
        self._start = secrets.token_hex(8)
        self._count = 0

    def new(self) -> str:
        self._count += 1
        return f"req_{self._start}{self._count:08x}"


def given_request_id(given: bytes | None) -> bytes | None:
    """The client's own name for its request, if it is one that may be logged and passed on."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else None


def body_changes(envelope: Envelope, caller: Caller) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """What of the body is the gateway's to say: whose cache, how urgent, and nothing about the gateway's own options."""
    put: dict[str, bytes] = {}
    salt = caller.cache_salt(envelope.salt)
    if salt != envelope.salt:
        envelope.salt = salt
        put["cache_salt"] = msgspec.json.encode(salt)
    asked_priority = envelope.priority if isinstance(envelope.priority, int) else None
    priority = caller.best_priority(asked_priority)
    if priority != (asked_priority or 0):
        put["priority"] = b"%d" % priority
    return put, () if envelope.reject_if_busy is UNSET else ("rejectIfBusy",)
