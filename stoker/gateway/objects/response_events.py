"""Edits the events of a Responses stream: gives the response the gateway's id, and finds its end."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from msgspec import Raw

from stoker.gateway.api.client_body import fields
from stoker.proto.sse import encode_event

_RESPONSE = re.compile(rb'"response":\s*\{')
_DATA = re.compile(rb"^data: ?(.*)$", re.MULTILINE)
_TYPE = re.compile(rb"^event: ?([a-z0-9_.]+)\s*$", re.MULTILINE)
_NUMBER = re.compile(rb'"sequence_number":\s*(\d{1,18})(?!\d)')
_LAST = frozenset({b"response.completed", b"response.incomplete", b"response.failed"})
_ERROR = b"error"


class ResponseEdits:
    """What the gateway sets in a response object that a worker made. Values are JSON."""

    def __init__(
        self, response_id: str, previous_id: str | None, *, is_background: bool, created_s: float | None = None
    ) -> None:
        """`created_s` is the time that the client was told, if it was."""
        self.values: dict[str, Raw] = {
            "id": Raw(msgspec.json.encode(response_id)),
            "store": Raw(b"true"),
            "background": Raw(b"true" if is_background else b"false"),
            "previous_response_id": Raw(msgspec.json.encode(previous_id)),
        }
        if created_s is not None:
            self.values["created_at"] = Raw(b"%d" % created_s)

    def whole(self, response: bytes) -> bytes:
        """Return the response object with these values. Raises DecodeError if it is not a JSON object."""
        return msgspec.json.encode(fields(response) | self.values)


class EditedStream:
    """Cuts a stream into events and edits those that hold the response. The last one is kept back in `last_event`."""

    def __init__(self, edits: ResponseEdits) -> None:
        self._edits = edits
        self._rest = bytearray()
        self.response: bytes | None = None  # the final response object, once its event has come
        self.last_event = b""
        self.num_events = 0

    def push(self, data: bytes) -> list[bytes]:
        """Return the whole events in `data`, without the last one of the stream."""
        self._rest += data
        if b"\r" in self._rest:  # some engines end their lines so; JSON has no such byte
            self._rest = self._rest.replace(b"\r\n", b"\n")
        cut = self._rest.rfind(b"\n\n") + 2
        if cut < 2:
            return []
        events, self._rest = bytes(self._rest[:cut]), self._rest[cut:]
        return [shown for event in events.split(b"\n\n")[:-1] if (shown := self._event(event + b"\n\n"))]

    def _event(self, event: bytes) -> bytes:
        if event.startswith(b":"):
            return b""  # a comment
        self.num_events += 1
        if _RESPONSE.search(event) is None:
            return event
        found, kind = _DATA.search(event), _TYPE.search(event)
        if found is None or kind is None:
            return event
        try:
            table = fields(found.group(1))
            response = self._edits.whole(bytes(table["response"]))
        except (msgspec.DecodeError, KeyError):
            return event
        edited = encode_event(msgspec.json.encode(table | {"response": Raw(response)}), kind.group(1).decode())
        if kind.group(1) not in _LAST:
            return edited
        self.response, self.last_event = response, edited
        return b""


def event_number(event: bytes) -> int | None:
    """Return the sequence number of an event."""
    found = _NUMBER.search(event)
    return None if found is None else int(found.group(1))


def events_beyond(events: bytes, number: int) -> bytes:
    """Return the events with larger sequence numbers than `number`."""
    kept = [one + b"\n\n" for one in events.split(b"\n\n") if one]
    return b"".join(one for one in kept if (found := event_number(one)) is None or found > number)


def error_of(event: bytes) -> Mapping[str, Raw] | None:
    """Return the fields of an `error` event, or None if it is another event."""
    kind, found = _TYPE.search(event), _DATA.search(event)
    if kind is None or kind.group(1) != _ERROR or found is None:
        return None
    try:
        return fields(found.group(1))
    except msgspec.DecodeError:
        return {}


def response_event(kind: str, response: bytes, number: int) -> bytes:
    """Return an event of the gateway's own that holds the response."""
    table = {"type": kind, "sequence_number": number, "response": Raw(response)}
    return encode_event(msgspec.json.encode(table), kind)
