"""What is said about KV that moves: what a block is, who may share it, and a claim on blocks that a worker holds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from stoker.base.errors import StokerError
from stoker.base.ids import BlockId, BlockKey


class TierUnavailable(StokerError):
    """A tier cannot answer at all; what it may hold is recomputed."""

    code = "kv_tier_unavailable"


class PeerUnavailable(StokerError):
    """The worker that holds the blocks cannot be reached, or will not give them; they are recomputed."""

    code = "kv_peer_unavailable"


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """What must agree before two workers may share KV; a part each, so that a mismatch can be named."""

    model: str  # digest of config and weights
    tokenizer: str  # digest
    layout: str  # of all heads: ranks of different tensor-parallel sizes may share
    dtype: str

    def differences(self, other: KvIdentity) -> list[str]:
        return [
            f"{part.name}: {getattr(self, part.name)} here, {getattr(other, part.name)} there"
            for part in fields(self)
            if getattr(self, part.name) != getattr(other, part.name)
        ]


@dataclass(frozen=True, slots=True)
class BlockName:
    """A full block, besides its bytes. `salt`: of a chain's first block, a hash of the salt that it is rooted in ("" if none);
    None for all that follow."""

    key: BlockKey
    parent: BlockKey
    token_ids: tuple[int, ...]
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class OfferedBlock:
    """A block that was just named, kept until somebody has copied its bytes."""

    name: BlockName
    block: BlockId


@dataclass(frozen=True, slots=True)
class KvTicket:
    """A claim on the KV of one sequence's first `num_tokens` tokens, until it is pulled or the lease ends. The last block may
    be unfilled."""

    engine_id: str  # one life of one engine: at the same address, a later one has another
    address: str  # host:port of its KV server
    lease_id: str
    num_tokens: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class KvLoad:
    """Blocks to be filled from elsewhere: `keys[i]`, block `first + i` of its sequence, goes into `blocks[i]`. `num_stored`
    of them, leading, are worth taking from a tier; all of them can be had from the ticket's worker, which alone has an
    unfilled last block."""

    load_id: int
    first: int
    keys: list[BlockKey]
    blocks: list[BlockId]
    num_stored: int
    ticket: KvTicket | None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """`num_loaded` leading blocks hold what their keys say; `num_pulled` of them came from the ticket's worker."""

    load_id: int
    num_loaded: int
    num_pulled: int
