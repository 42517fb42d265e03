"""PlanBuilder: a step's plan under construction.

Entries are kept per sequence, so that a sequence that is preempted during planning leaves no trace in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.base.ids import BlockId, Row
from stoker.kv.blocks.transfer import KvLoad
from stoker.sched.plan import ON_DEVICE, BlockCopy, BlockTableChange, NewRow, Span, StepPlan, TapeUpload
from stoker.sched.sequence import Sequence


@dataclass(slots=True)
class PlanBuilder:
    """Collects the contents of one step."""

    budget: int  # tokens that this step can still compute
    counts: dict[Sequence, int] = field(default_factory=dict)  # known tokens that this step computes, by sequence
    drafts: dict[Sequence, int] = field(default_factory=dict)  # drafts that follow them; missing: none
    changes: dict[Sequence, BlockTableChange] = field(default_factory=dict)
    new_rows: list[NewRow] = field(default_factory=list)
    fresh_blocks: list[BlockId] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    loads: list[KvLoad] = field(default_factory=list)

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
        tapes: list[TapeUpload] = []
        drafts = self.drafts
        filled = {copy.dst for copy in self.copies} | {block for load in self.loads for block in load.blocks}
        for seq, count in self.counts.items():
            start, num_known, slack = seq.num_computed, len(seq.token_ids), seq.num_drafting
            end = seq.num_computed = start + count
            if end <= num_known:
                token_ids += seq.token_ids[start:end]
            else:  # the token is still being sampled, so it is the only one left to compute
                token_ids.append(ON_DEVICE)
            samples = end == num_known + seq.num_pending + slack
            if samples:
                seq.num_pending += 1
            assert seq.row is not None
            spans.append(span := Span(seq.row, start, count, samples, 0, slack, start < seq.request.num_prompt))
            if end < num_known:
                span.next_id = seq.token_ids[end]
            if drafts and seq in drafts:
                token_ids += self._put_drafts(seq, span, tapes)
            if count >= seq.block_tokens and not slack:
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
            tapes,
            sum(drafts.values()),
        )

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
