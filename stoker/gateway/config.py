"""The gateway's settings: a frozen tree, from a TOML file and the command line. Every complaint names its field.

Files are read by `load()` alone; nothing here opens a socket or reads the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.errors import ConfigError
from stoker.base.tables import check_positive, in_words, path_of, read_tables, refuse_unknown
from stoker.fleet.spec import WorkerSpec
from stoker.gateway.worker_option import WorkerSettings, worker_spec
from stoker.routing.policy import RouterSettings

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ListenSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_body_mib: float = 64.0
    max_connections: int = 10_000
    drain_s: float = 3600.0  # longest wait for running requests at SIGTERM

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"listen.port={self.port}: a port is 0 to 65535")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("listen.tls_cert and listen.tls_key: TLS needs both")
        check_positive("listen", self, "max_body_mib", "max_connections", "drain_s")


@dataclass(frozen=True, slots=True)
class RoutingSettings(RouterSettings):
    """The router's own numbers, and what the gateway adds."""

    debug_routes: bool = False  # `x-stoker-route` in answers
    tokenize: bool = True  # exact token blocks where a worker gives its tokenizer; else text blocks
    index_blocks: int = 2_000_000  # prefix blocks remembered for one model

    def __post_init__(self) -> None:
        check_positive("routing", self, "index_blocks", "expected_output_tokens")
        for name in ("num_explained", "local_prefill_tokens", "cluster_spill_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"routing.{name}={getattr(self, name)}: it must not be below zero")


@dataclass(frozen=True, slots=True)
class ProxySettings:
    connect_s: float = 2.0
    first_byte_s: float = 600.0  # a worker's answer must begin within this
    retries: int = 3  # other workers tried before the first byte
    retry_share: float = 0.2  # retries may be this part of all requests; beyond it faults are passed on
    resumes: int = 3  # other workers tried in the middle of a stream
    resume_grace_s: float = 10.0  # how long a broken stream waits for one that can go on with it

    def __post_init__(self) -> None:
        check_positive("proxy", self, "connect_s", "first_byte_s")
        for name in ("retries", "retry_share", "resumes", "resume_grace_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"proxy.{name}={getattr(self, name)}: it must not be below zero")


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """How much the fleet is given at a time, and how long the rest may wait."""

    requests_per_worker: int = 512  # in flight, for a worker that reports no queue
    waiting_per_worker: int = 4  # sequences that may wait inside a worker that reports its queue
    prefill_s: float = 10.0  # seconds of uncached prefill in flight for each worker whose rate is known
    prefill_tokens: int = 4096  # and at least so many tokens, whatever the rate
    queue_requests: int = 4096
    queue_s: float = 30.0  # longest wait in a burst; who would predictably wait longer is refused at once
    standing_s: float = 2.0  # the same, once the queue has stood for queue_s: overload, not a burst
    priority_age_s: float = 5.0  # waiting so long counts as one step of priority: nobody starves

    def __post_init__(self) -> None:
        check_positive(
            "admission",
            self,
            "requests_per_worker",
            "prefill_s",
            "prefill_tokens",
            "queue_s",
            "standing_s",
            "priority_age_s",
        )
        for name in ("queue_requests", "waiting_per_worker"):
            if getattr(self, name) < 0:
                raise ConfigError(f"admission.{name}={getattr(self, name)}: it must not be below zero")


@dataclass(frozen=True, slots=True)
class MeterSettings:
    path: Path | None = None  # "none": nothing is metered; None: default_path
    default_path: Path | None = None  # where this user's ledger lies; None: nothing is metered
    flush_s: float = 0.2
    flush_rows: int = 500
    max_pending: int = 100_000  # rows not yet on disk; beyond it new requests are refused, none goes unbilled
    currency: str = "USD"

    def __post_init__(self) -> None:
        check_positive("meter", self, "flush_s", "flush_rows", "max_pending")

    @property
    def ledger(self) -> Path | None:
        path = self.path or self.default_path
        return None if path == Path("none") else path


@dataclass(frozen=True, slots=True)
class TracingSettings:
    otlp_endpoint: str | None = None  # such as http://collector:4318/v1/traces; None: no tracing
    service_name: str = "stoker-gateway"
    sample: float = 1.0  # part of the requests that nobody upstream has decided on

    def __post_init__(self) -> None:
        if not 0 <= self.sample <= 1:
            raise ConfigError(f"tracing.sample={self.sample}: it must be from 0 to 1")


@dataclass(frozen=True, slots=True)
class PriceSettings:
    """For a million tokens. `model` may be "*": any model that has no price of its own."""

    model: str
    input: float
    output: float
    cached_input: float | None = None  # None: as `input`

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached_input"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e9:
                raise ConfigError(f"price.{name}={value} of model {self.model!r}: it must be from 0 to 1e9")


@dataclass(frozen=True, slots=True)
class TenantSettings:
    name: str
    weight: float = 1.0  # share of uncached tokens against other tenants when requests wait
    share_cache: bool = False  # True: may hit prefixes of the other tenants that say so too

    def __post_init__(self) -> None:
        _name("tenant.name", self.name)
        check_positive(f"tenant {self.name!r}", self, "weight")


@dataclass(frozen=True, slots=True)
class KeySettings:
    name: str
    sha256: str
    tenant: str = "default"
    priority: int = 0  # the best this key may ask for; lower runs first
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        _name("key.name", self.name)
        _name(f"key {self.name!r}: tenant", self.tenant)
        if not _SHA256.fullmatch(self.sha256):
            raise ConfigError(
                f"key {self.name!r}: sha256 must be 64 lower-case hex digits; see stoker gateway --new-key"
            )
        check_positive(f"key {self.name!r}", self, "requests_per_minute", "tokens_per_minute", "concurrency")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    listen: ListenSettings = field(default_factory=ListenSettings)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    proxy: ProxySettings = field(default_factory=ProxySettings)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    meter: MeterSettings = field(default_factory=MeterSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)
    worker: tuple[WorkerSettings, ...] = ()
    price: tuple[PriceSettings, ...] = ()
    tenant: tuple[TenantSettings, ...] = ()
    key: tuple[KeySettings, ...] = ()
    admin_token_file: Path | None = None
    secret_file: Path | None = None  # what workers show to register, and what we show to them
    log_requests: bool = True
    log_level: str = "info"

    def __post_init__(self) -> None:
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level={self.log_level!r}: it must be debug, info, warning or error")
        _unique("worker.url", [one.url.rstrip("/") for one in self.worker])
        _unique("key.name", [one.name for one in self.key])
        _unique("tenant.name", [one.name for one in self.tenant])
        _unique("price.model", [one.model for one in self.price])

    def worker_specs(self) -> tuple[WorkerSpec, ...]:
        specs = tuple(worker_spec(one) for one in self.worker)
        _unique("worker (host:port)", [spec.worker_id for spec in specs])
        return specs


def load(path: Path | None, overrides: Mapping[str, Any] | None = None) -> GatewayConfig:
    """The file's settings (none: the defaults) under `overrides`: dotted names such as "listen.port"; a list adds to the
    file's."""
    table = {} if path is None else read_tables(path)
    for name, value in (overrides or {}).items():
        _put(table, name.split("."), value)
    where = "" if path is None else f"{path}: "
    refuse_unknown(GatewayConfig, table, source=where)
    try:
        return msgspec.convert(table, GatewayConfig, dec_hook=path_of)
    except msgspec.ValidationError as error:
        raise ConfigError(where + in_words(error)) from error


def read_secret(path: Path | None, what: str) -> str | None:
    """A token or secret out of its file; surrounding blanks do not count."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}={path}: cannot be read: {error}") from error
    if not text:
        raise ConfigError(f"{what}={path}: the file is empty")
    return text


def _put(table: dict[str, Any], names: Sequence[str], value: Any) -> None:
    for name in names[:-1]:
        table = table.setdefault(name, {})
    if isinstance(value, list) and isinstance(table.get(names[-1]), list):
        value = [*table[names[-1]], *value]
    table[names[-1]] = value


def _name(where: str, value: str) -> None:
    if not _NAME.fullmatch(value):
        raise ConfigError(f"{where}={value!r}: up to 64 letters, digits and . _ @ - are allowed")


def _unique(where: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{where}: {', '.join(twice)} is there twice")
