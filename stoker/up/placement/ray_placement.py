"""RayPlacement: parts run on the nodes of a Ray cluster, if they have a request; the others run on this machine.

Ray chooses the nodes, starts an actor for each process of a part (ray_actor.py) and reports when one is lost. The supervisor then
starts the part again, and Ray places it on nodes that are left. A part whose ranks span several nodes is a placement group with a
bundle on each of them. No request passes through Ray.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

from stoker.base.errors import ConfigError
from stoker.base.extras import install_command
from stoker.base.fleet_key import is_loopback
from stoker.up.part import FleetPart
from stoker.up.part_log import PartLog
from stoker.up.placement.local import LocalPart, LocalPlacement
from stoker.up.placement.ray_lease import RayLease
from stoker.up.placement.ray_nodes import own_address
from stoker.up.placement.ray_part import RayPart
from stoker.up.rotating_file import RotatingFile

_CONNECT_S = 5.0


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
        self._kept: dict[str, RayLease] = {}  # of parts that stay where they are, while they are restarted
        _check_reachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"up.ray_address={address!r}: {str(error).splitlines()[0]} Start Ray on this machine with `ray start`, or "
                "give the address of a cluster"
            ) from error

    def reach(self, host: str) -> str:
        own = own_address(self._ray)
        if not is_loopback(host):
            return own if host in ("0.0.0.0", "::", "") else host
        addresses = {node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]} - {own}
        if others := sorted(address for address in addresses if not is_loopback(address)):
            raise ConfigError(
                f"gateway.listen.host={host}: workers on {others[0]} cannot reach the gateway there; use 0.0.0.0 or {own}"
            )
        return host

    async def start(self, part: FleetPart, file: RotatingFile) -> RayPart | LocalPart:
        request = part.request
        if request is None:
            return await self._local.start(part, file)
        files = {name: path.read_bytes() for name, path in request.files.items()}
        lease = self._kept.pop(part.name, None) or RayLease(self._ray, request)

        def keep(lease: RayLease) -> None:
            if request.stays:
                self._kept[part.name] = lease
            else:
                lease.release()

        log = PartLog(file)
        with log.writer():
            return RayPart(part, request, files, log, lease, self._ray, keep)

    def close(self) -> None:
        for lease in self._kept.values():
            lease.release()
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
