"""A client's body: the few fields that the gateway reads, and edits that leave every other byte as it came.

Bodies are large (an agent's whole conversation) and mostly not our business. So they are scanned once, into `Envelope`,
which skips what it does not know and keeps the big fields as raw JSON; and they are changed by inserting bytes behind the
opening brace. Only where a key is already there the top level, and nothing below it, is taken apart and put together again.
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

# What the gateway and its workers say to each other in a body; a client that sends one would speak as the gateway.
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


class Kind(StrEnum):
    """Which of the generating endpoints a request came to."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"


class Envelope(msgspec.Struct, kw_only=True):
    """What the gateway reads of a request. UNSET is a key that is not there: only such a key can be inserted."""

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

    # Not of the JSON: `parse` sets them over whatever a client may have sent under these names.
    kind: Kind = msgspec.field(default=Kind.CHAT, name="x-stoker-kind")
    raw: bytes = msgspec.field(default=b"", name="x-stoker-raw")
    salt: str | None = msgspec.field(default=None, name="x-stoker-salt")  # the cache salt that workers will see

    @property
    def num_choices(self) -> int:
        """How many choices the answer will have: n for each prompt."""
        return (self.n or 1) * self.num_prompts

    @property
    def num_prompts(self) -> int:
        """More than one where a completion's `prompt` is a list of texts or of token lists."""
        if self.kind is not Kind.COMPLETIONS or isinstance(self.prompt, UnsetType):
            return 1
        if memoryview(self.prompt)[0] != ord("["):
            return 1
        prompts = msgspec.json.decode(self.prompt, type=list[Any])
        return len(prompts) if prompts and not isinstance(prompts[0], int) else 1

    @property
    def max_new_tokens(self) -> int | None:
        """The client's own bound on the answer, under whichever name its endpoint has. One below zero is none: reserved as it
        is, it would make a loaded worker look idle."""
        for bound in (self.max_completion_tokens, self.max_tokens, self.max_output_tokens):
            if isinstance(bound, int):
                return bound if bound >= 0 else None
        return None

    @property
    def wants_usage(self) -> bool:
        """The client asked for a usage chunk at its stream's end. The Responses API always tells."""
        options = self.stream_options
        return isinstance(options, StreamOptions) and bool(options.include_usage)


_internal_values = attrgetter(*INTERNAL_FIELDS)
_NO_INTERNALS = (UNSET,) * len(INTERNAL_FIELDS)


def parse(kind: Kind, body: bytes) -> Envelope:
    """The envelope of `body`, or InvalidRequest: not JSON, a field of the wrong type, or a field that clients may not send."""
    envelope = decode(Envelope, body)
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


def edit(envelope: Envelope, put: Mapping[str, bytes], drop: Collection[str] = ()) -> bytes:
    """The body with `put` (values are JSON) in it and `drop` out of it."""
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
    """The top level of a JSON object; what is below stays as it is written."""
    return _TABLE.decode(data)


def _insert(raw: bytes, put: Mapping[str, bytes]) -> bytes:
    brace = raw.index(b"{") + 1
    new = b",".join([b'"%b":%b' % (name.encode(), value) for name, value in put.items()])
    comma = b"" if raw[brace : brace + 64].lstrip()[:1] == b"}" else b","
    return b"".join((b"{", new, comma, raw[brace:]))
