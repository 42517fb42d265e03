"""Finds the session of a request and its parent session, from the headers that agents send or else from the body.

A session is a hint for routing. A key that is longer than 128 characters or has unusual ones is hashed; a header of more than
1,024 bytes is refused, like a body field of more than 512 characters (`client_body.py`). Keys are prefixed with the tenant,
so two tenants never share a session.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Raw
from xxhash import xxh3_128_hexdigest

from stoker.base.errors import InvalidRequest
from stoker.gateway.api.client_body import MAX_NAME_CHARS, EndpointKind, RequestEnvelope
from stoker.proto.anthropic.messages import MessageMetadata

# The first header that is present wins.
_SESSION_HEADERS = (
    b"x-session-affinity",
    b"x-session-id",
    b"x-claude-code-session-id",
    b"session_id",  # Codex
    b"session-id",
    b"thread-id",
    b"x-dynamo-session-id",
    b"x-correlation-id",
)
_PARENT_HEADERS = (
    b"x-parent-session-id",
    b"x-codex-parent-thread-id",
    b"x-dynamo-parent-session-id",
)
_AGENT = b"x-claude-code-agent-id"
_PARENT_AGENT = b"x-claude-code-parent-agent-id"
_RANKS = {name: rank for rank, name in enumerate((*_SESSION_HEADERS, *_PARENT_HEADERS, _AGENT, _PARENT_AGENT))}
_FIRST_PARENT = len(_SESSION_HEADERS)
_FIRST_AGENT = _FIRST_PARENT + len(_PARENT_HEADERS)
_CLAUDE = _SESSION_HEADERS.index(b"x-claude-code-session-id")

_MAX_HEADER_BYTES = 1024
_PLAIN = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """A request's session key and its parent session's key."""

    session: str | None = None
    parent: str | None = None


_NONE = SessionKeys()


def session_of(headers: Mapping[bytes, bytes], envelope: RequestEnvelope, tenant: str) -> SessionKeys:
    """Return the session keys of a request. `headers` has lower-case names. Raises InvalidRequest for a long header."""
    key = parent = None
    if not _RANKS.keys().isdisjoint(headers):
        named = {rank: _checked(name, headers[name]) for name, rank in _RANKS.items() if name in headers}
        key, parent = _of_headers({rank: value for rank, value in named.items() if value})
    if key is None:
        for given in (envelope.prompt_cache_key, envelope.session_id, envelope.user):
            if given is not None and (key := _text(given)) is not None:
                break
        else:
            if envelope.kind is EndpointKind.MESSAGES and envelope.metadata is not UNSET:
                key = _user_id(envelope.metadata)
    if key is None and parent is None:
        return _NONE
    return SessionKeys(_scoped(tenant, key), _scoped(tenant, parent))


def _of_headers(found: dict[int, bytes]) -> tuple[str | None, str | None]:
    ranks = sorted(found)
    session = next((rank for rank in ranks if rank < _FIRST_PARENT), None)
    parent = next((rank for rank in ranks if _FIRST_PARENT <= rank < _FIRST_AGENT), None)
    key = None if session is None else _decoded(found[session])
    parent_key = None if parent is None else _decoded(found[parent])
    if session == _CLAUDE and key is not None:
        # Claude Code sends one session id for an agent and all its sub-agents, which have separate conversations.
        agent, parent_agent = found.get(_FIRST_AGENT), found.get(_FIRST_AGENT + 1)
        whole = key
        if agent is not None:
            key = f"{whole}/{_decoded(agent)}"
        if parent_key is None and parent_agent is not None:
            parent_key = f"{whole}/{_decoded(parent_agent)}"
        elif parent_key is None and agent is not None:
            parent_key = whole
    elif parent_key is None and _FIRST_AGENT + 1 in found:
        parent_key = _decoded(found[_FIRST_AGENT + 1])
    return key, parent_key


def _checked(name: bytes, value: bytes) -> bytes:
    if len(value) > _MAX_HEADER_BYTES:
        header = name.decode()
        message = f"The header {header} has {len(value)} bytes; at most {_MAX_HEADER_BYTES} are allowed."
        raise InvalidRequest(message, param=header, code="invalid_value")
    return value.strip()


def _decoded(value: bytes) -> str:
    return value.decode("latin-1")


def _user_id(metadata: Raw) -> str | None:
    """Return the `user_id` in the `metadata` of a Messages request. Claude Code puts its session there."""
    try:
        found = msgspec.json.decode(metadata, type=MessageMetadata | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the worker will report the error
    given = None if found is None else found.user_id
    return None if given is None or len(given) > MAX_NAME_CHARS else _text(given)


def _text(value: str | int) -> str | None:
    return value.strip() or None if isinstance(value, str) else str(value)


def _scoped(tenant: str, key: str | None) -> str | None:
    if key is None:
        return None
    if not _PLAIN.fullmatch(key):
        key = f"hashed-{xxh3_128_hexdigest(key.encode('utf-8', 'surrogatepass'))}"
    return f"{tenant}:{key}"
