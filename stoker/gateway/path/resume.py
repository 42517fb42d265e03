"""What the gateway remembers of a stream so that another worker can go on with it.

Our workers put comment lines in front of their events (a client would skip them; we take them out):

    :u PROMPT_TOKENS CACHED_TOKENS CREATED SEED     with the first token; again where a later prompt of the request says more
    :t CHOICE TOKEN TOKEN ...                       what the next event brings: ids, or [id,logprob,...] without blanks
    :f CHOICE                                       the next event is this choice's last
    :e                                              what follows comes after all choices
    :x STATUS CODE                                  the next event is an error, and the last
    :k {...}                                        instead of an end: a prefill worker's hand-off ticket

They are kept as the bytes they are and read only when a worker is lost. An event counts as sent when it was complete, and
its tokens with it: what came of an event before the connection broke is neither shown nor remembered.
"""

from __future__ import annotations

import re

import msgspec

from stoker.gateway.path.rewrite import EventCutter, Usage, set_cached_tokens_in_events
from stoker.proto.sse import DONE

_LEAD = re.compile(rb"(?::[^\n]*\n)+\n?")  # the comment lines in front of an event, or alone
_COMMENTS = re.compile(rb"^(?::[^\n]*\n)+\n?", re.MULTILINE)
_TOKENS = re.compile(rb"^:([tf]) (\d+)([^\n]*)", re.MULTILINE)
_USAGE = re.compile(rb"^:u (\d+) (\d+) (\d+)", re.MULTILINE)
_ERROR = re.compile(rb"^:x (\d+) ([^\n]*)\n", re.MULTILINE)
_LAST_RESPONSE_EVENT = re.compile(rb"^event: response\.(?:completed|incomplete|failed)\n", re.MULTILINE)

_GONE_STATUS = (
    503  # its engine died, or it stops: the answer can go on elsewhere. Any other error would come there, too.
)


class TokenMemory(msgspec.Struct, eq=False):
    """The comment lines of one answer, over all its workers."""

    _lines: bytearray = msgspec.field(default_factory=bytearray)
    _cached_tokens: int | None = None  # what the first worker found; later ones were handed what they have
    num_events: int = 0  # that the client has got
    ticket: bytes | None = None  # a prefill worker's, until a decode worker has it

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
        """What follows is another worker's."""
        if self._cached_tokens is None:
            self._cached_tokens = self._last_cached_tokens()

    @property
    def cached_tokens(self) -> int | None:
        """None: no worker has told yet."""
        return self._last_cached_tokens() if self._cached_tokens is None else self._cached_tokens

    @property
    def num_tokens(self) -> int:
        """Counted by blanks, not by reading: `:t C` has one more blank than tokens, `:f C` one, `:u` four."""
        lines = self._lines
        return lines.count(b" ") - lines.count(b":t") - lines.count(b":f") - 4 * lines.count(b":u")

    @property
    def usage(self) -> Usage | None:
        cached_tokens, told = self.cached_tokens, self._last_told()
        if cached_tokens is None or told is None:
            return None
        prompt_tokens = int(told.group(1))
        return Usage(prompt_tokens, min(cached_tokens, prompt_tokens), self.num_tokens)

    def resume_field(self, num_choices: int) -> bytes:
        """The body's `resume`, as JSON. Tokens stand in it as they stand in the lines."""
        told = self._last_told()
        assert told is not None, "no worker has told of a token: there is nothing to resume"
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
    """One worker's part of a stream: comment lines go to the memory, events to the client."""

    __slots__ = ("_cached_tokens", "_counts_events", "_failed", "_last", "_memory", "failure")

    def __init__(self, memory: TokenMemory, *, counts_events: bool = False) -> None:
        super().__init__()
        memory.begin_worker()
        self._memory = memory
        self._counts_events = counts_events  # of the Responses API, where a token makes several
        self._last = b""
        self._cached_tokens = memory.cached_tokens if memory else None  # only a later worker's usage needs a change
        self._failed = False
        self.failure: str | None = None  # why the worker gave up, if another one may make good for it

    def push(self, data: bytes) -> bytes:
        """What the client may see of `data`: whole events without our lines."""
        if self.rest or data[-2:] != b"\n\n":
            data = self.cut(data)
            if not data:
                return b""
        if b":x " in data:
            data = self._before_failure(data)
        if data.find(b"\n\n") + 2 == len(data):  # one event: as workers write them
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
        """For a stream that only we listen to."""
        self.push(data)
        return b""

    @property
    def is_complete(self) -> bool:
        """The stream's own end was sent, or the error that ends it; what happens to the connection now does not matter."""
        return self._failed or self._last.endswith(DONE) or _LAST_RESPONSE_EVENT.search(self._last) is not None

    @property
    def lacks_only_done(self) -> bool:
        """The usage chunk, the last before [DONE], was sent, and [DONE] was not."""
        return not self.is_complete and b'"usage":{' in self._last and b'"choices":[]' in self._last

    def _remember(self, lines: bytes) -> None:
        if b":k " in lines:
            lines, _, ticket = lines.rpartition(b":k ")
            self._memory.ticket = ticket.strip()
        self._memory.add(lines.removesuffix(b"\n") if lines.endswith(b"\n\n") else lines)

    def _before_failure(self, data: bytes) -> bytes:
        """Without an error event that the client need not see."""
        found = _ERROR.search(data)
        if found is None:
            return data
        if int(found.group(1)) != _GONE_STATUS:
            self._failed = True
            return data
        self.failure = found.group(2).decode("ascii", "replace")
        return data[: found.start()]
