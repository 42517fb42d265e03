"""PrefillOrder: in which order the prompts of waiting and running sequences are computed. Pure.

1. A better (lower) priority first.
2. Within a priority, tenants share the computed prompt tokens by weight (base/fair_shares.py).
3. Within a tenant, the sequence with the fewest tokens left to compute, with ageing (base/shortest_first.py). Sequences that
   have output were preempted or come from another worker. They go before those, because their clients' streams are stalled.

A running sequence whose prompt is partly computed stays in the order. So a short prompt overtakes a long one between two
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from stoker.base.fair_shares import FairShares
from stoker.base.shortest_first import ShortestFirst
from stoker.sched.sequence import Sequence

_FIRST = -(1 << 48)  # a size before all others, whatever ageing adds
_MAX_EXAMINED = 256  # sequences of a tenant that one step looks at


class PrefillOrder:
    """The sequences that have prompt tokens to compute and could be computed now.

    `measure` returns how many tokens a sequence has to compute. The size of a waiting sequence changes as other sequences
    compute or evict blocks, so it is measured again before the sequence is chosen.
    """

    def __init__(self, step_tokens: int, measure: Callable[[Sequence], int]) -> None:
        self._step_tokens = step_tokens
        self._measure = measure
        self._classes: dict[int, dict[str, ShortestFirst[Sequence]]] = {}  # by priority and tenant
        self._shares = FairShares()
        self._passed_over: set[str] = set()  # tenants that get no more turns in this walk

    @property
    def is_empty(self) -> bool:
        return not self._classes

    @property
    def best_priority(self) -> int | None:
        return min(self._classes, default=None)

    def add(self, seq: Sequence) -> None:
        tenants = self._classes.setdefault(seq.request.priority, {})
        queue = tenants.get(seq.request.tenant)
        if queue is None:
            queue = tenants[seq.request.tenant] = ShortestFirst(self._step_tokens)
        queue.add(seq, self._size(seq, self._measure(seq)), seq.arrival)

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence, if it is in the order."""
        tenants = self._classes.get(seq.request.priority, {})
        queue = tenants.get(seq.request.tenant)
        if queue is None or seq not in queue:
            return
        queue.remove(seq)
        if not queue:
            del tenants[seq.request.tenant]
            if not tenants:
                del self._classes[seq.request.priority]
        if not self._classes:
            self._shares.clear()

    def measure(self, seq: Sequence) -> None:
        """Measure a sequence of the order again."""
        self._queue_of(seq).resize(seq, self._size(seq, self._measure(seq)))

    def charge(self, turn: Sequence, seq: Sequence, count: int, left: int) -> None:
        """Note that this step computes `count` tokens of `seq`, in the turn of `turn`; `left` tokens remain.

        The tenant whose turn it was pays. A last single token is computed like a decoded one, which needs no turn.
        """
        self._queue_of(turn).charge(turn, count)
        request = turn.request
        self._shares.charge(request.tenant, count, request.tenant_weight)
        if left > 1:
            self._queue_of(seq).resize(seq, self._size(seq, left))
        else:
            self.discard(seq)

    def walk(self) -> Iterator[Sequence]:
        """Yield the sequences in order. The caller reports what it computes with `charge` before it takes the next one.

        A sequence may be yielded twice.
        """
        self._shares.trim()
        start_of = self._shares.start
        for priority in sorted(self._classes):
            tenants = self._classes.get(priority, {})
            turns = [(start_of(tenant), queue.oldest.arrival, tenant) for tenant, queue in tenants.items()]
            heapify(turns)
            candidates: dict[str, Iterator[Sequence]] = {}  # only of tenants that get a turn, because there may be many
            self._passed_over.clear()
            while turns:
                _, arrival, tenant = heappop(turns)
                if tenant not in candidates:
                    queue = tenants.get(tenant)
                    candidates[tenant] = iter(()) if queue is None else self._candidates(queue)
                seq = next(candidates[tenant], None)
                if seq is not None:
                    yield seq
                    if tenant not in self._passed_over:
                        heappush(turns, (start_of(tenant), arrival, tenant))

    def pass_over(self, seq: Sequence) -> None:
        """Give the tenant of this sequence no more turns at its priority in this walk."""
        self._passed_over.add(seq.request.tenant)

    def _candidates(self, queue: ShortestFirst[Sequence]) -> Iterator[Sequence]:
        """Yield a tenant's sequences in order."""
        tried: Sequence | None = None
        smallest = queue.smallest(_MAX_EXAMINED)
        while queue:
            if queue.favours_oldest and queue.oldest is not tried:
                tried = queue.oldest
                yield tried
            elif (seq := self._pop_smallest(queue, smallest)) is not None:
                yield seq
            else:
                return

    def _pop_smallest(self, queue: ShortestFirst[Sequence], heap: list[tuple[int, int, Sequence]]) -> Sequence | None:
        while heap:
            rank, arrival, seq = heappop(heap)
            if seq not in queue:
                continue
            new_rank = queue.resize(seq, self._size(seq, self._measure(seq)))
            if new_rank <= rank:
                return seq
            heappush(heap, (new_rank, arrival, seq))
        return None

    def _size(self, seq: Sequence, tokens_left: int) -> int:
        return _FIRST if seq.has_output else tokens_left

    def _queue_of(self, seq: Sequence) -> ShortestFirst[Sequence]:
        return self._classes[seq.request.priority][seq.request.tenant]
