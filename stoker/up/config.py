"""fleet.toml -> FleetConfig: a frozen tree in which every complaint names its field and its numbers.

What a worker may be told besides is what `stoker serve` takes; which options those are comes as an argument. The gateway's
table is the gateway's own business: it is passed on as it stands, and checked by the gateway's own reader.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stoker.base.errors import ConfigError
from stoker.base.paths import written_path
from stoker.base.tables import check_positive, in_words, no_such_setting, path_of, read_tables, refuse_unknown

START = "start"
_TABLES = ("gateway", "workers", "store", "up")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,40}")
_ADDRESS = re.compile(r"[^\s/:]+:\d{1,5}|\[[^\s/]+\]:\d{1,5}")
# What `stoker up` decides itself, and why.
_OURS = {
    "gateway": "the fleet's own gateway is meant",
    "secret_file": "the fleet's parts share a secret of their own; another one is [gateway] secret_file",
    "advertise": "the fleet's parts reach each other on this machine",
    "cache_dir": "it is [up] cache_dir",
    "offline": "it is [up] offline",
}

_Settings = TypeVar("_Settings")


@dataclass(frozen=True, slots=True)
class ServeOption:
    """An option of `stoker serve`."""

    flag: str
    kind: type  # bool is a switch
    choices: tuple[str, ...] = ()
    repeatable: bool = False


@dataclass(frozen=True, slots=True)
class StoreConfig:
    name: str | None = None  # of the host tier's shared memory; None: one that no other fleet has
    host_gib: float = 0.0
    disk_dir: Path | None = None
    disk_gib: float = 16.0
    disk_key_file: Path | None = None
    mooncake: str | None = None  # "start", or HOST:PORT of a master that runs already
    segment_gib: float = 1.0  # RAM that each worker gives to Mooncake's store
    protocol: str = "tcp"
    ssd_dir: Path | None = None  # below it each worker has a folder for what Mooncake moves out of RAM

    def __post_init__(self) -> None:
        check_positive("store", self, "disk_gib", "segment_gib")
        if self.host_gib < 0:
            raise ConfigError(f"store.host_gib={self.host_gib:g}: it must not be below zero")
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise ConfigError(f"store.name={self.name!r}: up to 41 letters, digits and . _ - are allowed")
        if self.disk_key_file is not None and self.disk_dir is None:
            raise ConfigError(f"store.disk_key_file={self.disk_key_file}: there is no store.disk_dir to encrypt")
        if self.ssd_dir is not None and self.mooncake is None:
            raise ConfigError(f"store.ssd_dir={self.ssd_dir}: there is no store.mooncake to use it")
        if self.mooncake not in (None, START) and not _ADDRESS.fullmatch(self.mooncake):
            raise ConfigError(f"store.mooncake={self.mooncake!r}: it must be {START!r}, or a master's HOST:PORT")


@dataclass(frozen=True, slots=True)
class UpConfig:
    log_dir: Path | None = None
    cache_dir: Path | None = None
    offline: bool = False
    first_pause_s: float = 0.5  # before a part that ended is started again; doubled each time
    longest_pause_s: float = 30.0
    healthy_s: float = 60.0  # a part that ran for so long begins anew with the first pause
    start_s: float = 3600.0  # until a part must be ready
    drain_s: float = 30.0  # how long a worker finishes requests that did not come through the gateway
    log_mib: float = 64.0  # a log larger than this is put aside when its part starts

    def __post_init__(self) -> None:
        check_positive("up", self, "first_pause_s", "longest_pause_s", "healthy_s", "start_s", "drain_s", "log_mib")
        if self.first_pause_s > self.longest_pause_s:
            raise ConfigError(
                f"up.first_pause_s={self.first_pause_s:g} > up.longest_pause_s={self.longest_pause_s:g}: "
                "the first pause is the shortest"
            )


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """So many workers of one kind."""

    role: str = "unified"
    count: int = 1
    name: str | None = None  # of the parts; None: the role
    model: str | None = None  # None: the embedded one
    devices: tuple[int, ...] = ()  # cards, in turns; empty: what `stoker serve` chooses
    env: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of `stoker serve`


@dataclass(frozen=True, slots=True)
class FleetConfig:
    workers: tuple[WorkersConfig, ...]
    gateway: dict[str, Any] = field(default_factory=dict)
    store: StoreConfig = field(default_factory=StoreConfig)
    up: UpConfig = field(default_factory=UpConfig)


def fleet_config(table: Mapping[str, Any], serve_options: Mapping[str, ServeOption]) -> FleetConfig:
    """`serve_options` by their names in the file: those of the flags, with _ for -."""
    for name in table:
        if name not in _TABLES:
            raise no_such_setting(name, _TABLES, what="table")
    workers = table.get("workers", [])
    if not isinstance(workers, list) or not all(isinstance(one, dict) for one in workers):
        raise ConfigError("workers: it must be written [[workers]], once for each kind of worker")
    config = FleetConfig(
        workers=tuple(
            _workers(one, serve_options, f"workers[{number}]" if len(workers) > 1 else "workers")
            for number, one in enumerate(workers)
        ),
        gateway=_gateway_table(_is_table("gateway", table.get("gateway", {}))),
        store=_settings(StoreConfig, table.get("store", {}), "store"),
        up=_settings(UpConfig, table.get("up", {}), "up"),
    )
    _check_together(config)
    return config


def _workers(table: dict[str, Any], serve_options: Mapping[str, ServeOption], where: str) -> WorkersConfig:
    own = {one.name for one in dataclasses.fields(WorkersConfig)} - {"options"}
    given = {name: value for name, value in table.items() if name in own}
    options = {}
    for name, value in table.items():
        if name in own:
            continue
        if name in _OURS:
            raise ConfigError(f"{where}.{name}: not for a worker to set: {_OURS[name]}")
        if name not in serve_options:
            raise no_such_setting(name, sorted((own | set(serve_options)) - set(_OURS)), f"{where}.")
        options[name] = _option_value(value, serve_options[name], f"{where}.{name}")
    workers = _settings(WorkersConfig, given | {"options": options}, where)
    roles = serve_options["role"].choices
    if workers.role not in roles:
        raise ConfigError(f"{where}.role={workers.role!r}: it must be {_or(roles)}")
    if workers.count < 1:
        raise ConfigError(f"{where}.count={workers.count}: it must be above zero")
    if workers.name is not None and not _NAME.fullmatch(workers.name):
        raise ConfigError(f"{where}.name={workers.name!r}: up to 41 letters, digits and . _ - are allowed")
    if workers.devices and "device" in options:
        raise ConfigError(
            f"{where}: device={options['device']!r} and devices={list(workers.devices)}: give one of them"
        )
    _check_ports(options.get("port", 0), workers.count, where)
    if unfit := [name for name, text in workers.env.items() if not name or "=" in name or "\0" in name + text]:
        raise ConfigError(f"{where}.env: {unfit[0]!r}: no environment can hold that")
    if wrong := [device for device in workers.devices if device < 0]:
        raise ConfigError(f"{where}.devices: {wrong[0]}: cards are counted from 0")
    return workers


def _check_ports(first: int, count: int, where: str) -> None:
    last = first + count - 1 if first else 0  # 0: any free one for each
    if not 0 <= first <= last <= 65535:
        others = f" for {count} workers" if count > 1 else ""
        raise ConfigError(f"{where}.port={first}{others}: a port is 0 to 65535")


def _option_value(value: Any, option: ServeOption, where: str) -> Any:
    if option.repeatable and isinstance(value, list):
        return [_option_value(one, dataclasses.replace(option, repeatable=False), where) for one in value]
    wanted = {bool: "true or false", int: "an integer", float: "a number"}.get(option.kind, "text")
    types: tuple[type, ...] = {int: (int,), float: (int, float), bool: (bool,)}.get(option.kind, (str,))
    if not isinstance(value, types) or (isinstance(value, bool) and option.kind is not bool):
        raise ConfigError(f"{where}={value!r}: it must be {wanted}")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{where}={value!r}: no command can hold that")
    if option.choices and value not in option.choices:
        raise ConfigError(f"{where}={value!r}: it must be {_or(option.choices)}")
    return value


def _gateway_table(table: dict[str, Any]) -> dict[str, Any]:
    """With what the file of `config` says, under what stands here."""
    if "config" not in table:
        return table
    if not isinstance(table["config"], str):
        raise ConfigError(f"gateway.config={table['config']!r}: it must be the path of a gateway's file")
    here = {name: value for name, value in table.items() if name != "config"}
    return merged(read_tables(written_path(table["config"])), here)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged, lists are added up, anything else is replaced."""
    result = dict(below)
    for name, value in above.items():
        old = result.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            result[name] = merged(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            result[name] = [*old, *value]
        else:
            result[name] = value
    return result


def _check_together(config: FleetConfig) -> None:
    others = config.gateway.get("worker", [])
    if not config.workers and not others:
        raise ConfigError("there is no worker: at least one [[workers]] is needed")
    if others:
        return  # workers elsewhere may have the roles that are missing here
    for model in {one.model for one in config.workers}:
        counts = {one.role: 0 for one in config.workers}
        for one in config.workers:
            counts[one.role] += one.count if one.model == model else 0
        if counts.get("prefill") and not counts.get("decode") and not counts.get("unified"):
            named = "the embedded model" if model is None else model
            raise ConfigError(
                f"{named}: {counts['prefill']} prefill and no decode or unified workers: nobody would write its answers"
            )


def _settings(kind: type[_Settings], table: Any, where: str) -> _Settings:
    _is_table(where, table)
    refuse_unknown(kind, table, f"{where}.")
    try:
        return msgspec.convert(table, kind, dec_hook=path_of)
    except msgspec.ValidationError as error:
        raise ConfigError(in_words(error, where)) from error


def _is_table(where: str, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(f"{where}={table!r}: it must be a table, [{where}]")
    return table


def _or(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last
