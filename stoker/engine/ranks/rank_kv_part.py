"""RankKvPart: what a rank other than rank 0 does with KV. It has the tiers of its part of each block, and a KV server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError
from stoker.base.ids import BlockId, BlockKey
from stoker.engine.store import build_store
from stoker.kv.blocks.transfer import BlockName, KvIdentity, KvLoad
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.lease_book import LeaseBook
from stoker.kv.peer.peer_server import PeerServer
from stoker.parallel.kv_frame import KvUpdate, LeaseChange
from stoker.parallel.rank_link import Kind, LinkEnd, LinkMessage

_MAX_PORT = 65535


@dataclass(slots=True)
class _KnownLease:
    """The state of a lease in one KV set."""

    keys: list[BlockKey] = field(default_factory=list)
    blocks: list[BlockId] = field(default_factory=list)
    names: list[BlockName] = field(default_factory=list)


class RankKvPart:
    """Called by the rank's loop. The store's threads report what they have done."""

    def __init__(
        self,
        settings: EngineSettings,
        kv: DeviceKv,
        identity: KvIdentity,
        rank: int,
        engine_id: str,
        share: float,
        report: Callable[[LinkMessage], None],
    ) -> None:
        """`share` is this rank's part of the capacity of the tiers. `report` sends to rank 0, from any thread."""
        self._report = report
        self._reporting = threading.Lock()
        self._num_copied: dict[int, int] = {}
        self._known: dict[str, dict[int, _KnownLease]] = {}
        self._closing: set[str] = set()
        self.leases = LeaseBook()
        # Rank 0 has decided that a load is worth it, by the prefill rate of all ranks. Without a rate, this rank refuses only a
        # tier that is slower than any prefill.
        options = (identity, identity.fingerprint, lambda: None, self._report_results)
        self.store = build_store(settings, kv, *options, share=share, reports_events=False)
        self.server: PeerServer | None = None
        handoff = settings.handoff
        if handoff.serves:
            own = replace(handoff, port=_port_of(handoff.port, rank))
            self.server = PeerServer(kv, identity, self.leases, own, lambda lease_id: None, engine_id)

    def start_loads(self, loads: Iterable[KvLoad]) -> None:
        """Start the loads of a plan that was just launched."""
        for load in loads:
            self.store.start_load(load)

    def apply(self, update: KvUpdate) -> None:
        """Do what rank 0 has decided."""
        self.store.offer(update.offers)
        for change in update.leases:
            self._put(change)
        self._closing.update(update.closing)
        for hint in update.hints:
            self.store.prefetch(hint.token_ids, hint.salt, hint.ticket)
        self.poll()

    def poll(self) -> None:
        """Close leases that peers were reading when rank 0 closed them."""
        for lease_id in [one for one in self._closing if self.leases.close(one)]:
            self._closing.discard(lease_id)
            self._known.pop(lease_id, None)
            self._report(LinkMessage(Kind.CLOSED, text=lease_id))

    def close(self) -> None:
        """Write what waits for the tiers, and stop."""
        if self.server is not None:
            self.server.close()
        self.store.close()
        self._report(LinkMessage(Kind.WRITTEN))

    def _put(self, change: LeaseChange) -> None:
        lease = self._known.setdefault(change.lease_id, {}).setdefault(change.kv_set, _KnownLease())
        lease.keys[change.num_same :] = change.keys
        lease.blocks[change.num_same :] = change.blocks
        lease.names[change.num_same :] = change.names
        state = (lease.keys, lease.blocks, change.num_ready, change.complete, lease.names, change.kv_set)
        self.leases.put(change.lease_id, *state)

    def _report_results(self) -> None:
        """Report what the store has done. Called from its threads."""
        with self._reporting, suppress(LinkEnd):  # rank 0 has ended, and this process ends too
            for result in self.store.take_finished_loads():
                rest = f"{result.num_pulled} {int(result.local_loaded)}"
                self._report(LinkMessage(Kind.LOADED, result.load_id, result.num_loaded, rest))
            changed = set()
            for block in self.store.take_copied():
                self._num_copied[block.kv_set] = self._num_copied.get(block.kv_set, 0) + 1
                changed.add(block.kv_set)
            for kv_set in changed:
                self._report(LinkMessage(Kind.COPIED, kv_set, self._num_copied[kv_set]))


def _port_of(first: int, rank: int) -> int:
    """Return the port of a rank's KV server. `first` is rank 0's; 0: any free port."""
    if first and first + rank > _MAX_PORT:
        raise ConfigError(
            f"--kv-port {first}: rank {rank} needs port {first + rank}; use a number below {_MAX_PORT - rank}"
        )
    return first + rank if first else 0
