"""Rewrites foreign workers' answers: corrects the usage and removes internal fields. All other bytes stay unchanged.

A stream passes unchanged unless a few cheap byte searches match. Only then an event is parsed, and only its top level.
`cached_tokens` is set to what the *prefill* worker found in its cache. The decode worker of a pair counts the blocks that it
received as cached, so its number would bill a fully computed prompt as a cached one.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from stoker.gateway.api.client_body import fields
from stoker.gateway.path.errors import BadAnswer

_TOKEN_IDS = re.compile(rb'"(?:prompt_)?token_ids"\s*:\s*\[')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_INTERNAL_NAMES = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_TAIL_BYTES = 3  # of the longest event end, all but its last byte
_EVENT = re.compile(rb".*?(?:\r?\n){2,}", re.DOTALL)
_DATA = re.compile(rb"^data: ?([^\r\n]*)", re.MULTILINE)
_END = re.compile(rb"^(?:data: ?\[DONE\]|event: ?response\.(?:completed|incomplete|failed))\r?$", re.MULTILINE)
DEFAULT_MAX_EVENT_BYTES = 16 << 20


class UsageCounts(msgspec.Struct):
    """The token counts of one request, as reported by its workers so far."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class EventCutter:
    """Regroups stream bytes so that every output ends at the end of an event. An incomplete last event is never output.

    Raises BadAnswer if an event is larger than `max_event_bytes`. Each byte is searched and copied a fixed number of times,
    however small the pieces are in which an event arrives.
    """

    __slots__ = ("_max_event_bytes", "rest")

    def __init__(self, max_event_bytes: int = DEFAULT_MAX_EVENT_BYTES) -> None:
        self.rest = bytearray()
        self._max_event_bytes = max_event_bytes

    def cut(self, data: bytes) -> bytes:
        rest = self.rest
        # The rest contains no event end, but one may begin in its last bytes.
        tail = bytes(rest[-_TAIL_BYTES:])
        joined = tail + data
        lf, crlf = joined.rfind(b"\n\n"), joined.rfind(b"\r\n\r\n")
        end = max(lf + 2, crlf + 4 if crlf >= 0 else 0) - len(tail)
        if lf < 0 and crlf < 0:
            rest += data
            out = b""
        else:
            out = bytes(rest) + data[:end] if rest else data[:end]
            self.rest = rest = bytearray(data[end:])
        if len(rest) > self._max_event_bytes:
            raise BadAnswer(f"an event of the stream is larger than {self._max_event_bytes} bytes")
        return out


class ForeignAnswer(EventCutter):
    """Rewrites one answer of a foreign worker, streamed (`push`) or whole."""

    __slots__ = ("_is_pair", "_keep_token_ids", "_last", "ended", "hide_usage", "prefill_cached_tokens", "usage")

    def __init__(
        self,
        *,
        hide_usage: bool = False,
        keep_token_ids: bool = False,
        is_pair: bool = False,
        max_event_bytes: int = DEFAULT_MAX_EVENT_BYTES,
    ) -> None:
        super().__init__(max_event_bytes)
        self._last = b""  # the last whole events
        self.hide_usage = hide_usage  # the gateway requested the usage chunk, the client did not
        self._keep_token_ids = keep_token_ids
        self._is_pair = is_pair
        self.prefill_cached_tokens: int | None = None  # known once the prefill worker of a pair has answered
        self.usage: UsageCounts | None = None
        self.ended = False  # the last event of the stream has passed

    def push(self, data: bytes) -> bytes:
        """Return the part of the stream to send to the client now: always whole events."""
        if self.rest or not data.endswith(_EVENT_ENDS):
            data = self.cut(data)
            if not data:
                return b""
        self._last = data
        has_end = (b"[DONE]" in data or b"event: response." in data) and _END.search(data)
        if (b'"usage"' in data and _USAGE.search(data)) or self._holds_internals(data):
            data = b"".join([self._event(event) for event in _EVENT.findall(data)])
        if has_end:
            self.ended = True
        return data

    def finish(self) -> bytes:
        """Return the rest at a proper end of the stream: a last event without an empty line after it.

        `ended` tells then whether the stream was complete. A stream that ends with an error event is.
        """
        rest, self.rest = bytes(self.rest), bytearray()
        self.ended = self.ended or _END.search(rest) is not None or _is_error(rest or self._last)
        return rest

    def whole(self, data: bytes) -> bytes:
        """Rewrite a whole answer. Raises an error of `msgspec` if it is not a JSON object."""
        was_wrong = self._saw(read_whole_usage(data))
        if not was_wrong and not self._holds_internals(data):
            return data
        table = fields(data)
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
            table["usage"] = self._corrected(table["usage"])
        if _is_object(table.get("response")):  # the last event of the Responses API
            response = fields(table["response"])
            response.pop("kv_transfer_params", None)
            if _is_object(response.get("usage")):
                response["usage"] = self._corrected(response["usage"])
            table["response"] = Raw(msgspec.json.encode(response))

    def _saw(self, reported: UsageCounts | None) -> bool:
        """Keep the corrected usage. Return True if the usage in the answer must be rewritten."""
        self.usage = reported
        if reported is None:
            return False
        # A prefill worker that reports no cached tokens may have had some, but only reported tokens are passed on.
        cached = (self.prefill_cached_tokens or 0) if self._is_pair else reported.cached_tokens
        was = reported.cached_tokens
        reported.cached_tokens = min(cached, reported.prompt_tokens)
        return self._is_pair or was != reported.cached_tokens

    def _corrected(self, usage: Raw) -> Raw:
        return usage if self.usage is None else with_cached_tokens(usage, self.usage.cached_tokens)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _UsageFields(msgspec.Struct):
    """The token counts under the field names of both APIs."""

    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _HasUsage(msgspec.Struct):
    usage: _UsageFields | None = None


class _AnswerWithUsage(_HasUsage):
    response: _HasUsage | None = None


_USAGE_DECODER = msgspec.json.Decoder(_AnswerWithUsage)


def read_usage(data: bytes) -> UsageCounts | None:
    """Return the usage in a whole answer or in an event's data, or None."""
    try:
        answer = _USAGE_DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    counts = answer.usage or (answer.response and answer.response.usage)
    if not counts:
        return None
    details = counts.prompt_tokens_details or counts.input_tokens_details
    return UsageCounts(
        counts.prompt_tokens or counts.input_tokens or 0,
        (details and details.cached_tokens) or 0,
        counts.completion_tokens or counts.output_tokens or 0,
    )


def read_whole_usage(data: bytes) -> UsageCounts | None:
    """Return the usage in a whole answer, or None. Raises an error of `msgspec` if the answer is not a JSON object."""
    usage = read_usage(data)
    if usage is None:
        json_object(data)
    return usage


def json_object(data: bytes) -> bytes:
    """Return `data`. Raises an error of `msgspec` if it is not a JSON object."""
    fields(data)
    return data


def read_last_usage(data: bytes) -> UsageCounts | None:
    """Return the usage in a whole answer, or in the last event of a complete stream that has one."""
    if not data.startswith((b"data:", b"event:", b":")):
        return read_usage(data)
    usages = [usage for found in _DATA.findall(data) if (usage := read_usage(found)) is not None]
    return usages[-1] if usages else None


def with_cached_tokens(usage: Raw | bytes, cached_tokens: int) -> Raw:
    """Return the usage object with this count of cached tokens, otherwise unchanged."""
    table = fields(usage)
    name = "input_tokens_details" if "input_tokens" in table else "prompt_tokens_details"
    details = fields(table[name]) if _is_object(table.get(name)) else {}
    details["cached_tokens"] = Raw(b"%d" % cached_tokens)
    table[name] = Raw(msgspec.json.encode(details))
    return Raw(msgspec.json.encode(table))


def set_cached_tokens(data: bytes, cached_tokens: int) -> bytes:
    """Return a whole answer, or an event's data, with this count of cached tokens in its usage."""
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


def _is_error(events: bytes) -> bool:
    """Return True if the last event is an error."""
    found = _DATA.findall(events) if b'"error"' in events else []
    try:
        return bool(found) and "error" in fields(found[-1])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _is_object(value: Raw | None) -> bool:
    return value is not None and memoryview(value)[0] == ord("{")
