"""A client's generating request while the proxy runs it: input for every attempt and leg, and the results so far.

An *attempt* runs the request on one route (`Route`). A *leg* is the part of an attempt that runs on one worker: an attempt
has a decode leg, and a prefill leg too if the prompt is computed by a separate prefill worker. `Legs` runs them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from msgspec import UNSET

from stoker.base.errors import InvalidRequest
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.gateway.admission.api_keys import Caller
from stoker.gateway.api.client_body import RequestEnvelope, edit
from stoker.gateway.doctor.cache_doctor import ExaminedPrompt
from stoker.gateway.http import HeaderFilter, HttpRequest, header_block
from stoker.gateway.path.model_aliases import NO_ALIASES, ModelAliases, canary_place
from stoker.gateway.path.resume import TokenMemory
from stoker.gateway.path.rewrite import UsageCounts
from stoker.gateway.records.running_usage import NOT_ADMITTED, RunningUsage
from stoker.gateway.records.tracing import RequestTrace, TraceSpan
from stoker.proto.openai.fields import TenantShare
from stoker.routing.query import Route, RouteQuery

_NOTHING: Mapping[str, bytes] = {}


_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
_TRACEPARENT = re.compile(rb"^traceparent:.*\r\n", re.MULTILINE)


class Call(msgspec.Struct, eq=False):
    """One generating request. It is a msgspec struct because creating one is much cheaper than creating a dataclass."""

    request: HttpRequest
    envelope: RequestEnvelope
    query: RouteQuery
    request_id: bytes
    put: dict[str, bytes]  # fields to set in every leg's body, values as JSON
    drop: Sequence[str]  # fields to remove from every leg's body
    arrived_s: float
    seed: int
    trace: RequestTrace
    tenant: str = ""
    on_first_byte: Callable[[], None] = lambda: None

    memory: TokenMemory = msgspec.field(default_factory=TokenMemory)
    num_billed_tokens: int = 0  # of the answer, that another gateway has generated and billed
    running: RunningUsage = NOT_ADMITTED  # what the client was sent so far
    usage: UsageCounts | None = None  # as the workers reported it; `billed_usage` bounds it
    sent_pieces: int = 0  # of text in a foreign worker's stream
    sent_bytes: int = 0  # of the answer, by the worker of the latest attempt
    status: int = 0
    sent_s: float | None = None  # when the request was first sent to a worker
    handed_off_s: float | None = None  # when the prefill worker had computed the prompt
    first_byte_s: float | None = None
    last_piece_s: float | None = None  # of a stream, when the client was last sent something
    num_retries: int = 0
    num_resumes: int = 0
    continues: bool = (
        False  # the last worker handed it off: its tokens are part of the answer, even if the client has none
    )
    worker_id: WorkerId | None = None  # the decode worker of the latest attempt
    policy: str = ""
    shows_thinking: bool | None = None  # set while a Messages request runs as chat: whether its client wants to see it
    ended: bool = False  # the client had received the complete stream when the attempt was cancelled
    ignored_fields: Sequence[str] = ()  # of OpenAI's API, that the worker did not get
    explained: bytes | None = None  # value of the `x-stoker-route` header
    route: Route | None = None  # the latest one whose worker computes the prompt
    examined: ExaminedPrompt | None = None  # says why uncached tokens were computed; set once, at the end

    @property
    def has_added(self) -> bool:
        """Return True if the client was sent something by this gateway."""
        return self.request.started and (not self.num_billed_tokens or self.memory.num_tokens > self.num_billed_tokens)

    @property
    def streams(self) -> bool:
        return bool(self.envelope.stream)

    def headers_under(self, span: TraceSpan, passes: HeaderFilter) -> bytes:
        """Return a leg's request headers: the client's forwarded headers, the gateway's, and the leg's traceparent."""
        block = b"%bcontent-type: application/json\r\nx-request-id: %b\r\n" % (
            passes.block_of(self.request.head),
            self.request_id,
        )
        traceparent = span.traceparent
        if traceparent is None:
            return block
        return _TRACEPARENT.sub(b"", block) + header_block([(b"traceparent", traceparent)])

    def body(
        self, put: Mapping[str, bytes] = _NOTHING, drop: Sequence[str] = (), may_add: Collection[str] = ()
    ) -> bytes:
        """Return the client's body with the gateway's and this leg's changes.

        Fields that the gateway sets (`self.put`) are added only if they are in `may_add`; others are only changed where the
        client already sent them, because a foreign worker may refuse a field that it does not know.
        """
        if not (self.put or self.drop or put or drop):
            return self.envelope.raw
        if self.put:
            own = {k: v for k, v in self.put.items() if k in may_add or getattr(self.envelope, k) is not UNSET}
            put = {**own, **put}
        return edit(self.envelope, put, [*self.drop, *drop])


class RequestIds:
    """Generates request ids that are unique across gateways: a random prefix and a counter.

    They sort by arrival, so that the ledger's index grows at its end.
    """

    def __init__(self) -> None:
        self._start = secrets.token_hex(8)
        self._count = 0

    def new(self) -> str:
        self._count += 1
        return f"req_{self._start}{self._count:08x}"


def given_request_id(given: bytes | None) -> bytes | None:
    """Return the client's `x-request-id` if it is safe to log and to forward, else None."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else None


def requested_model(
    name: str | None, fleet: Fleet, aliases: ModelAliases = NO_ALIASES, session: str | None = None
) -> str:
    """Return the model that a request names. It may be omitted if the fleet serves only one."""
    if name:
        return aliases.resolve(name, fleet.models(), canary_place(session)) if aliases else name
    models = fleet.models()
    if len(models) == 1:
        return next(iter(models))
    names = ", ".join(sorted(models)) or "none"
    message = f"Missing required parameter: 'model'. Set it to one of the models served here: {names}."
    raise InvalidRequest(message, param="model", code="missing_required_parameter")


def body_changes(envelope: RequestEnvelope, caller: Caller) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the body fields that the gateway sets (cache salt, priority, tenant) and those it removes (its own options)."""
    put: dict[str, bytes] = {}
    salt = caller.cache_salt(envelope.salt)
    if salt != envelope.salt:
        envelope.salt = salt
        put["cache_salt"] = msgspec.json.encode(salt)
    requested_priority = envelope.priority if isinstance(envelope.priority, int) else None
    priority = caller.best_priority(requested_priority)
    if priority != (requested_priority or 0):
        put["priority"] = b"%d" % priority
    if caller.known:
        put["tenant_share"] = msgspec.json.encode(TenantShare(caller.tenant, caller.weight))
    return put, () if envelope.reject_if_busy is UNSET else ("rejectIfBusy",)
