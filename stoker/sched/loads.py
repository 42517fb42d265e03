"""Loads: KV that is on its way here, from the tiers or from the worker that a ticket names. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.ids import BlockId
from stoker.kv.blocks.transfer import KvLoad, LoadResult
from stoker.sched.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Loading:
    seq: Sequence
    load: KvLoad
    end: int  # tokens that are computed once all of it is there


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought its sequence. `unfilled` blocks may hold anything."""

    seq: Sequence
    num_computed: int  # tokens, those included that were here before
    stored_tokens: int  # of them, from tiers
    pulled_tokens: int  # of them, from the ticket's worker
    unfilled: list[BlockId]


class Loads:
    def __init__(self) -> None:
        self._under_way: dict[int, _Loading] = {}
        self._num_begun = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, seq: Sequence, first: int, end: int) -> KvLoad:
        """Blocks from `first` on are to be filled, up to the first `end` tokens."""
        num_blocks = seq.num_blocks_for(end)
        num_stored = max(0, _num_stored(seq) - first)
        ticket = seq.request.ticket if first + num_stored < num_blocks else None
        keys = seq.keys[first:num_blocks]
        if ticket is not None and ticket.num_tokens < num_blocks * seq.block_tokens:
            # The last block is unfilled there, and named by what it holds.
            keys = [*keys[: num_blocks - first - 1], seq.key_up_to(ticket.num_tokens)]
        load = KvLoad(self._num_begun, first, keys, seq.blocks[first:num_blocks], num_stored, ticket)
        self._num_begun += 1
        self._under_way[load.load_id] = _Loading(seq, load, end)
        return load

    def end(self, result: LoadResult) -> Loaded:
        loading = self._under_way.pop(result.load_id)
        seq, load = loading.seq, loading.load
        num_computed = min((load.first + result.num_loaded) * seq.block_tokens, loading.end)
        new_tokens = num_computed - load.first * seq.block_tokens
        pulled_tokens = min(result.num_pulled * seq.block_tokens, new_tokens)
        unfilled = load.blocks[result.num_loaded :]
        return Loaded(seq, num_computed, new_tokens - pulled_tokens, pulled_tokens, unfilled)


def loadable_tokens(seq: Sequence) -> int:
    """Leading tokens whose KV can be had elsewhere. It is asked for once: whatever failed to come is computed."""
    if seq.run:
        return 0
    stored = _num_stored(seq) * seq.block_tokens
    ticket = seq.request.ticket
    if ticket is None or not 0 < ticket.num_tokens <= len(seq.request.token_ids):
        return stored
    return max(stored, min(ticket.num_tokens, len(seq.token_ids) - 1))


def _num_stored(seq: Sequence) -> int:
    return min(seq.num_stored, seq.num_reusable)
