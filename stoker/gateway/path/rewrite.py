"""Rewrites foreign workers' answers: corrects the usage and removes internal fields. All other bytes stay unchanged.

A stream passes unchanged unless a few cheap byte searches match. Only then an event is parsed, and only its top level.
`cached_tokens` is set to what the *prefill* worker found in its cache. The decode worker of a pair counts the blocks that it
received as cached, so its number would bill a fully computed prompt as a cached one.

What passes is counted in a `RunningUsage`, so that a client that leaves early is billed for what it was sent. Workers that can
are asked for usage in every chunk, which is removed again. From others, each piece of text counts as one token.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from stoker.gateway.api.client_body import EndpointKind, fields
from stoker.gateway.path.errors import AnswerTooLarge, BadAnswer
from stoker.gateway.records.running_usage import COMPLETION, PROMPT, STATUS, RunningUsage
from stoker.proto.anthropic.answers import MessageUsage

_TOKEN_IDS = re.compile(rb'"(?:prompt_)?token_ids"\s*:\s*\[')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_INTERNAL_NAMES = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_TAIL_BYTES = 3  # of the longest event end, all but its last byte
_EVENT = re.compile(rb".*?(?:\r?\n){2,}", re.DOTALL)
_DATA = re.compile(rb"^data: ?([^\r\n]*)", re.MULTILINE)
_END = re.compile(rb"^(?:data: ?\[DONE\]|event: ?response\.(?:completed|incomplete|failed))\r?$", re.MULTILINE)
DEFAULT_MAX_EVENT_BYTES = 16 << 20
# The end of a chunk with usage, as vLLM and SGLang write it. A chunk that looks different is parsed.
_RUNNING_USAGE = re.compile(
    rb',"usage":\{"prompt_tokens":(\d{1,9}),[^{}]*"completion_tokens":(\d{1,9})[^{}]*\}\}\r?\n\r?\n'
)
# The names in front of generated text. Inside a JSON string the quotation mark is escaped, so text never matches.
_TEXT_NAMES = {
    EndpointKind.CHAT: (b'content":', b'arguments":'),
    EndpointKind.COMPLETIONS: (b'"text":',),
    EndpointKind.RESPONSES: (b'"delta":',),
}
_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|text|arguments)"\s*:\s*"((?:[^"\\]|\\.)*)"')
_NEVER = b"\0"  # no event begins with it
_BYTES_PER_TOKEN = 4  # estimate for text


class UsageCounts(msgspec.Struct):
    """The token counts of one request, as reported by its workers so far."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class EventCutter:
    """Regroups stream bytes so that every output ends at the end of an event. An incomplete last event is never output.

    Raises AnswerTooLarge if an event is larger than `max_event_bytes`. Each byte is searched and copied a fixed number of times,
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
            raise AnswerTooLarge(f"an event of the stream is larger than {self._max_event_bytes} bytes")
        return out


class ForeignAnswer(EventCutter):
    """Rewrites one answer of a foreign worker, streamed (`push`) or whole."""

    __slots__ = (
        "_after",
        "_before",
        "_cells",
        "_counter",
        "_is_pair",
        "_keep_token_ids",
        "_kind",
        "_last",
        "_prompt_tokens",
        "_running",
        "ended",
        "hide_running",
        "hide_usage",
        "num_pieces",
        "prefill_cached_tokens",
        "usage",
    )

    def __init__(
        self,
        running: RunningUsage | None = None,
        *,
        kind: EndpointKind = EndpointKind.CHAT,
        prompt_tokens: int = 0,
        hide_usage: bool = False,
        hide_running: bool = False,
        keep_token_ids: bool = False,
        is_pair: bool = False,
        max_event_bytes: int = DEFAULT_MAX_EVENT_BYTES,
    ) -> None:
        """`running` takes the counts, and `prompt_tokens` is the gateway's own estimate."""
        self.rest = bytearray()  # this and the next: as `EventCutter` does, without another call
        self._max_event_bytes = max_event_bytes
        self._last = b""  # the last whole events
        self.hide_usage = hide_usage  # the gateway requested the usage chunk, the client did not
        self.hide_running = hide_running  # the gateway requested usage in every chunk, the client did not
        self._running = running or RunningUsage()
        self._cells = self._running.cells
        self._kind = kind
        self._prompt_tokens = prompt_tokens
        self._counter: TextCounter | None = None  # made with the first bytes
        self._before = self._after = _NEVER  # the latest event without its text
        self.num_pieces = 0  # of text, as far as they were counted
        self._keep_token_ids = keep_token_ids
        self._is_pair = is_pair
        self.prefill_cached_tokens: int | None = None  # known once the prefill worker of a pair has answered
        self.usage: UsageCounts | None = None
        self.ended = False  # the last event of the stream has passed

    def push(self, data: bytes) -> bytes:
        """Return the part of the stream to send to the client now: always whole events."""
        if data.startswith(self._before) and data.endswith(self._after) and not self.rest:
            # Nearly all events differ from the one before in their text only. Then there is nothing else to look for.
            text = data[len(self._before) : -len(self._after)]
            if text and b'"' not in text and b"\n" not in text:
                self._last = data
                self.num_pieces += 1
                self._cells[COMPLETION] = self.num_pieces
                return data
        if self.rest or not data.endswith(_EVENT_ENDS):
            data = self.cut(data)
            if not data:
                return b""
        self._last = data
        has_end = (b"[DONE]" in data or b"event: response." in data) and _END.search(data)
        if self.hide_running and (at := data.rfind(b',"usage":{')) > 0:
            shown = self._without_running_usage(data, at)
            if shown is not None:
                return shown
        else:
            self._count(data)
        if self._must_rewrite(data):
            data = b"".join([self._event(event) for event in _EVENT.findall(data)])
        elif not has_end and self._counter is not None:
            self._before, self._after = self._counter.around_text(data)
        if has_end:
            self.ended = True
            self._cells[STATUS] = 200
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
        if self.usage is None:
            num_bytes = sum(map(len, _TEXT.findall(data)))
            self._running.update(self._prompt_tokens, 0, -(-num_bytes // _BYTES_PER_TOKEN))
        if not was_wrong and not self._holds_internals(data):
            return data
        table = fields(data)
        self._rewrite(table)
        return msgspec.json.encode(table)

    def _must_rewrite(self, data: bytes) -> bool:
        return (b'"usage"' in data and _USAGE.search(data) is not None) or self._holds_internals(data)

    def _holds_internals(self, data: bytes) -> bool:
        if b'"kv_transfer_params"' in data or b'"bootstrap_' in data:
            return True
        return b'token_ids"' in data and not self._keep_token_ids and _TOKEN_IDS.search(data) is not None

    def _event(self, event: bytes) -> bytes:
        found = _DATA.search(event)
        if found is None or not found.group(1).startswith(b"{") or not self._must_rewrite(event):
            return event
        try:
            data = self._event_data(found.group(1))
        except msgspec.DecodeError as error:
            raise BadAnswer(f"an event of the stream is not valid JSON: {error}") from error
        return event[: found.start(1)] + data + event[found.end(1) :] if data else b""

    def _event_data(self, data: bytes) -> bytes:
        """Return the rewritten data of an event, or nothing if the event must be hidden."""
        table = fields(data)
        usage = read_usage(data)
        if usage is not None:
            self._saw(usage)
            is_last = bytes(table.get("choices", b"[]")) == b"[]"
            if self.hide_usage and is_last and "choices" in table:
                return b""
            if self.hide_running and not is_last:
                del table["usage"]
                self.usage = None  # later chunks may update the running counts only
        self._rewrite(table)
        return msgspec.json.encode(table)

    def _without_running_usage(self, data: bytes, at: int) -> bytes | None:
        """Take the usage at `at` from a single chunk with choices. Return None if `data` is anything else."""
        found = _RUNNING_USAGE.match(data, at)
        if found is None or not data.startswith(b"}]", at - 2) or data.find(b"\n\n") + 2 != len(data):
            return None
        if self._holds_internals(data):
            return None
        cells, (prompt_tokens, completion_tokens) = self._cells, found.groups()
        cells[PROMPT], cells[COMPLETION] = int(prompt_tokens), int(completion_tokens)
        if cells[COMPLETION]:
            self.num_pieces += 1
        return data[:at] + b"}\n\n"

    def _count(self, data: bytes) -> None:
        """Count the pieces of text in `data`."""
        counter = self._counter
        if counter is None:
            counter = self._counter = TextCounter(self._kind, data)
        if found := counter.count(data):
            self.num_pieces += found
            cells = self._cells
            if not cells[PROMPT]:
                cells[PROMPT] = self._prompt_tokens
            if cells[COMPLETION] < self.num_pieces:
                cells[COMPLETION] = self.num_pieces

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
        reported.cached_tokens = min(cached, max(0, reported.prompt_tokens))
        self._running.update(reported.prompt_tokens, reported.cached_tokens, reported.completion_tokens)
        return self._is_pair or was != reported.cached_tokens

    def _corrected(self, usage: Raw) -> Raw:
        return usage if self.usage is None else with_cached_tokens(usage, self.usage.cached_tokens)


class TextCounter:
    """Counts the pieces of generated text in a stream, without parsing its events."""

    __slots__ = ("_empty", "_names")

    def __init__(self, kind: EndpointKind, first: bytes) -> None:
        """`first` are the first bytes of the stream. They show whether its JSON has spaces after colons."""
        quote = b' "' if b'": "' in first else b'"'
        self._names = [name + quote for name in _TEXT_NAMES[kind]]
        self._empty = [name + b'"' for name in self._names]

    def count(self, data: bytes) -> int:
        """Return the number of pieces in `data`, which are whole events."""
        num_pieces = 0
        for name, empty in zip(self._names, self._empty, strict=True):
            if found := data.count(name):
                num_pieces += found - data.count(empty)
        return num_pieces

    def around_text(self, data: bytes) -> tuple[bytes, bytes]:
        """Return what stands before and after the text, if `data` is one event with one text without escapes."""
        if data.find(b"\n\n") + 2 == len(data):
            for name in self._names:
                if (at := data.find(name)) >= 0:
                    start = at + len(name)
                    end = data.find(b'"', start)
                    if start < end and b"\\" not in data[start:end] and self.count(data) == 1:
                        return data[:start], data[end:]
        return _NEVER, _NEVER


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _UsageFields(msgspec.Struct):
    """The token counts under the field names of all APIs."""

    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None  # this and the next: Anthropic counts them beside input_tokens
    cache_creation_input_tokens: int | None = None


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
    prompt_tokens = counts.input_tokens if counts.prompt_tokens is None else counts.prompt_tokens
    completion_tokens = counts.output_tokens if counts.completion_tokens is None else counts.completion_tokens
    if prompt_tokens is None and completion_tokens is None:
        return None
    if counts.cache_read_input_tokens is not None:
        cached_tokens = counts.cache_read_input_tokens
        beside = cached_tokens + (counts.cache_creation_input_tokens or 0)
        return UsageCounts((prompt_tokens or 0) + beside, cached_tokens, completion_tokens or 0)
    details = counts.prompt_tokens_details or counts.input_tokens_details
    return UsageCounts(
        prompt_tokens or 0,
        (details and details.cached_tokens) or 0,
        completion_tokens or 0,
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
    if "cache_read_input_tokens" in table:
        known = read_usage(b'{"usage":%b}' % bytes(usage)) or UsageCounts()
        corrected = MessageUsage.of(known.prompt_tokens, cached_tokens, known.completion_tokens)
        return Raw(msgspec.json.encode({**table, **msgspec.structs.asdict(corrected)}))
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
