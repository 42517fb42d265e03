"""KvStore: the chain of tiers below the device, and other workers that hold what we need.

It answers how much of a prompt is worth loading, fills blocks behind the engine's back, and takes in what was computed. It
knows bytes and seconds; it refuses to know sequences. Whatever is missing, late or wrong is computed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import ParamSpec

from stoker.base import log as logs
from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.keys import block_keys, root_key, salt_hash
from stoker.kv.blocks.transfer import BlockName, KvLoad, KvTicket, LoadResult, OfferedBlock
from stoker.kv.store.block_io import BlockIo, Mark
from stoker.kv.store.bounded_reader import BoundedReader
from stoker.kv.store.buffer_pool import BufferPool
from stoker.kv.store.loader import Loader, Peers
from stoker.kv.store.measured_tier import MeasuredTier, first_holders
from stoker.kv.store.tier_prefetcher import TierPrefetcher
from stoker.kv.store.write_behind import WriteBehind

_LOADERS = 4
# RAM for blocks on their way into the tiers, and the fewest and most buffers that it makes.
_BUFFER_BYTES = {False: 256 << 20, True: 1 << 30}
_FEWEST_BUFFERS, _MOST_BUFFERS = 16, 4096
_UNKNOWN_COMPUTE_S = 0.1  # for a block, until the first prompt was measured
_CLOSE_S = 2.0
_TOLD_AT_A_TIME = 256
_CATCH_UP_S = 1.0  # so late may be known here, and told, what others removed
_MOST_HINTS = 256  # that wait: they are of use soon or not at all

log = logs.EventLog("kv")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class TierEvent:
    """Blocks that a tier has, or has no longer."""

    tier: str
    stored: tuple[BlockName, ...] = ()
    removed: tuple[BlockKey, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreContext:
    """What the store must know of the engine. `wake` is called from any thread when the engine should look."""

    fingerprint: str
    block_tokens: int
    block_bytes: int
    on_card: bool
    prefill_tokens_per_s: Callable[[], float | None]
    wake: Callable[[], None]


class KvStore:
    """`events` is where the tiers note what they lost, and the store what they took: in the order in which it happened."""

    def __init__(
        self, tiers: Sequence[MeasuredTier], peers: Peers, io: BlockIo, context: StoreContext, events: deque[TierEvent]
    ) -> None:
        self.tiers = list(tiers)
        self._peers = peers
        self._io = io
        self._context = context
        self._events = events
        self._filled: deque[LoadResult] = deque()
        count = max(_FEWEST_BUFFERS, min(_MOST_BUFFERS, _BUFFER_BYTES[context.on_card] // context.block_bytes))
        self.max_offers = count if self.tiers else 0
        buffers = BufferPool(count, context.block_bytes, context.on_card)
        self._bounded_reader = BoundedReader(self.tiers, buffers)
        self._loader = Loader(
            self.tiers, peers, io, buffers, self._bounded_reader, context.block_bytes, self._compute_s
        )
        self._write_behind = WriteBehind(self.tiers, io, buffers, count // 2, context.wake, self._stored)
        self._prefetcher = TierPrefetcher(self.tiers, peers, buffers, self._bounded_reader, self._stored)
        self._loads = ThreadPoolExecutor(_LOADERS, thread_name_prefix="kv-load")
        # Apart from those: a worker that does not answer takes its time of whoever pulls, and of nobody else.
        self._pulls = ThreadPoolExecutor(_LOADERS, thread_name_prefix="kv-pull")
        self._hints = ThreadPoolExecutor(1, thread_name_prefix="kv-ahead")
        self._telling = ThreadPoolExecutor(1, thread_name_prefix="kv-tell")
        self._closed = threading.Event()
        self._hint_room = threading.Semaphore(_MOST_HINTS)
        if self.tiers:
            threading.Thread(target=self._look_after, name="kv-look-after", daemon=True).start()

    # ---- asked by any thread

    def num_worth_loading(self, token_ids: Sequence[int], salt: str) -> int:
        """Leading full blocks of the prompt that tiers hold and that are had sooner from there than by computing."""
        if not self.tiers:
            return 0
        keys = block_keys(token_ids, root_key(self._context.fingerprint, salt), self._context.block_tokens)
        count = 0
        for holder in first_holders(self.tiers, keys):
            if holder is None or not self._loader.is_worth(holder):
                break
            count += 1
        return count

    def crossover_tokens(self, tier: MeasuredTier) -> int | None:
        """From so many tokens on, loading from there beats computing; None: never, or not measured."""
        return self._context.block_tokens if tier.speed.measured is not None and self._loader.is_worth(tier) else None

    def prefetch(self, token_ids: Sequence[int], salt: str, ticket: KvTicket | None) -> None:
        """A hint: bring it into RAM, from slower tiers or from the ticket's worker while that still computes it."""
        if ticket is not None:
            self._hint(self._prefetcher.pull, ticket)
        if token_ids:
            self._hint(self._promote, token_ids, salt)

    def offer_again(self, to: MeasuredTier, keys: Sequence[BlockKey]) -> None:
        self._run(self._hints, self._prefetcher.offer_again, to, list(keys))

    # ---- asked by the engine's thread

    def start(self, wanted: KvLoad) -> None:
        """The blocks are the store's until `take_filled` tells of them."""
        threads = self._loads if wanted.ticket is None else self._pulls
        self._run(threads, self._load, wanted, self._io.mark())

    def take_filled(self) -> list[LoadResult]:
        return [self._filled.popleft() for _ in range(len(self._filled))]

    def release(self, ticket: KvTicket) -> None:
        """Nothing more is wanted of it."""
        self._run(self._loads, self._peers.release, ticket)

    def offer(self, offered: list[OfferedBlock]) -> None:
        self._write_behind.offer(offered)

    def take_copied(self) -> list[BlockId]:
        """Blocks that were offered and need not be kept any longer."""
        return self._write_behind.take_copied()

    @property
    def num_queued(self) -> list[int]:
        """Blocks on their way into each tier."""
        return self._write_behind.num_queued

    def take_events(self) -> list[TierEvent]:
        return [self._events.popleft() for _ in range(len(self._events))]

    # ---- at start and end

    def measure(self) -> None:
        """Each tier's speed, so that the first decision is already a measured one."""
        for tier in self.tiers:
            tier.measure(self._context.block_bytes)
            log.event(
                "kv_tier",
                tier=tier.name,
                bytes_per_s=tier.speed.measured,
                prefill_tokens_per_s=self._context.prefill_tokens_per_s(),
                crossover_tokens=self.crossover_tokens(tier),
            )

    def tell_held(self) -> None:
        """What the tiers held before this worker began, as events. Behind the engine's back: a disk of many blocks takes long."""
        self._run(self._telling, self._tell_held)

    def close(self) -> None:
        self._closed.set()
        for threads in (self._loads, self._pulls, self._hints, self._telling):
            threads.shutdown(wait=False, cancel_futures=True)
        self._bounded_reader.close()
        self._write_behind.close(_CLOSE_S)
        self._peers.close()
        for tier in self.tiers:
            tier.backend.close()

    # ---- on threads

    def _load(self, wanted: KvLoad, mark: Mark) -> None:
        result = LoadResult(wanted.load_id, 0, 0)
        try:
            result = self._loader.load(wanted, mark)
        finally:
            self._filled.append(result)
            self._context.wake()
            if wanted.ticket is not None:
                self._peers.release(wanted.ticket)

    def _promote(self, token_ids: Sequence[int], salt: str) -> None:
        self._prefetcher.promote(self._names(token_ids, salt))

    def _tell_held(self) -> None:
        for tier in self.tiers:
            names = tier.backend.names()
            while not self._closed.is_set() and (group := tuple(islice(names, _TOLD_AT_A_TIME))):
                self._stored(tier, group)
                # Listing takes long: some may have gone since they were listed, and their end was told before they were.
                here = tier.find([name.key for name in group])
                if gone := tuple(name.key for name, is_here in zip(group, here, strict=True) if not is_here):
                    self._events.append(TierEvent(tier.name, removed=gone))
                    self._context.wake()

    def _look_after(self) -> None:
        while not self._closed.wait(_CATCH_UP_S):
            for tier in self.tiers:
                if tier.backend.shared_location is not None:
                    tier.catch_up()
                if not self._loader.is_worth(tier):
                    tier.measure_again(self._context.block_bytes)

    def _stored(self, tier: MeasuredTier, names: Sequence[BlockName]) -> None:
        if names:
            self._events.append(TierEvent(tier.name, stored=tuple(names)))
            self._context.wake()

    def _hint(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        if not self._hint_room.acquire(blocking=False):
            log.event("kv_hint_dropped")
            return

        def hint() -> None:
            try:
                work(*args, **kwargs)
            finally:
                self._hint_room.release()

        self._run(self._hints, hint)

    def _run(self, threads: ThreadPoolExecutor, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            threads.submit(work, *args, **kwargs).add_done_callback(_tell_error)
        except RuntimeError:  # the threads are shut down: the engine is ending
            log.event("kv_store_closed")

    # ---- what is worth it

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


def _tell_error(done: Future[None]) -> None:
    """Of work that nobody waits for."""
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("kv_work_failed", exc_info=error)
