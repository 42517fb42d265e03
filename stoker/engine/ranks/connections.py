"""Connects a rank to the others, and compares what they were started with."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from stoker.base.config import EngineSettings
from stoker.engine.memory import ResolvedSettings
from stoker.engine.model_identity import model_digest
from stoker.engine.part import ModelSource
from stoker.engine.ranks.place import RankPlace, compare_ranks, find_place
from stoker.models.family import ModelFamily
from stoker.parallel.collectives import Collectives
from stoker.parallel.gloo import GlooWorld
from stoker.parallel.ipc import IpcCollectives
from stoker.parallel.nccl import NcclWorld
from stoker.parallel.through_host import HostCollectives

_TIMEOUT_S = 60.0  # for a rank to arrive, after all of them have been started


@dataclass(frozen=True, slots=True)
class RankConnections:
    place: RankPlace
    groups: tuple[Collectives, ...]
    world: GlooWorld  # keeps the rendezvous open

    def close(self) -> None:
        for group in self.groups:
            group.close()


def connect_ranks(
    rank: int,
    source: ModelSource,
    family: ModelFamily,
    settings: EngineSettings,
    resolved: ResolvedSettings,
    host: str,
    port: int,
    listener: socket.socket | None = None,
    interface: str | None = None,
) -> RankConnections:
    """Meet the other ranks at rank 0's port, where rank 0 has a `listener`. `interface` is this machine's address for
    connections between ranks; by default it is `host`.

    Raises ConfigError if they have other files, versions or settings.
    """
    num_ranks = resolved.layout.num_ranks
    world = GlooWorld(host, port, rank, num_ranks, _TIMEOUT_S, listener, interface)
    control = world.group("control", tuple(range(num_ranks)))
    compare_ranks(control, rank_facts(source, settings))
    groups: list[Collectives] = [control]

    def make_group(name: str, ranks: tuple[int, ...]) -> Collectives:
        on_host = world.group(name, ranks)
        groups.append(on_host)
        if resolved.device.type == "cuda":
            torch.cuda.set_device(resolved.device.index or 0)
            per_gpu = settings.ranks.per_gpu
            nccl = NcclWorld(world, resolved.device)
            groups.append(nccl.group(name, ranks) if per_gpu == 1 else HostCollectives(on_host))
            if len({one // settings.ranks_per_node for one in ranks}) == 1:  # on one machine
                groups.append(IpcCollectives(groups[-1], on_host, resolved.device, per_gpu))
        return groups[-1]

    return RankConnections(find_place(rank, family, resolved, make_group, control), tuple(groups), world)


def rank_facts(source: ModelSource, settings: EngineSettings) -> dict[str, str]:
    """Return what must be the same on all ranks, by its name."""
    compared = asdict(settings)
    for name in ("device", "spare_engine", "kernel_archive", "handoff", "nodes"):
        compared.pop(name)
    compared["store"].pop("mooncake_host")
    compared["handoff"] = (settings.handoff.serves, settings.handoff.transports)
    return {
        "weights": model_digest(source.folder, source.hf, source.random_seed),
        "draft model": "" if source.draft is None else model_digest(source.draft.folder, {}, None),
        "version": _version(),
        "settings": json.dumps(compared, sort_keys=True),
    }


def _version() -> str:
    try:
        return version("stoker")
    except PackageNotFoundError:  # the source tree on a bare machine
        return "source"
