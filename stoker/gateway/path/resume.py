"""What the gateway remembers of a stream so that another worker can go on with it.

`proto/resume_notes.py` has the format of the notes that our workers put in front of their events, and of the field that
continues an answer.
"""

from __future__ import annotations

import re

import msgspec

from stoker.gateway.path.rewrite import EventCutter, Usage, set_cached_tokens_in_events
from stoker.proto.resume_notes import ResumeNotes, find_error
from stoker.proto.sse import DONE

_LAST_RESPONSE_EVENT = re.compile(rb"^event: response\.(?:completed|incomplete|failed)\n", re.MULTILINE)

_GONE_STATUS = (
    503  # its engine died, or it stops: the answer can go on elsewhere. Any other error would come there, too.
)


class TokenMemory(msgspec.Struct, eq=False):
    """The notes of one answer, over all its workers, and what the client has of it."""

    notes: ResumeNotes = msgspec.field(default_factory=ResumeNotes)
    _cached_tokens: int | None = None  # what the first worker found; later ones were handed what they have
    num_events: int = 0  # that the client has got

    def clear(self) -> None:
        self.notes.clear()
        self._cached_tokens = None
        self.num_events = 0

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
        return self.notes.num_tokens

    @property
    def usage(self) -> Usage | None:
        told = self.notes.last_usage
        if told is None:
            return None
        cached_tokens = told.cached_tokens if self._cached_tokens is None else self._cached_tokens
        return Usage(told.prompt_tokens, min(cached_tokens, told.prompt_tokens), self.num_tokens)

    def resume_field(self, num_choices: int) -> bytes:
        """The body's `resume`, as JSON."""
        return self.notes.resume_field(num_choices, self.num_events)

    def take_ticket(self) -> bytes | None:
        """A prefill worker's `kv_transfer_params`, for the decode worker. It is valid once."""
        ticket, self.notes.ticket = self.notes.ticket, None
        return ticket

    def _last_cached_tokens(self) -> int | None:
        told = self.notes.last_usage
        return None if told is None else told.cached_tokens


class StokerStream(EventCutter):
    """One worker's part of a stream: comment lines go to the memory, events to the client."""

    __slots__ = ("_cached_tokens", "_counts_events", "_failed", "_last", "_memory", "_take_notes", "failure")

    def __init__(self, memory: TokenMemory, *, counts_events: bool = False) -> None:
        super().__init__()
        memory.begin_worker()
        self._memory = memory
        self._take_notes = memory.notes.take
        self._counts_events = counts_events  # of the Responses API, where a token makes several
        self._last = b""
        self._cached_tokens = memory.cached_tokens if memory.notes else None  # only for a later worker's usage
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
        data = self._take_notes(data)
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

    def _before_failure(self, data: bytes) -> bytes:
        """Without an error event that the client need not see."""
        found = find_error(data)
        if found is None:
            return data
        if found.status != _GONE_STATUS:
            self._failed = True
            return data
        self.failure = found.code
        return data[: found.start]
