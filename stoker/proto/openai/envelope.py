"""What stands around a choice in the events of a stream: the same each time, so it is encoded once."""

from __future__ import annotations

import msgspec

from stoker.proto.openai.chat import ChatChunk, ChatChunkChoice
from stoker.proto.openai.completions import Completion, CompletionChoice
from stoker.proto.sse import encode_event

_CHOICES = b'"choices":['


class Envelope:
    """Makes events that are alike but for their one choice."""

    def __init__(self, chunk: ChatChunk | Completion) -> None:
        assert not chunk.choices
        # A quote within a string is escaped: the first place that looks like the key is the key.
        before, key, after = encode_event(msgspec.json.encode(chunk)).partition(_CHOICES)
        self._before = before + key
        self._after = after
        self._encode = msgspec.json.Encoder().encode

    def event(self, choice: ChatChunkChoice | CompletionChoice) -> bytes:
        return self._before + self._encode(choice) + self._after
