"""API keys: authenticate a request and find its tenant. Only hashes are configured or stored, and no key is logged.

Keys have 256 random bits and cannot be guessed, so plain SHA-256 is as safe as a slow password hash.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stoker.base.errors import ConfigError, StokerError
from stoker.gateway.admission.budgets import KeyBudgets
from stoker.gateway.admission.rate_limits import KeyLimiter
from stoker.gateway.key_settings import KeySettings, TenantSettings

ANONYMOUS = "anonymous"
DEFAULT_TENANT = "default"
_KEY_START = "sk-stoker-"
_MAX_STEPS = 16  # of priority below a key's. The queue looks at each step in use, whenever a request is admitted.


class Unauthorized(StokerError):
    """The API key is missing or unknown."""

    code = "invalid_api_key"


class HasHeaders(Protocol):
    """The part of a request that authentication reads."""

    def header(self, name: bytes) -> bytes | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Caller:
    """The API key that a request was sent with, and what it may do."""

    key_id: str
    tenant: str
    priority: int = 0  # a lower number runs first
    weight: float = 1.0  # the tenant's share relative to other tenants
    salt: str | None = None  # None: shares cached prefixes with the other tenants that allow sharing
    limiter: KeyLimiter = field(default_factory=KeyLimiter)
    budgets: KeyBudgets = field(default_factory=KeyBudgets)
    known: bool = True  # False: the gateway requires no keys

    def cache_salt(self, requested: str | None) -> str | None:
        """Return the `cache_salt` to send to the worker.

        The client's own salt is placed below the tenant's name, so that no client can name another tenant's cache.
        """
        if not self.known:
            return requested
        if self.salt is None:
            return None if requested is None else f"shared:{requested}"
        return self.salt if requested is None else f"{self.salt}:{requested}"

    @property
    def lowest_priority(self) -> int:
        """Return the priority of flex requests, which run after all others."""
        return self.priority + _MAX_STEPS

    def best_priority(self, requested: int | None) -> int:
        """Return the priority to use: a client may lower its priority by some steps, but not raise it above its key's."""
        return self.priority if requested is None else min(max(self.priority, requested), self.priority + _MAX_STEPS)


UNAUTHENTICATED = Caller(ANONYMOUS, DEFAULT_TENANT, known=False)  # a request whose key is not checked yet


class ApiKeys:
    """The API keys of the configuration file and of the store. If there never was any, every request is accepted."""

    def __init__(self, keys: Sequence[KeySettings], tenants: Sequence[TenantSettings] = ()) -> None:
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._configured = tuple(keys)
        self._callers: dict[KeySettings, Caller] = {}
        self._by_digest: dict[bytes, tuple[bytes, Caller]] = {}
        self._by_name: dict[str, KeySettings] = {}
        self._anonymous: Caller | None = None
        digests: dict[str, str] = {}
        for key in keys:
            if (other := digests.setdefault(key.sha256, key.name)) != key.name:
                raise ConfigError(f"key {key.name!r} has the same sha256 as key {other!r}; create a new key for one")
        self.set_stored((), any_key=False)

    @property
    def required(self) -> bool:
        return self._anonymous is None

    def set_stored(self, stored: Sequence[KeySettings], *, any_key: bool) -> None:
        """Replace the keys of the store. `any_key` is True if it ever had one: then requests need a key.

        A key that stays keeps its limits' state. Where a name or hash is in both places, the configuration file's key counts.
        """
        callers: dict[KeySettings, Caller] = {}
        by_name: dict[str, KeySettings] = {}
        by_digest: dict[bytes, tuple[bytes, Caller]] = {}
        for key in (*self._configured, *stored):
            digest = bytes.fromhex(key.sha256)
            if key.name in by_name or digest in by_digest:
                continue
            caller = callers[key] = self._callers.get(key) or self._caller(key)
            by_name[key.name] = key
            by_digest[digest] = (digest, caller)
        self._callers, self._by_name, self._by_digest = callers, by_name, by_digest
        if self._configured or any_key:
            self._anonymous = None
        elif self._anonymous is None:
            self._anonymous = Caller(ANONYMOUS, DEFAULT_TENANT, known=False)

    def settings_of(self, key_id: str) -> KeySettings | None:
        """Return the settings of a key by its name. Any thread may call it."""
        return self._by_name.get(key_id)

    def _caller(self, key: KeySettings) -> Caller:
        tenant = self._tenants.get(key.tenant, TenantSettings(key.tenant))
        return Caller(
            key_id=key.name,
            tenant=key.tenant,
            priority=key.priority,
            weight=tenant.weight,
            salt=None if tenant.share_cache else f"tenant:{key.tenant}",
            limiter=KeyLimiter(key.requests_per_minute, key.tokens_per_minute, key.concurrency, key.name),
            budgets=KeyBudgets(key),
        )

    def caller(self, key_id: str) -> Caller | None:
        """Return the caller of a key by its name, for work that outlives its request. None if the key is gone."""
        if self._anonymous is not None:
            return self._anonymous if key_id == ANONYMOUS else None
        key = self._by_name.get(key_id)
        return None if key is None else self._callers.get(key)

    def authenticate(self, request: HasHeaders) -> Caller:
        if self._anonymous is not None:
            return self._anonymous
        sent = sent_key(request)
        if not sent:
            raise Unauthorized("No API key was sent: send it as `Authorization: Bearer KEY`.")
        digest = hashlib.sha256(sent).digest()
        # The lookup uses a hash of the sent key, so its duration reveals nothing about valid keys. The final comparison of
        # digests takes constant time.
        expected, caller = self._by_digest.get(digest, (bytes(32), None))
        if not hmac.compare_digest(digest, expected) or caller is None:
            raise Unauthorized("The API key is not valid for this gateway.")
        return caller


class AdminToken:
    """An operator's bearer tokens: for /admin/* and every tenant's usage, or for /metrics only. None allows nothing.

    There are two while a token is replaced.
    """

    def __init__(self, tokens: Sequence[str] = (), what: str = "admin") -> None:
        for token in tokens:
            if len(token) < 16:
                raise ConfigError(f"the {what} token has {len(token)} characters; use at least 16")
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    @property
    def configured(self) -> bool:
        return bool(self._digests)

    def allows(self, request: HasHeaders) -> bool:
        sent = request.header(b"x-admin-token") or sent_key(request)
        if not sent:
            return False
        digest = hashlib.sha256(sent).digest()
        return any(hmac.compare_digest(digest, one) for one in self._digests)


def sent_key(request: HasHeaders) -> bytes | None:
    """Return the request's API key: its bearer token, or the `x-api-key` header that some clients use."""
    value = request.header(b"authorization")
    if value is not None and value[:7].lower() == b"bearer ":
        return value[7:].strip()
    return request.header(b"x-api-key")


def new_key() -> tuple[str, str]:
    """Return a new key and its hash for the configuration file."""
    key = _KEY_START + secrets.token_urlsafe(32)
    return key, hashlib.sha256(key.encode()).hexdigest()
