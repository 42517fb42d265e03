"""The settings of a fleet, as fleet.toml has them. `fleet_table.py` reads it.

A `[[workers]]` table takes every setting of `stoker serve`, and the `[gateway]` table is passed on to the gateway, which checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.base.config import StoreSettings
from stoker.base.errors import ConfigError
from stoker.base.settings import check_settings, same_as, setting, setting_map

START = "start"
LOCAL, RAY = "local", "ray"
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,40}"
_NAME_EXPECTED = "up to 41 letters, digits, '.', '_' and '-'"
_RESOURCE = r"(?!(CPU|GPU|memory|object_store_memory)$)[^\s\"]{1,100}"
_RESOURCE_EXPECTED = "the name of a custom resource, without spaces"


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
        f'`"{START}"` starts a Mooncake master with the fleet, on a node of the cluster if `up.placement = "ray"`. `"HOST:PORT"` '
        "uses a master that already runs.",
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
    gateway_placement: str = setting(
        LOCAL,
        'Where the gateways run, if `placement = "ray"`. `local`: one, on this machine. `ray`: on nodes of the cluster. Each '
        "listens on its node's address, and the files that its settings name are sent to it.",
        choices=(LOCAL, RAY),
    )
    gateways: int = setting(
        1,
        'Number of gateways. More than one needs `gateway_placement = "ray"`, and a load balancer in front.',
        ge=1,
        le=64,
    )
    gateway_resource: str | None = setting(
        None,
        "Custom resource of Ray that a node must have for a gateway (`ray start --resources`). Each gateway takes 1 of it.",
        pattern=_RESOURCE,
        expected=_RESOURCE_EXPECTED,
        default_text="any node",
    )
    mooncake_resource: str | None = setting(
        None,
        'Custom resource of Ray that a node must have for the master of `store.mooncake = "start"`, which takes 1 of it.',
        pattern=_RESOURCE,
        expected=_RESOURCE_EXPECTED,
        default_text="any node",
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
