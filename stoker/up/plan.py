"""FleetConfig -> parts: what exactly is started, with which arguments, on which port, in which order.

Pure but for the ports, which are taken from whoever keeps them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from stoker.base.address import join_address, local_host
from stoker.base.errors import ConfigError
from stoker.up.config import START, FleetConfig, ServeOption, StoreConfig, WorkersConfig, merged
from stoker.up.machine import GIB, Machine
from stoker.up.ports import Ports
from stoker.up.supervisor import Rule

_LEAST_CARD_BYTES = 2 * GIB  # beside the weights: the least that an engine works with
_STORE_STOP_S = 10.0
_AFTER_DRAIN_S = 15.0  # for a part that has drained to end its processes


class Kind(StrEnum):
    STORE = "store"
    GATEWAY = "gateway"
    WORKER = "worker"


_START_RANKS = {Kind.STORE: 0, Kind.GATEWAY: 1, Kind.WORKER: 2}
_STOP_RANKS = {Kind.GATEWAY: 0, Kind.WORKER: 1, Kind.STORE: 2}


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the fleet."""

    name: str
    kind: Kind
    role: str
    command: tuple[str, ...]
    address: str  # a URL, or HOST:PORT
    ready_path: str | None  # 200 there means ready; None: so does taking a connection
    stop_s: float
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def rule(self) -> Rule:
        return Rule(self.name, _START_RANKS[self.kind], _STOP_RANKS[self.kind], self.stop_s)


@dataclass(frozen=True, slots=True)
class Model:
    """A model whose files are here."""

    folder: str
    name: str  # what clients call it
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the gateway is to be found."""

    host: str
    port: int
    tls: bool = False
    drain_s: float = 3600.0

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{join_address(local_host(self.host), self.port)}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the fleet keeps what its parts need to know."""

    run_dir: Path
    secret_file: Path
    admin_token_file: Path

    @property
    def gateway_file(self) -> Path:
        return self.run_dir / "gateway.toml"


@dataclass(frozen=True, slots=True)
class FleetPlan:
    parts: tuple[Part, ...]
    gateway: Listening
    gateway_table: dict[str, Any]  # the content of the gateway's file
    store_name: str | None  # of shared memory that outlives its users
    models: tuple[str, ...]
    wants_keys: bool  # clients must show one


@dataclass(slots=True)
class Planner:
    config: FleetConfig
    serve_options: Mapping[str, ServeOption]
    machine: Machine
    models: Mapping[str | None, Model]
    place: Place
    ports: Ports
    master: Sequence[str] = ()  # the command of Mooncake's master, but for its ports

    def plan(self, gateway: Listening) -> FleetPlan:
        """`gateway`'s port is taken already: the fleet's place has its name from it."""
        self._check_shared_memory()
        parts: list[Part] = []
        store = self.config.store
        name = store.name or f"stoker-{gateway.port}" if store.host_gib else None
        mooncake = store.mooncake
        if mooncake == START:
            parts.append(self._master(gateway.port))
            mooncake = parts[-1].address
        tiers = _tier_options(store, name, mooncake)
        workers = self._workers(gateway, tiers)
        known = [{"url": part.address, "role": part.role} for part in workers]
        table = merged(
            self.config.gateway,
            {
                "listen": {"host": gateway.host, "port": gateway.port},
                "secret_file": str(self.place.secret_file),
                "admin_token_file": str(self.place.admin_token_file),
                # They register too. Written down, they are known at once to a gateway that was started again.
                "worker": known,
            },
        )
        parts.append(self._gateway(gateway))
        parts += workers
        served = dict.fromkeys(self.models[one.model].name for one in self.config.workers)
        return FleetPlan(tuple(parts), gateway, table, name, tuple(served), bool(table.get("key")))

    def _check_shared_memory(self) -> None:
        host_gib, num_models = self.config.store.host_gib, len(self.models)
        wanted_bytes = host_gib * num_models * GIB
        asked = f"store.host_gib={host_gib:g}" + (f" for each of {num_models} models" if num_models > 1 else "")
        if wanted_bytes > self.machine.shared_bytes:
            raise ConfigError(
                f"{asked}: /dev/shm has {self.machine.shared_bytes / GIB:.2f} GiB free. "
                "Take less, or give it more (docker: --shm-size)"
            )
        if wanted_bytes > self.machine.ram_bytes:  # it fills up over hours; who asks for memory then is killed
            raise ConfigError(
                f"{asked}: {self.machine.ram_bytes / GIB:.2f} GiB of RAM are free on this machine, or in this container. "
                "Take less, or give it more (docker: --memory)"
            )

    def _master(self, gateway_port: int) -> Part:
        host = "127.0.0.1"
        port = self.ports.take_after(host, gateway_port)
        metrics_port = self.ports.take_after(host, port)
        command = (*self.master, f"--rpc_port={port}", f"--metrics_port={metrics_port}")
        return Part("mooncake", Kind.STORE, "store", command, f"{host}:{port}", None, _STORE_STOP_S)

    def _gateway(self, gateway: Listening) -> Part:
        command = (*_STOKER, "gateway", "--config", str(self.place.gateway_file))
        stop_s = gateway.drain_s + _AFTER_DRAIN_S
        return Part("gateway", Kind.GATEWAY, "gateway", command, gateway.url, "/health", stop_s)

    def _workers(self, gateway: Listening, tiers: Mapping[str, Any]) -> list[Part]:
        names = _part_names(self.config.workers)
        sharers = Counter(card for one in self.config.workers for card in _cards(one))
        parts = []
        for workers in self.config.workers:
            for number, card in enumerate(_cards(workers) or [None] * workers.count):
                name = names.pop(0)
                host = workers.options.get("host", "127.0.0.1")
                if "port" in workers.options:
                    first = workers.options["port"]
                    port = self.ports.take(host, first + number if first else 0)
                else:
                    port = self.ports.take_after(host, gateway.port)
                options = self._common(gateway, workers.model) | _own_folder(tiers, name) | workers.options
                options |= {"role": workers.role, "host": host, "port": port}
                if card is not None:
                    options |= {"device": f"cuda:{card}"}
                    options |= self._card_share(workers, card, sharers[card])
                drain_s = options["drain_s"]
                parts.append(
                    Part(
                        name=name,
                        kind=Kind.WORKER,
                        role=workers.role,
                        command=(*_STOKER, "serve", self.models[workers.model].folder, *self._flags(options, name)),
                        address=f"http://{join_address(local_host(host), port)}",
                        ready_path="/ready",
                        stop_s=drain_s + _AFTER_DRAIN_S,
                        env=workers.env,
                    )
                )
        return parts

    def _common(self, gateway: Listening, model: str | None) -> dict[str, Any]:
        options: dict[str, Any] = {
            "served_name": [self.models[model].name],
            "drain_s": self.config.up.drain_s,
            "secret_file": str(self.place.secret_file),
            "offline": True,  # all that a model needs is here already
        }
        if self.config.up.cache_dir is not None:
            options["cache_dir"] = str(self.config.up.cache_dir)
        # Its certificate is hardly made for the address by which we reach it; the gateway knows its workers anyway.
        return options if gateway.tls else options | {"gateway": [gateway.url]}

    def _card_share(self, workers: WorkersConfig, card: int, sharers: int) -> dict[str, Any]:
        """An engine alone takes what its card has left. Several must not each take that; what of its part an engine has left for
        KV it knows best itself."""
        cards = self.machine.card_bytes
        if card >= len(cards):
            raise ConfigError(f"workers.devices: card {card}: this machine has {len(cards)}, counted from 0")
        if sharers == 1 or {"card_memory_gib", "kv_memory_gib", "kv_blocks"} & set(workers.options):
            return {}
        each, weights = cards[card] // sharers, self.models[workers.model].weight_bytes
        if each < weights + _LEAST_CARD_BYTES:
            raise ConfigError(
                f"card {card} has {cards[card] / GIB:.1f} GiB free for {sharers} workers, {each / GIB:.1f} for each: with "
                f"{weights / GIB:.1f} GiB of weights too little. Put fewer workers there, or set their kv_memory_gib"
            )
        return {"card_memory_gib": round(each / GIB, 2)}

    def _flags(self, options: Mapping[str, Any], name: str) -> list[str]:
        flags: list[str] = []
        for option, value in options.items():
            if option not in self.serve_options:
                raise ConfigError(f"{name}: this version of stoker serve has no --{option.replace('_', '-')}")
            flag = self.serve_options[option].flag
            if isinstance(value, bool):
                flags += [flag] if value else []
            else:
                for one in value if isinstance(value, list) else [value]:
                    flags += [flag, str(one)]
        return flags


_STOKER = (sys.executable, "-m", "stoker.cli.main")


def _tier_options(store: StoreConfig, name: str | None, mooncake: str | None) -> dict[str, Any]:
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
    """Mooncake's clients must not write into each other's folders."""
    if "kv_mooncake_ssd" not in tiers:
        return dict(tiers)
    return {**tiers, "kv_mooncake_ssd": str(Path(tiers["kv_mooncake_ssd"]) / name)}


def _part_names(workers: Sequence[WorkersConfig]) -> list[str]:
    """prefill-0, prefill-1, decode-0: counted over all tables that have the same name."""
    counts: Counter[str] = Counter()
    names = []
    for one in workers:
        base = one.name or one.role
        for _ in range(one.count):
            names.append(f"{base}-{counts[base]}")
            counts[base] += 1
    return names


def _cards(workers: WorkersConfig) -> list[int]:
    """The card of each worker, if cards were named."""
    return [workers.devices[n % len(workers.devices)] for n in range(workers.count)] if workers.devices else []
