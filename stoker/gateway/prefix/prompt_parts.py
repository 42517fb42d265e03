"""Hashes of the parts of a prompt: its tools, its system prompt and its messages.

Two requests of a conversation are compared by them, to find the part that differs. No text is kept.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Raw, UnsetType
from xxhash import xxh3_64_intdigest

from stoker.gateway.api.client_body import EndpointKind, RequestEnvelope
from stoker.gateway.prefix.stable_json import StableJson

_MAX_BYTES = 8 << 20  # of a field; the parts of a larger one are not compared
_NOTHING: array[int] = array("Q")
_ITEMS: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
# Clients of Anthropic's API move these marks from turn to turn. They do not reach the prompt.
_CACHE_MARK = re.compile(rb',?\s*"cache_control"\s*:\s*(?:null|\{[^{}]*\})')
_SEPARATE_SYSTEM = frozenset({EndpointKind.MESSAGES, EndpointKind.RESPONSES})


@dataclass(frozen=True, slots=True)
class PromptParts:
    """Hashes of each tool and each message. The system prompt is a message of its own if it has a field of its own."""

    tools: array[int]
    messages: array[int]
    has_system: bool = False  # the first message is the system prompt, which is not in the client's list

    @property
    def size(self) -> int:
        return len(self.tools) + len(self.messages)

    def name(self, message: int) -> str:
        """Return a message as the client counts it."""
        if not self.has_system:
            return f"message {message}"
        return f"message {message - 1}" if message else "system"


def prompt_parts(envelope: RequestEnvelope, stable: StableJson) -> PromptParts | None:
    """Return the parts of a request, or None if it has no list of messages."""
    listed = envelope.input if envelope.kind is EndpointKind.RESPONSES else envelope.messages
    if isinstance(listed, UnsetType) or envelope.prompt_token_ids is not UNSET:
        return None
    try:
        has_marks = envelope.kind is EndpointKind.MESSAGES
        messages = _hashes(listed, has_marks, stable)
        tools = _hashes(envelope.tools, has_marks)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # a text instead of a list, or a body that the worker will refuse
    has_system = envelope.kind in _SEPARATE_SYSTEM
    if has_system:
        given = envelope.system if envelope.kind is EndpointKind.MESSAGES else envelope.instructions
        system = 0 if isinstance(given, UnsetType) else xxh3_64_intdigest(_plain(stable.of(memoryview(given))))
        messages.insert(0, system)
    return PromptParts(tools, messages, has_system)


def _hashes(field: Raw | UnsetType, has_marks: bool, stable: StableJson | None = None) -> array[int]:
    if isinstance(field, UnsetType):
        return _NOTHING
    view = memoryview(field)
    if len(view) > _MAX_BYTES:
        raise msgspec.DecodeError(f"{len(view)} bytes are too many to compare")
    if stable is not None:
        view = stable.of(view)
    items = _ITEMS.decode(view)
    if has_marks:
        return array("Q", [xxh3_64_intdigest(_plain(memoryview(item))) for item in items])
    return array("Q", map(xxh3_64_intdigest, items))


def _plain(view: memoryview) -> bytes:
    return _CACHE_MARK.sub(b"", bytes(view))
