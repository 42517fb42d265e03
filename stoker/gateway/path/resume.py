"""The tokens of a stream that the gateway keeps so that another worker can continue the stream.

`proto/resume_notes.py` has the format: the notes that Stoker workers put in front of their events, and the field `resume`.
"""

from __future__ import annotations

import re

import msgspec

from stoker.gateway.path.rewrite import DEFAULT_MAX_EVENT_BYTES, EventCutter, UsageCounts, set_cached_tokens_in_events
from stoker.gateway.records.running_usage import CACHED, COMPLETION, PROMPT, STATUS, RunningUsage
from stoker.proto.resume_notes import DEFAULT_MAX_NOTES_BYTES, ResumeNotes, find_error
from stoker.proto.sse import DONE

_LAST_EVENT = re.compile(rb"^event: (?:response\.(?:completed|incomplete|failed)|message_stop)\n", re.MULTILINE)

# The engine died or the worker stops, so another worker can continue. Errors with another status would recur there.
_GONE_STATUS = 503


class TokenMemory(msgspec.Struct, eq=False):
    """The notes of one answer, from all workers that contributed to it, and how much of it the client has."""

    notes: ResumeNotes = msgspec.field(default_factory=ResumeNotes)
    _cached_tokens: int | None = None  # as the first worker reported; later workers got the prefix from it
    num_events: int = 0  # sent to the client

    def clear(self) -> None:
        self.notes.clear()
        self._cached_tokens = None
        self.num_events = 0

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
        return self.notes.num_tokens

    @property
    def usage(self) -> UsageCounts | None:
        reported = self.notes.last_usage
        if reported is None:
            return None
        cached_tokens = reported.cached_tokens if self._cached_tokens is None else self._cached_tokens
        return UsageCounts(reported.prompt_tokens, min(cached_tokens, reported.prompt_tokens), self.num_tokens)

    def resume_field(self, num_choices: int) -> bytes:
        """Return the `resume` field of a request body as JSON."""
        return self.notes.resume_field(num_choices, self.num_events)

    def check(self, num_choices: int) -> None:
        """Raise BadNotes if the notes or the ticket of a prefill worker are not valid."""
        self.notes.check(num_choices)

    def take_ticket(self) -> bytes | None:
        """Return a prefill worker's `kv_transfer_params` for the decode worker. A ticket is valid once."""
        ticket, self.notes.ticket = self.notes.ticket, None
        return ticket

    def _last_cached_tokens(self) -> int | None:
        usage = self.notes.last_usage
        return None if usage is None else usage.cached_tokens


class StokerStream(EventCutter):
    """One worker's part of a stream: stores the comment lines and passes the events on."""

    __slots__ = (
        "_cached_tokens",
        "_cells",
        "_counts_events",
        "_failed",
        "_last",
        "_memory",
        "_notes",
        "_others",
        "_take_notes",
        "failure",
    )

    def __init__(
        self,
        memory: TokenMemory,
        running: RunningUsage | None = None,
        *,
        counts_events: bool = False,
        max_event_bytes: int = DEFAULT_MAX_EVENT_BYTES,
        max_notes_bytes: int = DEFAULT_MAX_NOTES_BYTES,
    ) -> None:
        """`running` takes the counts of what is shown to the client."""
        super().__init__(max_event_bytes)
        memory.begin_worker()
        memory.notes.max_bytes = max_notes_bytes
        self._memory = memory
        self._notes = memory.notes
        self._take_notes = memory.notes.take
        self._others = -1  # `notes.num_others` when the cells were last written in full
        self._cells = (running or RunningUsage()).cells
        self._counts_events = (
            counts_events  # where one token makes several events: in the Responses and the Messages API
        )
        self._last = b""
        # The usage of the first worker is not rewritten.
        self._cached_tokens = memory.cached_tokens if memory.notes else None
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
        data = self._take_notes(data)
        if not data:
            return b""
        notes = self._notes
        self._cells[COMPLETION] = notes.num_tokens
        if notes.num_others != self._others:
            self._count_prompt()
        if self._cached_tokens is not None:
            data = set_cached_tokens_in_events(data, self._cached_tokens)
        if self._counts_events:
            self._memory.num_events += data.count(b"\n\n")
        self._last = data
        return data

    def _count_prompt(self) -> None:
        self._others = self._notes.num_others
        usage = self._memory.usage
        if usage is not None:
            self._cells[PROMPT], self._cells[CACHED] = usage.prompt_tokens, usage.cached_tokens
            if self._notes.is_ended:
                self._cells[STATUS] = 200

    def push_unseen(self, data: bytes) -> bytes:
        """Store the comment lines of a stream that is not sent to the client."""
        self.push(data)
        return b""

    @property
    def is_complete(self) -> bool:
        """Return True if the end of the stream, or its final error, was sent. A later connection error does not matter."""
        return self._failed or self._last.endswith(DONE) or _LAST_EVENT.search(self._last) is not None

    @property
    def lacks_only_done(self) -> bool:
        """Return True if the usage chunk, which comes right before [DONE], was sent, and [DONE] was not."""
        return not self.is_complete and b'"usage":{' in self._last and b'"choices":[]' in self._last

    def _before_failure(self, data: bytes) -> bytes:
        """Cut off an error event that the client need not see, because another worker can continue the stream."""
        found = find_error(data)
        if found is None:
            return data
        if found.status != _GONE_STATUS:
            self._failed = True
            return data
        self.failure = found.code
        return data[: found.start]
