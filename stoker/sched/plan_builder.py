"""PlanBuilder: a step's plan under construction.

Entries are kept per sequence, so that a sequence that is preempted during planning leaves no trace in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.base.ids import BlockId, Row
from stoker.kv.blocks.transfer import KvLoad
from stoker.sched.plan import ON_DEVICE, BlockCopy, BlockTableChange, NewRow, Span, StepPlan, TapeUpload
from stoker.sched.sequence import Sequence, SequenceState


@dataclass(slots=True)
class PlanBuilder:
    """Collects the contents of one step."""

    budget: int  # tokens that this step can still compute
    fresh_blocks: list[list[BlockId]]  # blocks taken in this step, in each KV set
    counts: dict[Sequence, int] = field(default_factory=dict)  # known tokens that this step computes, by sequence
    drafts: dict[Sequence, int] = field(default_factory=dict)  # drafts that follow them; missing: none
    changes: dict[Sequence, dict[int, BlockTableChange]] = field(default_factory=dict)  # by KV set
    new_rows: dict[Sequence, NewRow] = field(default_factory=dict)
    copies: list[BlockCopy] = field(default_factory=list)
    loads: list[KvLoad] = field(default_factory=list)
    holds_flex: bool = False  # flex sequences get no tokens in this step

    def schedule(self, seq: Sequence, count: int) -> None:
        """Compute the sequence's next `count` tokens in this step."""
        self.counts[seq] = count
        self.budget -= count

    def add_drafts(self, seq: Sequence, count: int) -> None:
        """Verify `count` drafts of a scheduled sequence in this step."""
        self.drafts[seq] = count
        self.budget -= count

    def limit_drafts(self, max_drafts: int) -> None:
        """Drop drafts until at most `max_drafts` are left. The runner has memory for a limited number of logits."""
        num_drafts = sum(self.drafts.values())
        while num_drafts > max_drafts:
            seq = max(self.drafts, key=self.drafts.__getitem__)
            dropped = min(self.drafts[seq], num_drafts - max_drafts)
            num_drafts -= dropped
            self.drafts[seq] -= dropped
            if not self.drafts[seq]:
                del self.drafts[seq]

    def unschedule(self, seq: Sequence) -> None:
        """Take the sequence out of this step."""
        self.budget += self.counts.pop(seq, 0) + self.drafts.pop(seq, 0)
        self.changes.pop(seq, None)

    def may_preempt(self, seq: Sequence) -> bool:
        """Return True if the sequence runs, and did so before this step."""
        return seq.state is SequenceState.RUNNING and seq not in self.new_rows

    def add_row(self, seq: Sequence) -> None:
        """Add the row that the sequence was just given."""
        request = seq.request
        is_new = len(seq.token_ids) == len(request.token_ids)  # nothing is appended to the request's own list
        token_ids = request.token_ids if is_new else list(seq.token_ids)
        self.new_rows[seq] = NewRow(
            seq.running_row, request.sampling, token_ids, request.num_prompt, request.max_new_tokens
        )
        self.put_tables(seq)

    def put_tables(self, seq: Sequence) -> None:
        """Write the sequence's block tables."""
        self.changes[seq] = {
            kv_set: BlockTableChange(seq.running_row, held.first, held.table_entries(held.first), kv_set)
            for kv_set, held in enumerate(seq.held)
        }

    def add_blocks(self, seq: Sequence, kv_set: int, blocks: list[BlockId]) -> None:
        """Append blocks that the sequence was just given in a KV set to its block table."""
        changes = self.changes.setdefault(seq, {})
        if (change := changes.get(kv_set)) is not None:
            change.blocks.extend(blocks)
        else:
            first = len(seq.held[kv_set].ids) - len(blocks)
            changes[kv_set] = BlockTableChange(seq.running_row, first, list(blocks), kv_set)

    @property
    def is_empty(self) -> bool:
        return not (self.counts or self.loads)

    def build(
        self, freed_rows: list[Row], unfilled: list[BlockId], num_guesses: int = 0, *, flex_runs_alone: bool = False
    ) -> StepPlan:
        """Return the plan. From now on, its tokens count as computed.

        If a row samples, a draft model makes `num_guesses` guesses. Fresh blocks and the `unfilled` ones of the first KV set
        are cleared, except blocks that this step fills completely. With `flex_runs_alone`, a step of flex sequences runs alone.
        """
        spans: list[Span] = []
        token_ids: list[int] = []
        tapes: list[TapeUpload] = []
        drafts, any_samples = self.drafts, False
        filled = self._filled_blocks()
        for seq, count in self.counts.items():
            start, num_known, slack = seq.num_computed, len(seq.token_ids), seq.num_drafting
            end = seq.num_computed = start + count
            if end <= num_known:
                token_ids += seq.token_ids[start:end]
            else:  # the token is still being sampled, so it is the only one left to compute
                token_ids.append(ON_DEVICE)
            samples = end == num_known + seq.num_pending + slack
            if samples:
                any_samples = True
                seq.num_pending += 1
            assert seq.row is not None
            spans.append(span := Span(seq.row, start, count, samples, 0, slack, start < seq.request.num_prompt))
            if end < num_known:
                span.next_id = seq.token_ids[end]
            if drafts and seq in drafts:
                token_ids += self._put_drafts(seq, span, tapes)
            if count >= seq.block_tokens and not slack:
                for blocks, held in zip(filled, seq.held, strict=True):
                    blocks.update(held.ids[-(-start // seq.block_tokens) : end // seq.block_tokens])
        self.fresh_blocks[0] += unfilled
        is_flex = bool(spans) and all(seq.request.is_flex for seq in self.counts)
        return StepPlan(
            spans,
            token_ids,
            freed_rows,
            list(self.new_rows.values()),
            [change for changes in self.changes.values() for change in changes.values()],
            self.copies,
            [
                [block for block in fresh if block not in own] if own else fresh
                for fresh, own in zip(self.fresh_blocks, filled, strict=True)
            ],
            self.loads,
            tapes,
            sum(drafts.values()),
            num_guesses if any_samples else 0,
            is_interruptible=is_flex,
            runs_alone=is_flex and flex_runs_alone,
        )

    def _filled_blocks(self) -> list[set[BlockId]]:
        """Return the blocks of each KV set that copies and loads fill."""
        filled: list[set[BlockId]] = [set() for _ in self.fresh_blocks]
        for copy in self.copies:
            filled[copy.kv_set].add(copy.dst)
        for load in self.loads:
            filled[0].update(load.blocks)
            for part in load.local:
                filled[part.kv_set].update(part.blocks)
        return filled

    def _put_drafts(self, seq: Sequence, span: Span, tapes: list[TapeUpload]) -> range:
        """Add the sequence's drafts to its span, and its tape if the device does not have it. Return the drafts' markers."""
        span.num_drafts = num_drafts = self.drafts[seq]
        span.count += num_drafts
        seq.num_drafting += num_drafts
        seq.num_computed += num_drafts
        tape = seq.tape
        if tape is not None and tape is not seq.uploaded_tape:
            seq.uploaded_tape = tape
            tapes.append(TapeUpload(span.row, tape.start, tape.token_ids))
        return range(ON_DEVICE - 1, ON_DEVICE - 1 - num_drafts, -1)
