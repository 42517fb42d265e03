"""PrefixIndex: which worker holds which KV blocks, and in which tier. There is one index per model.

A key identifies a block together with all blocks before it. So a map from each key to the set of its holders is enough:
a lookup walks the conversation's keys from the first one while any worker still has the block. A set of holders is a bit
mask with one bit per worker.

There are two kinds of workers:

- Workers with KV events report what they store and remove, so the index is exact. A block that was removed from the
  middle ends the match there. Blocks of a routed request are assumed to be stored for `expected_s`, and dropped then
  unless an event has confirmed them.
- For workers without KV events, the blocks of every routed request are assumed to be stored. Beyond the worker's
  capacity, the least recently used blocks are assumed to be evicted.

Workers may share a store. What one of them reports about a shared medium belongs to the store: it is counted once, and
all workers of the store are credited with it.

Memory is bounded: beyond `max_entries` (block, holder) pairs, the oldest blocks of the fullest holder are dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from stoker.base.ids import WorkerId
from stoker.fleet.lost_blocks import BlockLosses, LossCause, NoLosses
from stoker.fleet.prefix_matches import Match as Match
from stoker.fleet.prefix_matches import PrefixMatches, Runs

Key = int | bytes

_DEVICE, _HOST, _DISK = range(3)
_TIERS = {"GPU": _DEVICE, "CPU": _HOST, "CPU_PINNED": _HOST}  # any other medium counts as disk
_BATCH = 64  # smallest number of blocks to drop at once: reaching the front of a large dict is slow
_BATCH_SHARE = 512  # from a large dict, drop at least 1/512 of it
_RECENT_BLOCKS = 16_384  # after this number of stored blocks, the counts of stored and evicted blocks are halved


@dataclass(frozen=True, slots=True)
class _Expected:
    until: float
    keys: Sequence[Key]


@dataclass(slots=True, eq=False)
class _Holder:
    """A worker, or a store that several workers share."""

    bit: int
    members: int = 0  # for a store: the bits of its workers
    stores: dict[str, _Holder] = field(default_factory=dict)  # for a worker: its shared stores by medium
    capacity_blocks: int | None = None
    has_events: bool = False
    # For each tier: key -> whether an event has confirmed it, least recently used first.
    held: tuple[dict[Key, bool], ...] = field(default_factory=lambda: ({}, {}, {}))
    expected: deque[_Expected] = field(default_factory=deque)


class PrefixIndex:
    """The blocks of all workers of one model. See the module docstring."""

    def __init__(
        self, max_entries: int = 2_000_000, expected_s: float = 30.0, losses: BlockLosses | None = None
    ) -> None:
        self._max_entries = max_entries
        self._losses = NoLosses() if losses is None else losses
        self._expected_s = expected_s
        self._holders: dict[WorkerId, _Holder] = {}
        self._stores: dict[str, _Holder] = {}
        self._ids: dict[int, WorkerId] = {}  # worker by bit
        self._bits: dict[WorkerId, int] = {}  # and bit by worker
        self._masks: tuple[dict[Key, int], ...] = ({}, {}, {})
        self._branches: dict[Key, int] = {}
        self._all = 0  # the bits of all workers
        self._taken = 0  # the bits of all workers and stores
        self._num_entries = 0
        self._stored_blocks = self._evicted_blocks = 0  # recent blocks on workers whose evictions are known

    def __len__(self) -> int:
        """Return the number of (block, holder) pairs in all tiers."""
        return self._num_entries

    # ---- reading

    def match(self, keys: Sequence[Key]) -> PrefixMatches:
        """Return a Match for every worker that has at least the first block, in its own tiers or in a shared store."""
        device_masks, host_masks, disk_masks = self._masks
        device = self._walk(keys, device_masks, ())
        host = self._walk(keys, device_masks, (host_masks,)) if host_masks else device
        disk = self._walk(keys, device_masks, (host_masks, disk_masks)) if disk_masks else host
        return PrefixMatches(self._bits, self._ids, device, host, disk)

    def _walk(self, keys: Sequence[Key], masks: dict[Key, int], below: Sequence[dict[Key, int]]) -> Runs:
        """Return the workers by the number of leading blocks that they have in any of these tiers, if not zero."""
        left, count = self._all, 0
        found: list[tuple[int, int]] = []
        stores = list(self._stores.values()) if below else ()
        holders_of = masks.get
        for key in keys:
            holders = holders_of(key, 0)
            if holders & left != left:
                for mask in below:
                    holders |= mask.get(key, 0)
                for store in stores:
                    if holders & store.bit:
                        holders |= store.members
                lost = left & ~holders
                left ^= lost
                if lost and count:
                    found.append((lost, count))
                if not left:
                    break
            count += 1
        if left and count:
            found.append((left, count))
        return found

    def num_confirmed(self, worker_id: WorkerId, keys: Sequence[Key], blocks: int) -> int:
        """Return how many of the first `blocks` blocks, which the worker holds, it has confirmed.

        The others belong to requests that were routed to it a short time ago. It may still be computing them.
        """
        holder = self._holders.get(worker_id)
        if holder is None or not blocks or not holder.has_events:
            return blocks
        held = holder.held[_DEVICE]
        if held.get(keys[blocks - 1]) is not False:
            return blocks
        return bisect_left(keys, True, 0, blocks, key=lambda key: held.get(key) is False)

    def branches(self, key: Key) -> int:
        """Return how many different blocks have followed this one.

        It is 0 at the end of a conversation, 1 inside one, and more at the end of a prefix that several conversations
        share, such as a system prompt.
        """
        return self._branches.get(key, 0)

    @property
    def evicting(self) -> float:
        """Return the fraction of recently stored blocks that evicted another one, 0 to 1.

        Caches whose evictions are not known are assumed to be full: the result is then 1.
        """
        return self._evicted_blocks / self._stored_blocks if self._stored_blocks else 1.0

    # ---- events

    def stored(self, worker_id: WorkerId, keys: Iterable[Key], medium: str = "GPU") -> None:
        """Record that the worker stored these blocks."""
        holder = self._holder(worker_id)
        holder.has_events = True
        holder = holder.stores.get(medium, holder)
        tier = _TIERS.get(medium, _DISK)
        held, masks = holder.held[tier], self._masks[tier]
        before = self._num_entries
        for key in keys:
            if key not in held:
                masks[key] = masks.get(key, 0) | holder.bit
                self._num_entries += 1
            held[key] = True
        self._note_stored(self._num_entries - before)
        self._bound()

    def removed(self, worker_id: WorkerId, keys: Iterable[Key], medium: str = "GPU") -> None:
        """Record that the worker removed these blocks."""
        holder = self._holders.get(worker_id)
        if holder is not None:
            self._evict(holder.stores.get(medium, holder), _TIERS.get(medium, _DISK), keys)

    def cleared(self, worker_id: WorkerId) -> None:
        """Record that the worker lost all its blocks in all tiers. Stores that it shares with others keep theirs."""
        holder = self._holders.get(worker_id)
        if holder is not None:
            self._empty(holder, "restarted")
            for store in holder.stores.values():
                if store.members == holder.bit:
                    self._empty(store, "restarted")

    def share(self, worker_id: WorkerId, stores: Mapping[str, str]) -> None:
        """Set the worker's shared stores: for each medium, the name of the store that holds its blocks from now on."""
        holder = self._holder(worker_id)
        left, holder.stores = holder.stores, {}
        for medium, name in stores.items():
            store = self._stores.get(name)
            if store is None:
                store = self._stores[name] = _Holder(self._new_bit())
            store.members |= holder.bit
            holder.stores[medium] = store
        self._leave(holder, left.values())

    # ---- routed requests

    def routed(self, worker_id: WorkerId, keys: Sequence[Key], now: float) -> None:
        """Record that a request with these blocks was sent to the worker, which will store them."""
        holder = self._holder(worker_id)
        held, masks, bit = holder.held[_DEVICE], self._masks[_DEVICE], holder.bit
        if holder.expected:
            self._drop_unconfirmed(holder, now)
        if not keys:
            return
        if holder.has_events:
            new = [key for key in keys if key not in held]
            if new:
                holder.expected.append(_Expected(now + self._expected_s, new))
        else:
            new = [key for key in keys if held.pop(key, None) is None]  # removed here, added at the recent end below
        fresh = 0
        for key in new:
            holders = masks.get(key, 0)
            fresh += not holders
            masks[key] = holders | bit
        self._num_entries += len(new)
        if fresh:
            self._note_branch(keys, len(keys) - fresh)
        if holder.has_events:
            held.update(dict.fromkeys(new, False))
            self._note_stored(len(new))
            return
        # The end of a conversation is shared less often than its start, so it is evicted first.
        held.update(dict.fromkeys(reversed(keys), False))
        if holder.capacity_blocks is not None:
            self._note_stored(len(new))
            if len(held) > holder.capacity_blocks:
                self._evict(holder, _DEVICE, _oldest(held, len(held) - holder.capacity_blocks))
        self._bound()

    def set_capacity(self, worker_id: WorkerId, blocks: int | None) -> None:
        """Set how many blocks the GPU of a worker without KV events holds; None: unlimited."""
        self._holder(worker_id).capacity_blocks = blocks

    def forget(self, worker_id: WorkerId) -> None:
        """Drop a worker that has left the fleet."""
        holder = self._holders.pop(worker_id, None)
        if holder is not None:
            self._empty(holder, "left")
            left, holder.stores = holder.stores, {}
            self._leave(holder, left.values())
            del self._ids[holder.bit], self._bits[worker_id]
            self._all ^= holder.bit
            self._taken ^= holder.bit

    # ---- internal

    def _note_branch(self, keys: Sequence[Key], start: int) -> None:
        """Count a new branch: no worker had the blocks from `start` on, so a conversation begins or continues there."""
        branches = self._branches
        if start:
            branches[keys[start - 1]] = branches.get(keys[start - 1], 0) + 1
        branches.update(dict.fromkeys(keys[start:-1], 1))

    def _holder(self, worker_id: WorkerId) -> _Holder:
        holder = self._holders.get(worker_id)
        if holder is None:
            holder = self._holders[worker_id] = _Holder(self._new_bit())
            self._ids[holder.bit] = worker_id
            self._bits[worker_id] = holder.bit
            self._all |= holder.bit
        return holder

    def _new_bit(self) -> int:
        bit = (self._taken + 1) & ~self._taken  # the lowest free one
        self._taken |= bit
        return bit

    def _leave(self, holder: _Holder, stores: Iterable[_Holder]) -> None:
        """Remove the worker from these stores, and drop stores without workers: no worker reports their contents."""
        for store in stores:
            if store not in holder.stores.values():
                store.members &= ~holder.bit
        for name in [name for name, store in self._stores.items() if not store.members]:
            store = self._stores.pop(name)
            self._empty(store, "left")
            self._taken ^= store.bit

    def _empty(self, holder: _Holder, cause: LossCause) -> None:
        for tier, held in enumerate(holder.held):
            self._drop(holder, tier, list(held), cause)
        holder.expected.clear()

    def _note_stored(self, num_blocks: int) -> None:
        self._stored_blocks += num_blocks
        if self._stored_blocks > _RECENT_BLOCKS:
            self._stored_blocks //= 2
            self._evicted_blocks //= 2

    def _evict(self, holder: _Holder, tier: int, keys: Iterable[Key]) -> None:
        before = self._num_entries
        self._drop(holder, tier, keys, "evicted")
        self._evicted_blocks = min(self._stored_blocks, self._evicted_blocks + before - self._num_entries)

    def _drop(self, holder: _Holder, tier: int, keys: Iterable[Key], cause: LossCause) -> None:
        held, masks, bit = holder.held[tier], self._masks[tier], holder.bit
        lost: list[Key] = []
        for key in keys:
            if held.pop(key, None) is None:
                continue
            self._num_entries -= 1
            rest = masks[key] & ~bit
            if rest:
                masks[key] = rest
            else:
                del masks[key]
                lost.append(key)
                if tier == _DEVICE:
                    self._branches.pop(key, None)
        if lost:
            self._losses.note(lost, cause)

    def _drop_unconfirmed(self, holder: _Holder, now: float) -> None:
        held = holder.held[_DEVICE]
        while holder.expected and holder.expected[0].until <= now:
            keys = holder.expected.popleft().keys
            self._drop(holder, _DEVICE, [key for key in keys if held.get(key) is False], "not_stored")

    def _bound(self) -> None:
        while self._num_entries > self._max_entries:
            holders = chain(self._holders.values(), self._stores.values())
            fullest = max(holders, key=lambda holder: max(map(len, holder.held)))
            tier = max(range(3), key=lambda one: len(fullest.held[one]))
            self._drop(fullest, tier, _oldest(fullest.held[tier], self._num_entries - self._max_entries), "forgotten")


def _oldest(held: dict[Key, bool], least: int) -> list[Key]:
    """Return at least the `least` oldest keys. Some more are returned, so that the next insertions need not search again."""
    return list(islice(held, least + max(_BATCH, len(held) // _BATCH_SHARE)))
