"""API keys: who a request comes from. The config has only hashes; a key itself is never kept, logged or compared.

Keys are 256 random bits, so a plain sha256 is as good as a slow hash: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stoker.base.errors import ConfigError, StokerError
from stoker.gateway.admission.rate_limits import KeyLimiter
from stoker.gateway.config import KeySettings, TenantSettings

ANONYMOUS = "anonymous"
DEFAULT_TENANT = "default"
_KEY_START = "sk-stoker-"


class Unauthorized(StokerError):
    """No key, or one that nobody was given."""

    code = "invalid_api_key"


class HasHeaders(Protocol):
    def header(self, name: bytes) -> bytes | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Caller:
    key_id: str
    tenant: str
    priority: int = 0  # lower runs first, as everywhere
    weight: float = 1.0  # the tenant's share against other tenants
    salt: str | None = None  # None: the tenant shares cached prefixes with others that do
    limiter: KeyLimiter = field(default_factory=KeyLimiter)
    known: bool = True  # False: nobody had to show a key

    def cache_salt(self, asked: str | None) -> str | None:
        """The `cache_salt` a worker must see. What clients choose is put below the tenant's own name, so that nobody can
        name somebody else's."""
        if not self.known:
            return asked
        if self.salt is None:
            return None if asked is None else f"shared:{asked}"
        return self.salt if asked is None else f"{self.salt}:{asked}"

    def best_priority(self, asked: int | None) -> int:
        """A client may make its request wait for others; it cannot push it before what its key allows."""
        return self.priority if asked is None else max(self.priority, asked)


NOBODY = Caller(ANONYMOUS, DEFAULT_TENANT, known=False)  # who has not, or not yet, said who it is


class Keys:
    def __init__(self, keys: Sequence[KeySettings], tenants: Sequence[TenantSettings] = ()) -> None:
        by_name = {tenant.name: tenant for tenant in tenants}
        self._by_digest: dict[bytes, tuple[bytes, Caller]] = {}
        for key in keys:
            digest = bytes.fromhex(key.sha256)
            if digest in self._by_digest:
                raise ConfigError(f"key {key.name!r} has the sha256 of {self._by_digest[digest][1].key_id!r}")
            tenant = by_name.get(key.tenant, TenantSettings(key.tenant))
            caller = Caller(
                key_id=key.name,
                tenant=key.tenant,
                priority=key.priority,
                weight=tenant.weight,
                salt=None if tenant.share_cache else f"tenant:{key.tenant}",
                limiter=KeyLimiter(key.requests_per_minute, key.tokens_per_minute, key.concurrency),
            )
            self._by_digest[digest] = (digest, caller)
        self._anonymous = None if keys else Caller(ANONYMOUS, DEFAULT_TENANT, known=False)

    @property
    def required(self) -> bool:
        return self._anonymous is None

    def authenticate(self, request: HasHeaders) -> Caller:
        if self._anonymous is not None:
            return self._anonymous
        shown = shown_key(request)
        if not shown:
            raise Unauthorized("No API key was given: send it as `Authorization: Bearer KEY`.")
        digest = hashlib.sha256(shown).digest()
        # The table is searched by a hash of what was shown, so the time it takes says nothing about a key; the last
        # comparison is of digests, in constant time.
        expected, caller = self._by_digest.get(digest, (bytes(32), None))
        if not hmac.compare_digest(digest, expected) or caller is None:
            raise Unauthorized("The API key is not known here.")
        return caller

    def callers(self) -> list[Caller]:
        """Everybody who may call: for the admin view."""
        if self._anonymous is not None:
            return [self._anonymous]
        return [caller for _, caller in self._by_digest.values()]


class AdminToken:
    """The one token that opens /admin/* and sees every tenant's usage. Without one they stay shut."""

    def __init__(self, token: str | None) -> None:
        if token is not None and len(token) < 16:
            raise ConfigError(f"the admin token has {len(token)} characters: at least 16 are needed")
        self._digest = None if token is None else hashlib.sha256(token.encode()).digest()

    @property
    def configured(self) -> bool:
        return self._digest is not None

    def allows(self, request: HasHeaders) -> bool:
        shown = request.header(b"x-admin-token") or shown_key(request)
        if self._digest is None or not shown:
            return False
        return hmac.compare_digest(hashlib.sha256(shown).digest(), self._digest)


def shown_key(request: HasHeaders) -> bytes | None:
    """What the request shows as its key: a bearer token, or `x-api-key` as some clients send it."""
    value = request.header(b"authorization")
    if value is not None and value[:7].lower() == b"bearer ":
        return value[7:].strip()
    return request.header(b"x-api-key")


def new_key() -> tuple[str, str]:
    """A fresh key, and its hash for the config."""
    key = _KEY_START + secrets.token_urlsafe(32)
    return key, hashlib.sha256(key.encode()).hexdigest()
