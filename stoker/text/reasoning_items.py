"""The `encrypted_content` of reasoning items: the reasoning itself, so that stateless clients can send it back.

Clients such as Codex return only this field and the summary. It holds nothing that the client was not sent, so it is encoded
and not encrypted. What another server wrote there is ignored.
"""

from __future__ import annotations

from base64 import b64decode, b64encode

_START = "stoker-reasoning-1:"


def encode_reasoning(text: str) -> str:
    return _START + b64encode(text.encode()).decode()


def decode_reasoning(content: str | None) -> str:
    """Return the reasoning in an item's `encrypted_content`, or nothing if it is of another origin."""
    if content is None or not content.startswith(_START):
        return ""
    try:
        return b64decode(content[len(_START) :], validate=True).decode()
    except ValueError:  # not base64, not ASCII, or not UTF-8
        return ""
