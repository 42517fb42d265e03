"""Server-sent events, read and written. Knows nothing of what the data means but OpenAI's `[DONE]`."""

from __future__ import annotations

from dataclasses import dataclass

DONE = b"data: [DONE]\n\n"


def encode_event(data: bytes, event: str | None = None) -> bytes:
    """One event. `data` is JSON as msgspec writes it: without line breaks."""
    if event is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


@dataclass(frozen=True, slots=True)
class SseEvent:
    data: bytes
    event: str | None = None

    @property
    def is_done(self) -> bool:
        return self.data == b"[DONE]"


class SseReader:
    """Bytes in pieces cut anywhere -> whole events. Lines may end in LF, CRLF or CR, as the standard allows."""

    def __init__(self, max_event_bytes: int = 64 << 20) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._event: str | None = None
        self._size = 0
        self._after_cr = False  # the LF of a CRLF may come with the next piece
        self._at_start = True

    def push(self, piece: bytes) -> list[SseEvent]:
        events: list[SseEvent] = []
        self._rest += piece
        if self._at_start and len(self._rest) >= 3:
            self._at_start = False
            if self._rest.startswith(b"\xef\xbb\xbf"):
                del self._rest[:3]
        elif self._at_start and b"\xef\xbb\xbf".startswith(self._rest):
            return events
        start = 0
        while (end := self._line_end(start)) >= 0:
            line = bytes(self._rest[start:end])
            start = end + 1
            self._after_cr = self._rest[end] == 13
            if (event := self._line(line)) is not None:
                events.append(event)
        del self._rest[:start]
        if self._size + len(self._rest) > self._max_event_bytes:
            raise ValueError(f"an event of more than {self._max_event_bytes} bytes")
        return events

    def _line_end(self, start: int) -> int:
        """Where the line that begins at `start` ends, or -1; steps over the LF that belongs to a CR before it."""
        if self._after_cr and start < len(self._rest):
            self._after_cr = False
            if self._rest[start] == 10:
                # An empty "line" between CR and LF is no line: cut it out.
                del self._rest[start]
        lf, cr = self._rest.find(b"\n", start), self._rest.find(b"\r", start)
        if lf < 0 or cr < 0:
            return max(lf, cr)
        return min(lf, cr)

    def _line(self, line: bytes) -> SseEvent | None:
        if not line:
            event = SseEvent(b"\n".join(self._data), self._event) if self._data else None
            self._data, self._event, self._size = [], None, 0
            return event
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        return None
