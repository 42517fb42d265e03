"""KV that is kept after its sequence ended, for whoever continues it elsewhere: under a lease, until pulled or expired. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.ids import BlockId, BlockKey
from stoker.kv.transfer import BlockName, KvTicket


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What this engine promises with a ticket."""

    engine_id: str
    address: str
    lease_s: float

    def ticket(self, lease_id: str, num_tokens: int) -> KvTicket:
        return KvTicket(self.engine_id, self.address, lease_id, num_tokens, self.lease_s)


@dataclass(frozen=True, slots=True)
class LeasedKv:
    """The KV of a sequence that somebody may pull: `num_ready` leading blocks are final. The last key may be that of an
    unfilled block; `names` are of the full ones that are ready."""

    lease_id: str
    keys: list[BlockKey]
    blocks: list[BlockId]
    names: list[BlockName]
    num_ready: int
    complete: bool


class HeldBlocks:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._blocks: dict[str, list[BlockId]] = {}
        self._ends_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._blocks

    def hold(self, lease_id: str, blocks: list[BlockId]) -> None:
        self._blocks[lease_id] = blocks

    def due(self, now: float) -> list[str]:
        """Leases that have ended. A lease begins when this is first asked after it was given."""
        for lease_id in self._blocks:
            self._ends_s.setdefault(lease_id, now + self._lease_s)
        return [lease_id for lease_id, end_s in self._ends_s.items() if end_s <= now]

    def take(self, lease_id: str) -> list[BlockId]:
        """Whose they are now is up to the caller; empty for a lease that is not known."""
        self._ends_s.pop(lease_id, None)
        return self._blocks.pop(lease_id, [])
