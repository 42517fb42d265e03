"""FleetConfig -> FleetPlan: the processes to start, with their arguments, ports and order.

It does no I/O, except that `Ports` reserves ports.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from stoker.base.address import join_address, local_host
from stoker.base.errors import ConfigError
from stoker.base.paths import expand_home
from stoker.base.settings import Declared, merged
from stoker.up.config import RAY, START, FleetConfig, FleetStore, WorkersConfig
from stoker.up.machine import GIB, Machine
from stoker.up.ports import Ports
from stoker.up.supervisor import PartRule

_LEAST_GPU_BYTES = 2 * GIB  # the least that an engine needs besides its weights
_STORE_STOP_S = 10.0
_AFTER_DRAIN_S = 15.0  # time to exit after a drain

# Arguments of a command that are not known before it is known where the part runs. A placement fills them in.
PYTHON, HOST, PORT, HEAD, NODE_RANK, SECRET_FILE = (
    "<python>",
    "<host>",
    "<port>",
    "<head>",
    "<node-rank>",
    "<secret-file>",
)


class PartKind(StrEnum):
    """What a process of the fleet does."""

    STORE = "store"
    GATEWAY = "gateway"
    WORKER = "worker"


_START_RANKS = {PartKind.STORE: 0, PartKind.GATEWAY: 1, PartKind.WORKER: 2}
_STOP_RANKS = {PartKind.GATEWAY: 0, PartKind.WORKER: 1, PartKind.STORE: 2}


@dataclass(frozen=True, slots=True)
class FleetPart:
    """One process of the fleet."""

    name: str
    kind: PartKind
    role: str
    command: tuple[str, ...]
    address: str  # a URL, or HOST:PORT; empty until it is known where the part runs
    ready_path: str | None  # the part is ready when this path answers 200; None: when it accepts a connection
    stop_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    health_url: str | None = None  # asked while the part runs; None: it is not asked
    nodes: int = 1  # machines that its ranks are divided over
    gpus_per_node: int = 1
    device: str | None = None
    files: Mapping[str, Path] = field(default_factory=dict)  # the names in the command are replaced by these paths
    spare: bool = False  # it starts when the autoscaler wants it

    def uses_gpus(self, are_there: bool) -> bool:
        """Return True if each rank needs a GPU. `are_there`: there are some."""
        return are_there if self.device is None else self.device.startswith("cuda")

    @property
    def rule(self) -> PartRule:
        return PartRule(self.name, _START_RANKS[self.kind], _STOP_RANKS[self.kind], self.stop_s, self.spare)


@dataclass(frozen=True, slots=True)
class FleetModel:
    """A model whose files are on this machine."""

    folder: str
    name: str  # what clients call it
    weight_bytes: int = 0  # size of the weight files
    cpu_bytes: int = 0  # RAM for the weights, if it runs on a CPU


@dataclass(frozen=True, slots=True)
class Listening:
    """The address on which the gateway listens."""

    host: str
    port: int
    tls: bool = False
    drain_s: float = 3600.0  # the notice to load balancers included

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{join_address(local_host(self.host), self.port)}"


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
    gateway_table: dict[str, Any]  # the content of the gateway's file
    store_name: str | None  # name of the host tier's shared memory, which stays when its users exit
    models: tuple[str, ...]
    needs_api_key: bool  # whether clients need an API key
    is_scaled: bool = False  # the gateway's autoscaler starts and ends workers


@dataclass(slots=True)
class Planner:
    """Turns a fleet's settings into a plan for this machine."""

    config: FleetConfig
    serve: Mapping[str, Declared]  # the settings of `stoker serve`, by their keys in [[workers]]
    machine: Machine
    models: Mapping[str | None, FleetModel]
    paths: FleetPaths
    ports: Ports
    master: Sequence[str] = ()  # the command of the Mooncake master, without its ports
    reach: Callable[[str], str] = local_host  # where workers reach a server of this machine that listens on a host

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
            mooncake = parts[-1].address
        tiers = _tier_options(store, name, mooncake)
        workers = self._workers(gateway, tiers)
        # The autoscaler's workers come and go, so that the gateway learns of them only when they register.
        addressed = [] if self.config.is_scaled else [part for part in workers if part.address and not part.spare]
        known = [{"url": part.address, "role": part.role} for part in addressed]
        table = merged(
            self.config.gateway,
            {
                "listen": {"host": gateway.host, "port": gateway.port},
                "secret_file": str(self.paths.secret_file),
                "admin_token_file": str(self.paths.admin_token_file),
                # The workers also register themselves. Listed here, a restarted gateway knows them at once.
                **({"worker": known} if known else {}),
            },
        )
        parts.append(self._gateway(gateway))
        parts += workers
        served = dict.fromkeys(name for one in self.config.workers for name in self._served_names(one))
        return FleetPlan(
            tuple(parts), gateway, table, name, tuple(served), bool(table.get("key")), self.config.is_scaled
        )

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
        host = "127.0.0.1"
        port = self.ports.take_after(host, gateway_port)
        metrics_port = self.ports.take_after(host, port)
        command = (*self.master, f"--rpc_port={port}", f"--metrics_port={metrics_port}")
        health_url = f"http://{join_address(host, metrics_port)}/health"
        address = join_address(host, port)
        return FleetPart(
            "mooncake", PartKind.STORE, "store", command, address, None, _STORE_STOP_S, health_url=health_url
        )

    def _gateway(self, gateway: Listening) -> FleetPart:
        command = (*_STOKER, "gateway", "--config", str(self.paths.gateway_file))
        stop_s = gateway.drain_s + _AFTER_DRAIN_S
        health_url = f"{gateway.url}/health"
        return FleetPart(
            "gateway", PartKind.GATEWAY, "gateway", command, gateway.url, "/health", stop_s, health_url=health_url
        )

    def _workers(self, gateway: Listening, tiers: Mapping[str, Any]) -> list[FleetPart]:
        names = _part_names(self.config.workers)
        if self.config.up.placement == RAY:
            return [
                self._placed_worker(gateway, workers, tiers, names.pop(0), number >= workers.count)
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
                options = self._common(gateway, workers.model) | _own_folder(tiers, name) | dict(workers.options)
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

    def _placed_worker(
        self, gateway: Listening, workers: WorkersConfig, tiers: Mapping[str, Any], name: str, spare: bool
    ) -> FleetPart:
        """Return a worker that runs on a machine that is not known yet. Its model is found there, not here."""
        if gateway.tls:
            raise ConfigError(
                'gateway.listen.tls_cert: with up.placement="ray", workers register with the gateway, which needs a plain port; '
                "terminate TLS in front of it"
            )
        url = f"http://{join_address(self.reach(gateway.host), gateway.port)}"
        options = self._common(gateway, workers.model) | _own_folder(tiers, name) | dict(workers.options)
        options |= {"role": workers.role, "offline": self.config.up.offline, "gateway": [url]}
        for key in ("secret_file", "host", "port"):
            options.pop(key, None)
        where = ["--host", HOST, "--port", PORT, "--secret-file", SECRET_FILE]
        nodes = options.get("nodes", 1)
        if nodes > 1:
            where += ["--head", HEAD, "--node-rank", NODE_RANK]
        return FleetPart(
            name=name,
            kind=PartKind.WORKER,
            role=workers.role,
            command=(PYTHON, *_STOKER[1:], "serve", *_named(workers.model), *self._flags(options), *where),
            address="",
            ready_path="/ready",
            stop_s=options["drain_s"] + _AFTER_DRAIN_S,
            env=workers.env,
            nodes=nodes,
            gpus_per_node=options.get("tp", 1) * options.get("pp", 1) // nodes // options.get("ranks_per_gpu", 1),
            device=options.get("device"),
            files={SECRET_FILE: self.paths.secret_file},
            spare=spare,
        )

    def _common(self, gateway: Listening, model: str | None) -> dict[str, Any]:
        options: dict[str, Any] = {
            "served_name": [self.models[model].name],
            "drain_s": self.config.up.drain_s,
            "secret_file": str(self.paths.secret_file),
            "offline": True,  # `stoker up` has already downloaded the model
        }
        if self.config.up.cache_dir is not None:
            options["cache_dir"] = str(self.config.up.cache_dir)
        # A TLS certificate is rarely valid for the local address, so workers do not register; the gateway has them in its file.
        return options if gateway.tls else options | {"gateway": [gateway.url]}

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


def _named(model: str | None) -> list[str]:
    """Return the model as an argument. A folder of this machine must be at the same path on the others."""
    if model is None:
        return []
    folder = expand_home(model)
    return [str(folder.absolute()) if folder.exists() else model]


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
