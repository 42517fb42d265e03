"""One worker as an operator writes it: `URL[,role=…][,dialect=…]…` on the command line, or a table in the file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stoker.base.address import join_address
from stoker.base.errors import ConfigError
from stoker.base.ids import WorkerId
from stoker.fleet.spec import Role, WorkerSpec

_ROLES = tuple(role.value for role in Role)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    url: str
    role: str = Role.UNIFIED.value
    dialect: str = "stoker"
    cluster: str = "default"
    weight: float = 1.0
    models: tuple[str, ...] = ()  # empty: what its /v1/models says
    events: str | None = None  # where it publishes KV events, such as tcp://host:5557
    replay: str | None = None
    bootstrap_port: int | None = None
    api_key_file: Path | None = None  # what it wants as a bearer token
    labels: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        what = f"worker {self.url}"
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{what}: url: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{what}: url must be like http://host:port")
        if parts.username or parts.query or parts.fragment or port == 0:
            raise ConfigError(f"{what}: url may have a host, a port and a path, nothing else")
        if self.role not in _ROLES:
            raise ConfigError(f"{what}: role={self.role!r} must be one of {', '.join(_ROLES)}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"{what}: weight={self.weight} must be above zero")
        for name in ("events", "replay"):
            address = getattr(self, name)
            if address is not None and not address.startswith(("tcp://", "ipc://")):
                raise ConfigError(f"{what}: {name}={address!r} must begin with tcp:// or ipc://")
        if self.bootstrap_port is not None and not 1 <= self.bootstrap_port <= 65535:
            raise ConfigError(f"{what}: bootstrap_port={self.bootstrap_port} must be 1 to 65535")


_READ: dict[str, tuple[str, Callable[[str], Any]]] = {
    "role": ("role", str),
    "dialect": ("dialect", str),
    "cluster": ("cluster", str),
    "weight": ("weight", float),
    "model": ("models", str),
    "events": ("events", str),
    "replay": ("replay", str),
    "bootstrap_port": ("bootstrap_port", int),
    "api_key_file": ("api_key_file", Path),
}


def parse_worker(text: str) -> dict[str, Any]:
    """`URL[,name=value]…` as a table of WorkerSettings; `model=` may come several times, `label.x=` sets a label."""
    url, *options = text.split(",")
    table: dict[str, Any] = {"url": url.strip()}
    for option in options:
        name, equals, value = (part.strip() for part in option.partition("="))
        if not equals or not value:
            raise ConfigError(f"--worker {text}: {option!r} must be like name=value")
        if name.startswith("label."):
            table.setdefault("labels", {})[name.removeprefix("label.")] = value
            continue
        if name not in _READ:
            raise ConfigError(f"--worker {text}: no option {name!r}; there are: {', '.join(_READ)}, label.NAME")
        target, read = _READ[name]
        if target in table and target != "models":
            raise ConfigError(f"--worker {text}: {name} is there twice")
        try:
            parsed = read(value)
        except ValueError as error:
            raise ConfigError(f"--worker {text}: {name}={value!r} is not a number") from error
        if target == "models":
            table.setdefault("models", []).append(parsed)
        else:
            table[target] = parsed
    WorkerSettings(
        **{**table, "models": tuple(table.get("models", ()))}
    )  # complains about this option, not about a file
    return table


def worker_id_of(url: str) -> WorkerId:
    """host:port, and the path where there is one: what people call a worker, and the same in every gateway."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return WorkerId(join_address(parts.hostname or "", port) + parts.path.rstrip("/"))


def worker_spec(settings: WorkerSettings) -> WorkerSpec:
    return WorkerSpec(
        worker_id=worker_id_of(settings.url),
        url=settings.url.rstrip("/"),
        role=Role(settings.role),
        dialect=settings.dialect,
        models=settings.models,
        cluster=settings.cluster,
        weight=settings.weight,
        labels=settings.labels,
        events_url=settings.events,
        replay_url=settings.replay,
        bootstrap_port=settings.bootstrap_port,
    )
