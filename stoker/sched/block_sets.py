"""BlockSets: the blocks that sequences hold, over all KV sets of the model. Pure.

A model's layers are partitioned into sets (KvLayout.sets), each with a block pool. Block i of a sequence holds tokens
i * block_tokens and following, in every set. In a set with an unbounded reach, a sequence holds all blocks from the
first one on. In a set with a bounded reach it holds those that its next tokens see, and blocks that fall behind are
released. They can be found by their key until they are reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.reach import visible_prefix
from stoker.sched.held_blocks import NO_BLOCK, HeldBlocks
from stoker.sched.sequence import Sequence


@dataclass(slots=True)
class PrefixMatch:
    """The leading `num_blocks` blocks of a sequence can be reused: `held` are those that it needs, in each set. The leading
    `num_shared` blocks are those of another sequence, at least as many."""

    num_blocks: int
    held: tuple[HeldBlocks, ...]
    num_shared: int


class BlockSets:
    """The block pools of all KV sets. The first one has an unbounded reach, unless the model has no such layers."""

    def __init__(self, pools: Iterable[BlockPool], block_tokens: int) -> None:
        self.pools = tuple(pools)
        self.first_pool = self.pools[0]
        self._block_tokens = block_tokens
        self._bounded = [pool for pool in self.pools if pool.reach.is_bounded]
        for pool in self._bounded:
            assert pool.num_blocks >= pool.reach.min_pool_blocks(block_tokens), (
                f"{pool.num_blocks} blocks, {pool.reach}"
            )

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of a sequence. None: the blocks do not limit them."""
        pool = self.first_pool
        return None if pool.reach.is_bounded else pool.num_blocks * self._block_tokens

    def set_time(self, now_s: float) -> None:
        for pool in self.pools:
            pool.now_s = now_s

    # ---- prefixes

    def match(self, keys: list[BlockKey]) -> PrefixMatch:
        """Return the longest prefix with these keys that can be reused, without taking references.

        It needs all of its blocks in a set with an unbounded reach, and in others those that the next token sees.
        """
        first = self.first_pool
        found = [] if first.reach.is_bounded else first.match(keys)
        count = self._visible(keys, len(keys) if first.reach.is_bounded else len(found))
        num_shared = max(count, len(found))
        held = []
        for pool in self.pools:
            if not pool.reach.is_bounded:
                held.append(HeldBlocks(found[:count]))
                continue
            start = pool.reach.first_block(count * self._block_tokens, self._block_tokens)
            held.append(HeldBlocks([NO_BLOCK] * start + pool.match(keys[start:count]), start))
        return PrefixMatch(count, tuple(held), num_shared)

    def _visible(self, keys: list[BlockKey], count: int) -> int:
        """Return the longest prefix of at most `count` blocks that can be reused in all bounded sets."""

        def has_block(pool: BlockPool) -> Callable[[int], bool]:
            return lambda number: pool.holds(keys[number])

        sets = [(pool.reach, has_block(pool)) for pool in self._bounded]
        return visible_prefix(count, self._block_tokens, sets) if sets else count

    def match_partial(self, parent: BlockKey, token_ids: list[int]) -> tuple[list[BlockId], int] | None:
        """Return a block after `parent` that starts with the same tokens, in each set, and how many are equal."""
        best = self.first_pool.match_partial(parent, token_ids)
        if best is None:
            return None
        blocks = [block for pool in self.pools if (block := pool.find(best[0])) is not None]
        return (blocks, best[1]) if len(blocks) == len(self.pools) else None

    # ---- blocks of a sequence

    def wanted(self, seq: Sequence, match: PrefixMatch, load_end: int) -> list[range]:
        """Return the numbers of the blocks that a sequence takes in each set when it starts, after the matched ones.

        In an unbounded set there is one for all of its known tokens and one more. In a bounded set it gets what it needs
        in the long run. `load_end`: tokens that are computed after a load, 0 without one.
        """
        wanted, size, all_blocks = [], self._block_tokens, seq.num_blocks_for(len(seq.token_ids) + 1)
        for pool, held in zip(self.pools, match.held, strict=True):
            start, end = match.num_blocks, all_blocks
            if pool.reach.is_bounded and load_end:
                start, end = max(start, pool.reach.first_block(load_end, size)), seq.num_blocks_for(load_end)
            elif pool.reach.is_bounded:
                end = min(end, max(start + 1, held.first + pool.reach.num_blocks(size)))
            wanted.append(range(start, max(start, end)))
        return wanted

    def can_start(self, match: PrefixMatch, wanted: list[range], preempted: Iterable[Sequence] = ()) -> bool:
        """Return True if the pools have these blocks, if the sequences `preempted` gave back theirs."""
        others = list(preempted)
        for number, (pool, held, numbers) in enumerate(zip(self.pools, match.held, wanted, strict=True)):
            freed = sum(len(other.held[number].held) for other in others)
            if pool.num_free_after(held.held) + freed < len(numbers):
                return False
        return True

    def start(self, seq: Sequence, match: PrefixMatch, wanted: list[range], fresh: list[list[BlockId]]) -> None:
        """Give a sequence its matched blocks and new ones. The new blocks are appended to `fresh`, per set."""
        for pool, held in zip(self.pools, match.held, strict=True):
            pool.hold_matched(held.held)
        seq.held, seq.num_shared = match.held, match.num_shared
        for pool, held, numbers, new in zip(self.pools, seq.held, wanted, fresh, strict=True):
            taken = pool.take(len(numbers))
            held.ids += [NO_BLOCK] * (numbers.start - len(held.ids)) + taken
            new += taken
        self._set_room(seq)

    def free_tokens(self, seq: Sequence) -> int:
        """Return for how many tokens the sequence would have room if it got all free blocks."""
        size = self._block_tokens
        return min((len(held.ids) + pool.num_free) * size for pool, held in zip(self.pools, seq.held, strict=True))

    def extend(self, seq: Sequence, num_tokens: int, fresh: list[list[BlockId]]) -> list[tuple[int, list[BlockId]]]:
        """Take blocks until a sequence has room for `num_tokens`. The caller has checked `free_tokens`.

        Return the sets and the new blocks, which are appended to `fresh` too.
        """
        changed, num_blocks = [], seq.num_blocks_for(num_tokens)
        for number, (pool, held) in enumerate(zip(self.pools, seq.held, strict=True)):
            if (missing := num_blocks - len(held.ids)) > 0:
                taken = pool.take(missing)
                held.ids += taken
                fresh[number] += taken
                changed.append((number, taken))
        self._set_room(seq)
        return changed

    def release_behind(self, seq: Sequence) -> None:
        """Release the blocks that no further token of a running sequence sees.

        The device may be `num_drafting` tokens behind. Blocks are kept until they have their names, so that later
        requests find them. Those that a later request may need count as used, and the others as passed.
        """
        position, size = seq.num_computed - seq.num_drafting, self._block_tokens
        for pool, held in zip(self.pools, seq.held, strict=True):
            if not pool.reach.is_bounded:
                continue
            first, end = held.first, min(pool.reach.first_block(position, size), seq.num_named)
            if end > first:
                needed = self.needed_later(seq, pool)
                behind = held.numbered(first, end)
                pool.release([block for number, block in behind if number in needed])
                pool.release_passed([block for number, block in behind if number not in needed])
                held.first = end

    def needed_later(self, seq: Sequence, pool: BlockPool) -> set[int]:
        """Return the numbers of a sequence's blocks that a later request may need in a bounded set.

        A later request may continue where the prompt ends, for example because it leaves out the answer's reasoning. Or it
        has the text that this sequence shares with an earlier one, and goes on differently, as agents with the same tools do.
        """
        size = self._block_tokens
        ends = ((len(seq.request.token_ids) - 1) // size, seq.num_shared)
        return {number for end in ends for number in range(pool.reach.first_block(end * size, size), end)}

    def releases_soon(self, seq: Sequence) -> bool:
        """Return True if `release_behind` will release more blocks after the launched steps, which name them."""
        position = seq.num_computed - seq.num_drafting
        return any(
            pool.reach.first_block(position, self._block_tokens) > max(held.first, seq.num_named)
            for pool, held in zip(self.pools, seq.held, strict=True)
            if pool.reach.is_bounded
        )

    def shorten(self, seq: Sequence, first: int, count: int) -> None:
        """Keep of a load from block `first` on what it filled in the bounded sets: the token after the first `count` blocks
        of the sequence sees it. The load has put it into the first of its blocks."""
        size = self._block_tokens
        for pool, held in zip(self.pools, seq.held, strict=True):
            if pool.reach.is_bounded:
                begin = max(first, pool.reach.first_block(count * size, size))
                taken = held.between(first, len(held.ids))
                kept = taken[: count - begin]
                pool.release(taken[len(kept) :])
                held.ids[first:] = [NO_BLOCK] * (begin - first) + kept
        self._set_room(seq)

    def release(self, seq: Sequence) -> None:
        """Give all blocks of a sequence back."""
        for pool, held in zip(self.pools, seq.held, strict=True):
            pool.release(held.held)
        seq.held, seq.room = (), 0

    def _set_room(self, seq: Sequence) -> None:
        seq.room = min(len(held.ids) for held in seq.held) * self._block_tokens
