"""SequenceStates: what a drafter remembers of each running sequence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from stoker.sched.sequence import Sequence

_MAX_SEQUENCES = 2048  # more than the sequences that run at a time

S = TypeVar("S")


class SequenceStates(Generic[S]):
    """States by sequence, at most `limit`. The one that was not used for the longest time is dropped first.

    A state can be made again from the sequence's tokens, so dropping one costs time only.
    """

    def __init__(self, make: Callable[[Sequence], S], limit: int = _MAX_SEQUENCES) -> None:
        self._make = make
        self._limit = limit
        self._states: OrderedDict[Sequence, S] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def get(self, seq: Sequence) -> S:
        """Return the state of a sequence, and make it if there is none."""
        state = self._states.get(seq)
        if state is None:
            state = self._states[seq] = self._make(seq)
            if len(self._states) > self._limit:
                self._states.popitem(last=False)
        else:
            self._states.move_to_end(seq)
        return state

    def pop(self, seq: Sequence) -> S | None:
        """Drop the state of a sequence and return it, or None if there is none."""
        return self._states.pop(seq, None)
