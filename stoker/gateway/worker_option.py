"""A worker as an operator writes it: `URL[,name=value]…` after --worker, or a [[worker]] table in the gateway's file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stoker.base.address import join_address
from stoker.base.errors import ConfigError
from stoker.base.ids import WorkerId
from stoker.base.settings import check_settings, declared, from_table, required, setting, setting_map
from stoker.fleet.spec import Role, WorkerSpec

_LABEL = "label."
_ZMQ = "(tcp|ipc)://.+"
_ZMQ_EXPECTED = "an address that begins with tcp:// or ipc://"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """A worker that the gateway sends requests to. The names after --worker are the same, unless noted."""

    # Here `flag` is the name of the option after --worker, if it differs from the key.
    url: str = required("URL of the worker, such as http://10.0.0.1:8000.", expected="a URL such as http://host:port")
    role: str = setting(
        Role.UNIFIED.value,
        "What it is sent: prefill, decode, or both (unified).",
        choices=tuple(role.value for role in Role),
    )
    dialect: str = setting(
        "stoker",
        "Protocol of the worker: stoker, vllm, vllm_mooncake, sglang or openai (any server with an OpenAI API).",
    )
    cluster: str = setting(
        "default",
        "Cluster of the worker. A session has a home cluster and leaves it only when its queues are too long.",
    )
    weight: float = setting(1.0, "How much work it gets, relative to a worker of weight 1.", gt=0)
    models: tuple[str, ...] = setting(
        (),
        "Models that it serves. After --worker: model=NAME, repeatable.",
        flag="model",
        default_text="the names that its /v1/models lists",
    )
    events: str | None = setting(
        None,
        "Address where it publishes KV events, such as tcp://host:5557.",
        pattern=_ZMQ,
        expected=_ZMQ_EXPECTED,
        default_text="what a stoker worker reports",
    )
    replay: str | None = setting(
        None,
        "Address where missed KV events can be requested again.",
        pattern=_ZMQ,
        expected=_ZMQ_EXPECTED,
        default_text="what a stoker worker reports",
    )
    bootstrap_port: int | None = setting(
        None, "Bootstrap port of an SGLang or Mooncake prefill worker.", ge=1, le=65535, default_text="8998"
    )
    api_key_file: Path | None = setting(None, "File with the bearer token that the worker expects.")
    labels: dict[str, str] = setting_map(
        "Labels, which /admin/fleet shows. After --worker: label.NAME=VALUE.", flag="label.NAME"
    )

    def __post_init__(self) -> None:
        what = f"worker {self.url}"
        check_settings(self, what)
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{what}: url: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{what}: url must be a URL such as http://host:port")
        if parts.username or parts.query or parts.fragment or port == 0:
            raise ConfigError(f"{what}: url may only have a host, a port and a path")


def parse_worker(text: str) -> dict[str, Any]:
    """Convert `URL[,name=value]…` into a [[worker]] table. `model=` may come several times, `label.x=` sets a label."""
    url, *options = text.split(",")
    table: dict[str, Any] = {"url": url.strip()}
    known = {one.setting.flag or one.key: one for one in declared(WorkerSettings)}
    for option in options:
        name, equals, value = (part.strip() for part in option.partition("="))
        if not equals or not value:
            raise ConfigError(f"--worker {text}: {option!r} must have the form name=value")
        if name.startswith(_LABEL):
            table.setdefault("labels", {})[name.removeprefix(_LABEL)] = value
            continue
        if name == "url" or name not in known:
            names = ", ".join(one for one in known if one != "url")
            raise ConfigError(f"--worker {text}: no option {name!r}; choose one of: {names}")
        one = known[name]
        if one.key in table and not one.shape.is_list:
            raise ConfigError(f"--worker {text}: {name} is given twice; remove one")
        try:
            parsed = one.parse(value, name)
        except ConfigError as error:
            raise ConfigError(f"--worker {text}: {error.message}") from error
        if one.shape.is_list:
            table.setdefault(one.key, []).extend(parsed)
        else:
            table[one.key] = parsed
    from_table(WorkerSettings, table)  # raises an error that names this worker, not a table of a file
    return table


def worker_id_of(url: str) -> WorkerId:
    """Return host:port, and the path if there is one. It is the same in every gateway."""
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
