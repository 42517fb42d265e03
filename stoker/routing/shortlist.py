"""Shortlist: the workers of a large pool that are worth scoring for a request.

Scoring every worker of a pool of a thousand takes milliseconds. Most of them cannot win: they neither hold the prompt's
blocks nor have a short queue. The shortlist keeps the workers ordered by what a typical request without cached blocks would
cost there, and a second time by what one with cached blocks would cost. A request is scored on the first workers of the first
order, on those of the second that hold the most of its prompt, and on those that the policy names.

The orders are updated where the load has changed since the last request, and when a queue is empty. They are computed again
from time to time, because loads also change by themselves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from math import exp
from typing import Protocol, runtime_checkable

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import CandidatePool, Member
from stoker.fleet.load_book import LoadBook
from stoker.fleet.prefix_matches import PrefixMatches
from stoker.routing.candidate import Candidate, PoolTotals, PrefixInfo
from stoker.routing.query import RouteQuery

MIN_WORKERS = 128  # smaller pools are scored completely
_CHEAPEST = 12
_HOLDERS = 24
_FEW = 160  # holders that are ordered one by one
_MAX_WALK = 256  # workers of an order that are looked at
_SMOOTHING = 0.05
_RANK_EVERY_S = 2.0
_RANK_SHARE = 4  # the orders are computed again after one request for this many workers, too

Ranker = Callable[[Candidate], float]


@runtime_checkable
class ShortlistPolicy(Protocol):
    """A policy that can choose among a part of the workers."""

    def ranker(self, query: RouteQuery, candidates: Sequence[Candidate], totals: PoolTotals) -> Ranker:
        """Return a function that gives the cost of a request like this one on a candidate."""

    def must_score(
        self, query: RouteQuery, members: Collection[Member], prefix: PrefixInfo, is_known: bool, now: float
    ) -> Iterable[WorkerId]:
        """Return the workers that must be among the candidates. `is_known`: some worker has a part of the prompt."""


class _Order:
    """All workers of a pool, ordered by the cost of one kind of request.

    The cost of a worker whose queue drains falls by a second each second. So such workers are kept apart, ordered by their
    cost at time zero, and their order stays right until their queues are drained.
    """

    def __init__(self, ranker: Ranker, candidates: Iterable[Candidate], now: float) -> None:
        self._ranker = ranker
        self._places = {one.worker_id: self._place(one, one.load.draining_tokens > 0, now) for one in candidates}
        self._lists: tuple[list[tuple[float, WorkerId]], ...] = ([], [])  # without and with a queue that drains
        for worker_id, (drains, cost) in self._places.items():
            self._lists[drains].append((cost, worker_id))
        for one in self._lists:
            one.sort()

    def _place(self, one: Candidate, drains: bool, now: float) -> tuple[bool, float]:
        return drains, self._ranker(one) + (now if drains else 0.0)

    def cheapest(self, now: float, count: int, condition: Callable[[WorkerId], bool]) -> list[WorkerId]:
        """Return up to `count` workers for which the condition holds, the cheapest first."""
        found: list[tuple[float, WorkerId]] = []
        for workers, fallen_s in zip(self._lists, (0.0, now), strict=True):
            left = count
            for cost, worker_id in islice(workers, _MAX_WALK):
                if condition(worker_id):
                    found.append((cost - fallen_s, worker_id))
                    left -= 1
                    if not left:
                        break
        found.sort()
        return [worker_id for _, worker_id in found[:count]]

    def move(self, one: Candidate, drains: bool, now: float) -> None:
        """Put a worker whose load has changed to its new place."""
        worker_id = one.worker_id
        drained, cost = self._places[worker_id]
        before = self._lists[drained]
        del before[bisect_left(before, (cost, worker_id))]
        _, cost = self._places[worker_id] = self._place(one, drains, now)
        insort(self._lists[drains], (cost, worker_id))

    def best_of(self, worker_ids: Iterable[WorkerId], now: float, count: int) -> list[WorkerId]:
        """Return up to `count` of these workers, the cheapest first."""
        places = self._places
        found = sorted(
            (places[worker_id][1] - now * places[worker_id][0], worker_id)
            for worker_id in worker_ids
            if worker_id in places
        )
        return [worker_id for _, worker_id in found[:count]]


class Shortlist:
    """The orders of the workers of one pool. `candidate` fills in what a query would cause on a member that holds a given
    number of the prompt's tokens."""

    def __init__(
        self,
        policy: ShortlistPolicy,
        load_book: LoadBook,
        candidate: Callable[[RouteQuery, Member, int, float], Candidate],
    ) -> None:
        self._policy = policy
        self._load_book = load_book
        self._candidate = candidate
        self._pool: CandidatePool | None = None
        self._ranked_at = 0.0
        self._num_requests = 0  # since then
        self._members: dict[WorkerId, Member] = {}
        self._fastest: dict[WorkerId, int] = {}  # the rank of each worker by its speed, in order
        # The typical request, and how many of its tokens are cached in each order. The first order is for none.
        self._query: RouteQuery | None = None
        self._cached = (0, 0)
        self._uncached_tokens = 0.0  # average of the requests whose prompt is cached in part
        self._orders: tuple[_Order, ...] = ()
        self._parts: dict[WorkerId, PoolTotals] = {}  # what each worker adds to the totals
        self._drained: list[tuple[float, WorkerId]] = []  # when queues will be empty; a heap
        self._sums = PoolTotals()  # the sum of the parts, as if nothing had decayed since `_ranked_at`
        self._decay_per_s = 0.0

    def totals(self, now: float) -> PoolTotals:
        """Return the sums over all workers of the pool. Averages have decayed since they were added."""
        sums, fade = self._sums, exp(-self._decay_per_s * (now - self._ranked_at))
        return PoolTotals(
            sums.workers,
            sums.weight,
            sums.recent_requests * fade,
            sums.recent_returns * fade,
            sums.recent_tokens * fade,
            sums.mean_queue_s * fade,
        )

    def _is_old(self, now: float) -> bool:
        return now >= self._ranked_at + _RANK_EVERY_S or self._num_requests * _RANK_SHARE > len(self._members)

    def members(
        self, pool: CandidatePool, query: RouteQuery, matches: PrefixMatches, prefix: PrefixInfo, now: float
    ) -> list[Member]:
        """Return the members to score."""
        changed = self._load_book.take_changed()
        drained: set[WorkerId] = set()
        while self._drained and self._drained[0][0] <= now:
            drained.add(heappop(self._drained)[1])
        self._num_requests += 1
        if matches.num_longest > 1:  # else there is nothing to choose among those that hold the most
            uncached = query.num_tokens - matches.most_blocks * query.block_tokens
            self._uncached_tokens += _SMOOTHING * (uncached - self._uncached_tokens)
        if pool is not self._pool or self._is_old(now):
            self._rank_all(pool, query, now)
        else:
            for worker_id in drained - changed:
                self._rank_again(worker_id, False, now)
            for worker_id in changed:
                self._rank_again(worker_id, True, now)
        whole, cached = self._orders
        chosen: dict[WorkerId, None] = dict.fromkeys(whole.cheapest(now, _CHEAPEST, _any))
        # The weight of some terms depends on the least time that any worker would need.
        if matches:
            for worker_ids, condition in matches.longest(_HOLDERS, _FEW):
                if worker_ids:
                    chosen.update(dict.fromkeys(cached.best_of(worker_ids, now, _HOLDERS)))
                else:
                    chosen.update(dict.fromkeys(cached.cheapest(now, _HOLDERS, condition)))
            worker_ids, has_most = next(matches.longest(1, _FEW))
            if worker_ids:
                ranks = self._fastest
                fastest = min((one for one in worker_ids if one in ranks), key=ranks.__getitem__, default=None)
            else:  # many workers have them, so the search ends after a few
                fastest = next(filter(has_most, self._fastest), None)
        else:
            fastest = next(iter(self._fastest))
        if fastest is not None:
            chosen[fastest] = None
        named = self._policy.must_score(query, self._members.values(), prefix, bool(matches), now)
        chosen.update(dict.fromkeys(named))
        members = self._members
        return [members[worker_id] for worker_id in chosen if worker_id in members]

    def _rank_all(self, pool: CandidatePool, query: RouteQuery, now: float) -> None:
        self._pool, self._ranked_at, self._num_requests = pool, now, 0
        self._query, self._cached = query, (0, max(0, query.num_tokens - max(1, int(self._uncached_tokens))))
        self._members = {member.worker_id: member for member in pool.members}
        by_speed = sorted(self._members, key=lambda worker_id: -self._members[worker_id].tokens_per_s)
        self._fastest = {worker_id: rank for rank, worker_id in enumerate(by_speed)}
        orders: list[_Order] = []
        for cached in self._cached:
            candidates = [self._candidate(query, member, cached, now) for member in pool.members]
            if not orders:
                self._parts = {one.worker_id: _part(one, 1.0) for one in candidates}
                self._sums = PoolTotals(*map(sum, zip(*self._parts.values(), strict=True)))
                self._decay_per_s = candidates[0].load.decay_per_s
                self._drained = [
                    (now + one.load.draining_tokens / one.member.tokens_per_s, one.worker_id)
                    for one in candidates
                    if one.load.draining_tokens > 0
                ]
                heapify(self._drained)
            orders.append(_Order(self._policy.ranker(query, candidates, self._sums), candidates, now))
        self._orders = tuple(orders)

    def _rank_again(self, worker_id: WorkerId, has_changed: bool, now: float) -> None:
        """Move a worker whose load has changed, or whose queue is drained, to its place in the orders."""
        member, query = self._members.get(worker_id), self._query
        if member is None or query is None:
            return
        for order, cached in zip(self._orders, self._cached, strict=True):
            candidate = self._candidate(query, member, cached, now)
            drain_s = candidate.load.draining_tokens / member.tokens_per_s if has_changed else 0.0
            order.move(candidate, drain_s > 0, now)
        if drain_s > 0:
            heappush(self._drained, (now + drain_s, worker_id))
        part = _part(candidate, exp(candidate.load.decay_per_s * (now - self._ranked_at)))
        before, self._parts[worker_id] = self._parts[worker_id], part
        self._sums = _combined(_combined(self._sums, before, -1.0), part, 1.0)


def _any(worker_id: WorkerId) -> bool:
    return True


def _part(one: Candidate, growth: float) -> PoolTotals:
    """Return what a worker adds to the totals. `growth` undoes the decay of its averages since a common time."""
    load = one.load
    return PoolTotals(
        1,
        one.member.weight,
        load.recent_requests * growth,
        load.recent_returns * growth,
        load.recent_tokens * growth,
        load.mean_queued_tokens / one.member.tokens_per_s * growth,
    )


def _combined(totals: PoolTotals, part: PoolTotals, factor: float) -> PoolTotals:
    """Return the totals plus `factor` times a worker's part."""
    return PoolTotals(
        totals.workers,
        totals.weight + factor * part.weight,
        totals.recent_requests + factor * part.recent_requests,
        totals.recent_returns + factor * part.recent_returns,
        totals.recent_tokens + factor * part.recent_tokens,
        totals.mean_queue_s + factor * part.mean_queue_s,
    )
