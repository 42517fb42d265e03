"""A client's request body: the few fields that the gateway reads, and edits that leave all other bytes unchanged.

Bodies are large (an agent's whole conversation), and the gateway needs little of them. So a body is scanned once into a
`RequestEnvelope`, which skips unknown fields and keeps large fields as raw JSON. It is edited by inserting bytes after the
opening brace. Only if a field to set already exists, the top level is decoded and encoded again, and nothing below it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from itertools import islice
from operator import attrgetter
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from stoker.base.errors import InvalidRequest
from stoker.proto.openai.decode import decode, nested_too_deeply
from stoker.proto.openai.fields import StreamOptions, UsageOption

# Fields that only the gateway may send to workers. A client that sends one is refused.
INTERNAL_FIELDS = (
    "resume",
    "kv_transfer_params",
    "tenant_share",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "data_parallel_rank",
)

MAX_NAME_CHARS = 512  # of a model, a user, a session or a cache salt: the gateway keeps and logs these texts
MAX_CHOICES = 4096  # of `n`, and of the prompts of one completion
_NameText = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
_NumChoices = Annotated[int, Meta(le=MAX_CHOICES)]

_MAX_NAME_BYTES = 12 * MAX_NAME_CHARS + 2  # in JSON: a character can be two escapes of six bytes
_LARGE_BYTES = 1 << 20  # the names of a larger body are measured before they are decoded

# Decoding the top level makes an object for each field, and many bodies are decoded so. The conversation itself is one field.
_MAX_FIELDS = 50_000
_FEW_FIELDS_BYTES = 256 << 10  # a smaller rest of the body cannot have more

_MAX_VALUES = 100_000  # of JSON that is decoded below its top level
_TEXT_OR_COMMA = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|,', re.DOTALL)

_SLICE_BYTES = 64 << 10
_NOT_ASCII = re.compile(rb"[\x80-\xff]")
_PROMPT_LIST = re.compile(rb'\[[ \t\r\n]*(["\[])')
_PROMPT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|\[[^\]]*+\]', re.DOTALL)  # a text, or a list of token ids


class EndpointKind(StrEnum):
    """The generating endpoint that a request was sent to."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"


class RequestEnvelope(msgspec.Struct, kw_only=True):
    """The fields of a generating request that the gateway reads. UNSET means that the field is absent, so it can be inserted
    without decoding the body."""

    model: _NameText | None = None
    stream: bool | None = None
    stream_options: StreamOptions | UnsetType | None = UNSET
    n: _NumChoices | None = None
    max_tokens: int | UnsetType | None = UNSET
    max_completion_tokens: int | UnsetType | None = UNSET
    max_output_tokens: int | UnsetType | None = UNSET
    seed: int | UnsetType | None = UNSET
    cache_salt: _NameText | UnsetType | None = UNSET
    priority: int | UnsetType | None = UNSET
    reject_if_busy: bool | UnsetType | None = msgspec.field(default=UNSET, name="rejectIfBusy")
    return_token_ids: bool | None = None
    usage: UsageOption | None = None
    service_tier: Raw | UnsetType = UNSET
    timeout_s: Raw | UnsetType = UNSET
    user: _NameText | int | None = None
    prompt_cache_key: _NameText | int | None = None
    session_id: _NameText | int | None = None

    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    instructions: Raw | UnsetType = UNSET
    system: Raw | UnsetType = UNSET
    metadata: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    prompt_token_ids: Raw | UnsetType = UNSET

    resume: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET
    tenant_share: Raw | UnsetType = UNSET
    bootstrap_host: Raw | UnsetType = UNSET
    bootstrap_port: Raw | UnsetType = UNSET
    bootstrap_room: Raw | UnsetType = UNSET
    bootstrap_pair_key: Raw | UnsetType = UNSET
    routed_dp_rank: Raw | UnsetType = UNSET
    disagg_prefill_dp_rank: Raw | UnsetType = UNSET
    data_parallel_rank: Raw | UnsetType = UNSET

    # Not from the JSON: `parse` sets them, and overwrites what a client may have sent under these names.
    kind: EndpointKind = msgspec.field(default=EndpointKind.CHAT, name="x-stoker-kind")
    raw: bytes = msgspec.field(default=b"", name="x-stoker-raw")
    salt: str | None = msgspec.field(default=None, name="x-stoker-salt")  # the cache salt sent to the worker

    @property
    def num_choices(self) -> int:
        """Return the number of choices in the answer: `n` for each prompt."""
        return (self.n or 1) * self.num_prompts

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts: more than one if a completion's `prompt` is a list of texts or of token lists."""
        if self.kind is not EndpointKind.COMPLETIONS or isinstance(self.prompt, UnsetType):
            return 1
        return _num_prompts(memoryview(self.prompt))

    @property
    def max_new_tokens(self) -> int | None:
        """Return the client's limit on output tokens, whatever the field is called in its API.

        A negative limit counts as none. Reserving it would make a loaded worker look idle.
        """
        for bound in (self.max_completion_tokens, self.max_tokens, self.max_output_tokens):
            if isinstance(bound, int):
                return bound if bound >= 0 else None
        return None

    @property
    def is_flex(self) -> bool:
        """Return True if the request may wait for idle capacity."""
        return not isinstance(self.service_tier, UnsetType) and bytes(self.service_tier) == b'"flex"'

    @property
    def wants_usage(self) -> bool:
        """Return True if the client requested a usage chunk. (The Responses API always reports usage.)"""
        options = self.stream_options
        if isinstance(options, StreamOptions) and options.include_usage:
            return True
        return self.usage is not None and bool(self.usage.include)


class _RawNames(msgspec.Struct):
    """The texts of `RequestEnvelope` whose length is limited, as JSON."""

    model: Raw | UnsetType = UNSET
    user: Raw | UnsetType = UNSET
    prompt_cache_key: Raw | UnsetType = UNSET
    session_id: Raw | UnsetType = UNSET
    cache_salt: Raw | UnsetType = UNSET


_CONVERSATION = ("messages", "prompt", "input", "instructions", "system", "tools", "prompt_token_ids")
_large_values = attrgetter(*_CONVERSATION)
_LargeFields = msgspec.defstruct(  # of all endpoints, whatever they hold
    "_LargeFields",
    [(name, Raw | UnsetType, UNSET) for name in (*_CONVERSATION, "query", "documents", "text_1", "text_2")],
)
_internal_values = attrgetter(*INTERNAL_FIELDS)
_NO_INTERNALS = (UNSET,) * len(INTERNAL_FIELDS)


def parse(kind: EndpointKind, body: bytes) -> RequestEnvelope:
    """Decode the envelope of `body`.

    Raises InvalidRequest if it is not JSON, a field has the wrong type or length, or it has a field that clients may not send.
    """
    if not body.isascii():
        check_utf8(body)
    if len(body) > _LARGE_BYTES:
        _check_names(body)
    envelope = decode(RequestEnvelope, body)
    if len(body) > _FEW_FIELDS_BYTES:
        _check_fields(_large_values(envelope), body)
    envelope.kind = kind
    envelope.raw = body
    envelope.salt = envelope.cache_salt if isinstance(envelope.cache_salt, str) else None
    values = _internal_values(envelope)
    if values != _NO_INTERNALS:
        for name, value in zip(INTERNAL_FIELDS, values, strict=True):
            if value is not UNSET and bytes(value) != b"null":
                raise InvalidRequest(
                    f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter"
                )
    return envelope


def check_utf8(body: bytes) -> None:
    """Raise InvalidRequest if the body is not valid UTF-8. The JSON decoder checks only the strings that it returns, and
    other bytes would reach workers unchecked."""
    if body.isascii():
        return
    first = _NOT_ASCII.search(body)
    at = first.start() if first is not None else 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        # In slices, because the text can take four times the memory of its bytes.
        for start in range(at, len(body), _SLICE_BYTES):
            decoder.decode(body[start : start + _SLICE_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not valid UTF-8.", code="invalid_json") from None


def _check_names(body: bytes) -> None:
    """Refuse a name that is far too long without decoding it: as text it can take four times the memory of its bytes."""
    names = decode(_RawNames, body)
    for name in _RawNames.__struct_fields__:
        value = getattr(names, name)
        if value is not UNSET and memoryview(value).nbytes > _MAX_NAME_BYTES:
            message = f"Invalid value for '{name}': expected `str` of length <= {MAX_NAME_CHARS}."
            raise InvalidRequest(message, param=name, code="invalid_value")


def _check_fields(values: Iterable[Raw | UnsetType], body: bytes) -> None:
    """Refuse a body with very many fields besides those with these values. Counts their colons, which is quick."""
    large = [memoryview(value) for value in values if not isinstance(value, UnsetType)]
    if len(body) - sum(view.nbytes for view in large) <= _FEW_FIELDS_BYTES:
        return
    num_fields = body.count(b":") - sum(bytes(view).count(b":") for view in large)
    if num_fields > _MAX_FIELDS:
        raise InvalidRequest(
            f"The request body has up to {num_fields} fields besides the conversation and the tools; at most"
            f" {_MAX_FIELDS} are allowed.",
            code="too_many_fields",
        )


def _num_prompts(prompt: memoryview) -> int:
    """Count the prompts in a completion's `prompt` without decoding them, up to a little more than MAX_CHOICES.

    The worker refuses anything that is not a text, a list of token ids, or a list of those.
    """
    begin = _PROMPT_LIST.match(prompt)
    if begin is None:
        return 1
    return sum(1 for _ in islice(_PROMPT.finditer(prompt, begin.start(1)), MAX_CHOICES + 2))


_TABLE: msgspec.json.Decoder[dict[str, Raw]] = msgspec.json.Decoder(dict[str, Raw])


def edit(envelope: RequestEnvelope, put: Mapping[str, bytes], drop: Collection[str] = ()) -> bytes:
    """Return the body with the fields of `put` set (values are JSON) and those of `drop` removed."""
    if not put and not drop:
        return envelope.raw
    if not drop and all(getattr(envelope, name) is UNSET for name in put):
        return _insert(envelope.raw, put)
    table = envelope_fields(envelope)
    for name in drop:
        table.pop(name, None)
    for name, value in put.items():
        table[name] = Raw(value)
    return msgspec.json.encode(table)


def check_num_values(json: bytes, param: str) -> None:
    """Refuse JSON of very many values. It is not decoded, because that could take seconds, and texts are skipped."""
    if json.count(b",") <= _MAX_VALUES:
        return
    if sum(1 for _ in islice(_TEXT_OR_COMMA.finditer(json), _MAX_VALUES + 1)) > _MAX_VALUES:
        raise InvalidRequest(f"Invalid value for '{param}': it has more than {_MAX_VALUES} values.", param=param)


def envelope_fields(envelope: RequestEnvelope) -> dict[str, Raw]:
    """Decode the top level of a body that `parse` has accepted. Raises InvalidRequest if too little of the stack is left."""
    try:
        return fields(envelope.raw)
    except msgspec.DecodeError:
        raise nested_too_deeply() from None


def client_fields(body: bytes) -> dict[str, Raw]:
    """Decode the top level of a client's body; the values stay raw JSON. Raises InvalidRequest also for very many fields."""
    if len(body) > _FEW_FIELDS_BYTES:
        _check_fields(msgspec.structs.astuple(decode(_LargeFields, body)), body)
    try:
        return fields(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The request body is not a JSON object: {error}.", code="invalid_json") from None


def fields(data: bytes | Raw) -> dict[str, Raw]:
    """Decode the top level of a JSON object; the values stay raw JSON. Raises DecodeError for anything else."""
    try:
        return _TABLE.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def _insert(raw: bytes, put: Mapping[str, bytes]) -> bytes:
    brace = raw.index(b"{") + 1
    new = b",".join([b'"%b":%b' % (name.encode(), value) for name, value in put.items()])
    comma = b"" if raw[brace : brace + 64].lstrip()[:1] == b"}" else b","
    return b"".join((b"{", new, comma, memoryview(raw)[brace:]))
