"""A reader of server-sent events that follows the whole standard."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SseEvent:
    data: bytes
    event: str | None = None

    @property
    def is_done(self) -> bool:
        return self.data == b"[DONE]"


_LINE_END = re.compile(rb"[\r\n]")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseReader:
    """Reads whole events from bytes that are split anywhere. Lines may end in LF, CRLF or CR, as the standard allows."""

    def __init__(self, max_event_bytes: int = 64 << 20) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()  # the start of a line whose end has not arrived
        self._data: list[bytes] = []
        self._event: str | None = None
        self._size = 0
        self._after_cr = False  # the LF of a CRLF may arrive with the next piece
        self._at_start = True

    def push(self, piece: bytes) -> list[SseEvent]:
        events: list[SseEvent] = []
        searched = len(self._rest)
        self._rest += piece
        if self._at_start:
            if len(self._rest) < 3 and _BYTE_ORDER_MARK.startswith(self._rest):
                return events
            self._at_start = False
            searched = 0
            if self._rest.startswith(_BYTE_ORDER_MARK):
                del self._rest[:3]
        start = 0
        while (end := _LINE_END.search(self._rest, max(start, searched))) is not None:
            at = end.start()
            split_crlf = self._after_cr and at == start and self._rest[at] == 10
            self._after_cr = self._rest[at] == 13
            if not split_crlf and (event := self._line(bytes(self._rest[start:at]))) is not None:
                events.append(event)
            start = at + 1
        if start < len(self._rest):
            self._after_cr = False
        del self._rest[:start]
        if self._size + len(self._rest) > self._max_event_bytes:
            raise ValueError(f"an event of more than {self._max_event_bytes} bytes")
        return events

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
