"""Residency: gives sequences a row and blocks, and takes them back, by preemption if it must. Pure."""

from __future__ import annotations

from stoker.base.ids import BlockId
from stoker.kv.blocks.transfer import LoadResult
from stoker.sched.block_sets import BlockSets, PrefixMatch
from stoker.sched.drafting import Drafting
from stoker.sched.leases import Leases
from stoker.sched.loads import PendingLoads, loadable_tokens
from stoker.sched.plan import BlockCopy
from stoker.sched.plan_builder import PlanBuilder
from stoker.sched.prefix_cache import PrefixCache
from stoker.sched.row_pool import RowPool
from stoker.sched.scheduler_config import Counters
from stoker.sched.sequence import Sequence, SequenceState
from stoker.sched.sequence_queues import SequenceQueues


class Residency:
    """Moves sequences between the queues, together with their rows, blocks and loads."""

    def __init__(
        self,
        queues: SequenceQueues,
        rows: RowPool,
        sets: BlockSets,
        prefixes: PrefixCache,
        leases: Leases,
        drafting: Drafting,
        counters: Counters,
    ) -> None:
        self._queues = queues
        self._rows = rows
        self._sets = sets
        self._prefixes = prefixes
        self._leases = leases
        self._drafting = drafting
        self._counters = counters
        self._loads = PendingLoads(sets)
        self._unfilled: list[BlockId] = []
        self._shortened: list[Sequence] = []

    @property
    def num_loading(self) -> int:
        return len(self._loads)

    # ---- waiting sequences that start

    def admit(self, seq: Sequence, builder: PlanBuilder) -> bool:
        """Start a waiting sequence, if there are a row and blocks for all of its known tokens and one more.

        Return False if there are not. Then the sequence runs, or its blocks are being loaded.
        """
        match = self._prefixes.match(seq)
        num_matched = match.num_blocks
        matched_tokens = num_matched * seq.block_tokens
        loadable = loadable_tokens(seq)
        loads = loadable > matched_tokens
        wanted = self._sets.wanted(seq, match, loadable if loads else 0)
        if not self._make_room(seq, match, wanted, builder):
            return False
        partial = None if loads else self._prefixes.match_partial(seq, num_matched)
        self._sets.start(seq, match, wanted, builder.fresh_blocks)
        seq.num_computed = matched_tokens
        seq.num_named = num_matched
        if partial is not None:
            sources, count = partial
            builder.copies += [
                BlockCopy(src, held.ids[num_matched], kv_set)
                for kv_set, (src, held) in enumerate(zip(sources, seq.held, strict=True))
            ]
            seq.num_computed += count
            self._counters.partial_tokens += count
        self._queues.start(seq)
        seq.row_epoch += 1
        seq.row = self._rows.take()
        self._prefixes.start_computing(seq, num_matched)
        builder.add_row(seq)
        if loads:
            seq.state = SequenceState.LOADING
            builder.loads.append(self._loads.start(seq, num_matched, loadable))
        else:
            seq.state = SequenceState.RUNNING
            self._count_cached(seq, matched_tokens)
        return True

    def _make_room(self, seq: Sequence, match: PrefixMatch, wanted: list[range], builder: PlanBuilder) -> bool:
        """Free a row and the wanted blocks besides the matched ones, by preempting sequences of worse priority.

        Return False if there is still too little room. No sequence is preempted if preempting all of them would not be
        enough.
        """
        rows, sets = self._rows, self._sets
        preemptible = list(self._queues.preemptible_for(seq))
        if not rows.num_free and not preemptible:
            return False
        if not sets.can_start(match, wanted, preemptible):
            return False
        if not preemptible:
            return True
        while preemptible and (not (rows.num_free or rows.num_cooling) or not sets.can_start(match, wanted)):
            self._preempt(preemptible.pop(), builder)
        # There may still be too few blocks, if the preempted sequences shared theirs with others.
        return rows.num_free > 0 and sets.can_start(match, wanted)

    def finish_load(self, result: LoadResult) -> None:
        """Take in the result of a plan's load. Blocks that did not arrive are computed."""
        finished = self._loads.finish(result)
        seq = finished.seq
        if seq.state is SequenceState.DONE:  # it ended during the load; its blocks are no longer written to
            self._sets.release(seq)
            return
        if finished.failed:
            self._sets.shorten(seq, seq.num_named, finished.num_computed // seq.block_tokens)
            self._shortened.append(seq)
        seq.state = SequenceState.RUNNING
        seq.num_computed = finished.num_computed
        seq.pulled_tokens = finished.pulled_tokens
        self._count_cached(seq, finished.num_computed - finished.pulled_tokens)
        self._counters.loaded_tokens += finished.stored_tokens
        self._counters.pulled_tokens += finished.pulled_tokens
        self._counters.failed_loads += finished.failed
        self._unfilled += finished.unfilled
        self._prefixes.name_blocks(seq, seq.num_computed)
        if seq.num_to_compute > 1:
            self._queues.order.add(seq)

    def take_unfilled(self) -> list[BlockId]:
        """Return the blocks of the first KV set that failed loads left undefined since the last call."""
        unfilled, self._unfilled = self._unfilled, []
        return unfilled

    def take_shortened(self) -> list[Sequence]:
        """Return the running sequences whose block tables were changed by failed loads since the last call."""
        shortened, self._shortened = self._shortened, []
        return [seq for seq in shortened if seq.state is SequenceState.RUNNING]

    def _count_cached(self, seq: Sequence, num_tokens: int) -> None:
        if seq.cached_tokens is None:
            seq.cached_tokens = min(num_tokens, seq.request.num_prompt)
            self._counters.cached_tokens += seq.cached_tokens

    # ---- blocks of running sequences

    def extend(self, seq: Sequence, num_tokens: int, builder: PlanBuilder) -> bool:
        """Take blocks until a running sequence has room for `num_tokens` tokens.

        If a pool has too few, the sequences of lowest precedence are preempted, except those that start in this step.
        Return False if `seq` itself was preempted, or if it gets no blocks in this step.
        """
        self._sets.release_behind(seq)
        while num_tokens > self._sets.free_tokens(seq):
            if self._sets.releases_soon(seq):
                return False
            victim = next(other for other in reversed(self._queues.running) if builder.may_preempt(other))
            self._preempt(victim, builder)
            if victim is seq:
                return False
        self._append_blocks(seq, num_tokens, builder)
        return True

    def extend_if_free(self, seq: Sequence, num_tokens: int, builder: PlanBuilder) -> bool:
        """Take blocks until a running sequence has room for `num_tokens` tokens. Return False if too few are free."""
        if num_tokens > self._sets.free_tokens(seq):
            return False
        self._append_blocks(seq, num_tokens, builder)
        return True

    def _append_blocks(self, seq: Sequence, num_tokens: int, builder: PlanBuilder) -> None:
        for kv_set, blocks in self._sets.extend(seq, num_tokens, builder.fresh_blocks):
            builder.add_blocks(seq, kv_set, blocks)

    # ---- sequences that stop

    def requeue(self, seq: Sequence) -> None:
        """Make a running sequence wait. Its full blocks stay in the prefix cache until they are reused."""
        self._release(seq)
        seq.num_computed = 0
        self._queues.requeue(seq)

    def remove(self, seq: Sequence) -> None:
        """End a sequence. What it has is free for others, except blocks that a lease or the store keeps."""
        self._drafting.ended(seq)
        if seq.state is not SequenceState.WAITING:
            self._prefixes.offer_last(seq)
            self._release(seq)
        self._queues.remove(seq)
        if seq.request.lease_id is not None:
            self._leases.sequence_ended(seq.request.lease_id)

    def _preempt(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Take a running sequence out of the plan, and move it back to the queue."""
        builder.unschedule(seq)
        self.requeue(seq)
        self._counters.preemptions += 1

    def _release(self, seq: Sequence) -> None:
        """Take row and blocks from a running or loading sequence."""
        self._prefixes.stop_computing(seq)
        if seq.request.lease_id is not None:
            self._leases.blocks_released(seq.request.lease_id)
        if seq.state is not SequenceState.LOADING:  # a load still writes into its blocks: finish_load() releases them
            self._sets.release(seq)
        self._rows.give_back(seq.running_row)
        seq.row = None
        seq.uploaded_tape = None
        seq.row_epoch += 1
