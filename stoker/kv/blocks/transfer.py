"""Types that describe KV on its way between devices, tiers and workers, and the errors of a transfer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from hashlib import sha256

from stoker.base.errors import StokerError
from stoker.base.ids import BlockId, BlockKey


class TierUnavailable(StokerError):
    """A tier cannot answer. The blocks that it may hold are recomputed."""

    code = "kv_tier_unavailable"


class PeerUnavailable(StokerError):
    """The worker that holds the blocks cannot be reached or refuses to send them. They are recomputed."""

    code = "kv_peer_unavailable"


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """What must be equal before two workers may share KV. The fields are compared one by one, so that an error can name
    the one that differs."""

    model: str  # digest of config and weights
    tokenizer: str  # digest
    layout: str  # of the whole model, so that ranks of different tensor-parallel sizes may share
    dtype: str

    @property
    def fingerprint(self) -> str:
        """A short digest, which is part of all block keys."""
        return sha256(repr(self).encode()).hexdigest()[:16]

    def differences(self, other: KvIdentity) -> list[str]:
        """Return a description of each field that differs."""
        return [
            f"{part.name}: {getattr(self, part.name)} here, {getattr(other, part.name)} there"
            for part in fields(self)
            if getattr(self, part.name) != getattr(other, part.name)
        ]


@dataclass(frozen=True, slots=True)
class BlockName:
    """The identity of a full block: its key and what the key was computed from. `salt` is set for the first block of a
    chain: the hash of the tenant's salt, "" without a salt. It is None for all other blocks."""

    key: BlockKey
    parent: BlockKey
    token_ids: tuple[int, ...]
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class OfferedBlock:
    """A newly named block that is kept in the pool of its KV set until the store has copied its bytes."""

    name: BlockName
    block: BlockId
    kv_set: int = 0


@dataclass(frozen=True, slots=True)
class KvTicket:
    """A claim on the KV of a sequence's first `num_tokens` tokens, valid until it is pulled or the lease ends. The last
    block may be partly filled."""

    engine_id: str  # changes when the engine restarts, even at the same address
    address: str  # host:port of the engine's KV server
    lease_id: str
    num_tokens: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class LocalLoad:
    """The blocks that a load fills in a KV set with a bounded reach: `keys[i]` goes into `blocks[i]`. `first` is the
    place of the first of them in the ticket's lease."""

    kv_set: int
    first: int
    keys: list[BlockKey]
    blocks: list[BlockId]


@dataclass(frozen=True, slots=True)
class KvLoad:
    """Blocks of a sequence to fill from a tier or another worker: `keys[i]`, block `first + i` of the sequence, goes
    into `blocks[i]` of the first KV set.

    The first `num_stored` blocks are worth reading from a tier. With a ticket, all of them can be pulled from its
    worker. Only that worker has the last block if it is partly filled. `local` are the blocks of the other sets that the
    token after the load sees. A load that does not bring all of this may bring a shorter prefix: its blocks of the first
    set, and in the first of the `local` blocks those that the token after the shorter prefix sees.
    """

    load_id: int
    first: int
    keys: list[BlockKey]
    blocks: list[BlockId]
    num_stored: int
    ticket: KvTicket | None
    local: list[LocalLoad] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The first `num_loaded` blocks hold the KV of their keys. `num_pulled` of them came from the ticket's worker.
    `local_loaded`: what the token after them sees in the load's other KV sets arrived too."""

    load_id: int
    num_loaded: int
    num_pulled: int
    local_loaded: bool = False
