"""Builds a message from the parts of an answer, and encodes the events of its stream.

One content block is open at a time. A part of another kind, or of another tool call, closes it. Every call returns whole events,
and how many depends only on the parts, so that a stream that broke can be continued after any of its events.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.proto.anthropic.answers import AnswerBlock, MessageObject, MessageUsage, StopReason
from stoker.proto.sse import encode_event

_STOP = encode_event(b'{"type":"message_stop"}', "message_stop")
_SIGNATURE = "stoker"  # thinking blocks must have one; nothing checks it
_encode = msgspec.json.Encoder().encode


class MessageWriter:
    """Writes one message."""

    def __init__(self, message: MessageObject) -> None:
        self.message = message
        self.started = False
        self._open: AnswerBlock | None = None
        self._texts: list[str] = []  # of the open block
        self._before = self._after = b""  # the bytes around the text of a delta of the open block
        self._call = -1  # the number of the open tool call

    def start(self) -> list[bytes]:
        """Return the event that begins the stream."""
        self.started = True
        return [_event("message_start", message=self.message)]

    def text(self, text: str) -> list[bytes]:
        events = []
        if self._open is None or self._open.type != "text":
            events = self._begin(AnswerBlock(type="text", text="", citations=None), "text_delta", "text")
        return [*events, self._delta(text)]

    def thinking(self, text: str) -> list[bytes]:
        events = []
        if self._open is None or self._open.type != "thinking":
            block = AnswerBlock(type="thinking", thinking="", signature="")
            events = self._begin(block, "thinking_delta", "thinking")
        return [*events, self._delta(text)]

    def call(self, number: int, call_id: str, name: str) -> list[bytes]:
        self._call = number
        block = AnswerBlock(type="tool_use", id=call_id, name=name, input={})
        return self._begin(block, "input_json_delta", "partial_json")

    def arguments(self, number: int, text: str) -> list[bytes]:
        if number != self._call or self._open is None or self._open.type != "tool_use":
            return []
        return [self._delta(text)]

    def finish(self, reason: StopReason, stop_sequence: str | None, usage: MessageUsage) -> list[bytes]:
        events = self._close()
        message = self.message
        message.stop_reason, message.stop_sequence, message.usage = reason, stop_sequence, usage
        delta = {"stop_reason": reason, "stop_sequence": stop_sequence}
        return [*events, _event("message_delta", delta=delta, usage=usage), _STOP]

    def _begin(self, block: AnswerBlock, delta_type: str, field: str) -> list[bytes]:
        events = self._close()
        self._open = block
        self.message.content.append(block)
        index = len(self.message.content) - 1
        head = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        around = encode_event(head % (index, delta_type.encode(), field.encode()) + b"\0}}", "content_block_delta")
        self._before, _, self._after = around.partition(b"\0")
        return [*events, _event("content_block_start", index=index, content_block=block)]

    def _delta(self, text: str) -> bytes:
        self._texts.append(text)
        return self._before + _encode(text) + self._after

    def _close(self) -> list[bytes]:
        block, text = self._open, "".join(self._texts)
        if block is None:
            return []
        index = len(self.message.content) - 1
        events = []
        if block.type == "text":
            block.text = text
        elif block.type == "thinking":
            block.thinking, block.signature = text, _SIGNATURE
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            events.append(_event("content_block_delta", index=index, delta=delta))
        else:
            block.input = _parsed(text)
        events.append(_event("content_block_stop", index=index))
        self._open, self._texts = None, []
        return events


def _parsed(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call. Arguments that are not an object are kept as text, under a name of their own."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"unparsed_arguments": arguments}


def _event(name: str, **fields: Any) -> bytes:
    return encode_event(_encode({"type": name, **fields}), name)
