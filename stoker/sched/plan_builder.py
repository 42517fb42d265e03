"""PlanBuilder: a step's plan under construction.

Entries are kept per sequence, so that a sequence that is preempted during planning leaves no trace in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.base.ids import BlockId, Row
from stoker.kv.blocks.transfer import KvLoad
from stoker.sched.plan import ON_DEVICE, BlockCopy, BlockTableChange, NewRow, Span, StepPlan
from stoker.sched.sequence import Sequence


@dataclass(slots=True)
class PlanBuilder:
    """Collects the contents of one step."""

    budget: int  # tokens that this step can still compute
    counts: dict[Sequence, int] = field(default_factory=dict)  # tokens that this step computes, by sequence
    changes: dict[Sequence, BlockTableChange] = field(default_factory=dict)
    new_rows: list[NewRow] = field(default_factory=list)
    fresh_blocks: list[BlockId] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    loads: list[KvLoad] = field(default_factory=list)

    def schedule(self, seq: Sequence, count: int) -> None:
        """Compute the sequence's next `count` tokens in this step."""
        self.counts[seq] = count
        self.budget -= count

    def unschedule(self, seq: Sequence) -> None:
        """Take the sequence out of this step."""
        self.budget += self.counts.pop(seq, 0)
        self.changes.pop(seq, None)

    def add_row(self, seq: Sequence) -> None:
        """Add the row that the sequence was just given."""
        request = seq.request
        self.new_rows.append(
            NewRow(seq.running_row, request.sampling, list(seq.token_ids), request.num_prompt, request.max_new_tokens)
        )
        self.changes[seq] = BlockTableChange(seq.running_row, 0, list(seq.blocks))

    @property
    def is_empty(self) -> bool:
        return not (self.counts or self.loads)

    def build(self, freed_rows: list[Row], unfilled: list[BlockId]) -> StepPlan:
        """Return the plan. From now on, its tokens count as computed.

        Fresh and `unfilled` blocks are cleared, except blocks that this step fills completely.
        """
        spans: list[Span] = []
        token_ids: list[int] = []
        filled = {copy.dst for copy in self.copies} | {block for load in self.loads for block in load.blocks}
        for seq, count in self.counts.items():
            start, num_known = seq.num_computed, len(seq.token_ids)
            end = seq.num_computed = start + count
            if end <= num_known:
                token_ids += seq.token_ids[start:end]
            else:  # the token is still being sampled, so it is the only one left to compute
                token_ids.append(ON_DEVICE)
            samples = end == num_known + seq.num_pending
            if samples:
                seq.num_pending += 1
            assert seq.row is not None
            spans.append(Span(seq.row, start, count, samples))
            if count >= seq.block_tokens:
                filled.update(seq.blocks[-(-start // seq.block_tokens) : end // seq.block_tokens])
        return StepPlan(
            spans,
            token_ids,
            freed_rows,
            self.new_rows,
            list(self.changes.values()),
            self.copies,
            [block for block in self.fresh_blocks + unfilled if block not in filled],
            self.loads,
        )
