"""What must change in a foreign worker's answer, and nothing else: usage, and fields that are between us and workers.

Streams pass as they come unless a few cheap byte searches find something; only then an event is taken apart, and only its
top level. `cached_tokens` is what the *prefill* worker found in its cache: the decode worker of a pair counts the blocks it
was handed as cached, which would bill a prompt that was computed in full as one that was not.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from stoker.gateway.api.client_body import fields

_TOKEN_IDS = re.compile(rb'"(?:prompt_)?token_ids"\s*:\s*\[')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_INTERNAL_NAMES = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_EVENT = re.compile(rb".*?(?:\r?\n){2,}", re.DOTALL)
_DATA = re.compile(rb"^data: ?([^\r\n]*)", re.MULTILINE)
_END = re.compile(rb"^(?:data: ?\[DONE\]|event: ?response\.(?:completed|incomplete|failed))\r?$", re.MULTILINE)
_MAX_EVENT_BYTES = 64 << 20


class Usage(msgspec.Struct):
    """The tokens of one request, as far as a worker has told."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class EventCutter:
    """Bytes cut anywhere -> bytes that end where an event ends. What is left of a stream that was cut is never shown."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest = b""

    def cut(self, data: bytes) -> bytes:
        data = self.rest + data
        if data.endswith(_EVENT_ENDS):
            self.rest = b""
            return data
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        if end < 4:  # rfind gave -1 twice, or no event could be so short
            end = 0
        self.rest = data[end:]
        if len(self.rest) > _MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {_MAX_EVENT_BYTES} bytes")
        return data[:end]


class ForeignAnswer(EventCutter):
    """One answer of a worker that is not ours, streamed (`push`) or whole."""

    __slots__ = ("_is_pair", "_keep_token_ids", "ended", "hide_usage", "prefill_cached_tokens", "usage")

    def __init__(self, *, hide_usage: bool = False, keep_token_ids: bool = False, is_pair: bool = False) -> None:
        self.rest = b""
        self.hide_usage = hide_usage  # we asked for the usage chunk, the client did not
        self._keep_token_ids = keep_token_ids
        self._is_pair = is_pair
        self.prefill_cached_tokens: int | None = None  # known once a pair's prefill has answered
        self.usage: Usage | None = None
        self.ended = False  # the stream's own last event went through

    def push(self, data: bytes) -> bytes:
        """The part of a stream that the client may see now: always whole events."""
        if self.rest or not data.endswith(_EVENT_ENDS):
            data = self.cut(data)
        if (b"[DONE]" in data or b"event: response." in data) and _END.search(data):
            self.ended = True
        if (b'"usage"' in data and _USAGE.search(data)) or self._holds_internals(data):
            return b"".join([self._event(event) for event in _EVENT.findall(data)])
        return data

    def finish(self) -> bytes:
        """What is left at a proper end: a last event that has no empty line behind it."""
        rest, self.rest = self.rest, b""
        self.ended = self.ended or _END.search(rest) is not None
        return rest

    def whole(self, data: bytes) -> bytes:
        """A whole answer, as JSON."""
        was_wrong = self._saw(read_usage(data))
        if not was_wrong and not self._holds_internals(data):
            return data
        try:
            table = fields(data)
        except msgspec.DecodeError:
            return data  # no JSON object: nothing of ours can be in it
        self._rewrite(table)
        return msgspec.json.encode(table)

    def _holds_internals(self, data: bytes) -> bool:
        if b'"kv_transfer_params"' in data or b'"bootstrap_' in data:
            return True
        return b'token_ids"' in data and not self._keep_token_ids and _TOKEN_IDS.search(data) is not None

    def _event(self, event: bytes) -> bytes:
        found = _DATA.search(event)
        if found is None or not found.group(1).startswith(b"{"):
            return event
        try:
            table = fields(found.group(1))
        except msgspec.DecodeError:
            return event
        usage = read_usage(found.group(1))
        if usage is not None:
            self._saw(usage)
            if self.hide_usage and bytes(table.get("choices", b"")) == b"[]":
                return b""
        self._rewrite(table)
        return event[: found.start(1)] + msgspec.json.encode(table) + event[found.end(1) :]

    def _rewrite(self, table: dict[str, Raw]) -> None:
        for name in _INTERNAL_NAMES:
            table.pop(name, None)
        if not self._keep_token_ids:
            table.pop("prompt_token_ids", None)
            if _TOKEN_IDS.search(table.get("choices", b"")):
                table["choices"] = _without_token_ids(table["choices"])
        if _is_object(table.get("usage")):
            table["usage"] = self._honest(table["usage"])
        if _is_object(table.get("response")):  # the Responses API's last event
            response = fields(table["response"])
            response.pop("kv_transfer_params", None)
            if _is_object(response.get("usage")):
                response["usage"] = self._honest(response["usage"])
            table["response"] = Raw(msgspec.json.encode(response))

    def _saw(self, told: Usage | None) -> bool:
        """Keeps the usage, set right. True: what the worker told is not what we tell."""
        self.usage = told
        if told is None:
            return False
        # A prefill worker that reports no cached tokens may have had some; nobody is told of what nobody counted.
        cached = (self.prefill_cached_tokens or 0) if self._is_pair else told.cached_tokens
        was = told.cached_tokens
        told.cached_tokens = min(cached, told.prompt_tokens)
        return self._is_pair or was != told.cached_tokens

    def _honest(self, usage: Raw) -> Raw:
        return usage if self.usage is None else with_cached_tokens(usage, self.usage.cached_tokens)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _UsageFields(msgspec.Struct):
    """Both APIs' names for the same three numbers."""

    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Inner(msgspec.Struct):
    usage: _UsageFields | None = None


class _Carrier(_Inner):
    response: _Inner | None = None


_CARRIER = msgspec.json.Decoder(_Carrier)


def read_usage(data: bytes) -> Usage | None:
    """The usage in a whole answer or in an event's data, if it is there."""
    try:
        carrier = _CARRIER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    told = carrier.usage or (carrier.response and carrier.response.usage)
    if not told:
        return None
    details = told.prompt_tokens_details or told.input_tokens_details
    return Usage(
        told.prompt_tokens or told.input_tokens or 0,
        (details and details.cached_tokens) or 0,
        told.completion_tokens or told.output_tokens or 0,
    )


def read_last_usage(data: bytes) -> Usage | None:
    """The usage in a whole answer, or in the last event of a whole stream that has one."""
    if not data.startswith((b"data:", b"event:", b":")):
        return read_usage(data)
    told = [usage for found in _DATA.findall(data) if (usage := read_usage(found)) is not None]
    return told[-1] if told else None


def with_cached_tokens(usage: Raw | bytes, cached_tokens: int) -> Raw:
    """The usage object with this count of cached tokens, and everything else as it was."""
    table = fields(usage)
    name = "input_tokens_details" if "input_tokens" in table else "prompt_tokens_details"
    details = fields(table[name]) if _is_object(table.get(name)) else {}
    details["cached_tokens"] = Raw(b"%d" % cached_tokens)
    table[name] = Raw(msgspec.json.encode(details))
    return Raw(msgspec.json.encode(table))


def set_cached_tokens(data: bytes, cached_tokens: int) -> bytes:
    """A whole answer, or an event's data, with this count in its usage wherever its API has it."""
    table = fields(data)
    if _is_object(table.get("usage")):
        table["usage"] = with_cached_tokens(table["usage"], cached_tokens)
    elif _is_object(table.get("response")):
        table["response"] = Raw(set_cached_tokens(bytes(table["response"]), cached_tokens))
    else:
        return data
    return msgspec.json.encode(table)


def set_cached_tokens_in_events(events: bytes, cached_tokens: int) -> bytes:
    if b'"usage"' not in events or not _USAGE.search(events):
        return events
    return _DATA.sub(lambda found: _with_data(found, cached_tokens), events)


def _with_data(found: re.Match[bytes], cached_tokens: int) -> bytes:
    if not _USAGE.search(found.group(1)):
        return found.group(0)
    return b"data: " + set_cached_tokens(found.group(1), cached_tokens)


def _without_token_ids(choices: Raw) -> Raw:
    kept = msgspec.json.decode(choices, type=list[dict[str, Raw]])
    for choice in kept:
        choice.pop("token_ids", None)
        choice.pop("prompt_token_ids", None)
    return Raw(msgspec.json.encode(kept))


def _is_object(value: Raw | None) -> bool:
    return value is not None and memoryview(value)[0] == ord("{")
