"""PrefixIndex: which worker holds which blocks, and in which tier. One index for each space of keys (a model's).

A key names a block and all before it, so a map from key to the set of its holders is all that is needed: a
conversation's leading blocks are walked down while anybody still has them. Sets are bit masks, a bit for each worker.

Two kinds of workers. Those with KV events tell what they store and remove, and the index is exact: a block removed out of
the middle ends the match there. What was routed to them is believed for `expected_s` and then dropped unless an
event confirmed it. Of those without events, what was routed to them is assumed to be there, least recently used
blocks first out beyond the worker's capacity.

Workers may share a store: what one of them says of a shared medium is the store's, counts once, and counts for all of them.

Memory is bounded: beyond `max_entries` (block, holder) pairs, the fullest holder's oldest blocks are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from stoker.base.ids import WorkerId

Key = int | bytes

_DEVICE, _HOST, _DISK = range(3)
_TIERS = {"GPU": _DEVICE, "CPU": _HOST, "CPU_PINNED": _HOST}  # every other medium is slower than these: the disk's tier
_BATCH = 64  # forgotten at a time, at least: the front of a dict is slow to reach, the slower the larger the dict was
_BATCH_SHARE = 512  # and of a large dict so small a part
_LATELY = 16_384  # blocks: of what came and went before that many, half is remembered


@dataclass(slots=True)
class Match:
    """A conversation's leading blocks on one worker; each tier counts what follows those of the tiers above it."""

    device_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0

    @property
    def blocks(self) -> int:
        return self.device_blocks + self.host_blocks + self.disk_blocks


@dataclass(frozen=True, slots=True)
class _Expected:
    until: float
    keys: Sequence[Key]


@dataclass(slots=True, eq=False)
class _Holder:
    """A worker, or a store that `members` (bits) share."""

    bit: int
    members: int = 0
    stores: dict[str, _Holder] = field(default_factory=dict)  # a worker's, by medium
    capacity_blocks: int | None = None
    has_events: bool = False
    # By tier: key -> whether an event said so; the least recently used first.
    held: tuple[dict[Key, bool], ...] = field(default_factory=lambda: ({}, {}, {}))
    expected: deque[_Expected] = field(default_factory=deque)


class PrefixIndex:
    def __init__(self, max_entries: int = 2_000_000, expected_s: float = 30.0) -> None:
        self._max_entries = max_entries
        self._expected_s = expected_s
        self._holders: dict[WorkerId, _Holder] = {}
        self._stores: dict[str, _Holder] = {}
        self._ids: dict[int, WorkerId] = {}  # by bit
        self._masks: tuple[dict[Key, int], ...] = ({}, {}, {})
        self._branches: dict[Key, int] = {}
        self._all = 0  # every worker's bit
        self._taken = 0  # and every store's
        self._num_entries = 0
        self._came = self._evicted = 0  # blocks, lately, of those workers whose evictions we know of

    def __len__(self) -> int:
        """(block, holder) pairs, of all tiers."""
        return self._num_entries

    # ---- reading

    def match(self, keys: Sequence[Key]) -> dict[WorkerId, Match]:
        """Every worker with at least the first block, in whatever tier, its stores' among them."""
        if not keys:
            return {}
        ids, (device_masks, host_masks, disk_masks) = self._ids, self._masks
        device = self._walk(keys, device_masks, ())
        if not (host_masks or disk_masks):
            return {ids[bit]: Match(count) for bit, count in device.items()}
        host = self._walk(keys, device_masks, (host_masks,)) if host_masks else device
        disk = self._walk(keys, device_masks, (host_masks, disk_masks)) if disk_masks else host
        found = {}
        for bit, count in disk.items():
            in_device = device.get(bit, 0)
            in_host = host.get(bit, in_device)
            found[ids[bit]] = Match(in_device, in_host - in_device, count - in_host)
        return found

    def _walk(self, keys: Sequence[Key], masks: dict[Key, int], below: Sequence[dict[Key, int]]) -> dict[int, int]:
        """By worker's bit: the leading blocks that it has in any of these tiers, if there are any."""
        left, count, found = self._all, 0, {}
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
                while lost and count:
                    bit = lost & -lost
                    found[bit] = count
                    lost ^= bit
                if not left:
                    break
            count += 1
        while left and count:
            bit = left & -left
            found[bit] = count
            left ^= bit
        return found

    def branches(self, key: Key) -> int:
        """How many ways conversations were seen to go on after this block: 0 at a conversation's end, 1 within one, more
        at the end of what several have in common, such as a system prompt."""
        return self._branches.get(key, 0)

    @property
    def evicting(self) -> float:
        """0..1: of the blocks that came lately, how many pushed another one out. Caches of which nobody tells are taken to be
        full."""
        return self._evicted / self._came if self._came else 1.0

    # ---- events

    def stored(self, worker_id: WorkerId, keys: Iterable[Key], medium: str = "GPU") -> None:
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
        self._note_came(self._num_entries - before)
        self._bound()

    def removed(self, worker_id: WorkerId, keys: Iterable[Key], medium: str = "GPU") -> None:
        holder = self._holders.get(worker_id)
        if holder is not None:
            self._evict(holder.stores.get(medium, holder), _TIERS.get(medium, _DISK), keys)

    def cleared(self, worker_id: WorkerId) -> None:
        """The worker has nothing any more, in no tier. What it shares with others is still theirs."""
        holder = self._holders.get(worker_id)
        if holder is not None:
            self._empty(holder)
            for store in holder.stores.values():
                if store.members == holder.bit:
                    self._empty(store)

    def share(self, worker_id: WorkerId, stores: Mapping[str, str]) -> None:
        """From now on the worker's blocks in each of these media are those of the store named."""
        holder = self._holder(worker_id)
        left, holder.stores = holder.stores, {}
        for medium, name in stores.items():
            store = self._stores.get(name)
            if store is None:
                store = self._stores[name] = _Holder(self._new_bit())
            store.members |= holder.bit
            holder.stores[medium] = store
        self._leave(holder, left.values())

    # ---- our own routing

    def routed(self, worker_id: WorkerId, keys: Sequence[Key], now: float) -> None:
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
            new = [key for key in keys if held.pop(key, None) is None]  # popped: they go to the young end
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
            self._note_came(len(new))
            return
        held.update(dict.fromkeys(reversed(keys), False))  # a conversation's end is less often shared than its start
        if holder.capacity_blocks is not None:
            self._note_came(len(new))
            if len(held) > holder.capacity_blocks:
                self._evict(holder, _DEVICE, _oldest(held, len(held) - holder.capacity_blocks))
        self._bound()

    def set_capacity(self, worker_id: WorkerId, blocks: int | None) -> None:
        self._holder(worker_id).capacity_blocks = blocks

    def forget(self, worker_id: WorkerId) -> None:
        """The worker has left the fleet."""
        holder = self._holders.pop(worker_id, None)
        if holder is not None:
            self._empty(holder)
            left, holder.stores = holder.stores, {}
            self._leave(holder, left.values())
            del self._ids[holder.bit]
            self._all ^= holder.bit
            self._taken ^= holder.bit

    # ---- inside

    def _note_branch(self, keys: Sequence[Key], start: int) -> None:
        """Nobody had the blocks from `start` on: a conversation begins there, or goes on."""
        branches = self._branches
        if start:
            branches[keys[start - 1]] = branches.get(keys[start - 1], 0) + 1
        branches.update(dict.fromkeys(keys[start:-1], 1))

    def _holder(self, worker_id: WorkerId) -> _Holder:
        holder = self._holders.get(worker_id)
        if holder is None:
            holder = self._holders[worker_id] = _Holder(self._new_bit())
            self._ids[holder.bit] = worker_id
            self._all |= holder.bit
        return holder

    def _new_bit(self) -> int:
        bit = (self._taken + 1) & ~self._taken  # the lowest free one
        self._taken |= bit
        return bit

    def _leave(self, holder: _Holder, stores: Iterable[_Holder]) -> None:
        """A store that nobody reads any more is forgotten: nobody tells what becomes of it."""
        for store in stores:
            if store not in holder.stores.values():
                store.members &= ~holder.bit
        for name in [name for name, store in self._stores.items() if not store.members]:
            store = self._stores.pop(name)
            self._empty(store)
            self._taken ^= store.bit

    def _empty(self, holder: _Holder) -> None:
        for tier, held in enumerate(holder.held):
            self._drop(holder, tier, list(held))
        holder.expected.clear()

    def _note_came(self, num_blocks: int) -> None:
        self._came += num_blocks
        if self._came > _LATELY:
            self._came //= 2
            self._evicted //= 2

    def _evict(self, holder: _Holder, tier: int, keys: Iterable[Key]) -> None:
        before = self._num_entries
        self._drop(holder, tier, keys)
        self._evicted = min(self._came, self._evicted + before - self._num_entries)

    def _drop(self, holder: _Holder, tier: int, keys: Iterable[Key]) -> None:
        held, masks, bit = holder.held[tier], self._masks[tier], holder.bit
        for key in keys:
            if held.pop(key, None) is None:
                continue
            self._num_entries -= 1
            rest = masks[key] & ~bit
            if rest:
                masks[key] = rest
            else:
                del masks[key]
                if tier == _DEVICE:
                    self._branches.pop(key, None)

    def _drop_unconfirmed(self, holder: _Holder, now: float) -> None:
        held = holder.held[_DEVICE]
        while holder.expected and holder.expected[0].until <= now:
            keys = holder.expected.popleft().keys
            self._drop(holder, _DEVICE, [key for key in keys if held.get(key) is False])

    def _bound(self) -> None:
        while self._num_entries > self._max_entries:
            holders = chain(self._holders.values(), self._stores.values())
            fullest = max(holders, key=lambda holder: max(map(len, holder.held)))
            tier = max(range(3), key=lambda one: len(fullest.held[one]))
            self._drop(fullest, tier, _oldest(fullest.held[tier], self._num_entries - self._max_entries))


def _oldest(held: dict[Key, bool], least: int) -> list[Key]:
    """So many, and some besides: the next that come need not ask again."""
    return list(islice(held, least + max(_BATCH, len(held) // _BATCH_SHARE)))
