"""The settings of records: the usage ledger and traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.base.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class MeterSettings:
    """The usage ledger."""

    RENAMED: ClassVar[dict[str, str]] = {"path": "store, at the top of the file"}
    flush_s: float = setting(0.2, "Maximum time between two batches of rows.", unit="s", gt=0)
    flush_rows: int = setting(500, "Maximum rows in a batch.", ge=1)
    max_pending: int = setting(
        32_768,
        "Maximum requests that run or whose rows are not yet in the ledger. Beyond it new requests are refused, so that none"
        " goes unbilled. Each takes 1 KiB of disk space in advance.",
        ge=1,
        le=1 << 22,
    )
    hidden_tokens: int = setting(
        32_768,
        "Maximum output tokens per choice that a worker may report beyond the bytes that it sent, such as reasoning that it"
        " does not show. It applies to requests without a limit on output tokens.",
        unit="tokens",
        ge=0,
    )
    keep_days: float | None = setting(
        None,
        "How long usage rows, audit entries and the spending of sessions are kept. Sums of hours and days stay.",
        unit="days",
        gt=0,
        default_text="forever",
    )
    currency: str = setting("USD", "Currency of the prices, as shown by /v1/usage.")

    def __post_init__(self) -> None:
        check_settings(self, "meter")


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """OpenTelemetry traces."""

    otlp_endpoint: str | None = setting(
        None,
        "URL that traces are sent to, such as http://collector:4318/v1/traces.",
        flag="--otlp-endpoint",
        metavar="URL",
        default_text="no tracing",
    )
    service_name: str = setting("stoker-gateway", "Service name in the traces.")
    sample: float = setting(
        1.0, "Share of requests that are traced. A client's own sampling decision takes precedence.", ge=0, le=1
    )

    def __post_init__(self) -> None:
        check_settings(self, "tracing")
