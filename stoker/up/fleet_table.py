"""fleet.toml -> FleetConfig. Every error names the key, the value and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.base.errors import ConfigError
from stoker.base.paths import expand_home
from stoker.base.settings import Declared, declared, from_table, merged, no_such_name, read_toml, unknown_key
from stoker.up.config import FleetConfig, FleetStore, UpConfig, WorkersConfig
from stoker.up.placement_check import check_placement

_TABLES = ("gateway", "workers", "store", "up")
# Settings of `stoker serve` that `stoker up` sets itself, and what to use instead.
_SET_BY_UP = {
    "gateway": "workers register with the fleet's own gateway",
    "gateway_file": "workers register with the fleet's own gateway",
    "secret_file": "all processes of the fleet share one secret; choose it with [gateway] secret_file",
    "insecure": "the processes of the fleet share a secret, so no port is open",
    "advertise": "the processes of the fleet reach each other on this machine",
    "node_rank": 'with `nodes`, placement = "ray" under [up] starts the worker on all of them',
    "cache_dir": "use [up] cache_dir",
    "offline": "use [up] offline",
}


def fleet_config(table: Mapping[str, Any], serve: Mapping[str, Declared]) -> FleetConfig:
    """Check and convert a fleet's table. `serve` has the settings of `stoker serve` by their keys in [[workers]]."""
    for name in table:
        if name not in _TABLES:
            raise no_such_name(name, _TABLES, what="table")
    workers = table.get("workers", [])
    if not isinstance(workers, list) or not all(isinstance(one, dict) for one in workers):
        raise ConfigError("workers: write [[workers]], once for each kind of worker")
    config = FleetConfig(
        workers=tuple(
            _workers(one, serve, f"workers[{number}]" if len(workers) > 1 else "workers")
            for number, one in enumerate(workers)
        ),
        gateway=_gateway_table(table.get("gateway", {})),
        store=from_table(FleetStore, table.get("store", {}), "store"),
        up=from_table(UpConfig, table.get("up", {}), "up"),
    )
    _check_roles(config)
    check_placement(config)
    _check_scaling(config)
    return config


def _workers(table: dict[str, Any], serve: Mapping[str, Declared], at: str) -> WorkersConfig:
    own = {one.key: one for one in declared(WorkersConfig)}
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in table.items():
        where = f"{at}.{name}"
        if name in own:
            values[name] = own[name].convert(value, where)
        elif name in _SET_BY_UP:
            raise ConfigError(f"{where}: `stoker up` sets this itself: {_SET_BY_UP[name]}")
        elif name in serve:
            options[name] = serve[name].convert(value, where)
        else:
            raise _unknown_worker_key(name, serve, own, at)
    workers = WorkersConfig(**values, role=options.pop("role", serve["role"].default), options=options)
    if workers.devices and "device" in options:
        raise ConfigError(
            f"{at}: device={options['device']!r} and devices={list(workers.devices)}: give only one of them"
        )
    _check_count(workers, at)
    _check_ports(options.get("port", 0), workers.most, at)
    if invalid := [name for name, text in workers.env.items() if not name or "=" in name or "\0" in name + text]:
        raise ConfigError(f"{at}.env: {invalid[0]!r} cannot be an environment variable; rename or remove it")
    return workers


def _unknown_worker_key(name: str, serve: Mapping[str, Declared], own: Mapping[str, Declared], at: str) -> ConfigError:
    for key, one in serve.items():
        if name in one.old_keys:
            return ConfigError(f"{at}.{name} was renamed: write {at}.{key}")
    return unknown_key(name, own.values(), set(serve) - set(_SET_BY_UP), at)


def _check_count(workers: WorkersConfig, at: str) -> None:
    if workers.max_count and workers.max_count < workers.count:
        raise ConfigError(f"{at}: max_count={workers.max_count} is below count={workers.count}; raise it or remove it")
    if not workers.most:
        raise ConfigError(
            f"{at}.count=0: give a count of at least 1, or max_count for workers that the autoscaler starts"
        )


def _check_ports(first: int, count: int, at: str) -> None:
    last = first + count - 1 if first else 0  # 0: each worker gets any free port
    if last > 65535:
        raise ConfigError(f"{at}.port={first} for {count} workers: the last port would be {last}; ports end at 65535")


def _gateway_table(table: Any) -> dict[str, Any]:
    """Return the [gateway] table, merged over the file that its key `config` names."""
    if not isinstance(table, dict):
        raise ConfigError(f"gateway={table!r}: write a table, [gateway]")
    if "config" not in table:
        return table
    if not isinstance(table["config"], str):
        raise ConfigError(f"gateway.config={table['config']!r}: give the path of a gateway's TOML file")
    here = {name: value for name, value in table.items() if name != "config"}
    return merged(read_toml(expand_home(table["config"])), here)


def _check_roles(config: FleetConfig) -> None:
    others = config.gateway.get("worker", [])
    if not any(one.count for one in config.workers) and not others:
        raise ConfigError(
            "there is no worker: add a [[workers]] table with a count above 0, or --unified, --prefill or --decode"
        )
    if others:
        return  # workers elsewhere may have the roles that are missing here
    for model in {one.model for one in config.workers}:
        counts = {one.role: 0 for one in config.workers}
        for one in config.workers:
            counts[one.role] += one.count if one.model == model else 0
        if counts.get("prefill") and not counts.get("decode") and not counts.get("unified"):
            named = "the default model" if model is None else model
            raise ConfigError(
                f"{named}: there are {counts['prefill']} prefill workers, and no decode or unified workers that could "
                "generate answers; add one"
            )


def _check_scaling(config: FleetConfig) -> None:
    """Refuse workers that nothing would ever start."""
    spare = [one for one in config.workers if one.most > one.count]
    if spare and not config.may_scale:
        raise ConfigError(
            f'workers.max_count={spare[0].max_count} has no effect without the autoscaler: write mode = "on" and max_workers '
            "under [gateway.autoscale], or remove max_count"
        )
