"""RayPlacement: workers run on the nodes of a Ray cluster; the gateway and the KV store stay on this machine.

Ray chooses the nodes, starts an actor for each process of a worker (ray_actor.py) and reports when one is lost. The supervisor
then starts the worker again, and Ray places it on nodes that are left. A worker whose ranks span several nodes is a placement group
with a bundle on each of them. No request passes through Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from stoker.base.address import join_address
from stoker.base.errors import ConfigError
from stoker.base.extras import install_command
from stoker.base.fleet_key import is_loopback
from stoker.up.part_log import PartLog
from stoker.up.placement.local import LocalPart, LocalPlacement
from stoker.up.placement.ray_actor import PartActor
from stoker.up.plan import HEAD, HOST, NODE_RANK, PORT, FleetPart, PartKind
from stoker.up.rotating_file import RotatingFile
from stoker.up.supervisor import StopMode

_POLL_S = 5.0  # a call of an actor that has no news lasts this long
_PATIENCE_S = 10.0  # after this time without a place, the log says what the worker waits for
_CUT_OFF_S, _RETRY_S = 10.0, 0.5  # Ray declares an actor dead within seconds, if its node or process is gone
_CONNECT_S = 5.0
_LAST_LINES_S = 1.0
_LOST = 1  # the exit code of a part whose node is lost


class RayPart:
    """A worker on one or several nodes: its processes, each in an actor."""

    def __init__(self, part: FleetPart, log: PartLog, ray: Any) -> None:
        self._part, self._log, self._ray = part, log, ray
        self._log_fd = os.dup(log.write_fd)
        self._actors: list[Any] = []
        self._group: Any = None
        self._pids: list[int] = []
        self._is_stopping = False
        self._life = asyncio.create_task(self._run(), name=f"ray-{part.name}")

    @property
    def log(self) -> PartLog:
        return self._log

    @property
    def part(self) -> FleetPart:
        return self._part

    @property
    def where(self) -> str:
        return "Ray " + ", ".join(map(str, self._pids)) if self._pids else "Ray"

    @property
    def pid(self) -> int | None:
        return None

    async def wait(self) -> int:
        try:
            code = await self._life
        except asyncio.CancelledError:
            if not self._life.cancelled():
                raise
            code = -9
        finally:
            self._let_go()
        await asyncio.to_thread(self._log.finish, _LAST_LINES_S)
        return code

    def stop(self, how: StopMode) -> None:
        self._is_stopping = True
        if how is StopMode.KILL or not self._pids:
            self._life.cancel()
        else:  # the head of a worker on several nodes stops the others
            self._actors[0].stop.remote(int(how))

    async def _run(self) -> int:
        try:
            await self._place()
            await self._start_processes()
            return await self._watch()
        except self._ray.exceptions.RayError as error:
            self._say(f"a Ray node or actor is lost: {str(error).strip().splitlines()[0]}")
            return _LOST

    async def _place(self) -> None:
        """Create the actors, and wait until Ray has found nodes for them."""
        part, ray = self._part, self._ray
        needs: dict[str, float] = {"CPU": 1}
        if part.uses_gpus(bool(ray.cluster_resources().get("GPU"))):
            needs["GPU"] = part.gpus_per_node
        options: dict[str, Any] = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0)}
        if part.nodes > 1:
            self._group = ray.util.placement_group([needs] * part.nodes, strategy="STRICT_SPREAD")
            await self._patiently(self._group.ready(), f"{part.nodes} nodes with {needs} each")
        for number in range(part.nodes):
            strategy: Any = "SPREAD"
            if self._group is not None:
                strategies = ray.util.scheduling_strategies
                strategy = strategies.PlacementGroupSchedulingStrategy(self._group, number)
            kind = ray.remote(**options, scheduling_strategy=strategy, max_restarts=0)(PartActor)
            self._actors.append(kind.remote())
        self._places = [
            await self._patiently(actor.reserve.remote(2), f"a node with {needs}") for actor in self._actors
        ]

    async def _patiently(self, ref: Any, needs: str) -> Any:
        future = asyncio.ensure_future(_resolved(ref))
        done, _ = await asyncio.wait({future}, timeout=_PATIENCE_S)
        if not done:
            available = self._ray.available_resources()
            free = {name: available.get(name, 0) for name in ("CPU", "GPU")}
            self._say(f"waits for Ray to find {needs}; the cluster has {free} free")
        return await future

    async def _start_processes(self) -> None:
        host, (port, head_port) = self._places[0]
        files = {name: path.read_bytes() for name, path in self._part.files.items()}
        for number, (actor, place) in enumerate(zip(self._actors, self._places, strict=True)):
            values = {HOST: place[0], PORT: str(port), HEAD: join_address(host, head_port), NODE_RANK: str(number)}
            command = [values.get(argument, argument) for argument in self._part.command]
            self._pids.append(await actor.start.remote(command, dict(self._part.env), files))
        address = f"http://{join_address(host, port)}"
        self._part = replace(self._part, address=address, health_url=f"{address}/health")

    async def _watch(self) -> int:
        """Return the exit code of the first process that ends; of the head, if the part is being stopped."""
        watches = [asyncio.create_task(self._follow(actor)) for actor in self._actors]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return await watches[0] if self._is_stopping else done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _follow(self, actor: Any) -> int:
        """Return the exit code of a process. An actor that cannot be reached may only be cut off for a moment."""
        lost_s: float | None = None
        while True:
            try:
                lines, code = await _resolved(actor.poll.remote(_POLL_S))
                lost_s = None
            except self._ray.exceptions.ActorUnavailableError:
                lost_s = lost_s or time.monotonic()
                if time.monotonic() - lost_s > _CUT_OFF_S:
                    raise
                await asyncio.sleep(_RETRY_S)
                continue
            if lines:
                os.write(self._log_fd, lines)
            if code is not None:
                return int(code)

    def _say(self, text: str) -> None:
        os.write(self._log_fd, f"stoker up: {text}\n".encode())

    def _let_go(self) -> None:
        """End the actors, and with them their processes, and give back what Ray reserved."""
        os.close(self._log_fd)
        for actor in self._actors:
            with suppress(Exception):  # whatever Ray has to say of an actor that is gone, or of a cluster
                self._ray.kill(actor)
        if self._group is not None:
            with suppress(Exception):
                self._ray.util.remove_placement_group(self._group)


class RayPlacement:
    def __init__(self, address: str, local: LocalPlacement) -> None:
        """Connect to a cluster that runs. Raises ConfigError if there is none."""
        try:
            import ray
            import ray.util.scheduling_strategies
        except ImportError as error:
            raise ConfigError(f'up.placement="ray" needs Ray: {install_command("ray")}') from error
        self._ray: Any = ray
        self._local = local
        _check_reachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"up.ray_address={address!r}: {str(error).splitlines()[0]} Start Ray on this machine with `ray start`, or "
                "give the address of a cluster"
            ) from error

    def reach(self, host: str) -> str:
        own = str(self._ray.util.get_node_ip_address())
        if not is_loopback(host):
            return own if host in ("0.0.0.0", "::", "") else host
        addresses = {node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]} - {own}
        if others := sorted(address for address in addresses if not is_loopback(address)):
            raise ConfigError(
                f"gateway.listen.host={host}: workers on {others[0]} cannot reach the gateway there; use 0.0.0.0 or {own}"
            )
        return host

    async def start(self, part: FleetPart, file: RotatingFile) -> RayPart | LocalPart:
        if part.kind is not PartKind.WORKER:
            return await self._local.start(part, file)
        log = PartLog(file)
        with log.writer():
            return RayPart(part, log, self._ray)

    def close(self) -> None:
        self._ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise ConfigError if nothing answers at HOST:PORT. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():  # `auto`
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(
            f"up.ray_address={address!r} cannot be reached: {error}; start Ray there with `ray start --head`"
        ) from error


async def _resolved(ref: Any) -> Any:
    return await ref
