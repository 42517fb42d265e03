"""The settings of API keys with their limits, of tenants, and of the prices that their requests cost."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.settings import check_settings, required, setting
from stoker.proto.openai.fields import MAX_TENANT_WEIGHT, MIN_TENANT_WEIGHT

_NAME = r"[A-Za-z0-9._@-]{1,64}"
_NAME_EXPECTED = "up to 64 letters, digits, '.', '_', '@' and '-'"


@dataclass(frozen=True, slots=True)
class PriceSettings:
    """The price of a model, for a million tokens."""

    model: str = required("Model name. `*` is the price of all models that have none of their own.")
    input: float = required("Price of a million uncached prompt tokens.", ge=0, le=1e9)
    output: float = required("Price of a million generated tokens.", ge=0, le=1e9)
    cached_input: float | None = setting(
        None, "Price of a million cached prompt tokens.", ge=0, le=1e9, default_text="the same as input"
    )

    def __post_init__(self) -> None:
        check_settings(self, f"price of model {self.model!r}")


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """A group of API keys that shares a cache and a fair share of the workers."""

    name: str = required("Name of the tenant.", pattern=_NAME, expected=_NAME_EXPECTED)
    weight: float = setting(
        1.0,
        "Share of uncached tokens relative to other tenants, while requests wait in the queue or at a worker.",
        ge=MIN_TENANT_WEIGHT,
        le=MAX_TENANT_WEIGHT,
    )
    share_cache: bool = setting(
        False, "Whether its requests may hit cached prefixes of other tenants that have share_cache = true too."
    )

    def __post_init__(self) -> None:
        check_settings(self, "tenant")


@dataclass(frozen=True, slots=True)
class KeySettings:
    """An API key and its limits. `stoker keys create NAME --print` prints one; `stoker keys create NAME` puts it in the store."""

    name: str = required("Name of the key.", pattern=_NAME, expected=_NAME_EXPECTED)
    sha256: str = required(
        "SHA-256 hash of the key.",
        pattern="[0-9a-f]{64}",
        expected="64 lower-case hex digits, as `stoker keys create NAME --print` prints them",
    )
    tenant: str = setting("default", "Tenant that the key belongs to.", pattern=_NAME, expected=_NAME_EXPECTED)
    priority: int = setting(0, "Best priority that a request with this key may ask for. Lower numbers run first.")
    requests_per_minute: float | None = setting(None, "Maximum requests per minute.", gt=0, default_text="no limit")
    tokens_per_minute: float | None = setting(
        None, "Maximum uncached prompt tokens and generated tokens per minute.", gt=0, default_text="no limit"
    )
    concurrency: int | None = setting(None, "Maximum requests at the same time.", ge=1, default_text="no limit")
    budget: float | None = setting(
        None,
        "Maximum cost of all requests in a period, in the currency of the prices.",
        gt=0,
        le=1e9,
        default_text="no limit",
    )
    budget_period: str = setting(
        "total", "The period of the budget, in UTC. `total` never ends.", choices=("total", "day", "month")
    )
    session_budget: float | None = setting(
        None, "Maximum cost of all requests of one session.", gt=0, le=1e9, default_text="no limit"
    )

    def __post_init__(self) -> None:
        check_settings(self, "key")
