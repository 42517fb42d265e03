"""The tokens of a stream that the gateway keeps so that another worker can continue the stream.

Stoker workers put comment lines in front of their events. A client would ignore them; the gateway removes them:

    :u PROMPT_TOKENS CACHED_TOKENS CREATED SEED     with the first token; repeated when a later prompt changes the counts
    :t CHOICE TOKEN TOKEN ...                       the tokens of the next event: ids, or [id,logprob,...] without spaces
    :f CHOICE                                       the next event is the last of this choice
    :e                                              the following events come after all choices
    :x STATUS CODE                                  the next event is an error, and the last event
    :k {...}                                        the hand-off ticket of a prefill worker, instead of an end

The lines are kept as bytes and parsed only when a worker is lost. An event and its tokens count as sent once the event is
complete. A part of an event that arrived before the connection broke is neither forwarded nor kept.
"""

from __future__ import annotations

import re

import msgspec

from stoker.gateway.path.rewrite import EventCutter, ReportedUsage, set_cached_tokens_in_events
from stoker.proto.sse import DONE

_LEAD = re.compile(rb"(?::[^\n]*\n)+\n?")  # comment lines in front of an event, or without one
_COMMENTS = re.compile(rb"^(?::[^\n]*\n)+\n?", re.MULTILINE)
_TOKENS = re.compile(rb"^:([tf]) (\d+)([^\n]*)", re.MULTILINE)
_USAGE = re.compile(rb"^:u (\d+) (\d+) (\d+)", re.MULTILINE)
_ERROR = re.compile(rb"^:x (\d+) ([^\n]*)\n", re.MULTILINE)
_LAST_RESPONSE_EVENT = re.compile(rb"^event: response\.(?:completed|incomplete|failed)\n", re.MULTILINE)

_GONE_STATUS = (
    503  # the engine died or the worker stops, so another worker can continue; other errors would recur there
)


class TokenMemory(msgspec.Struct, eq=False):
    """The comment lines of one answer, from all workers that contributed to it."""

    _lines: bytearray = msgspec.field(default_factory=bytearray)
    _cached_tokens: int | None = None  # as the first worker reported; later workers got the prefix from it
    num_events: int = 0  # sent to the client
    ticket: bytes | None = None  # of the prefill worker, until it is sent to a decode worker

    def clear(self) -> None:
        self._lines = bytearray()
        self._cached_tokens = None
        self.num_events = 0
        self.ticket = None

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, lines: bytes) -> None:
        self._lines += lines

    def begin_worker(self) -> None:
        """Note that the following lines come from another worker."""
        if self._cached_tokens is None:
            self._cached_tokens = self._last_cached_tokens()

    @property
    def cached_tokens(self) -> int | None:
        """Return the cached prompt tokens, or None if no worker has reported them yet."""
        return self._last_cached_tokens() if self._cached_tokens is None else self._cached_tokens

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, counted by spaces: `:t C` has one space more than tokens, `:f C` one, `:u` four."""
        lines = self._lines
        return lines.count(b" ") - lines.count(b":t") - lines.count(b":f") - 4 * lines.count(b":u")

    @property
    def usage(self) -> ReportedUsage | None:
        cached_tokens, told = self.cached_tokens, self._last_told()
        if cached_tokens is None or told is None:
            return None
        prompt_tokens = int(told.group(1))
        return ReportedUsage(prompt_tokens, min(cached_tokens, prompt_tokens), self.num_tokens)

    def resume_field(self, num_choices: int) -> bytes:
        """Return the `resume` field of a request body as JSON. Tokens are copied from the lines unchanged."""
        told = self._last_told()
        assert told is not None, "no worker has reported a token, so there is nothing to resume"
        tokens: list[list[bytes]] = [[] for _ in range(num_choices)]
        finished = [b"false"] * num_choices
        for what, index, items in _TOKENS.findall(self._lines):
            if what == b"f":
                finished[int(index)] = b"true"
            else:
                tokens[int(index)] += items.split()
        choices = b",".join(
            b'{"token_ids":[%b],"finished":%b}' % (b",".join(ids), end)
            for ids, end in zip(tokens, finished, strict=True)
        )
        events = b',"events":%d' % self.num_events if self.num_events else b""
        return b'{"created":%b,"choices":[%b]%b}' % (told.group(3), choices, events)

    def _last_told(self) -> re.Match[bytes] | None:
        start = self._lines.rfind(b":u ")
        return None if start < 0 else _USAGE.match(self._lines, start)

    def _last_cached_tokens(self) -> int | None:
        told = self._last_told()
        return None if told is None else int(told.group(2))


class StokerStream(EventCutter):
    """One worker's part of a stream: stores the comment lines and passes the events on."""

    __slots__ = ("_cached_tokens", "_counts_events", "_failed", "_last", "_memory", "failure")

    def __init__(self, memory: TokenMemory, *, counts_events: bool = False) -> None:
        super().__init__()
        memory.begin_worker()
        self._memory = memory
        self._counts_events = counts_events  # for the Responses API, where one token makes several events
        self._last = b""
        self._cached_tokens = memory.cached_tokens if memory else None  # the first worker's usage is not rewritten
        self._failed = False
        self.failure: str | None = None  # why the worker stopped, if another worker may continue

    def push(self, data: bytes) -> bytes:
        """Return the part of `data` to send to the client: whole events without comment lines."""
        if self.rest or data[-2:] != b"\n\n":
            data = self.cut(data)
            if not data:
                return b""
        if b":x " in data:
            data = self._before_failure(data)
        if data.find(b"\n\n") + 2 == len(data):  # exactly one event, as workers write them
            lead = _LEAD.match(data)
            if lead is not None:
                self._remember(lead.group())
                data = data[lead.end() :]
        elif data.startswith(b":") or b"\n:" in data:
            for lines in _COMMENTS.findall(data):
                self._remember(lines)
            data = _COMMENTS.sub(b"", data)
        if not data:
            return b""
        if self._cached_tokens is not None:
            data = set_cached_tokens_in_events(data, self._cached_tokens)
        if self._counts_events:
            self._memory.num_events += data.count(b"\n\n")
        self._last = data
        return data

    def push_unseen(self, data: bytes) -> bytes:
        """Store the comment lines of a stream that is not sent to the client."""
        self.push(data)
        return b""

    @property
    def is_complete(self) -> bool:
        """Return True if the end of the stream, or its final error, was sent. A later connection error does not matter."""
        return self._failed or self._last.endswith(DONE) or _LAST_RESPONSE_EVENT.search(self._last) is not None

    @property
    def lacks_only_done(self) -> bool:
        """Return True if the usage chunk, which comes right before [DONE], was sent, and [DONE] was not."""
        return not self.is_complete and b'"usage":{' in self._last and b'"choices":[]' in self._last

    def _remember(self, lines: bytes) -> None:
        if b":k " in lines:
            lines, _, ticket = lines.rpartition(b":k ")
            self._memory.ticket = ticket.strip()
        self._memory.add(lines.removesuffix(b"\n") if lines.endswith(b"\n\n") else lines)

    def _before_failure(self, data: bytes) -> bytes:
        """Cut off an error event that the client need not see, because another worker can continue the stream."""
        found = _ERROR.search(data)
        if found is None:
            return data
        if int(found.group(1)) != _GONE_STATUS:
            self._failed = True
            return data
        self.failure = found.group(2).decode("ascii", "replace")
        return data[: found.start()]
