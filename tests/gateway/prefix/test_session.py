"""Session keys: the order of headers and fields, sub-agents, and unusual values."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.base.errors import InvalidRequest
from stoker.gateway.api.client_body import RequestEnvelope
from stoker.gateway.prefix.session import SessionKeys, session_of

IN_ORDER = [
    b"x-session-affinity",
    b"x-session-id",
    b"x-claude-code-session-id",
    b"session_id",
    b"session-id",
    b"thread-id",
    b"x-dynamo-session-id",
    b"x-correlation-id",
]


def of(headers: dict[bytes, bytes], tenant: str = "t", **body: Any) -> SessionKeys:
    return session_of(headers, RequestEnvelope(**body), tenant)


@pytest.mark.parametrize("place", range(len(IN_ORDER)))
def test_the_first_session_header_wins(place: int) -> None:
    headers = {name: name for name in reversed(IN_ORDER[place:])}
    assert of(headers, prompt_cache_key="p", user="u").session == f"t:{IN_ORDER[place].decode()}"


def test_the_body_counts_where_no_header_does() -> None:
    assert of({}, prompt_cache_key="p", session_id="s", user="u").session == "t:p"
    assert of({b"x-session-id": b"  "}, session_id="s", user="u").session == "t:s"
    assert of({}, user="u").session == "t:u"
    assert of({}, user=7).session == "t:7"
    assert of({}, prompt_cache_key=" ", user="u").session == "t:u"
    assert of({b"accept": b"x"}) == SessionKeys(None, None)


@pytest.mark.parametrize(
    "name",
    [
        b"x-parent-session-id",
        b"x-codex-parent-thread-id",
        b"x-dynamo-parent-session-id",
        b"x-claude-code-parent-agent-id",
    ],
)
def test_a_parent_is_named_beside_the_session(name: bytes) -> None:
    assert of({b"x-session-id": b"child", name: b"mother"}) == SessionKeys("t:child", "t:mother")
    assert of({name: b"mother"}, user="u") == SessionKeys("t:u", "t:mother")


def test_sub_agents_of_one_coding_session_are_sessions_of_their_own() -> None:
    session = {b"x-claude-code-session-id": b"s"}
    assert of(session) == SessionKeys("t:s", None)
    assert of(session | {b"x-claude-code-agent-id": b"a"}) == SessionKeys("t:s/a", "t:s")
    nested = session | {b"x-claude-code-agent-id": b"b", b"x-claude-code-parent-agent-id": b"a"}
    assert of(nested) == SessionKeys("t:s/b", "t:s/a")
    assert of(nested).parent == of(session | {b"x-claude-code-agent-id": b"a"}).session


def test_two_tenants_have_no_session_together() -> None:
    headers = {b"x-session-id": b"s"}
    assert of(headers, tenant="a").session != of(headers, tenant="b").session


@pytest.mark.parametrize("value", [b"x" * 1000, b"sp ace", b"\xff\xfe", b"tab\there", b"\x00"])
def test_odd_names_are_hashed(value: bytes) -> None:
    found = of({b"x-session-id": value}).session
    assert found is not None
    assert found.isascii()
    assert len(found) < 60
    assert found == of({b"x-session-id": value}).session
    assert found != of({b"x-session-id": value + b"."}).session


@pytest.mark.parametrize("name", [*IN_ORDER, b"x-parent-session-id", b"x-claude-code-agent-id"])
def test_a_long_header_is_refused_by_name(name: bytes) -> None:
    assert of({b"x-session-id": b"s", name: b"x" * 1024}).session is not None
    with pytest.raises(InvalidRequest, match="1025 bytes; at most 1024") as refused:
        of({b"x-session-id": b"s", name: b"x" * 1025})
    assert refused.value.param == name.decode()


def test_a_body_s_odd_name_too() -> None:
    found = of({}, user="ü" * 500).session
    assert found is not None
    assert len(found) < 60
