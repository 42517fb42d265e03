"""A KV server in a process of its own, with blocks of known contents, controlled by the test."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from kv.forked import FORKED

from stoker.base.config import HandoffSettings
from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.layout import KvGroup, KvLayout
from stoker.kv.blocks.transfer import BlockName, KvIdentity, KvTicket
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.lease_book import LeaseBook, LeaseView
from stoker.kv.peer.peer_client import PeerClient
from stoker.kv.peer.peer_server import PeerServer

PATIENCE_S = 60.0  # for events that happen at once, however busy the machine is
LAYOUT = KvLayout.of(num_layers=3, num_heads=4, width=8, block_tokens=16, dtype="float32", dtype_bytes=4)
SEED = 5


def identity_of(layout: KvLayout) -> KvIdentity:
    return KvIdentity(model="m", tokenizer="t", layout=layout.identity, dtype=layout.dtype)


def rank(layout: KvLayout, number: int, tp: int, pp: int = 1) -> KvLayout:
    """The layout of a rank: one of `tp` in one of `pp` stages."""
    heads, stage = layout.num_heads // tp, number // tp

    def held(group: KvGroup) -> KvGroup:
        count = group.num_layers
        return replace(group, held=range(count * stage // pp, count * (stage + 1) // pp)) if pp > 1 else group

    groups = tuple(map(held, layout.groups))
    return replace(layout, groups=groups, first_head=number % tp * heads, held_heads=heads)


def contents(layout: KvLayout, num_blocks: int, seed: int = SEED) -> torch.Tensor:
    """The blocks of a rank, [blocks, values]. Ranks of one model hold slices of the same blocks."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.zeros(num_blocks, layout.block_bytes // layout.dtype_bytes, dtype=getattr(torch, layout.dtype))
    first = 0
    for group in layout.groups:
        shape = (num_blocks, group.num_layers, 2, group.num_heads, layout.block_tokens, group.width)
        each = group.num_heads // layout.model_heads
        heads = slice(each * layout.first_head, each * layout.end_head)
        own = torch.randn(shape, generator=generator)[:, group.layers.start : group.layers.stop, :, heads]
        own = own.flatten(1)
        blocks[:, first : first + own.shape[1]] = own
        first += own.shape[1]
    return blocks


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def keys(count: int, first: int = 0) -> list[BlockKey]:
    return [key(first + number) for number in range(count)]


def names(count: int) -> list[BlockName]:
    return [
        BlockName(key(at), key(at - 1) if at else BlockKey(b"root" * 4), (at, at + 1, 7), "s" if at == 0 else None)
        for at in range(count)
    ]


def block_ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def raw(blocks: torch.Tensor) -> bytes:
    return bytes(blocks.cpu().contiguous().view(-1).view(torch.uint8).numpy())


@dataclass(frozen=True)
class ServerSetup:
    layout: KvLayout = LAYOUT
    num_blocks: int = 32
    settings: HandoffSettings = field(default_factory=HandoffSettings)
    identity: KvIdentity | None = None
    seed: int = SEED
    engine_id: str | None = None
    device: str = "cpu"


class Leases(LeaseBook):
    """Counts the lookups, so that a test can wait until a client waits."""

    num_looks = 0

    def view(self, *args: Any, **kwargs: Any) -> LeaseView:
        self.num_looks += 1
        return super().view(*args, **kwargs)


class World:
    """A server and its leases, in this process."""

    def __init__(self, setup: ServerSetup) -> None:
        self.kv = DeviceKv(setup.layout, setup.num_blocks, torch.device(setup.device))
        self.kv.blocks.copy_(contents(setup.layout, setup.num_blocks, setup.seed))
        self.leases = Leases()
        self.released: list[str] = []
        identity = setup.identity or identity_of(setup.layout)
        self.server = PeerServer(
            self.kv, identity, self.leases, setup.settings, self.released.append, engine_id=setup.engine_id
        )

    def ticket(self, lease_id: str = "L") -> KvTicket:
        return KvTicket(self.server.engine_id, self.server.address, lease_id, 100, 30.0)

    def join(self, addresses: list[str]) -> None:
        """Become the first of several ranks."""
        self.server.other_ranks = addresses

    def spoil(self, block: int) -> None:
        """Change the block's bytes after its checksum was computed."""
        wait_until(lambda: self.leases.next_unchecked(1, 0.0) is None)
        self.kv.blocks[block].view(-1)[-1:] += 1.0
        self.kv.blocks[block].cpu()  # wait for the GPU

    def close(self) -> None:
        self.server.close()


def _process(pipe: Connection, setup: ServerSetup) -> None:
    torch.set_num_threads(1)
    world = World(setup)
    pipe.send(world.ticket())
    while True:
        try:
            target, name, args, kwargs = pipe.recv()
        except EOFError:
            return
        owner = {"world": world, "leases": world.leases, "server": world.server}[target]
        found = getattr(owner, name)
        pipe.send(found(*args, **kwargs) if callable(found) else found)


class RemoteServer:
    def __init__(self, setup: ServerSetup) -> None:
        # A process that was forked cannot use a GPU.
        context = FORKED if setup.device == "cpu" else multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_process, args=(theirs, setup), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(PATIENCE_S), "the server does not start"
        self.ticket: KvTicket = self._pipe.recv()

    def __call__(self, target: str, name: str, *args: Any, **kwargs: Any) -> Any:
        self._pipe.send((target, name, args, kwargs))
        assert self._pipe.poll(PATIENCE_S), f"{target}.{name} does not come back"
        return self._pipe.recv()

    def lease(self, *args: Any, **kwargs: Any) -> None:
        self("leases", "put", *args, **kwargs)

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)

    def close(self) -> None:
        self._pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.kill()


class Puller:
    """A client and its pool, in this process."""

    def __init__(
        self,
        layout: KvLayout = LAYOUT,
        num_blocks: int = 32,
        settings: HandoffSettings | None = None,
        identity: KvIdentity | None = None,
        device: str = "cpu",
    ) -> None:
        self.kv = DeviceKv(layout, num_blocks, torch.device(device))
        self.client = PeerClient(self.kv, identity or identity_of(layout), settings or HandoffSettings())

    def pull(
        self,
        ticket: KvTicket,
        wanted: Sequence[BlockKey],
        into: Sequence[BlockId],
        first: int = 0,
        within_s: float = PATIENCE_S,
    ) -> list[bool]:
        return self.client.pull(ticket, first, wanted, into, time.monotonic() + within_s)

    def close(self) -> None:
        self.client.close()


@contextmanager
def closing(*things: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for thing in things:
            thing.close()


def wait_until(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "the condition did not become true in time"
        time.sleep(0.01)
