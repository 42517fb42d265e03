"""Events of a stream that differ only in their one choice. The bytes around the choice are encoded once."""

from __future__ import annotations

import msgspec

from stoker.proto.openai.chat import ChatChunk, ChatChunkChoice
from stoker.proto.openai.completions import CompletionChoice, TextCompletion
from stoker.proto.sse import encode_event

_CHOICES = b'"choices":['


class ChunkTemplate:
    """Encodes a chunk once, and then only its choice for each event."""

    def __init__(self, chunk: ChatChunk | TextCompletion) -> None:
        assert not chunk.choices
        # Quotes inside strings are escaped, so the first match is the key.
        before, key, after = encode_event(msgspec.json.encode(chunk)).partition(_CHOICES)
        self._before = before + key
        self._after = after
        self._encode = msgspec.json.Encoder().encode

    def event(self, choice: ChatChunkChoice | CompletionChoice) -> bytes:
        return self._before + self._encode(choice) + self._after
