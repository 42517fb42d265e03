"""A client's request body: the few fields that the gateway reads, and edits that leave all other bytes unchanged.

Bodies are large (an agent's whole conversation), and the gateway needs little of them. So a body is scanned once into a
`RequestEnvelope`, which skips unknown fields and keeps large fields as raw JSON. It is edited by inserting bytes after the
opening brace. Only if a field to set already exists, the top level is decoded and encoded again, and nothing below it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from stoker.base.errors import InvalidRequest
from stoker.proto.openai.decode import decode
from stoker.proto.openai.fields import StreamOptions

# Fields that only the gateway may send to workers. A client that sends one is refused.
INTERNAL_FIELDS = (
    "resume",
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "data_parallel_rank",
)


class EndpointKind(StrEnum):
    """The generating endpoint that a request was sent to."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"


class RequestEnvelope(msgspec.Struct, kw_only=True):
    """The fields of a generating request that the gateway reads. UNSET means that the field is absent, so it can be inserted
    without decoding the body."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | UnsetType | None = UNSET
    n: int | None = None
    max_tokens: int | UnsetType | None = UNSET
    max_completion_tokens: int | UnsetType | None = UNSET
    max_output_tokens: int | UnsetType | None = UNSET
    seed: int | UnsetType | None = UNSET
    cache_salt: str | UnsetType | None = UNSET
    priority: int | UnsetType | None = UNSET
    reject_if_busy: bool | UnsetType | None = msgspec.field(default=UNSET, name="rejectIfBusy")
    return_token_ids: bool | None = None
    timeout_s: Raw | UnsetType = UNSET
    user: Any = None
    prompt_cache_key: Any = None
    session_id: Any = None

    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    instructions: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    prompt_token_ids: Raw | UnsetType = UNSET

    resume: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET
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
        if memoryview(self.prompt)[0] != ord("["):
            return 1
        prompts = msgspec.json.decode(self.prompt, type=list[Any])
        return len(prompts) if prompts and not isinstance(prompts[0], int) else 1

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
    def wants_usage(self) -> bool:
        """Return True if the client requested a usage chunk. (The Responses API always reports usage.)"""
        options = self.stream_options
        return isinstance(options, StreamOptions) and bool(options.include_usage)


_internal_values = attrgetter(*INTERNAL_FIELDS)
_NO_INTERNALS = (UNSET,) * len(INTERNAL_FIELDS)


def parse(kind: EndpointKind, body: bytes) -> RequestEnvelope:
    """Decode the envelope of `body`.

    Raises InvalidRequest if it is not JSON, a field has the wrong type, or it has a field that clients may not send.
    """
    envelope = decode(RequestEnvelope, body)
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


_TABLE: msgspec.json.Decoder[dict[str, Raw]] = msgspec.json.Decoder(dict[str, Raw])


def edit(envelope: RequestEnvelope, put: Mapping[str, bytes], drop: Collection[str] = ()) -> bytes:
    """Return the body with the fields of `put` set (values are JSON) and those of `drop` removed."""
    if not put and not drop:
        return envelope.raw
    if not drop and all(getattr(envelope, name) is UNSET for name in put):
        return _insert(envelope.raw, put)
    table = fields(envelope.raw)
    for name in drop:
        table.pop(name, None)
    for name, value in put.items():
        table[name] = Raw(value)
    return msgspec.json.encode(table)


def fields(data: bytes | Raw) -> dict[str, Raw]:
    """Decode the top level of a JSON object; the values stay raw JSON."""
    return _TABLE.decode(data)


def _insert(raw: bytes, put: Mapping[str, bytes]) -> bytes:
    brace = raw.index(b"{") + 1
    new = b",".join([b'"%b":%b' % (name.encode(), value) for name, value in put.items()])
    comma = b"" if raw[brace : brace + 64].lstrip()[:1] == b"}" else b","
    return b"".join((b"{", new, comma, raw[brace:]))
