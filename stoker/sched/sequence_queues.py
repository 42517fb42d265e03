"""SequenceQueues: the sequences that have not ended, waiting or running. Pure."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from stoker.base.ids import RequestId
from stoker.sched.flex_steps import FlexSteps
from stoker.sched.prefill_order import PrefillOrder
from stoker.sched.sequence import Sequence, SequenceState


class SequenceQueues:
    """Each sequence waits, or it runs: then it has a row and blocks. `Residency` gives those and takes them back.

    Others read the attributes, and change them through the methods only. `order` has all sequences with prompt tokens to
    compute, those that run too.
    """

    def __init__(self, order: PrefillOrder, flex: FlexSteps) -> None:
        self.by_id: dict[RequestId, Sequence] = {}
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()  # the one that was measured last is last
        self.running: list[Sequence] = []  # ordered by precedence; includes loading sequences
        self.order = order
        self.num_deadlines = 0  # sequences that have one
        self._flex = flex

    @property
    def has_only_flex(self) -> bool:
        return self._flex.num_flex == len(self.by_id)

    @property
    def has_flex(self) -> bool:
        return self._flex.num_flex > 0

    def add(self, seq: Sequence) -> None:
        """Append a new sequence to those that wait."""
        self.by_id[seq.request.request_id] = seq
        self.num_deadlines += seq.request.deadline_s is not None
        self._flex.added(seq.request)
        self._enqueue(seq)

    def start(self, seq: Sequence) -> None:
        """Move a waiting sequence to the running ones."""
        del self.waiting[seq]
        insort(self.running, seq, key=lambda s: s.precedence)

    def requeue(self, seq: Sequence) -> None:
        """Move a running sequence, which has no blocks any more, back to those that wait."""
        self.running.remove(seq)
        seq.state = SequenceState.WAITING
        self.order.discard(seq)
        self._enqueue(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that ends."""
        self.order.discard(seq)
        if seq.state is SequenceState.WAITING:
            del self.waiting[seq]
        else:
            self.running.remove(seq)
        seq.state = SequenceState.DONE
        del self.by_id[seq.request.request_id]
        self.num_deadlines -= seq.request.deadline_s is not None
        self._flex.ended(seq.request)

    def measure_again(self, max_sequences: int) -> None:
        """Count the uncached tokens of the waiting sequences that were measured the longest time ago."""
        for _ in range(min(max_sequences, len(self.waiting))):
            seq = next(iter(self.waiting))
            self.waiting.move_to_end(seq)
            self.order.measure(seq)

    def preemptible_for(self, seq: Sequence) -> Iterator[Sequence]:
        """Yield the running sequences that may be preempted for a waiting one, the best of them first."""
        for other in self.running:
            if other.request.priority > seq.request.priority and other.state is SequenceState.RUNNING:
                yield other

    def _enqueue(self, seq: Sequence) -> None:
        self.waiting[seq] = None
        self.order.add(seq)
