"""ShortestFirst: a queue of work measured in tokens. The smallest item goes first, and no item starves. Pure.

Ageing protects the oldest item. Tokens computed for other items are counted against it, and each token that it gets
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


class ShortestFirst(Generic[T]):
    """Items with a size in tokens and a unique arrival number."""

    __slots__ = ("_by_arrival", "_by_size", "_entries", "_overtaken", "_step_tokens")

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._entries: dict[T, tuple[int, int]] = {}  # size and arrival
        self._by_size: list[tuple[int, int, T]] = []
        self._by_arrival: list[tuple[int, T]] = []
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
        return self.oldest if self.favours_oldest else self._by_size[0][2]

    def items(self) -> list[T]:
        """Return all items in order of arrival."""
        return [item for _, item in self._by_arrival]

    def smallest(self, count: int) -> list[tuple[int, int, T]]:
        """Return the size and arrival of the `count` smallest items, in order. Such a list is also a heap."""
        return self._by_size[:count]

    def num_up_to(self, size: int) -> int:
        """Return how many items are at most this large."""
        return bisect_left(self._by_size, (size + 1,))  # type: ignore[type-var]

    def add(self, item: T, size: int, arrival: int) -> None:
        self._entries[item] = (size, arrival)
        insort(self._by_size, (size, arrival, item))  # arrivals are unique, so items are never compared
        insort(self._by_arrival, (arrival, item))

    def remove(self, item: T) -> None:
        size, arrival = self._entries.pop(item)
        del self._by_size[bisect_left(self._by_size, (size, arrival))]  # type: ignore[type-var]
        del self._by_arrival[bisect_left(self._by_arrival, (arrival,))]  # type: ignore[type-var]

    def resize(self, item: T, size: int) -> None:
        old, arrival = self._entries[item]
        if size != old:
            del self._by_size[bisect_left(self._by_size, (old, arrival))]  # type: ignore[type-var]
            insort(self._by_size, (size, arrival, item))
            self._entries[item] = (size, arrival)

    def charge(self, item: T, tokens: int) -> None:
        """Note that an item gets `tokens` tokens. Call it before the item is removed."""
        if item is self.oldest:
            self._overtaken = max(0, self._overtaken - OVERTAKING_RATIO * tokens)
        elif not self.favours_oldest:  # otherwise the oldest item could not run, and is not paid for this
            self._overtaken += tokens
