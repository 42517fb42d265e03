"""FleetPart: one process of a fleet, with everything that a placement needs to start it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from stoker.up.supervisor import PartRule

# Names in commands, addresses and files for what is known only when it is known where the part runs. A placement replaces them.
PYTHON, NODE_RANK, HOST = "<python>", "<node-rank>", "<host>"  # of each node
PORT, SECOND_PORT = "<port>", "<second-port>"  # of the first node, which is the head
ENDPOINT, SECOND_ENDPOINT = "<endpoint>", "<second-endpoint>"  # HOST:PORT of the first node
SECRET_FILE, GATEWAY_FILE, GATEWAY_LIST = "<secret-file>", "<gateway-file>", "<gateway-list>"  # files of the part
MOONCAKE = "<mooncake>"  # the address of another part


class PartKind(StrEnum):
    """What a process of the fleet does."""

    STORE = "store"
    GATEWAY = "gateway"
    WORKER = "worker"


_START_RANKS = {PartKind.STORE: 0, PartKind.GATEWAY: 1, PartKind.WORKER: 2}
_STOP_RANKS = {PartKind.GATEWAY: 0, PartKind.WORKER: 1, PartKind.STORE: 2}


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """What a part needs of the machine that a placement chooses for it, and how its address follows from that machine."""

    address: str
    health_url: str
    ports: tuple[int, int] = (0, 0)  # on each node; the next free one if it is taken, and any free one for 0
    nodes: int = 1  # machines that its ranks are divided over
    cpus: int = 1  # per node
    gpus_per_node: int = 0
    device: str | None = None
    resource: str | None = None  # a custom resource that the node must have
    resource_setting: str = ""  # the setting that asks for it, for messages
    stays: bool = False  # others know its address, so a restart uses the same machine and ports while they are there
    files: Mapping[str, Path] = field(default_factory=dict)  # copied to the machine, where the names become their paths
    texts: Mapping[str, str] = field(default_factory=dict)  # files that `stoker up` writes; names in them are replaced
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # files with the addresses of these parts

    def uses_gpus(self, are_there: bool) -> bool:
        """Return True if each rank needs a GPU. `are_there`: the machines have some."""
        return self.gpus_per_node > 0 and (are_there if self.device is None else self.device.startswith("cuda"))


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
    spare: bool = False  # it starts when the autoscaler wants it
    # names in the command -> parts whose addresses they become
    addresses: Mapping[str, str] = field(default_factory=dict)
    request: NodeRequest | None = None  # None: it runs on this machine

    @property
    def rule(self) -> PartRule:
        return PartRule(self.name, _START_RANKS[self.kind], _STOP_RANKS[self.kind], self.stop_s, self.spare)

    def placed(self, values: Mapping[str, str]) -> FleetPart:
        """Return the part with its address, where `values` replace the names."""
        assert self.request is not None
        address, health_url = (filled(text, values) for text in (self.request.address, self.request.health_url))
        return replace(self, address=address, health_url=health_url)


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return the text with all names replaced by their values."""
    for name, value in values.items():
        text = text.replace(name, value)
    return text
