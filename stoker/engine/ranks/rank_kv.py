"""RankKv: the KV stores and lease books of the other ranks, as rank 0 sees them.

Rank 0 decides what is offered, loaded and leased, and sends it with the plans. The others report what they have done. A load
has brought what all ranks have; a block is free again when no rank needs its bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from stoker.base.log import EventLog
from stoker.engine.ranks.commands import RankCommands
from stoker.kv.blocks.transfer import KvTicket, LoadResult, OfferedBlock
from stoker.kv.store.other_stores import NoOtherStores, OtherStores
from stoker.parallel.kv_frame import KvHint, KvUpdate, LeaseChange
from stoker.parallel.plan_frame import RankCommand
from stoker.parallel.rank_link import Kind, LinkMessage
from stoker.parallel.rank_watch import RankLost
from stoker.sched.leases import LeasedKv

KV_REPORTS = (Kind.LOADED, Kind.COPIED, Kind.CLOSED, Kind.WRITTEN)
_CLOSE_S = 4.0  # for the ranks to write what waits for their tiers

log = EventLog("ranks")


class OtherKv(OtherStores, Protocol):
    """What the engine tells the other ranks about KV, besides its plans."""

    def put_leases(self, leased: Sequence[LeasedKv]) -> None:
        """Set the state of leases."""

    def close_leases(self, lease_ids: Iterable[str]) -> set[str]:
        """Close leases. Return those that no peer can read on any other rank. Call it again for the others."""


class NoOtherKv(NoOtherStores):
    """An engine on one device."""

    def put_leases(self, leased: Sequence[LeasedKv]) -> None:
        pass

    def close_leases(self, lease_ids: Iterable[str]) -> set[str]:
        return set(lease_ids)


class RankKv:
    """Sends on the engine's thread. `received` is called on another one, with the reports of the ranks."""

    def __init__(self, commands: RankCommands, num_others: int, wake: Callable[[], None]) -> None:
        """`wake` is called when an idle engine should take a step."""
        self._commands, self._num_others, self._wake = commands, num_others, wake
        self._lock = threading.Condition()
        self._num_written = 0
        # Reports of the ranks, and results of rank 0 that wait for them:
        self._loads: dict[int, list[LoadResult]] = {}
        self._num_copied: dict[int, dict[int, int]] = {}  # by KV set and rank, since the start
        self._closed: dict[str, int] = {}  # how many ranks have closed a lease
        self._copied: dict[int, deque[OfferedBlock]] = {}  # by KV set: copied by rank 0, not yet by all
        self._num_released: dict[int, int] = {}
        self._sent: dict[str, dict[int, LeasedKv]] = {}  # the state of each lease that the ranks have, by KV set

    def received(self, rank: int, message: LinkMessage) -> None:
        """Take in a report of a rank, of one of the kinds KV_REPORTS."""
        with self._lock:
            if message.kind is Kind.LOADED:
                num_pulled, local_loaded = map(int, message.text.split())
                result = LoadResult(message.step, message.digest, num_pulled, bool(local_loaded))
                self._loads.setdefault(message.step, []).append(result)
            elif message.kind is Kind.COPIED:
                self._num_copied.setdefault(message.step, {})[rank] = message.digest
            elif message.kind is Kind.WRITTEN:
                self._num_written += 1
                self._lock.notify_all()
            elif message.text in self._closed:
                self._closed[message.text] += 1
        self._wake()

    # ---- OtherStores

    def offer(self, offered: list[OfferedBlock]) -> None:
        if offered:
            self._send(KvUpdate(offers=offered))

    def prefetch(self, token_ids: Sequence[int], salt: str, ticket: KvTicket | None) -> None:
        self._send(KvUpdate(hints=[KvHint(list(token_ids), salt, ticket)]))

    def join_copied(self, own: list[OfferedBlock]) -> list[OfferedBlock]:
        for block in own:
            self._copied.setdefault(block.kv_set, deque()).append(block)
        done: list[OfferedBlock] = []
        with self._lock:
            for kv_set, waiting in self._copied.items():
                counts = self._num_copied.get(kv_set, {})
                everywhere = min(counts.values()) if len(counts) == self._num_others else 0
                released = self._num_released.get(kv_set, 0)
                count = min(len(waiting), everywhere - released)
                done += [waiting.popleft() for _ in range(count)]
                self._num_released[kv_set] = released + count
        return done

    def join_loads(self, own: list[LoadResult]) -> list[LoadResult]:
        """See OtherStores. Called in every step: an engine that waits for a load must notice a rank that is lost."""
        self._commands.ranks.check()
        with self._lock:
            for result in own:
                self._loads.setdefault(result.load_id, []).append(result)
            done = [load_id for load_id, found in self._loads.items() if len(found) == self._num_others + 1]
            return [_joined(self._loads.pop(load_id)) for load_id in done]

    def close(self) -> None:
        try:
            self._commands.send(RankCommand.CLOSE_KV)
        except RankLost as error:
            log.warning("kv_not_written", reason=error.message)
            return
        with self._lock:
            if not self._lock.wait_for(lambda: self._num_written == self._num_others, _CLOSE_S):
                log.warning(
                    "kv_not_written", reason=f"{self._num_written} of {self._num_others} ranks within {_CLOSE_S} s"
                )

    # ---- leases

    def put_leases(self, leased: Sequence[LeasedKv]) -> None:
        changes = []
        for kv in leased:
            known = self._sent.setdefault(kv.lease_id, {})
            before, known[kv.kv_set] = known.get(kv.kv_set), kv
            if before != kv:
                changes.append(_change(before, kv))
        if changes:
            self._send(KvUpdate(leases=changes))

    def close_leases(self, lease_ids: Iterable[str]) -> set[str]:
        with self._lock:
            wanted = set(lease_ids)
            new = [lease_id for lease_id in wanted if lease_id not in self._closed]
            self._closed.update(dict.fromkeys(new, 0))
            closed = {lease_id for lease_id in wanted if self._closed[lease_id] == self._num_others}
            for lease_id in closed:
                del self._closed[lease_id]
        for lease_id in new:
            self._sent.pop(lease_id, None)
        if new:
            self._send(KvUpdate(closing=new))
        return closed

    def _send(self, update: KvUpdate) -> None:
        self._commands.send(RankCommand.KV, update=replace(update, after=self._commands.num_waited))


def _joined(results: Sequence[LoadResult]) -> LoadResult:
    """Return what all ranks have. What the token after a prefix sees in the other KV sets differs from prefix to prefix, so it is
    only there if all ranks have the same one."""
    num_loaded = {result.num_loaded for result in results}
    return LoadResult(
        results[0].load_id,
        min(num_loaded),
        max(result.num_pulled for result in results),
        len(num_loaded) == 1 and all(result.local_loaded for result in results),
    )


def _change(before: LeasedKv | None, now: LeasedKv) -> LeaseChange:
    """Return what the ranks do not know of a lease."""
    num_same = 0
    if before is not None:
        most = min(len(before.names), len(before.keys), len(now.keys), len(now.names))
        while num_same < most and _same_block(before, now, num_same):
            num_same += 1
    return LeaseChange(
        now.lease_id,
        now.kv_set,
        num_same,
        now.keys[num_same:],
        now.blocks[num_same:],
        now.names[num_same:],
        now.num_ready,
        now.complete,
    )


def _same_block(before: LeasedKv, now: LeasedKv, i: int) -> bool:
    return before.keys[i] == now.keys[i] and before.blocks[i] == now.blocks[i]
