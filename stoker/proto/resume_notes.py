"""Resume notes: what lets another worker continue an answer whose worker was lost, or that is handed off.

A worker writes notes into its stream when the gateway asks for them (`NOTES_HEADER`). A note is an SSE comment line in
front of the event that it describes, in the same write. The gateway removes the notes and keeps them:

    :u PROMPT_TOKENS CACHED_TOKENS CREATED SEED   with the first token; repeated when a later prompt of the request adds to it
    :t CHOICE TOKEN TOKEN ...                     the tokens of the next event: ids, or [id,logprob,...] without spaces
    :f CHOICE                                     the next event is the last one of this choice
    :e                                            the events that follow come after all choices
    :x STATUS CODE                                the next event is an error and ends the stream
    :k {...}                                      instead of an end: the `kv_transfer_params` of a prefill worker

To continue the answer, the gateway sends the request to another worker with the tokens so far in the field `resume`.
The gateway neither forwards nor stores an event that was cut off by a broken connection.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from stoker.base.errors import StokerError
from stoker.proto.handoff import KvTransferParams
from stoker.proto.openai.answers import finite_logprob
from stoker.proto.openai.field_types import INT64_MAX, CountOrZero, TokenId
from stoker.sched.request import TokenLogprobs

# ---- the field `resume`


class TokenWithLogprobs(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A token with its logprobs.

    It is a struct and not a tuple, because in a union with a bounded int, msgspec 0.22 applies the bounds to a tuple's length.
    """

    token_id: TokenId
    logprob: float
    top_ids: list[TokenId]
    top_logprobs: list[float]


class ResumedChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The tokens that a choice has so far. If the request asks for logprobs, each token comes with its own."""

    token_ids: list[TokenId | TokenWithLogprobs] = []
    finished: bool = False


class Resume(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The answer that another worker began, with one entry of `choices` per choice, in order.

    A stream continues after the tokens given here. An answer that is not streamed contains them.
    """

    created: Annotated[int, Meta(ge=0, le=INT64_MAX)]
    choices: list[ResumedChoice]
    events: CountOrZero | None = None  # Responses API: events the client has; None: all that the tokens produce


# ---- written by workers

END_NOTE = b":e\n"


def usage_note(prompt_tokens: int, cached_tokens: int, created: int, seed: int) -> bytes:
    return b":u %d %d %d %d\n" % (prompt_tokens, cached_tokens, created, seed)


def token_note(choice: int, token_ids: list[int]) -> bytes:
    return b":t %d %b\n" % (choice, " ".join(map(str, token_ids)).encode())


def logprobs_note(choice: int, tokens: Sequence[TokenLogprobs]) -> bytes:
    return b":t %d %b\n" % (choice, b" ".join(map(_token_json, tokens)))


def finish_note(choice: int) -> bytes:
    return b":f %d\n" % choice


def error_note(status: int, code: str) -> bytes:
    return f":x {status} {code}\n".encode()


def handoff_note(transfer: KvTransferParams) -> bytes:
    return b":k %b\n" % msgspec.json.encode(transfer)


def _token_json(entry: TokenLogprobs) -> bytes:
    """Return a `TokenWithLogprobs` as JSON. msgspec writes no spaces, so that it is one item of the note."""
    top = [finite_logprob(logprob) for logprob in entry.top_logprobs]
    return msgspec.json.encode(TokenWithLogprobs(entry.token_id, finite_logprob(entry.logprob), entry.top_ids, top))


# ---- read by the gateway

_LEADING_NOTES = re.compile(rb"(?::[^\n]*\n)+\n?")  # in front of an event, or alone
_NOTES = re.compile(rb"^(?::[^\n]*\n)+\n?", re.MULTILINE)
_TOKENS = re.compile(rb"^:([tf]) (\d{1,9})([^\n]*)", re.MULTILINE)
_USAGE = re.compile(rb"^:u (\d{1,15}) (\d{1,15}) (\d{1,15})", re.MULTILINE)
_ERROR = re.compile(rb"^:x (\d{3}) ([^\n]{1,100})\n", re.MULTILINE)
_T = ord("t")

DEFAULT_MAX_NOTES_BYTES = 32 << 20


class BadNotes(StokerError):
    """The notes in a worker's stream are not valid. The client sees the message."""

    code = "worker_lost"


class NotesTooLarge(BadNotes):
    """The notes are larger than the limit. A client that asks for many tokens with logprobs may be the cause."""


class UsageNote(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    created: int


class ErrorNote(NamedTuple):
    start: int  # where the note stands in the events
    status: int
    code: str


def find_error(events: bytes) -> ErrorNote | None:
    """Return the error note in `events`, if there is one. Check `b":x " in events` first: that is cheaper."""
    found = _ERROR.search(events)
    if found is None:
        return None
    return ErrorNote(found.start(), int(found.group(1)), found.group(2).decode("ascii", "replace"))


class ResumeNotes(msgspec.Struct, eq=False):
    """The notes of one answer, from all its workers.

    They are stored as bytes and parsed only if a worker is lost.
    """

    _lines: bytearray = msgspec.field(default_factory=bytearray)
    max_bytes: int = DEFAULT_MAX_NOTES_BYTES
    ticket: bytes | None = None  # `kv_transfer_params` of a prefill worker, until the decode worker has it
    num_tokens: int = 0
    num_others: int = (
        0  # grows with notes other than a single token's, so that a reader sees cheaply that there are some
    )

    def __bool__(self) -> bool:
        return bool(self._lines)

    def clear(self) -> None:
        if self._lines:
            self._lines = bytearray()
        self.ticket = None
        self.num_tokens = self.num_others = 0

    @classmethod
    def restored(cls, lines: bytes) -> ResumeNotes:
        """Return notes that were kept as `after(0)`."""
        notes = cls()
        notes._add(lines)
        return notes

    @property
    def num_bytes(self) -> int:
        return len(self._lines)

    def after(self, num_bytes: int) -> bytes:
        """Return the notes that came after the first `num_bytes`."""
        return bytes(self._lines[num_bytes:])

    def take(self, events: bytes) -> bytes:
        """Store the notes in `events`, which are whole events, and return the events without them."""
        if events.find(b"\n\n") + 2 == len(events):  # one event, which is how workers write them
            found = _LEADING_NOTES.match(events)
            if found is None:
                return events
            lines = found.group()
            if b":k " in lines or lines.endswith(b"\n\n"):
                self._add(lines)
            else:
                self._lines += lines
                if len(self._lines) > self.max_bytes:
                    raise self._too_large()
                # ":t CHOICE TOKEN", as nearly all notes are
                if lines.count(b" ") == 2 and lines[1] == _T and lines.count(b":") == 1:
                    self.num_tokens += 1
                else:
                    self._count(lines)
            return events[found.end() :]
        if not (events.startswith(b":") or b"\n:" in events):
            return events
        for lines in _NOTES.findall(events):
            self._add(lines)
        return _NOTES.sub(b"", events)

    @property
    def is_ended(self) -> bool:
        """Return True if all choices have ended."""
        return END_NOTE in self._lines

    def _count(self, lines: bytes) -> None:
        """Count the tokens in notes. Each token has a space before it, so all other spaces are subtracted."""
        others = lines.count(b":t") + lines.count(b":f") + 4 * lines.count(b":u") + 2 * lines.count(b":x")
        self.num_tokens += max(0, lines.count(b" ") - others)
        self.num_others += 1

    @property
    def last_usage(self) -> UsageNote | None:
        start = self._lines.rfind(b":u ")
        found = None if start < 0 else _USAGE.match(self._lines, start)
        if found is None:
            return None
        prompt_tokens, cached_tokens, created = found.groups()
        return UsageNote(int(prompt_tokens), int(cached_tokens), int(created))

    def resume_field(self, num_choices: int, num_events: int = 0) -> bytes:
        """Return the JSON of a `Resume`. The tokens are copied from the notes as they are.

        `num_events` is the number of events that the client has; 0 leaves the field out. Raises BadNotes if the notes are
        not what a worker writes.
        """
        usage = self.last_usage
        if usage is None:
            raise BadNotes("The worker's stream cannot be continued: its notes have no usage.")
        tokens: list[list[bytes]] = [[] for _ in range(num_choices)]
        finished = [b"false"] * num_choices
        for kind, index, items in _TOKENS.findall(self._lines):
            if int(index) >= num_choices:
                raise BadNotes(f"The worker's stream cannot be continued: it has no choice {int(index)}.")
            if kind == b"f":
                finished[int(index)] = b"true"
            else:
                tokens[int(index)] += items.split()
        choices = b",".join(
            b'{"token_ids":[%b],"finished":%b}' % (b",".join(ids), end)
            for ids, end in zip(tokens, finished, strict=True)
        )
        events = b',"events":%d' % num_events if num_events else b""
        field = b'{"created":%d,"choices":[%b]%b}' % (usage.created, choices, events)
        _check_json(field, Resume)
        return field

    def check(self, num_choices: int) -> None:
        """Raise BadNotes if another worker could not continue from these notes, or the ticket is not a JSON object."""
        self.resume_field(num_choices)
        if self.ticket is not None:
            _check_json(self.ticket, dict[str, msgspec.Raw])

    def _too_large(self) -> NotesTooLarge:
        return NotesTooLarge(f"The notes in the worker's stream are larger than {self.max_bytes} bytes.")

    def _add(self, lines: bytes) -> None:
        if b":k " in lines:
            lines, _, ticket = lines.rpartition(b":k ")
            self.ticket = ticket.strip()
        self._lines += lines.removesuffix(b"\n") if lines.endswith(b"\n\n") else lines
        if len(self._lines) > self.max_bytes:
            raise self._too_large()
        self._count(lines)


class BegunStream(msgspec.Struct, eq=False):
    """A stream that another gateway can continue if this one dies, or that another one has begun."""

    notes: ResumeNotes = msgspec.field(default_factory=ResumeNotes)
    num_events: int = 0  # events that the client has from the other gateway
    num_tokens: int = 0  # in the notes of the other gateway, which has billed them


def _check_json(data: bytes, kind: object) -> None:
    try:
        msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadNotes("The worker's stream cannot be continued: its notes are not valid.") from error
