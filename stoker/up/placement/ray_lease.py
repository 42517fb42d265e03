"""RayLease: the nodes that Ray has given to a part, with an actor and reserved ports on each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from stoker.base.address import join_address
from stoker.up.part import (
    ENDPOINT,
    HOST,
    NODE_RANK,
    PORT,
    SECOND_ENDPOINT,
    SECOND_PORT,
    NodeRequest,
)
from stoker.up.placement.ray_actor import PartActor

_PATIENCE_S = 10.0  # after this time without a place, the log says what the part waits for
_RESOURCE_UNITS = 1.0  # what a part takes of a custom resource


class RayLease:
    """It lasts until `release`, or until one of its nodes or actors is lost."""

    def __init__(self, ray: Any, request: NodeRequest) -> None:
        self.actors: list[Any] = []
        self._ray, self._request = ray, request
        self._group: Any = None
        self._places: list[tuple[str, list[int]]] = []

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses of the nodes; empty until it is known."""
        return tuple(host for host, _ in self._places)

    async def acquire(self, say: Callable[[str], None]) -> None:
        """Create the actors, and wait until Ray has found nodes for them. Does nothing if this was done before."""
        if self._places:
            return
        request, ray = self._request, self._ray
        needs: dict[str, float] = {"CPU": request.cpus}
        if request.uses_gpus(bool(ray.cluster_resources().get("GPU"))):
            needs["GPU"] = request.gpus_per_node
        if request.resource is not None:
            needs[request.resource] = _RESOURCE_UNITS
        if request.nodes > 1:
            self._group = ray.util.placement_group([needs] * request.nodes, strategy="STRICT_SPREAD")
            await self._patiently(self._group.ready(), f"{request.nodes} nodes with {needs} each", needs, say)
        for number in range(request.nodes):
            strategy: Any = "SPREAD"
            if self._group is not None:
                strategies = ray.util.scheduling_strategies
                strategy = strategies.PlacementGroupSchedulingStrategy(self._group, number)
            kind = ray.remote(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                resources={name: units for name, units in needs.items() if name == request.resource},
                scheduling_strategy=strategy,
                max_restarts=0,
            )(PartActor)
            self.actors.append(kind.remote())
        self._places = [
            await self._patiently(actor.reserve.remote(list(request.ports)), f"a node with {needs}", needs, say)
            for actor in self.actors
        ]

    def values(self, node: int) -> dict[str, str]:
        """Return what the names in the part's command and addresses become on a node."""
        host, ports = self._places[0]
        return {
            HOST: self._places[node][0],
            PORT: str(ports[0]),
            SECOND_PORT: str(ports[1]),
            ENDPOINT: join_address(host, ports[0]),
            SECOND_ENDPOINT: join_address(host, ports[1]),
            NODE_RANK: str(node),
        }

    def release(self) -> None:
        """End the actors, and with them their processes, and give back what Ray reserved."""
        for actor in self.actors:
            with suppress(Exception):  # whatever Ray has to say of an actor that is gone, or of a cluster
                self._ray.kill(actor)
        if self._group is not None:
            with suppress(Exception):
                self._ray.util.remove_placement_group(self._group)

    async def _patiently(self, ref: Any, place: str, needs: dict[str, float], say: Callable[[str], None]) -> Any:
        future = asyncio.ensure_future(resolved(ref))
        done, _ = await asyncio.wait({future}, timeout=_PATIENCE_S)
        if not done:
            available = self._ray.available_resources()
            free = {name: available.get(name, 0) for name in {"CPU": 0, "GPU": 0, **needs}}
            setting = self._request.resource_setting if self._request.resource is not None else ""
            asked = f" (see {setting}={self._request.resource!r})" if setting else ""
            say(f"waits for Ray to find {place}{asked}; the cluster has {free} free")
        return await future


async def resolved(ref: Awaitable[Any]) -> Any:
    return await ref
