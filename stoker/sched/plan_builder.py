"""Draft: a plan being written. Kept by sequence, so that one preempted on the way leaves nothing behind."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.base.ids import BlockId, Row
from stoker.kv.blocks.transfer import KvLoad
from stoker.sched.plan import ON_DEVICE, BlockCopy, BlockTableChange, NewRow, Span, StepPlan
from stoker.sched.sequence import Sequence


@dataclass(slots=True)
class Draft:
    budget: int  # tokens that may still be given out
    counts: dict[Sequence, int] = field(default_factory=dict)
    changes: dict[Sequence, BlockTableChange] = field(default_factory=dict)
    new_rows: list[NewRow] = field(default_factory=list)
    fresh_blocks: list[BlockId] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    loads: list[KvLoad] = field(default_factory=list)

    def give(self, seq: Sequence, count: int) -> None:
        self.counts[seq] = count
        self.budget -= count

    def withdraw(self, seq: Sequence) -> None:
        self.budget += self.counts.pop(seq, 0)
        self.changes.pop(seq, None)

    def place(self, seq: Sequence) -> None:
        """On a row that was just given to it."""
        request = seq.request
        self.new_rows.append(
            NewRow(seq.running_row, request.sampling, list(seq.token_ids), request.num_prompt, request.max_new_tokens)
        )
        self.changes[seq] = BlockTableChange(seq.running_row, 0, list(seq.blocks))

    @property
    def does_something(self) -> bool:
        return bool(self.counts or self.loads)

    def finish(self, freed_rows: list[Row], unfilled: list[BlockId]) -> StepPlan:
        """What it gave out counts as computed from here on. `unfilled` blocks are cleared beside the fresh ones, but for those
        that this very step fills to the last token."""
        spans: list[Span] = []
        token_ids: list[int] = []
        filled = {copy.dst for copy in self.copies} | {block for load in self.loads for block in load.blocks}
        for seq, count in self.counts.items():
            start, num_here = seq.num_computed, len(seq.token_ids)
            end = seq.num_computed = start + count
            if end <= num_here:
                token_ids += seq.token_ids[start:end]
            else:  # while a token is drawn there is nothing to compute before it: it is the only one
                token_ids.append(ON_DEVICE)
            samples = end == num_here + seq.num_drawing
            if samples:
                seq.num_drawing += 1
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
