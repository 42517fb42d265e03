"""API keys: the tenant of a request, its priority and its cache salt."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import pytest

from stoker.base.errors import ConfigError
from stoker.gateway.admission.api_keys import AdminToken, ApiKeys, Unauthorized, new_key
from stoker.gateway.admission.key_store import KeyStore
from stoker.gateway.admission.key_watch import KeyWatch
from stoker.gateway.key_settings import KeySettings, TenantSettings
from stoker.gateway.store.sqlite import SqliteStore
from stoker.gateway.store.store_threads import StoreThreads


class Headers:
    def __init__(self, **headers: str) -> None:
        self._headers = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}

    def header(self, name: bytes) -> bytes | None:
        return self._headers.get(name)


def settings(name: str, key: str, **more: object) -> KeySettings:
    return KeySettings(name, hashlib.sha256(key.encode()).hexdigest(), **more)  # type: ignore[arg-type]


def test_without_keys_every_request_is_anonymous() -> None:
    keys = ApiKeys([])
    caller = keys.authenticate(Headers())
    assert (caller.key_id, caller.tenant) == ("anonymous", "default")
    assert keys.authenticate(Headers(authorization="Bearer whatever")) is caller
    assert caller.cache_salt("mine") == "mine"
    assert caller.cache_salt(None) is None


@pytest.mark.parametrize(
    "shown",
    [
        Headers(authorization="Bearer sk-a"),
        Headers(authorization="bearer   sk-a "),
        Headers(x_api_key="sk-a"),
    ],
)
def test_a_valid_key_identifies_its_tenant(shown: Headers) -> None:
    keys = ApiKeys([settings("alice", "sk-a", tenant="team"), settings("bob", "sk-b")])
    caller = keys.authenticate(shown)
    assert (caller.key_id, caller.tenant) == ("alice", "team")


@pytest.mark.parametrize(
    "shown",
    [
        Headers(),
        Headers(authorization="Bearer "),
        Headers(authorization="Bearer sk-A"),
        Headers(authorization="sk-a"),
        Headers(authorization="Basic sk-a"),
        Headers(authorization=f"Bearer {hashlib.sha256(b'sk-a').hexdigest()}"),
    ],
)
def test_anything_else_is_refused_and_not_repeated(shown: Headers) -> None:
    keys = ApiKeys([settings("alice", "sk-a")])
    with pytest.raises(Unauthorized) as caught:
        keys.authenticate(shown)
    assert caught.value.code == "invalid_api_key"
    assert "sk-" not in caught.value.message


def test_a_new_key_matches_its_hash() -> None:
    key, digest = new_key()
    other, _ = new_key()
    keys = ApiKeys([KeySettings("n", digest)])
    assert keys.authenticate(Headers(authorization=f"Bearer {key}")).key_id == "n"
    assert key != other
    assert len(key) > 40


def test_one_key_cannot_have_two_names() -> None:
    with pytest.raises(ConfigError, match="'b' has the same sha256 as key 'a'"):
        ApiKeys([settings("a", "x"), settings("b", "x")])


def test_tenants_have_caches_of_their_own_unless_they_share() -> None:
    tenants = [
        TenantSettings("own"),
        TenantSettings("open", share_cache=True),
        TenantSettings("open2", share_cache=True),
    ]
    keys = ApiKeys(
        [
            settings("a", "a", tenant="own"),
            settings("b", "b", tenant="open"),
            settings("c", "c", tenant="open2"),
            settings("d", "d", tenant="unlisted"),
        ],
        tenants,
    )
    own, shared, shared2, unlisted = (keys.authenticate(Headers(x_api_key=name)) for name in "abcd")
    assert own.cache_salt(None) != unlisted.cache_salt(None) is not None
    assert shared.cache_salt(None) is shared2.cache_salt(None) is None
    # No tenant can reach another tenant's cache by sending its salt.
    salts = {
        caller.cache_salt(asked) for caller in (own, shared, unlisted) for asked in (None, "x", own.cache_salt(None))
    }
    assert len(salts) == 9


def test_a_client_may_wait_longer_but_not_push_ahead() -> None:
    caller = ApiKeys([settings("a", "a", priority=1)]).authenticate(Headers(x_api_key="a"))
    assert [caller.best_priority(asked) for asked in (None, -5, 1, 7, 10**300)] == [1, 1, 1, 7, 17]


def test_the_admin_token() -> None:
    token = AdminToken(["a-long-admin-token"])
    assert token.allows(Headers(authorization="Bearer a-long-admin-token"))
    assert token.allows(Headers(x_admin_token="a-long-admin-token"))
    assert not token.allows(Headers(authorization="Bearer a-long-admin-tokeN"))
    assert not token.allows(Headers())
    assert not AdminToken().allows(Headers(authorization="Bearer "))
    assert not AdminToken().configured
    with pytest.raises(ConfigError, match="at least 16"):
        AdminToken(["a-long-admin-token", "short"])


def test_two_admin_tokens_are_accepted_while_one_is_replaced() -> None:
    tokens = AdminToken(["the-new-admin-token", "the-old-admin-token"])
    assert tokens.allows(Headers(authorization="Bearer the-new-admin-token"))
    assert tokens.allows(Headers(authorization="Bearer the-old-admin-token"))
    assert not tokens.allows(Headers(authorization="Bearer the-new-admin-token\nthe-old-admin-token"))


def test_a_key_of_a_newer_version_keeps_no_other_from_being_revoked(tmp_path: Path) -> None:
    async def main() -> None:
        store, keys = SqliteStore(tmp_path / "store.db"), ApiKeys(())
        threads, stored = StoreThreads(store), KeyStore(store)
        (_, digest), (_, newer) = new_key(), new_key()
        stored.create(KeySettings("alice", digest), "test")
        watch = KeyWatch(keys, threads)
        assert keys.caller("alice") is not None
        stored.create(KeySettings("newer", newer), "test")
        with store.transaction() as changes:
            new_settings = json.dumps({"name": "newer", "sha256": newer, "max_joy": 5})
            changes.execute("UPDATE api_keys SET settings = ? WHERE name = 'newer'", (new_settings,))
        stored.revoke("alice", "test")
        watch._take(await threads.read(watch._changed))
        assert keys.required
        assert keys.caller("alice") is None
        assert keys.caller("newer") is None
        KeyWatch(keys, threads)  # a gateway that starts
        threads.close()
        store.close()

    asyncio.run(main())
