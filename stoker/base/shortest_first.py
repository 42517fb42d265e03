"""ShortestFirst: a queue of work measured in tokens. The smallest item goes first, and no item starves. Pure.

Ageing has two parts. Waiting items shrink: compared with an item that arrives now, an item counts one token less for each
`SHRINKING_TOKENS` tokens that were computed since its arrival. This keeps the tail of the waits short, but a burst of small
items could still delay a large one for any time.

So the oldest item is protected, too. Tokens computed for other items are counted against it, and each token that it gets
itself pays for `OVERTAKING_RATIO` of them. While the count is at least OVERTAKING_RATIO * step_tokens, the oldest item goes
first. So the oldest item gets at least one of OVERTAKING_RATIO + 1 tokens in the long run, whatever arrives.

The bound: let W be the tokens of an item and of all items that arrived before it, and C the largest number of tokens that an
item gets at once. Then the items that arrive after it get less than

    OVERTAKING_RATIO * (W + step_tokens) + C

tokens before it is done, as long as the oldest item can run. The rule counts work, so it needs no clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Generic, TypeVar

T = TypeVar("T")

OVERTAKING_RATIO = 3  # tokens of other items that each token of the oldest item pays for
SHRINKING_TOKENS = 32


class ShortestFirst(Generic[T]):
    """Items with a size in tokens and a unique arrival number."""

    __slots__ = ("_by_arrival", "_by_rank", "_computed", "_entries", "_overtaken", "_step_tokens")

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._entries: dict[T, tuple[int, int, int]] = {}  # rank, arrival, and what the rank has beyond the size
        self._by_rank: list[tuple[int, int, T]] = []
        self._by_arrival: list[tuple[int, T]] = []
        self._computed = 0  # tokens of all items, since the queue was created
        self._overtaken = 0  # tokens computed for other items that the oldest item has not been paid for

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    @property
    def oldest(self) -> T:
        return self._by_arrival[0][1]

    @property
    def newest(self) -> T:
        return self._by_arrival[-1][1]

    @property
    def favours_oldest(self) -> bool:
        """True if the oldest item goes before smaller ones, because these have overtaken it for long enough."""
        return self._overtaken >= OVERTAKING_RATIO * self._step_tokens

    @property
    def next(self) -> T:
        """The item that goes first now."""
        return self.oldest if self.favours_oldest else self._by_rank[0][2]

    def items(self) -> list[T]:
        """Return all items in order of arrival."""
        return [item for _, item in self._by_arrival]

    def smallest(self, count: int) -> list[tuple[int, int, T]]:
        """Return the rank and arrival of the `count` items of the lowest rank, in order. Such a list is also a heap."""
        return self._by_rank[:count]

    def num_before(self, size: int) -> int:
        """Return how many items would go before an item of this size that arrives now, if the oldest is not favoured."""
        return bisect_left(self._by_rank, (size + self._computed // SHRINKING_TOKENS + 1,))  # type: ignore[type-var]

    def add(self, item: T, size: int, arrival: int) -> None:
        since = self._computed // SHRINKING_TOKENS
        rank = size + since
        self._entries[item] = (rank, arrival, since)
        insort(self._by_rank, (rank, arrival, item))  # arrivals are unique, so items are never compared
        insort(self._by_arrival, (arrival, item))

    def remove(self, item: T) -> None:
        rank, arrival, _ = self._entries.pop(item)
        del self._by_rank[bisect_left(self._by_rank, (rank, arrival))]  # type: ignore[type-var]
        del self._by_arrival[bisect_left(self._by_arrival, (arrival,))]  # type: ignore[type-var]

    def resize(self, item: T, size: int) -> int:
        """Set the size of an item. Return its new rank."""
        old, arrival, since = self._entries[item]
        rank = size + since
        if rank != old:
            del self._by_rank[bisect_left(self._by_rank, (old, arrival))]  # type: ignore[type-var]
            insort(self._by_rank, (rank, arrival, item))
            self._entries[item] = (rank, arrival, since)
        return rank

    def charge(self, item: T, tokens: int) -> None:
        """Note that an item gets `tokens` tokens. Call it before the item is removed."""
        self._computed += tokens
        if item is self.oldest:
            self._overtaken = max(0, self._overtaken - OVERTAKING_RATIO * tokens)
        elif not self.favours_oldest:  # otherwise the oldest item could not run, and is not paid for this
            self._overtaken += tokens
