"""The gateway's settings: a frozen tree that is read from a TOML file and the command line.

Each part of the gateway declares its own settings; this tree joins them. Only `load()` and `read_secrets()` read files.
Nothing here opens a socket or reads the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.autoscale.settings import AutoscaleSettings
from stoker.base import log
from stoker.base.canary import CanaryLimits
from stoker.base.errors import ConfigError
from stoker.base.settings import check_settings, from_table, merged, put, read_toml, setting
from stoker.fleet.health import HealthSettings
from stoker.fleet.spec import WorkerSpec
from stoker.gateway.admission.admission_settings import AdmissionSettings, FlexSettings
from stoker.gateway.key_settings import KeySettings, PriceSettings, TenantSettings
from stoker.gateway.listen_settings import ListenSettings
from stoker.gateway.objects.object_settings import BatchSettings, ResponsesSettings
from stoker.gateway.path.proxy_settings import AliasSettings, ProxySettings
from stoker.gateway.records.record_settings import MeterSettings, TracingSettings
from stoker.gateway.routing_settings import RecordingSettings, RoutingSettings, TwinSettings
from stoker.gateway.store.location import StoreLocation
from stoker.gateway.worker_option import WorkerSettings, worker_spec

STORE_FILE = "store.db"


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything that the gateway is configured with."""

    listen: ListenSettings = field(default_factory=ListenSettings)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    proxy: ProxySettings = field(default_factory=ProxySettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    meter: MeterSettings = field(default_factory=MeterSettings)
    responses: ResponsesSettings = field(default_factory=ResponsesSettings)
    flex: FlexSettings = field(default_factory=FlexSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    autoscale: AutoscaleSettings = field(default_factory=AutoscaleSettings)
    canary: CanaryLimits = field(default_factory=CanaryLimits)
    tracing: TracingSettings = field(default_factory=TracingSettings)
    recording: RecordingSettings = field(default_factory=RecordingSettings)
    twin: TwinSettings = field(default_factory=TwinSettings)
    worker: tuple[WorkerSettings, ...] = ()
    price: tuple[PriceSettings, ...] = ()
    alias: tuple[AliasSettings, ...] = ()
    tenant: tuple[TenantSettings, ...] = ()
    key: tuple[KeySettings, ...] = ()
    store: str | None = setting(
        None,
        "Where the gateway keeps its durable state, such as usage rows: a SQLite file, or a URL postgresql://… that several "
        "gateways share. `none` keeps nothing, and turns metering off.",
        flag="--store",
        metavar="FILE|URL",
        default_text="store.db in the state folder, ~/.local/state/stoker",
        renamed_from=("--ledger",),
    )
    process: int = 0  # the number of this process among `listen.processes`
    process_ports: tuple[int, ...] = ()  # the processes' own ports on 127.0.0.1, if there are several
    state_dir: Path | None = None  # this machine's folder for state; None: without `store` there is no store
    admin_token_file: Path | None = setting(
        None,
        "File that holds the bearer token for /admin/*.",
        flag="--admin-token-file",
        metavar="FILE",
        default_text="no admin API",
    )
    metrics_token_file: Path | None = setting(
        None,
        "File that holds a bearer token for /metrics. Where API keys are configured, /metrics needs it or the admin token.",
        flag="--metrics-token-file",
        metavar="FILE",
        default_text="the admin token only",
    )
    secret_file: Path | None = setting(
        None,
        "File with the secret that workers and gateways share, at least 16 characters. Registrations and all requests to "
        "`stoker serve` workers are signed with it, and it never crosses the network.",
        flag="--secret-file",
        metavar="FILE",
        default_text="workers cannot register themselves",
    )
    log_requests: bool = setting(
        True,
        "Write a log line for each request.",
        flag="--no-request-log",
        flag_help="Write no log line for each request.",
    )
    log_level: str = setting(
        "info", "Lowest level of log events that are written.", flag="--log-level", choices=log.LEVELS
    )

    def __post_init__(self) -> None:
        check_settings(self, "")
        _unique("worker.url", [one.url.rstrip("/") for one in self.worker])
        _unique("key.name", [one.name for one in self.key])
        _unique("tenant.name", [one.name for one in self.tenant])
        _unique("price.model", [one.model for one in self.price])
        _unique("alias.name", [one.name for one in self.alias if one.share == 1])
        _unique("alias.name (with a share)", [one.name for one in self.alias if one.share < 1])
        _ = self.store_location  # refuses a wrong URL
        for key in self.key:
            if self.store == "none" and (key.budget is not None or key.session_budget is not None):
                raise ConfigError(
                    f"key {key.name!r}: a budget is counted in the store, and store=none; remove the budget, or set store"
                )

    @property
    def store_location(self) -> StoreLocation | None:
        """Return where the store lies; None if there is none."""
        if self.store == "none" or (self.store is None and self.state_dir is None):
            return None
        state_dir = self.state_dir or Path()
        return StoreLocation(self.store or str(state_dir / STORE_FILE), state_dir)

    def worker_specs(self) -> tuple[WorkerSpec, ...]:
        specs = tuple(worker_spec(one) for one in self.worker)
        _unique("worker (host:port)", [spec.worker_id for spec in specs])
        return specs


def load(path: Path | None, overrides: Mapping[str, Any] | None = None) -> GatewayConfig:
    """Read the gateway's settings from a file (None: the defaults) and apply `overrides` from the command line.

    Overrides have the names of the file, or dotted names such as "listen.port". A list is added to the file's list.
    """
    nested: dict[str, Any] = {}
    for name, value in (overrides or {}).items():
        put(nested, name.split("."), value)
    table = merged({} if path is None else read_toml(path), nested)
    try:
        return from_table(GatewayConfig, table)
    except ConfigError as error:
        raise ConfigError(error.message if path is None else f"{path}: {error.message}") from error


def read_secret(path: Path | None, what: str) -> str | None:
    """Read the token or secret to send from its file: the first line. `what` is the setting that errors name."""
    lines = read_secrets(path, what)
    return lines[0] if lines else None


def read_secrets(path: Path | None, what: str) -> tuple[str, ...]:
    """Read the tokens to accept from their file, one in each line: while a token is replaced, there are two."""
    if path is None:
        return ()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}={path}: cannot be read: {error}") from error
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines:
        raise ConfigError(f"{what}={path}: the file is empty; write a secret into it")
    return lines


def _unique(where: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{where}: {', '.join(twice)} is given twice; remove one")
