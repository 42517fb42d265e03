"""PrefillTurns: fills the rest of a step with prompts, in the order of `PrefillOrder`. Pure."""

from __future__ import annotations

from stoker.sched.block_sets import BlockSets
from stoker.sched.plan_builder import PlanBuilder
from stoker.sched.prefix_cache import PrefixCache
from stoker.sched.residency import Residency
from stoker.sched.row_pool import RowPool
from stoker.sched.sequence import Sequence, SequenceState
from stoker.sched.sequence_queues import SequenceQueues

_MEASURED_PER_STEP = 8  # waiting sequences whose uncached tokens are counted again in each step, in rotation


class PrefillTurns:
    """Gives sequences with prompt tokens to compute their turns, and starts those that wait."""

    def __init__(
        self, queues: SequenceQueues, rows: RowPool, sets: BlockSets, prefixes: PrefixCache, residency: Residency
    ) -> None:
        self._queues = queues
        self._rows = rows
        self._sets = sets
        self._prefixes = prefixes
        self._residency = residency

    def fill(self, builder: PlanBuilder, running: list[Sequence]) -> None:
        """Fill the rest of the step with prompts of running and waiting sequences, until one does not fit.

        `running` are the running sequences with prompt tokens to compute.
        """
        if not running and self._queues.order.is_empty:
            return
        self._queues.measure_again(_MEASURED_PER_STEP)
        if running or self._rows.num_free or self._could_preempt():
            self._take_turns(builder)
        # A waiting sequence that does not fit does not stop those that have their blocks. It may wait for these.
        for seq in sorted(running, key=lambda s: s.num_to_compute):
            if builder.budget and seq.state is SequenceState.RUNNING:
                self._take_turn(seq, builder)

    def _could_preempt(self) -> bool:
        """Return True if a running sequence has a worse priority than a waiting one."""
        best, running = self._queues.order.best_priority, self._queues.running
        return best is not None and bool(running) and best < running[-1].request.priority

    def _take_turns(self, builder: PlanBuilder) -> None:
        """Compute prompts in order. At most one sequence that does not fit is passed, by other tenants of its priority."""
        blocked: Sequence | None = None
        num_free = 0
        for seq in self._queues.order.walk():
            if not builder.budget or (blocked is not None and seq.request.priority != blocked.request.priority):
                break
            if self._take_turn(seq, builder):
                continue
            if blocked is not None or not self._may_be_passed(seq):
                break
            blocked, num_free = seq, self._sets.first_pool.num_free
            self._queues.order.pass_over(seq)
        if blocked is not None:
            blocked.blocks_passed += max(0, num_free - self._sets.first_pool.num_free)

    def _take_turn(self, turn: Sequence, builder: PlanBuilder) -> bool:
        """Compute prompt tokens of a sequence, or of the running one whose blocks it waits for.

        Return False if it does not fit.
        """
        seq = turn
        if builder.holds_flex and turn.request.is_flex:
            return True
        if turn.state is SequenceState.WAITING:
            if turn.num_pending or turn.leaves_under is not None:
                return True  # preempted while a step samples its next token, which is not known here yet, or leaving
            seq = self._prefixes.sequence_ahead(turn) or turn
        if seq in builder.counts or seq.state is SequenceState.LOADING:
            return True
        if seq.state is SequenceState.RUNNING:
            if seq.num_to_compute <= 1:
                return True  # launched steps compute the rest of its prompt
        elif not self._residency.admit(seq, builder):
            return False
        if not seq.is_loading:
            self._schedule(seq, builder)
        if count := builder.counts.get(seq, 0):
            self._queues.order.charge(turn, seq, count, seq.num_to_compute - count)
        elif seq.is_loading:
            self._queues.order.discard(seq)  # until its blocks are loaded
        return True

    def _schedule(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Compute prompt tokens of a running sequence, as many as it gets blocks for."""
        end = seq.num_computed + min(seq.num_to_compute, builder.budget)
        if end > seq.room:
            # Only in a KV set with a bounded reach: in others it has had all of its blocks since it started.
            self._sets.release_behind(seq)
            end = min(end, max(self._sets.free_tokens(seq), seq.num_computed + 1))
            if not self._residency.extend(seq, end, builder):
                return
        builder.schedule(seq, end - seq.num_computed)

    def _may_be_passed(self, seq: Sequence) -> bool:
        """Return True if other tenants' sequences may start before this one, which does not fit.

        Otherwise one tenant's prompt that needs most of the KV cache would stop all others until the running sequences end.
        After the others have taken as many blocks as it needs itself, they wait for it. So it does not starve.
        """
        return self._rows.num_free > 0 and seq.blocks_passed < seq.num_blocks_for(len(seq.token_ids) + 1)
