"""Server-sent events as OpenAI's API uses them."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"


def encode_event(data: bytes, event: str | None = None) -> bytes:
    """Return one event. `data` is JSON as msgspec writes it, without line breaks."""
    if event is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"
