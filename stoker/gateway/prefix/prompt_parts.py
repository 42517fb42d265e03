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

# The parts of a larger field, or of one with more items, are not compared: it would delay the event loop.
_MAX_BYTES = 4 << 20
_MAX_COMMAS = 100_000
_MAX_ITEMS = 4096
_NOTHING: array[int] = array("Q")
_ITEMS: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
# Clients of Anthropic's API move these marks from turn to turn. They do not reach the prompt.
# The pattern begins with a literal, which is found much faster.
_CACHE_MARK = re.compile(rb'"cache_control"\s{0,8}:\s{0,8}(?:null|\{[^{}]{0,256}\})')
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
    if len(view) > _MAX_BYTES or (len(view) > 2 * _MAX_COMMAS and bytes(view).count(b",") > _MAX_COMMAS):
        raise msgspec.DecodeError(f"{len(view)} bytes are too many to compare")
    if stable is not None:
        view = stable.of(view)
    items = _ITEMS.decode(view)
    if len(items) > _MAX_ITEMS:
        raise msgspec.DecodeError(f"{len(items)} items are too many to compare")
    if has_marks:
        return array("Q", [xxh3_64_intdigest(_plain(memoryview(item))) for item in items])
    return array("Q", map(xxh3_64_intdigest, items))


def _plain(view: memoryview) -> bytes:
    """Return the JSON without cache marks and the commas before them."""
    data, at, kept = bytes(view), 0, list[bytes]()
    for found in _CACHE_MARK.finditer(data):
        kept.append(data[at : found.start()].rstrip().removesuffix(b","))
        at = found.end()
    return b"".join([*kept, data[at:]]) if kept else data
