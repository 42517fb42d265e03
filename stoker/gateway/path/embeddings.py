"""`POST /v1/embeddings` and the rerank paths: forwarded to a foreign worker of the model.

Stoker workers have no such endpoints. Such a request is admitted, limited and billed as any other: it has prompt tokens and no
output. Only the fields of `_FIELDS` pass, and only text: an engine could be pointed to a URL by an image.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Raw
from msgspec.structs import asdict

from stoker.base.errors import InvalidRequest, NotFound
from stoker.fleet.fleet import Fleet, Member
from stoker.fleet.load_book import LoadBook
from stoker.fleet.spec import Role
from stoker.gateway.admission.admission import Admission, AdmittedRequest
from stoker.gateway.admission.api_keys import ApiKeys
from stoker.gateway.admission.flex import FlexGate
from stoker.gateway.api.client_body import MAX_NAME_CHARS, check_num_values, check_utf8, client_fields
from stoker.gateway.api.reply import Reply, method_not_allowed
from stoker.gateway.http import HttpRequest
from stoker.gateway.path.call import RequestIds, given_request_id, requested_model
from stoker.gateway.path.errors import reply_of
from stoker.gateway.path.forwarding import forward_to_any
from stoker.gateway.path.model_aliases import NO_ALIASES, ModelAliases
from stoker.gateway.path.proxy_settings import ProxySettings
from stoker.gateway.path.upstream import Upstreams
from stoker.gateway.records.running_usage import RunningUsage, UsageLedger
from stoker.gateway.records.usage_row import MAX_TOKENS, UsageHead, UsageRow
from stoker.proto.openai.decode import decode
from stoker.proto.openai.errors import CLIENT_GONE_STATUS
from stoker.routing.query import ModelNotFound

# Path -> the name of the endpoint in the ledger.
PATHS = {
    b"/v1/embeddings": "embeddings",
    b"/v1/rerank": "rerank",
    b"/v2/rerank": "rerank",
    b"/rerank": "rerank",
    b"/v1/score": "rerank",
    b"/score": "rerank",
}
_FIELDS = frozenset(
    [
        "model",
        "input",
        "encoding_format",
        "dimensions",
        "user",
        "input_type",
        "truncate",
        "truncate_prompt_tokens",
        "add_special_tokens",
        "normalize",
        "query",
        "documents",
        "top_n",
        "top_k",
        "return_documents",
        "max_tokens_per_doc",
        "max_chunks_per_doc",
        "text_1",
        "text_2",
    ]
)
_ROLES = frozenset({Role.UNIFIED})
_MEDIA = re.compile(r"(?:image|video|audio)(?:_url|_embeds|_pixel)?|multi_modal_data|prompt_embeds")
# What a body with such a key contains, also if the key is escaped. It may be a text, too.
_MAYBE_MEDIA = re.compile(rb'\\u00|"(?:%b)"' % _MEDIA.pattern.encode())
_MAX_ANSWER_BYTES = 256 << 20  # 4,096 embeddings of 8,192 numbers
_BYTES_PER_TOKEN = 4  # estimate for text
_TEMPLATE_TOKENS = 4096  # what an engine may add to each input


_Forwarded = msgspec.defstruct("_Forwarded", [(name, Any, None) for name in sorted(_FIELDS)])


class _NamedInput(msgspec.Struct):
    model: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] | None = None
    service_tier: str | None = None


class _Counts(msgspec.Struct):
    prompt_tokens: int | None = None
    total_tokens: int | None = None


class _Counted(msgspec.Struct):
    usage: _Counts | None = None


class EmbeddingsEndpoint:
    """Handles the paths of `PATHS`."""

    def __init__(
        self,
        fleet: Fleet,
        load_book: LoadBook,
        upstreams: Upstreams,
        keys: ApiKeys,
        admission: Admission,
        flex: FlexGate,
        meter: UsageLedger,
        on_end: Callable[[UsageRow], None],
        settings: ProxySettings,
        clock: Callable[[], float],
        aliases: ModelAliases = NO_ALIASES,
    ) -> None:
        self._fleet = fleet
        self._load_book = load_book
        self._upstreams = upstreams
        self._keys = keys
        self._admission = admission
        self._flex = flex
        self._meter = meter
        self._on_end = on_end  # also called for requests that failed
        self._settings = settings
        self._clock = clock
        self._aliases = aliases
        self._ids = RequestIds()

    async def answer(self, request: HttpRequest) -> Reply:
        if request.method != b"POST":
            self._keys.authenticate(request)
            return method_not_allowed(request.path, request.method, [b"POST"])
        caller = request.caller  # FrontGate has authenticated it
        began_s, time_s, row_id = self._clock(), time.time(), self._ids.new()
        request_id = given_request_id(request.header(b"x-request-id")) or row_id.encode()
        await self._admission.prepare(caller)
        claim = self._admission.claim(caller)
        tokens = 0
        try:
            model, body, is_flex = self._read(request.body)
            members = self._members(model, request.path)
            estimate = max(1, len(body) // _BYTES_PER_TOKEN)
            leave = await self._enter(request if is_flex else None, claim, estimate, model)
            try:
                head = UsageHead(
                    row_id, time_s, caller.key_id, caller.tenant, model, None, PATHS[request.path], request_id.decode()
                )
                reply = await self._run(head, members, request.path, body, estimate, began_s)
            finally:
                leave()
            tokens = _num_tokens(reply.body, len(body), estimate) if reply.status == 200 else 0
        finally:
            claim.done(tokens, 0)
        return Reply(reply.status, [*reply.headers, (b"x-request-id", request_id)], reply.body)

    async def _run(
        self, head: UsageHead, members: list[Member], path: bytes, body: bytes, estimate: int, began_s: float
    ) -> Reply:
        """Forward an admitted request. Its row is written however it ends."""
        record = _EndedRequest(head, self._meter.open(head), began_s)
        try:
            reply, member = await self._forward(members, path, body, estimate)
            record.worker, record.status = member.worker_id, reply.status
            if reply.status == 200:
                record.tokens = _num_tokens(reply.body, len(body), estimate)
            return reply
        except Exception as error:
            record.status = reply_of(error).status
            raise
        finally:
            row = record.row(self._clock())
            self._meter.settle(record.running, row)
            self._on_end(row)

    async def _enter(
        self, flex: HttpRequest | None, claim: AdmittedRequest, num_tokens: int, model: str
    ) -> Callable[[], object]:
        """Wait until a request is admitted. `flex` is the request if it is a flex one. Return what ends its admission."""
        if flex is not None:
            flex.on_gone = flex.task.cancel  # if it is preempted, too
            slot = await self._admission.enter_idle(claim, lambda: num_tokens, self._flex, flex.on_preempt, lane=model)
            return slot.end
        lane = self._flex.interactive_began(model)
        leave = partial(self._flex.interactive_ended, lane)
        try:
            await self._admission.enter(claim, num_tokens, lane=model)
        except BaseException:
            leave()
            raise
        return leave

    def _read(self, raw: bytes) -> tuple[str, bytes, bool]:
        """Return the model, the body for the worker, and True for a flex request."""
        check_utf8(raw)
        given = decode(_NamedInput, raw)
        if _MAYBE_MEDIA.search(raw):
            check_num_values(raw, "input")
            if _has_media(list(asdict(decode(_Forwarded, raw)).values())):
                message = "Only text is accepted here, no images, audio or video."
                raise InvalidRequest(message, code="unsupported_content")
        model = requested_model(given.model, self._fleet, self._aliases)
        table = {key: value for key, value in client_fields(raw).items() if key in _FIELDS}
        body = msgspec.json.encode({**table, "model": Raw(msgspec.json.encode(model))})
        return model, body, given.service_tier == "flex"

    def _members(self, model: str, path: bytes) -> list[Member]:
        """Return the workers that may serve the request, the least loaded first."""
        if model not in self._fleet.models():
            raise ModelNotFound(f"The model {model!r} is not served here.", param="model")
        now = self._clock()
        members = self._fleet.candidates(model, _ROLES, now)
        foreign = [member for member in members if member.spec.dialect != "stoker"]
        if members and not foreign:
            message = (
                f"The workers of model {model!r} do not serve {path.decode()}: it needs a worker of another engine."
            )
            raise NotFound(message, code="unknown_url")
        return sorted(foreign, key=lambda member: self._load_book.load(member.worker_id, now).requests)

    async def _forward(self, members: list[Member], path: bytes, body: bytes, num_tokens: int) -> tuple[Reply, Member]:
        if not members:
            return await forward_to_any((), self._upstreams, self._settings, path, body, _MAX_ANSWER_BYTES)
        reservation = self._load_book.reserve(
            members[0].worker_id, prefill_tokens=num_tokens, context_tokens=0, output_tokens=0, now=self._clock()
        )
        try:
            return await forward_to_any(members, self._upstreams, self._settings, path, body, _MAX_ANSWER_BYTES)
        finally:
            reservation.end(self._clock())


def _has_media(values: list[Any]) -> bool:
    """Return True if an object anywhere in the values has a key of `_MEDIA`."""
    left = values
    while left:
        match left.pop():
            case dict() as table:
                if any(_MEDIA.fullmatch(name) for name in table):
                    return True
                left += table.values()
            case list() as items:
                left += items
    return False


class _EndedRequest:
    """What is recorded about one request."""

    __slots__ = ("began_s", "head", "running", "status", "tokens", "worker")

    def __init__(self, head: UsageHead, running: RunningUsage, began_s: float) -> None:
        self.head = head
        self.running = running
        self.began_s = began_s
        self.worker = ""
        self.status = CLIENT_GONE_STATUS  # until it is known
        self.tokens = 0

    def row(self, now: float) -> UsageRow:
        head = self.head
        return UsageRow(
            head.request_id,
            head.time_s,
            head.key_id,
            head.tenant,
            head.model,
            None,
            self.worker,
            head.endpoint,
            self.status,
            self.tokens,
            0,
            0,
            None,
            (now - self.began_s) * 1e3,
            x_request_id=head.x_request_id,
        )


def _num_tokens(answer: bytes, body_bytes: int, estimate: int) -> int:
    """Return the tokens to bill: what the worker reports, bounded by the size of the request, or else an estimate."""
    try:
        usage = msgspec.json.decode(answer, type=_Counted).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        usage = None
    if usage is None:
        return estimate
    reported = usage.total_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    if reported is None or reported < 0:
        return estimate
    return min(reported, body_bytes * 2 + _TEMPLATE_TOKENS, MAX_TOKENS)
