"""The decision about a request that is made from its head alone, before any byte of its body is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.gateway.http.head import RequestHead


@dataclass(frozen=True, slots=True)
class HeadRefusal:
    """A complete error response, which is sent at once. The connection is closed after it."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


@dataclass(frozen=True, slots=True)
class BodyGrant:
    """What a request may send."""

    max_body_bytes: int
    caller: Any = None  # the authenticated caller; opaque here, and passed on as `HttpRequest.caller`
    account: str | None = None  # its share of the body budget is used. None: the share of the client's address
    beyond: Callable[[], HeadRefusal] | None = None  # makes the answer to a larger body, in place of status 413


# Called with the head and the client's address.
RequestGate = Callable[[RequestHead, str], BodyGrant | HeadRefusal]
