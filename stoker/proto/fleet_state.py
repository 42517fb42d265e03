"""`state.json`: what `stoker up` writes about a running fleet, and `stoker status` reads.

Fields have defaults, because another version of stoker may have written the file.
"""

from __future__ import annotations

import msgspec


class PartInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the fleet."""

    name: str
    kind: str = ""
    role: str = ""
    address: str = ""
    phase: str = ""
    pid: int | None = None  # on the machine of `stoker up`
    nodes: list[str] = []  # addresses of its machines, if it runs on others
    restarts: int = 0
    answers: bool = True  # the last health check
    hangs: int = 0  # how often it was killed because it did not answer
    last_code: int | None = None  # the exit code of the process before
    log: str = ""


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    pid: int  # of `stoker up`
    started_at: float  # seconds since 1970
    gateway_url: str  # the first gateway; empty until it is known where it runs
    admin_token_file: str = ""
    secret_file: str = ""
    store_name: str | None = None
    log_dir: str = ""
    models: list[str] = []
    parts: list[PartInfo] = []

    def has_gateway(self, url: str) -> bool:
        """Return True if the fleet runs the gateway at this URL."""
        return self.gateway_url == url or any(part.kind == "gateway" and part.address == url for part in self.parts)


def encode_fleet_state(state: FleetState) -> bytes:
    return msgspec.json.format(msgspec.json.encode(state))


def decode_fleet_state(data: bytes) -> FleetState:
    """Raises `msgspec.MsgspecError` if `data` is not a fleet's state."""
    return msgspec.json.decode(data, type=FleetState)
