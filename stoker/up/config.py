"""fleet.toml -> FleetConfig. Every error names the key, the value and what to write instead.

A `[[workers]]` table takes every setting of `stoker serve`. Their declarations come as an argument. The `[gateway]` table is
passed on to the gateway, which checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.base.config import StoreSettings
from stoker.base.errors import ConfigError
from stoker.base.paths import expand_home
from stoker.base.settings import (
    Declared,
    check_settings,
    declared,
    from_table,
    merged,
    no_such_name,
    read_toml,
    same_as,
    setting,
    setting_map,
    unknown_key,
)

START = "start"
LOCAL, RAY = "local", "ray"
_TABLES = ("gateway", "workers", "store", "up")
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,40}"
_NAME_EXPECTED = "up to 41 letters, digits, '.', '_' and '-'"
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


@dataclass(frozen=True, slots=True)
class FleetStore:
    """[store]: the KV tiers that all workers of the fleet share."""

    name: str | None = setting(
        None,
        "Name of the host tier's shared memory.",
        pattern=_NAME,
        expected=_NAME_EXPECTED,
        default_text="stoker-PORT, with the gateway's port",
    )
    host_gib: float = same_as(
        StoreSettings, "host_gib", help="RAM (/dev/shm) for the host tier, for each model. 0 turns it off."
    )
    disk_dir: Path | None = same_as(StoreSettings, "disk_dir")
    disk_gib: float = same_as(StoreSettings, "disk_gib")
    disk_key_file: Path | None = same_as(StoreSettings, "disk_key_file")
    mooncake: str | None = setting(
        None,
        f'`"{START}"` starts a Mooncake master with the fleet. `"HOST:PORT"` uses a master that already runs.',
        pattern=rf"{START}|[^\s/:]+:\d{{1,5}}|\[[^\s/]+\]:\d{{1,5}}",
        expected=f"{START!r}, or HOST:PORT of a master that already runs",
        default_text="no Mooncake tier",
    )
    segment_gib: float = same_as(
        StoreSettings,
        "mooncake_segment_gib",
        default=1.0,
        help="RAM that each worker adds to the Mooncake store.",
        ge=None,
        gt=0,
    )
    protocol: str = same_as(StoreSettings, "mooncake_protocol")
    ssd_dir: Path | None = same_as(
        StoreSettings,
        "mooncake_ssd_dir",
        help="Folder where Mooncake may put objects that its RAM cannot hold. Each worker gets a folder in it.",
    )

    def __post_init__(self) -> None:
        check_settings(self, "store")
        if self.disk_key_file is not None and self.disk_dir is None:
            raise ConfigError(
                f"store.disk_key_file={self.disk_key_file} has no effect without store.disk_dir: give both"
            )
        if self.ssd_dir is not None and self.mooncake is None:
            raise ConfigError(f"store.ssd_dir={self.ssd_dir} has no effect without store.mooncake: give both")


@dataclass(frozen=True, slots=True)
class UpConfig:
    """[up]: logs, the cache folder, and how processes are restarted."""

    log_dir: Path | None = setting(
        None,
        "Folder for the log files, one for each process.",
        flag="--log-dir",
        metavar="DIR",
        default_text="~/.local/state/stoker/logs/PORT",
    )
    cache_dir: Path | None = setting(
        None,
        "Folder for downloaded and converted models, compiled kernels and, in the default fleet, the disk tier.",
        flag="--cache-dir",
        metavar="DIR",
        default_text="~/.cache/stoker",
    )
    offline: bool = setting(False, "Download nothing.", flag="--offline")
    placement: str = setting(
        LOCAL,
        "Where the workers run. `local`: on this machine. `ray`: on the nodes of a Ray cluster, which need Stoker and the model "
        "at the same paths, or access to the hub.",
        choices=(LOCAL, RAY),
    )
    ray_address: str = setting(
        "auto",
        "Address of the Ray cluster. `auto`: the one that this machine belongs to.",
        pattern=r"\S+",
        expected="an address",
    )
    scale: str = setting(
        "on",
        "What to do when the gateway's autoscaler wants workers to start or to end: do it, or only say it (`dry_run`).",
        choices=("on", "dry_run"),
    )
    first_pause_s: float = setting(
        0.1, "Pause before a process that exited is restarted. It doubles with each restart.", unit="s", gt=0
    )
    longest_pause_s: float = setting(
        30.0,
        "Maximum pause before a restart. It is 5 s for a process that was ready after its last start.",
        unit="s",
        gt=0,
    )
    healthy_s: float = setting(10.0, "The pause is reset after a process has been ready for this time.", unit="s", gt=0)
    silent_s: float = setting(
        10.0,
        "A process that was ready and answers no health check for this time is killed and restarted. At most one process "
        "is killed in a minute, and its limit doubles each time.",
        unit="s",
        ge=1,
    )
    start_s: float = setting(3600.0, "Maximum time until a started process must be ready.", unit="s", gt=0)
    drain_s: float = setting(
        30.0,
        "Maximum time that a worker gets at the end to finish requests that did not come through the gateway.",
        unit="s",
        gt=0,
    )
    log_mib: float = setting(
        64.0,
        "A log file that has reached this size is renamed to NAME.log.1, and a new one is begun.",
        unit="MiB",
        gt=0,
    )
    log_files: int = setting(
        5, "Number of log files that are kept for each process, with the current one.", ge=1, le=1000
    )

    def __post_init__(self) -> None:
        check_settings(self, "up")
        if self.first_pause_s > self.longest_pause_s:
            raise ConfigError(
                f"up.first_pause_s={self.first_pause_s:g} is larger than up.longest_pause_s={self.longest_pause_s:g}: "
                "lower the first or raise the second"
            )


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """[[workers]]: one or more workers with the same settings."""

    count: int = setting(
        1,
        "Number of workers. 0: only the autoscaler starts some, and only if other workers do this work: otherwise it sees no load.",
        ge=0,
    )
    max_count: int = setting(
        0,
        "Most workers, with those that the autoscaler starts. They have the same settings, and memory and ports are kept for them.",
        ge=0,
        default_text="`count`",
    )
    name: str | None = setting(
        None,
        "Name of the workers: NAME-0, NAME-1 and so on.",
        pattern=_NAME,
        expected=_NAME_EXPECTED,
        default_text="the role",
    )
    model: str | None = setting(
        None,
        "A model folder, a .gguf file, or a Hugging Face id such as org/name or org/name@revision.",
        default_text="SmolLM2-135M-Instruct",
    )
    devices: tuple[int, ...] = setting(
        (),
        "GPUs, counted from 0. The workers take them in turn, and those on the same GPU get equal shares of its memory.",
        ge=0,
        default_text="what `stoker serve` chooses",
    )
    env: dict[str, str] = setting_map("Environment variables of the workers.")
    role: str = "unified"  # one of the settings of `stoker serve`, which are in `options`
    options: Mapping[str, Any] = field(default_factory=dict)  # settings of `stoker serve`, by their keys

    @property
    def most(self) -> int:
        """Return how many workers may run at the same time."""
        return max(self.count, self.max_count)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The content of fleet.toml."""

    workers: tuple[WorkersConfig, ...]
    gateway: dict[str, Any] = field(default_factory=dict)  # passed on to the gateway
    store: FleetStore = field(default_factory=FleetStore)
    up: UpConfig = field(default_factory=UpConfig)

    @property
    def is_scaled(self) -> bool:
        """Return True if the gateway's autoscaler starts and ends workers."""
        return self._autoscale_mode == "on"

    @property
    def may_scale(self) -> bool:
        """Return True if the autoscaler decides about workers, perhaps only in a dry run."""
        return self._autoscale_mode in ("on", "dry_run")

    @property
    def _autoscale_mode(self) -> object:
        """Return what the autoscaler does with its decisions about workers. The gateway checks the table."""
        autoscale = self.gateway.get("autoscale")
        if not isinstance(autoscale, dict) or not autoscale.get("max_workers"):
            return "off"
        return autoscale.get("mode", "off")


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
    _check_placement(config)
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


def _check_placement(config: FleetConfig) -> None:
    """Refuse what only works on this machine, if the workers run on others."""
    if config.up.placement == LOCAL:
        for workers in config.workers:
            if workers.options.get("nodes", 1) > 1 and "head" not in workers.options:
                raise ConfigError(
                    f'workers.nodes={workers.options["nodes"]}: write placement = "ray" under [up], or give `head` and start '
                    "the other nodes yourself"
                )
        return
    for workers in config.workers:
        for key in ("host", "port", "head"):
            if key in workers.options:
                raise ConfigError(f'workers.{key}: with up.placement="ray", each worker gets an address where it runs')
        if workers.devices:
            raise ConfigError('workers.devices: with up.placement="ray", Ray assigns the GPUs; remove it')
    if config.store.host_gib:
        raise ConfigError(
            'store.host_gib: RAM tiers are not supported with up.placement="ray"; use disk_dir or mooncake'
        )
    if config.store.mooncake == START:
        raise ConfigError(
            'store.mooncake="start" starts a master that only this machine reaches; with up.placement="ray", give HOST:PORT'
        )
