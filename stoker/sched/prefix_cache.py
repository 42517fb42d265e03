"""PrefixCache: which blocks a sequence can reuse, and which blocks running sequences are computing right now. Pure."""

from __future__ import annotations

from stoker.base.ids import BlockId, BlockKey
from stoker.sched.block_sets import BlockSets, PrefixMatch
from stoker.sched.loads import loadable_tokens
from stoker.sched.offers import Offers
from stoker.sched.sequence import Sequence, SequenceState


class PrefixCache:
    """Reuse of KV between sequences, over the block pools.

    Each full block is offered to the store when it gets its key. In a set with a bounded reach, a prefix needs only the blocks
    before its end. So only those before the likely ends are offered: the prompt's, that of a shared text, and the answer's.
    """

    def __init__(self, sets: BlockSets, offers: Offers) -> None:
        self._sets = sets
        self._offers = offers
        self._computing: dict[BlockKey, Sequence] = {}  # prompt blocks that a running sequence has not finished yet

    def match(self, seq: Sequence) -> PrefixMatch:
        """Return the pools' blocks for the sequence's leading tokens, without taking a reference."""
        seq.extend_keys()
        return self._sets.match(seq.keys[: seq.num_reusable])

    def match_partial(self, seq: Sequence, num_matched: int) -> tuple[list[BlockId], int] | None:
        """Return a block, in each KV set, that starts with the same tokens as the sequence's block `num_matched`, and
        how many are equal.

        The last known token is left out, because it is always computed.
        """
        start = num_matched * seq.block_tokens
        end = min(start + seq.block_tokens, len(seq.token_ids) - 1)
        return self._sets.match_partial(seq.parent_of(num_matched), seq.token_ids[start:end])

    def num_matched(self, seq: Sequence) -> int:
        """Return how many leading blocks of a waiting sequence are in the first pool.

        Only the changes since the last call are looked up, so this is fast for long prompts. It is an estimate: a block may
        have been evicted before its successors, and the other KV sets are not looked at. `match` is exact.
        """
        seq.extend_keys()
        most = seq.num_reusable
        keys, count, holds = seq.keys, min(seq.num_matched, most), self._sets.first_pool.holds
        while count and not holds(keys[count - 1]):
            count -= 1
        while count < most and holds(keys[count]):
            count += 1
        seq.num_matched = count
        return count

    def tokens_left(self, seq: Sequence) -> int:
        """Return how many known tokens are to be computed. For a waiting sequence it is an estimate."""
        if seq.state is not SequenceState.WAITING:
            return seq.num_to_compute
        cached = max(self.num_matched(seq) * seq.block_tokens, loadable_tokens(seq))
        return len(seq.token_ids) - cached

    def sequence_ahead(self, seq: Sequence) -> Sequence | None:
        """Return the running sequence that is computing the first block that `seq` does not find in the pool.

        Waiting for that block is cheaper than computing it twice.
        """
        count = self.num_matched(seq)
        return self._computing.get(seq.keys[count]) if count < seq.num_reusable else None

    def start_computing(self, seq: Sequence, first: int) -> None:
        """Record that the sequence computes its full blocks from index `first` on."""
        for key in seq.keys[first:]:
            self._computing.setdefault(key, seq)

    def stop_computing(self, seq: Sequence) -> None:
        """Record that the sequence will not finish the blocks that it was computing."""
        computing = self._computing
        for key in seq.keys[seq.num_named :]:
            if computing.get(key) is seq:
                del computing[key]

    def name_blocks(self, seq: Sequence, num_computed: int) -> None:
        """Register the sequence's blocks that are full after `num_computed` tokens under their keys."""
        first, end = seq.num_named, num_computed // seq.block_tokens
        if end <= first:
            return
        seq.extend_keys()
        keys, token_ids, size, computing = seq.keys, seq.token_ids, seq.block_tokens, self._computing
        names, parent = [], seq.parent_of(first)
        for i in range(first, end):
            key = keys[i]
            names.append(
                (key, parent, tuple(token_ids[i * size : (i + 1) * size]), None if i else seq.request.cache_salt)
            )
            parent = key
            if computing.get(key) is seq:
                del computing[key]
        seq.num_named = end
        for kv_set, (pool, held) in enumerate(zip(self._sets.pools, seq.held, strict=True)):
            blocks = held.numbered(first, end)
            for i, block in blocks:
                pool.name(block, *names[i - first])
            if self._offers.is_open:
                needed = self._sets.needed_later(seq, pool) if pool.reach.is_bounded else range(first, end)
                for i, block in blocks:
                    if i in needed:
                        self._offers.add(seq, i, block, kv_set)

    def offer_last(self, seq: Sequence) -> None:
        """Offer the blocks that a request needs which continues after the sequence's end, in sets with a bounded reach."""
        for kv_set, (pool, held) in enumerate(zip(self._sets.pools, seq.held, strict=True)):
            if pool.reach.is_bounded:
                first = pool.reach.first_block(seq.num_named * seq.block_tokens, seq.block_tokens)
                for i in set(range(first, seq.num_named)) - self._sets.needed_later(seq, pool):
                    if (block := held.find(i)) is not None:
                        self._offers.add(seq, i, block, kv_set)
