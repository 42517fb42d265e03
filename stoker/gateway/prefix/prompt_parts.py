"""Hashes of the parts of a prompt: its tools, its system prompt and its messages.

Two requests of a conversation are compared by them, to find the part that differs. No text is kept.

The next turn of a conversation usually begins with the same bytes. So a hash of a list's bytes is kept too. If it shows that a list
only has more items, the known ones are not parsed and hashed again.
"""

from __future__ import annotations

import re
from array import array

import msgspec
from msgspec import UNSET, Raw, UnsetType
from xxhash import xxh3_64_intdigest

from stoker.gateway.api.client_body import EndpointKind, RequestEnvelope
from stoker.gateway.prefix.stable_json import StableJson

# The parts of a larger field, or of one with more items, are not compared: it would delay the event loop.
_MAX_BYTES = 4 << 20
_MAX_COMMAS = 100_000
_MAX_ITEMS = 4096
_ITEMS: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
_COMMA = ord(",")
# Clients of Anthropic's API move these marks from turn to turn. They do not reach the prompt.
# The pattern begins with a literal, which is found much faster.
_CACHE_MARK = re.compile(rb'"cache_control"\s{0,8}:\s{0,8}(?:null|\{[^{}]{0,256}\})')
_SEPARATE_SYSTEM = frozenset({EndpointKind.MESSAGES, EndpointKind.RESPONSES})


class ListHashes(msgspec.Struct, frozen=True, gc=False):
    """A hash of each item of a JSON list, and one of all its bytes but the closing bracket."""

    items: array[int]
    num_bytes: int = 0
    digest: int = 0


_NO_LIST = ListHashes(array("Q"))


class PromptParts(msgspec.Struct, frozen=True, gc=False):
    """Hashes of each tool and each message. The system prompt is a message of its own if it has a field of its own."""

    tools: array[int]
    messages: array[int]
    has_system: bool = False  # the first message is the system prompt, which is not in the client's list
    tool_list: ListHashes = _NO_LIST  # this and the next: from the client's lists
    message_list: ListHashes = _NO_LIST

    @property
    def size(self) -> int:
        """Return how many hashes are kept. Without a system field, both lists of messages are the same."""
        return len(self.tools) + len(self.messages) + (len(self.messages) if self.has_system else 0)

    def name(self, message: int) -> str:
        """Return a message as the client counts it."""
        if not self.has_system:
            return f"message {message}"
        return f"message {message - 1}" if message else "system"


def prompt_parts(envelope: RequestEnvelope, stable: StableJson, known: PromptParts | None = None) -> PromptParts | None:
    """Return the parts of a request, or None if it has no list of messages.

    `known` are the parts of a request that this one may continue. They save time, and do not change the result.
    """
    listed = envelope.input if envelope.kind is EndpointKind.RESPONSES else envelope.messages
    if isinstance(listed, UnsetType) or envelope.prompt_token_ids is not UNSET:
        return None
    known_tools, known_messages = (_NO_LIST, _NO_LIST) if known is None else (known.tool_list, known.message_list)
    try:
        has_marks = envelope.kind is EndpointKind.MESSAGES
        messages = _hashes(stable.of(_checked(listed)), has_marks, known_messages)
        tools = _NO_LIST
        if not isinstance(envelope.tools, UnsetType):
            tools = _hashes(_checked(envelope.tools), has_marks, known_tools)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # a text instead of a list, or a body that the worker will refuse
    if envelope.kind not in _SEPARATE_SYSTEM:
        return PromptParts(tools.items, messages.items, False, tools, messages)
    given = envelope.system if envelope.kind is EndpointKind.MESSAGES else envelope.instructions
    system = 0 if isinstance(given, UnsetType) else xxh3_64_intdigest(_plain(stable.of(memoryview(given))))
    return PromptParts(tools.items, array("Q", [system]) + messages.items, True, tools, messages)


def _checked(field: Raw) -> memoryview:
    view = memoryview(field)
    if len(view) > _MAX_BYTES or (len(view) > 2 * _MAX_COMMAS and bytes(view).count(b",") > _MAX_COMMAS):
        raise msgspec.DecodeError(f"{len(view)} bytes are too many to compare")
    return view


def _hashes(view: memoryview, has_marks: bool, known: ListHashes) -> ListHashes:
    start, rest = _NO_LIST.items, view
    if 0 < known.num_bytes < len(view) and xxh3_64_intdigest(view[: known.num_bytes], has_marks) == known.digest:
        if known.num_bytes == len(view) - 1:
            return known
        if view[known.num_bytes] == _COMMA:  # else the last item goes on, such as the number 1 in 12
            start, rest = known.items, memoryview(b"[" + view[known.num_bytes + 1 :])
    new = _ITEMS.decode(rest)
    if len(start) + len(new) > _MAX_ITEMS:
        raise msgspec.DecodeError(f"{len(start) + len(new)} items are too many to compare")
    if has_marks:
        items = array("Q", [xxh3_64_intdigest(_plain(memoryview(item))) for item in new])
    else:
        items = array("Q", map(xxh3_64_intdigest, new))
    num_bytes = len(view) - 1
    return ListHashes(start + items if start else items, num_bytes, xxh3_64_intdigest(view[:num_bytes], has_marks))


def _plain(view: memoryview) -> bytes:
    """Return the JSON without cache marks and the commas before them."""
    data, at, kept = bytes(view), 0, list[bytes]()
    for found in _CACHE_MARK.finditer(data):
        kept.append(data[at : found.start()].rstrip().removesuffix(b","))
        at = found.end()
    return b"".join([*kept, data[at:]]) if kept else data
