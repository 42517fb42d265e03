"""PendingLoads: KV that is being loaded from a tier, or pulled from the worker that a ticket names. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.ids import BlockId
from stoker.kv.blocks.reach import KvReach
from stoker.kv.blocks.transfer import KvLoad, LoadResult, LocalLoad
from stoker.sched.block_sets import BlockSets
from stoker.sched.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _PendingLoad:
    seq: Sequence
    load: KvLoad
    end: int  # tokens that are computed if the whole load succeeds


@dataclass(frozen=True, slots=True)
class FinishedLoad:
    """What a load brought to its sequence. The content of `unfilled` blocks of the first KV set is undefined."""

    seq: Sequence
    num_computed: int  # tokens computed now, including those that were in the GPU pool before
    stored_tokens: int  # tokens that came from a tier
    pulled_tokens: int  # tokens that came from the ticket's worker
    unfilled: list[BlockId]
    failed: bool  # it brought fewer blocks than requested


class PendingLoads:
    """The loads that the store has not finished."""

    def __init__(self, sets: BlockSets) -> None:
        self._sets = sets
        self._pending: dict[int, _PendingLoad] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, seq: Sequence, first: int, end: int) -> KvLoad:
        """Return a load that fills the sequence's blocks from index `first`, up to its first `end` tokens."""
        num_blocks = seq.num_blocks_for(end)
        num_stored = max(0, _num_stored(seq) - first)
        ticket = seq.request.ticket if first + num_stored < num_blocks else None
        keys = seq.keys[:num_blocks]
        if ticket is not None and ticket.num_tokens < num_blocks * seq.block_tokens:
            # The other worker's last block is partly filled. Its key is the hash of the tokens that it holds.
            keys = [*keys[: num_blocks - 1], seq.key_up_to(ticket.num_tokens)]
        lease_tokens = end if ticket is None else ticket.num_tokens
        main, blocks, local = keys[first:], [], []
        for kv_set, (pool, held) in enumerate(zip(self._sets.pools, seq.held, strict=True)):
            if not pool.reach.is_bounded:
                blocks = held.between(first, num_blocks)
                continue
            start = max(first, pool.reach.first_block(end, seq.block_tokens))
            place = start - first_leased(pool.reach, lease_tokens, seq.block_tokens)
            local.append(LocalLoad(kv_set, place, keys[start:], held.between(start, num_blocks)))
        if not blocks:  # no KV set has an unbounded reach
            main = []
        load = KvLoad(self._next_id, first, main, blocks, num_stored, ticket, local)
        self._next_id += 1
        self._pending[load.load_id] = _PendingLoad(seq, load, end)
        return load

    def finish(self, result: LoadResult) -> FinishedLoad:
        """Remove the load, and return what it brought."""
        pending = self._pending.pop(result.load_id)
        seq, load = pending.seq, pending.load
        num_loaded = result.num_loaded
        if not load.local:
            num_computed = min((load.first + num_loaded) * seq.block_tokens, pending.end)
        elif result.local_loaded and num_loaded == len(load.keys):
            num_computed = pending.end
        elif result.local_loaded:
            num_computed = (load.first + num_loaded) * seq.block_tokens
        else:
            num_loaded, num_computed = 0, load.first * seq.block_tokens
        new_tokens = num_computed - load.first * seq.block_tokens
        pulled_tokens = min(result.num_pulled * seq.block_tokens, new_tokens)
        if not load.keys and result.num_pulled:  # what a bounded reach sees stands for all tokens
            pulled_tokens = new_tokens
        unfilled = load.blocks[num_loaded:]
        failed = num_computed < pending.end
        return FinishedLoad(seq, num_computed, new_tokens - pulled_tokens, pulled_tokens, unfilled, failed)


def first_leased(reach: KvReach, num_tokens: int, block_tokens: int) -> int:
    """Return the number of the first block that a lease on `num_tokens` tokens has in a KV set.

    The worker that continues computes its last known token again, and that may be the last token of the lease.
    """
    return reach.first_block(max(0, num_tokens - 1), block_tokens)


def loadable_tokens(seq: Sequence) -> int:
    """Return how many leading tokens have KV in a tier or on the ticket's worker.

    Each sequence loads at most once. Blocks that a load did not bring are computed.
    """
    if seq.row_epoch:
        return 0
    stored = _num_stored(seq) * seq.block_tokens
    ticket = seq.request.ticket
    if ticket is None or not 0 < ticket.num_tokens <= len(seq.request.token_ids):
        return stored
    return max(stored, min(ticket.num_tokens, len(seq.token_ids) - 1))


def _num_stored(seq: Sequence) -> int:
    return min(seq.num_stored, seq.num_reusable)
