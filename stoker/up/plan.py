"""FleetConfig -> FleetPlan: the processes to start, with their arguments, ports and order.

It does no I/O, except that `Ports` reserves ports.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.base.address import join_address, local_host
from stoker.base.errors import ConfigError
from stoker.base.settings import Declared, merged
from stoker.up.config import RAY, START, FleetConfig, FleetStore, WorkersConfig
from stoker.up.gateway_files import Keys
from stoker.up.machine import GIB, Machine
from stoker.up.part import MOONCAKE, FleetPart, PartKind
from stoker.up.ports import Ports
from stoker.up.ray_plan import MASTER, RayParts

_LEAST_GPU_BYTES = 2 * GIB  # the least that an engine needs besides its weights
_STORE_STOP_S = 10.0
_AFTER_DRAIN_S = 15.0  # time to exit after a drain


@dataclass(frozen=True, slots=True)
class FleetModel:
    """A model whose files are on this machine."""

    folder: str
    name: str  # what clients call it
    weight_bytes: int = 0  # size of the weight files
    cpu_bytes: int = 0  # RAM for the weights, if it runs on a CPU


@dataclass(frozen=True, slots=True)
class Listening:
    """The address on which the gateway listens. On a machine that is not known yet, it is what the settings ask for."""

    host: str
    port: int
    tls: bool = False
    drain_s: float = 3600.0  # the notice to load balancers included


@dataclass(frozen=True, slots=True)
class FleetPaths:
    """The fleet's files that its parts read."""

    run_dir: Path
    secret_file: Path
    admin_token_file: Path

    @property
    def gateway_file(self) -> Path:
        return self.run_dir / "gateway.toml"


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Everything that is started."""

    parts: tuple[FleetPart, ...]
    gateway: Listening
    gateway_table: dict[str, Any]  # the gateway's settings
    store_name: str | None  # name of the host tier's shared memory, which stays when its users exit
    models: tuple[str, ...]
    needs_api_key: bool  # whether clients need an API key
    is_scaled: bool = False  # the gateway's autoscaler starts and ends workers

    @property
    def gateways(self) -> list[FleetPart]:
        return [part for part in self.parts if part.kind is PartKind.GATEWAY]


@dataclass(slots=True)
class Planner:
    """Turns a fleet's settings into a plan for this machine."""

    config: FleetConfig
    serve: Mapping[str, Declared]  # the settings of `stoker serve`, by their keys in [[workers]]
    machine: Machine
    models: Mapping[str | None, FleetModel]
    paths: FleetPaths
    ports: Ports
    master: Sequence[str] = ()  # the command of the Mooncake master, without its addresses
    reach: Callable[[str], str] = local_host  # where workers reach a server of this machine that listens on a host
    gateway_files: Keys = ()  # the settings of the gateway that name files which it reads

    def plan(self, gateway: Listening) -> FleetPlan:
        """Return the plan. The gateway's port is already reserved, because the run folder is named after it."""
        if gateway.tls and self.config.is_scaled:
            raise ConfigError(
                "gateway.listen.tls_cert: workers that the autoscaler starts register with the gateway, which needs a plain port; "
                "terminate TLS in front of it, or set gateway.autoscale.max_workers = 0"
            )
        self._check_shared_memory()
        parts: list[FleetPart] = []
        store = self.config.store
        name = store.name or f"stoker-{gateway.port}" if store.host_gib else None
        mooncake = store.mooncake
        if mooncake == START:
            parts.append(self._master(gateway.port))
            mooncake = parts[-1].address or MOONCAKE
        tiers = _tier_options(store, name, mooncake)
        table = merged(
            self.config.gateway,
            {"secret_file": str(self.paths.secret_file), "admin_token_file": str(self.paths.admin_token_file)},
        )
        gateways = self._gateways(gateway, table)
        workers = self._workers(gateway, tiers, gateways)
        if gateways[0].request is None:
            # The autoscaler's workers come and go, so that the gateway learns of them only when they register.
            addressed = [] if self.config.is_scaled else [part for part in workers if part.address and not part.spare]
            known = [{"url": part.address, "role": part.role} for part in addressed]
            # The workers also register themselves. Listed here, a restarted gateway knows them at once.
            own = {"listen": {"host": gateway.host, "port": gateway.port}, **({"worker": known} if known else {})}
            table = merged(table, own)
        parts += [*gateways, *workers]
        served = dict.fromkeys(name for one in self.config.workers for name in self._served_names(one))
        return FleetPlan(
            tuple(parts), gateway, table, name, tuple(served), bool(table.get("key")), self.config.is_scaled
        )

    @property
    def _ray(self) -> RayParts:
        return RayParts(self.config.up, self.paths.secret_file)

    def _served_names(self, workers: WorkersConfig) -> Sequence[str]:
        names: Sequence[str] = workers.options.get("served_name") or (self.models[workers.model].name,)
        return names

    def _check_shared_memory(self) -> None:
        host_gib, num_models = self.config.store.host_gib, len(self.models)
        needed_bytes = host_gib * num_models * GIB
        setting = f"store.host_gib={host_gib:g}" + (f" for each of {num_models} models" if num_models > 1 else "")
        if needed_bytes > self.machine.shared_bytes:
            raise ConfigError(
                f"{setting}: /dev/shm has {self.machine.shared_bytes / GIB:.2f} GiB free. "
                "Lower host_gib, or give /dev/shm more (docker: --shm-size)"
            )
        if needed_bytes > self.machine.ram_bytes:
            # The tier would fill up over hours, and then the kernel would kill a process.
            raise ConfigError(
                f"{setting}: {self.machine.ram_bytes / GIB:.2f} GiB of RAM are free on this machine, or in this container. "
                "Lower host_gib, or give it more (docker: --memory)"
            )

    def _master(self, gateway_port: int) -> FleetPart:
        if self.config.up.placement == RAY:
            return self._ray.master(self.master, _STORE_STOP_S)
        host = "127.0.0.1"
        port = self.ports.take_after(host, gateway_port)
        metrics_port = self.ports.take_after(host, port)
        command = (*self.master, f"--rpc_address={host}", f"--rpc_port={port}")
        command += (f"--metrics_host={host}", f"--metrics_port={metrics_port}")
        health_url = f"http://{join_address(host, metrics_port)}/health"
        address = join_address(host, port)
        return FleetPart(MASTER, PartKind.STORE, "store", command, address, None, _STORE_STOP_S, health_url=health_url)

    def _gateways(self, gateway: Listening, table: Mapping[str, Any]) -> list[FleetPart]:
        stop_s = gateway.drain_s + _AFTER_DRAIN_S
        if gateway.tls and self.config.up.placement == RAY:
            raise ConfigError(
                'gateway.listen.tls_cert: with up.placement="ray", workers register with the gateway, which needs a plain port; '
                "terminate TLS in front of it"
            )
        if self.config.up.gateway_placement == RAY:
            return self._ray.gateways(table, gateway.port, self.gateway_files, stop_s)
        command = (*_STOKER, "gateway", "--config", str(self.paths.gateway_file))
        url = f"{'https' if gateway.tls else 'http'}://{join_address(self.reach(gateway.host), gateway.port)}"
        return [
            FleetPart(
                "gateway", PartKind.GATEWAY, "gateway", command, url, "/health", stop_s, health_url=f"{url}/health"
            )
        ]

    def _workers(self, gateway: Listening, tiers: Mapping[str, Any], gateways: Sequence[FleetPart]) -> list[FleetPart]:
        names = _part_names(self.config.workers)
        if self.config.up.placement == RAY:
            return [
                self._ray_worker(workers, tiers, names.pop(0), gateways, number >= workers.count)
                for workers in self.config.workers
                for number in range(workers.most)
            ]
        sharers = Counter(gpu for one in self.config.workers for gpu in _gpus(one))
        parts = []
        for workers in self.config.workers:
            for number, gpu in enumerate(_gpus(workers) or [None] * workers.most):
                name = names.pop(0)
                host = workers.options.get("host", "127.0.0.1")
                if "port" in workers.options:
                    first = workers.options["port"]
                    port = self.ports.take(host, first + number if first else 0)
                else:
                    port = self.ports.take_after(host, gateway.port)
                options = self._common(workers.model) | _own_folder(tiers, name) | dict(workers.options)
                # A TLS certificate is rarely valid for the local address, so workers do not register: the gateway's file has them.
                if not gateway.tls:
                    options["gateway"] = [gateways[0].address]
                options |= {"role": workers.role, "host": host, "port": port}
                if gpu is not None:
                    options |= {"device": f"cuda:{gpu}"}
                    options |= self._gpu_share(workers, gpu, sharers[gpu])
                drain_s = options["drain_s"]
                address = f"http://{join_address(local_host(host), port)}"
                parts.append(
                    FleetPart(
                        name=name,
                        kind=PartKind.WORKER,
                        role=workers.role,
                        command=(*_STOKER, "serve", self.models[workers.model].folder, *self._flags(options)),
                        address=address,
                        ready_path="/ready",
                        stop_s=drain_s + _AFTER_DRAIN_S,
                        env=workers.env,
                        health_url=f"{address}/health",
                        spare=number >= workers.count,
                    )
                )
        return parts

    def _ray_worker(
        self,
        workers: WorkersConfig,
        tiers: Mapping[str, Any],
        name: str,
        gateways: Sequence[FleetPart],
        spare: bool,
    ) -> FleetPart:
        options = self._common(workers.model) | _own_folder(tiers, name) | dict(workers.options)
        options |= {"role": workers.role, "offline": self.config.up.offline}
        for key in ("secret_file", "host", "port"):
            options.pop(key, None)
        stop_s = options["drain_s"] + _AFTER_DRAIN_S
        names = [part.name for part in gateways]
        return self._ray.worker(workers, name, self._flags(options), names, stop_s=stop_s, spare=spare)

    def _common(self, model: str | None) -> dict[str, Any]:
        options: dict[str, Any] = {
            "served_name": [self.models[model].name],
            "drain_s": self.config.up.drain_s,
            "secret_file": str(self.paths.secret_file),
            "offline": True,  # `stoker up` has already downloaded the model
        }
        if self.config.up.cache_dir is not None:
            options["cache_dir"] = str(self.config.up.cache_dir)
        return options

    def _gpu_share(self, workers: WorkersConfig, gpu: int, sharers: int) -> dict[str, Any]:
        """Give workers on the same GPU equal shares of its memory. A worker alone on a GPU takes what is free."""
        free = self.machine.gpu_bytes
        if gpu >= len(free):
            raise ConfigError(f"workers.devices: GPU {gpu}: this machine has {len(free)} GPUs, counted from 0")
        if sharers == 1 or {"gpu_memory_gib", "kv_memory_gib", "kv_blocks"} & set(workers.options):
            return {}
        each, weights = free[gpu] // sharers, self.models[workers.model].weight_bytes
        if each < weights + _LEAST_GPU_BYTES:
            raise ConfigError(
                f"GPU {gpu} has {free[gpu] / GIB:.1f} GiB free for {sharers} workers, {each / GIB:.1f} for each: too little "
                f"with {weights / GIB:.1f} GiB of weights. Put fewer workers on it, or set their kv_memory_gib"
            )
        return {"gpu_memory_gib": round(each / GIB, 2)}

    def _flags(self, options: Mapping[str, Any]) -> list[str]:
        flags: list[str] = []
        for key, value in options.items():
            flags += self.serve[key].arguments(value)
        return flags


_STOKER = (sys.executable, "-m", "stoker.cli.main")


def _tier_options(store: FleetStore, name: str | None, mooncake: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if name is not None:
        options |= {"kv_store": name, "kv_host_gib": store.host_gib}
    if store.disk_dir is not None:
        options |= {"kv_disk": str(store.disk_dir), "kv_disk_gib": store.disk_gib}
        if store.disk_key_file is not None:
            options |= {"kv_disk_key_file": str(store.disk_key_file)}
    if mooncake is not None:
        options |= {"kv_mooncake": mooncake, "kv_mooncake_segment_gib": store.segment_gib}
        options |= {"kv_mooncake_protocol": store.protocol}
        if store.ssd_dir is not None:
            options |= {"kv_mooncake_ssd": str(store.ssd_dir)}
    return options


def _own_folder(tiers: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Give each worker its own folder for Mooncake, whose clients must not share one."""
    if "kv_mooncake_ssd" not in tiers:
        return dict(tiers)
    return {**tiers, "kv_mooncake_ssd": str(Path(tiers["kv_mooncake_ssd"]) / name)}


def _part_names(workers: Sequence[WorkersConfig]) -> list[str]:
    """Return prefill-0, prefill-1, decode-0 and so on, counted over all tables with the same name."""
    counts: Counter[str] = Counter()
    names = []
    for one in workers:
        base = one.name or one.role
        for _ in range(one.most):
            names.append(f"{base}-{counts[base]}")
            counts[base] += 1
    return names


def _gpus(workers: WorkersConfig) -> list[int]:
    """Return the GPU of each worker, if the table names GPUs."""
    return [workers.devices[n % len(workers.devices)] for n in range(workers.most)] if workers.devices else []
