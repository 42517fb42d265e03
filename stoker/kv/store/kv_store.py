"""KvStore: the chain of tiers below the device, and the pulls from other workers.

It decides how much of a prompt is worth loading, fills blocks on its own threads, and writes computed blocks into the
tiers. It knows bytes and seconds, but not sequences. Blocks that are missing, late or wrong are computed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import ParamSpec

from stoker.base import log as logs
from stoker.base.ids import BlockKey
from stoker.kv.blocks.keys import block_keys, root_key, salt_hash
from stoker.kv.blocks.reach import visible_prefix
from stoker.kv.blocks.transfer import BlockName, KvLoad, KvTicket, LoadResult, LocalLoad, OfferedBlock
from stoker.kv.store.block_io import Mark
from stoker.kv.store.loader import Peers
from stoker.kv.store.measured_tier import MeasuredTier
from stoker.kv.store.other_stores import NoOtherStores, OtherStores
from stoker.kv.store.set_store import SetParts, SetStore

_LOADERS = 4
# RAM for blocks on their way into the tiers, by whether the device is a GPU, and the limits of the number of buffers.
_BUFFER_BYTES = {False: 256 << 20, True: 1 << 30}
_MIN_BUFFERS, _MAX_BUFFERS = 16, 4096
_UNKNOWN_COMPUTE_S = 0.1  # assumed time to compute a block until the first prefill is measured
_CLOSE_S = 2.0
_EVENT_BLOCKS = 256
_CATCH_UP_S = 1.0  # how late removals by other processes may be noticed and reported
_SHORTER_TRIES = 3  # prefixes that are tried after a load that failed in part
_MAX_HINTS = 256  # hints that may wait; a late hint is useless

log = logs.EventLog("kv")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class TierEvent:
    """Blocks that a tier has taken or lost."""

    tier: str
    stored: tuple[BlockName, ...] = ()
    removed: tuple[BlockKey, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreContext:
    """What the store must know of the engine. `wake` is called from any thread when the store has results for the
    engine."""

    fingerprint: str
    block_tokens: int
    on_gpu: bool
    prefill_tokens_per_s: Callable[[], float | None]
    wake: Callable[[], None]


class KvStore:
    """The tiers and the peer client, as the engine sees them. The tiers append the blocks that they lost to `events`,
    and the store appends the blocks that they took, in the order in which it happened."""

    def __init__(
        self,
        sets: Sequence[SetParts],
        peers: Peers,
        context: StoreContext,
        events: deque[TierEvent],
        others: OtherStores | None = None,
    ) -> None:
        """`sets` are the KV sets of the model. Only the blocks of the first one are reported as events. `others` are the
        stores of the other ranks."""
        self._peers = peers
        self._others = others or NoOtherStores()
        self._context = context
        self._events = events
        self._io = sets[0].io
        self._finished_loads: deque[LoadResult] = deque()
        room = _BUFFER_BYTES[context.on_gpu] // sum(parts.block_bytes for parts in sets)
        count = max(_MIN_BUFFERS, min(_MAX_BUFFERS, room))
        self.sets = [
            SetStore(
                number,
                parts,
                peers,
                count,
                context.on_gpu,
                self._compute_s,
                context.wake,
                _ignore if number else self._stored,
            )
            for number, parts in enumerate(sets)
        ]
        self.tiers = self.sets[0].tiers
        """The tiers of the first KV set."""
        self.max_offers = count if self.tiers else 0
        self._loads = ThreadPoolExecutor(_LOADERS, thread_name_prefix="kv-load")
        # Separate threads: a worker that does not answer delays only other pulls.
        self._pulls = ThreadPoolExecutor(_LOADERS, thread_name_prefix="kv-pull")
        self._hints = ThreadPoolExecutor(1, thread_name_prefix="kv-prefetch")
        self._announcing = ThreadPoolExecutor(1, thread_name_prefix="kv-announce")
        self._closed = threading.Event()
        self._hint_slots = threading.Semaphore(_MAX_HINTS)
        if self.tiers:
            threading.Thread(target=self._maintain, name="kv-maintain", daemon=True).start()

    # ---- called by any thread

    def num_worth_loading(self, token_ids: Sequence[int], salt: str) -> int:
        """Return how many leading full blocks of the prompt the tiers hold and can load faster than they can be
        computed."""
        if not self.tiers:
            return 0
        keys = block_keys(token_ids, root_key(self._context.fingerprint, salt), self._context.block_tokens)
        if len(self.sets) > 1 or self.sets[0].reach.is_bounded:
            # The last token is always computed. What it sees follows from the blocks before it.
            del keys[(len(token_ids) - 1) // self._context.block_tokens :]
        held = [one.held(keys) for one in self.sets]
        reaches = [(one.reach, there.__getitem__) for one, there in zip(self.sets, held, strict=True)]
        bounded = [entry for entry in reaches if entry[0].is_bounded]
        count = len(keys)
        if not self.sets[0].reach.is_bounded:
            count = next((i for i, is_there in enumerate(held[0]) if not is_there), count)
        return visible_prefix(count, self._context.block_tokens, bounded)

    def crossover_tokens(self, tier: MeasuredTier) -> int | None:
        """Return the number of tokens from which on loading from this tier is faster than computing. None: never, or
        the speed is not known."""
        is_worth = self._set_of(tier).loader.is_worth(tier)
        return self._context.block_tokens if tier.speed.measured is not None and is_worth else None

    def prefetch(self, token_ids: Sequence[int], salt: str, ticket: KvTicket | None) -> None:
        """Accept a hint: bring blocks into RAM, from slower tiers or from the ticket's worker while that worker still
        computes them. With several ranks, it is called by the engine's thread."""
        self._others.prefetch(token_ids, salt, ticket)
        if ticket is not None:
            self._hint(self._pull_ahead, ticket)
        if token_ids:
            self._hint(self._promote, token_ids, salt)

    def offer_again(self, to: MeasuredTier, keys: Sequence[BlockKey]) -> None:
        """Write blocks that a tier has lost into it again, as far as other tiers hold them."""
        self._run(self._hints, self._set_of(to).prefetcher.offer_again, to, list(keys))

    # ---- called by the engine's thread

    def start_load(self, wanted: KvLoad) -> None:
        """Begin to fill the blocks of a load. They belong to the store until `take_finished_loads` returns its result."""
        threads = self._loads if wanted.ticket is None else self._pulls
        self._run(threads, self._load, wanted, self._io.mark())

    def take_finished_loads(self) -> list[LoadResult]:
        """Return the results of the loads that have ended on all ranks since the last call."""
        return self._others.join_loads([self._finished_loads.popleft() for _ in range(len(self._finished_loads))])

    def release(self, ticket: KvTicket) -> None:
        """Tell the ticket's worker that nothing more will be pulled."""
        self._run(self._loads, self._peers.release, ticket)

    def offer(self, offered: list[OfferedBlock]) -> None:
        """Offer newly computed blocks to the tiers."""
        self._others.offer(offered)
        for number, one in enumerate(self.sets):
            one.write_behind.offer([block for block in offered if block.kv_set == number])

    def take_copied(self) -> list[OfferedBlock]:
        """Return offered blocks that need not be held any longer."""
        return self._others.join_copied([block for one in self.sets for block in one.write_behind.take_copied()])

    @property
    def num_queued(self) -> list[int]:
        """How many blocks wait for each tier."""
        return [count for one in self.sets for count in one.write_behind.num_queued]

    @property
    def local_tiers(self) -> list[MeasuredTier]:
        """The tiers of the other KV sets."""
        return [tier for one in self.sets[1:] for tier in one.tiers]

    def take_events(self) -> list[TierEvent]:
        """Return the tier events since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    # ---- at start and end

    def measure(self) -> None:
        """Measure each tier's speed, so that even the first decision is based on a measurement."""
        for one in self.sets:
            one.measure()
        for tier in (*self.tiers, *self.local_tiers):
            log.event(
                "kv_tier",
                tier=tier.name,
                bytes_per_s=tier.speed.measured,
                prefill_tokens_per_s=self._context.prefill_tokens_per_s(),
                crossover_tokens=self.crossover_tokens(tier),
            )

    def announce_held_blocks(self) -> None:
        """Report the blocks that the tiers held before this worker started, as events. Runs on its own thread, because
        listing a large disk tier takes long."""
        self._run(self._announcing, self._announce_held_blocks)

    def close(self) -> None:
        self._closed.set()
        if self.tiers:
            self._others.close()
        for threads in (self._loads, self._pulls, self._hints, self._announcing):
            threads.shutdown(wait=False, cancel_futures=True)
        for one in self.sets:
            one.close(_CLOSE_S)
        self._peers.close()
        for one in self.sets:
            one.close_tiers()

    # ---- on the store's threads

    def _load(self, wanted: KvLoad, mark: Mark) -> None:
        result = LoadResult(wanted.load_id, 0, 0)
        try:
            mark.wait()
            result = self._fill(wanted)
        finally:
            self._finished_loads.append(result)
            self._context.wake()

    def _fill(self, wanted: KvLoad) -> LoadResult:
        """Fill the blocks of a load, or of a shorter prefix if some are missing."""
        first = self.sets[0].loader.load(wanted, wanted.ticket)
        num_pulled, local_loaded = first.num_pulled, first.complete
        for part in wanted.local:
            if local_loaded:
                loaded = self.sets[part.kv_set].loader.load(part, wanted.ticket)
                local_loaded = loaded.complete
                num_pulled += 0 if wanted.keys else loaded.num_pulled
        if local_loaded or not wanted.local:
            return LoadResult(wanted.load_id, first.num_loaded, num_pulled, local_loaded)
        count = self._fill_shorter(wanted, first.num_loaded)
        return LoadResult(wanted.load_id, count, min(num_pulled, count), count > 0)

    def _fill_shorter(self, wanted: KvLoad, num_loaded: int) -> int:
        """Return how many of the leading `num_loaded` blocks of the first KV set can be used: the other sets now hold what
        the token after them sees."""
        count = min(num_loaded, len(wanted.keys) - 1)
        for _ in range(_SHORTER_TRIES):
            count = self._shorter_prefix(wanted, count)
            if count <= 0 or all(
                self.sets[part.kv_set].loader.load(part, None).complete for part in self._local_parts(wanted, count)
            ):
                return max(count, 0)
        return 0

    def _shorter_prefix(self, wanted: KvLoad, count: int) -> int:
        """Return the longest prefix of at most `count` blocks of a load for which tiers hold what the token after it sees,
        and for which the load has blocks."""
        size, first = self._context.block_tokens, wanted.first
        sets = []
        for part in wanted.local:
            one = self.sets[part.kv_set]
            sets.append((one.reach, partial(_is_there, first, one.held(wanted.keys[: max(0, count)]))))
        count += first
        while count > first:
            count = visible_prefix(count, size, sets)
            longest = count
            for part in self._local_parts(wanted, count - first):
                if (too_many := len(part.keys) - len(part.blocks)) > 0:
                    longest = min(longest, count - too_many)
            if longest == count:
                break
            count = longest
        return count - first

    def _local_parts(self, wanted: KvLoad, count: int) -> list[LocalLoad]:
        """Return what the token after the leading `count` blocks of a load sees in the other KV sets, as far as the sequence
        does not have it."""
        size, parts = self._context.block_tokens, []
        for part in wanted.local:
            start = self.sets[part.kv_set].reach.first_block((wanted.first + count) * size, size) - wanted.first
            keys = wanted.keys[max(0, start) : count]
            parts.append(LocalLoad(part.kv_set, 0, keys, part.blocks[: len(keys)]))
        return parts

    def _pull_ahead(self, ticket: KvTicket) -> None:
        for one in self.sets:
            one.prefetcher.pull(ticket)

    def _promote(self, token_ids: Sequence[int], salt: str) -> None:
        names, size = self._names(token_ids, salt), self._context.block_tokens
        count = self.num_worth_loading(token_ids, salt)
        for one in self.sets:
            if one.reach.is_bounded:
                one.prefetcher.promote(names[one.reach.first_block(count * size, size) : count])
            else:
                one.prefetcher.promote(names)

    def _announce_held_blocks(self) -> None:
        for tier in self.tiers:
            names = tier.backend.names()
            while not self._closed.is_set() and (group := tuple(islice(names, _EVENT_BLOCKS))):
                self._stored(tier, group)
                # Listing takes long. A block may have been removed, and its removal reported, before it was listed
                # here.
                here = tier.find([name.key for name in group])
                if gone := tuple(name.key for name, is_here in zip(group, here, strict=True) if not is_here):
                    self._events.append(TierEvent(tier.name, removed=gone))
                    self._context.wake()

    def _maintain(self) -> None:
        while not self._closed.wait(_CATCH_UP_S):
            for one in self.sets:
                one.maintain()

    def _stored(self, tier: MeasuredTier, names: Sequence[BlockName]) -> None:
        if names:
            self._events.append(TierEvent(tier.name, stored=tuple(names)))
            self._context.wake()

    def _hint(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        if not self._hint_slots.acquire(blocking=False):
            log.event("kv_hint_dropped")
            return

        def hint() -> None:
            try:
                work(*args, **kwargs)
            finally:
                self._hint_slots.release()

        self._run(self._hints, hint)

    def _run(self, threads: ThreadPoolExecutor, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            threads.submit(work, *args, **kwargs).add_done_callback(_log_error)
        except RuntimeError:  # the executor is shut down: the engine is closing
            log.event("kv_store_closed")

    def _set_of(self, tier: MeasuredTier) -> SetStore:
        return next(one for one in self.sets if tier in one.tiers)

    # ---- load or compute

    def _compute_s(self, num_blocks: int) -> float:
        rate = self._context.prefill_tokens_per_s()
        return num_blocks * (self._context.block_tokens / rate if rate else _UNKNOWN_COMPUTE_S)

    def _names(self, token_ids: Sequence[int], salt: str) -> list[BlockName]:
        size = self._context.block_tokens
        root = root_key(self._context.fingerprint, salt)
        parents = [root, *block_keys(token_ids, root, size)]
        return [
            BlockName(
                key,
                parents[i],
                tuple(token_ids[i * size : (i + 1) * size]),
                None if i else salt_hash(salt) or "",
            )
            for i, key in enumerate(parents[1:])
        ]


def _is_there(first: int, held: Sequence[bool], number: int) -> bool:
    """Return True if the sequence has the block of this number, or a tier does. `held` starts at block `first`."""
    return number < first or held[number - first]


def _ignore(tier: MeasuredTier, names: Sequence[BlockName]) -> None:
    """Blocks of the other KV sets have the keys of the first one, which are reported already."""


def _log_error(done: Future[None]) -> None:
    """Log the error of work whose result no caller waits for."""
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("kv_work_failed", exc_info=error)
