"""StepFiller: chooses the tokens of a step. Sequences that decode come first, then their drafts, then prompts. Pure."""

from __future__ import annotations

from stoker.sched.block_sets import BlockSets
from stoker.sched.drafting import Drafting
from stoker.sched.plan_builder import PlanBuilder
from stoker.sched.prefill_turns import PrefillTurns
from stoker.sched.residency import Residency
from stoker.sched.sequence import Sequence, SequenceState
from stoker.sched.sequence_queues import SequenceQueues
from stoker.sched.step_budget import StepBudget
from stoker.sched.step_costs import StepCosts
from stoker.sched.step_size import StepSize

_NO_COSTS = StepCosts()
_MIXED_DRAFT_PART = 4  # drafts take at most one in this many of the tokens that a mixed step has left for prompts


class StepFiller:
    """Fills a `PlanBuilder` for each step."""

    def __init__(
        self,
        queues: SequenceQueues,
        sets: BlockSets,
        residency: Residency,
        budget: StepBudget,
        prefill: PrefillTurns,
        drafting: Drafting,
        step_size: StepSize,
        max_heads: int,
    ) -> None:
        """`max_heads` is the maximum number of tokens of a step whose logits are computed."""
        self._queues = queues
        self._sets = sets
        self._residency = residency
        self._budget = budget
        self._prefill = prefill
        self._drafting = drafting
        self._step_size = step_size
        self._max_heads = max_heads

    def fill(self) -> PlanBuilder:
        """Return the contents of the next step. They are empty if there is nothing to compute now."""
        to_compute = [(seq, seq.num_to_compute) for seq in self._budget.plannable()]
        builder = PlanBuilder(0, [[] for _ in self._sets.pools], holds_flex=self._has_interactive_prompt(to_compute))
        self._fill(builder, to_compute)
        if builder.holds_flex and builder.is_empty:  # the interactive prompt may wait for blocks of flex sequences
            builder.holds_flex = False
            self._fill(builder, [entry for entry in to_compute if entry[0].state is SequenceState.RUNNING])
        if builder.drafts:
            builder.limit_drafts(self._max_heads - len(builder.counts))
            self._drafting.launched(builder.drafts)
        return builder

    def _has_interactive_prompt(self, to_compute: list[tuple[Sequence, int]]) -> bool:
        """Return True if flex sequences must wait, because prompt tokens of another sequence are to be computed."""
        if not self._queues.has_flex or self._queues.has_only_flex:
            return False
        return any(count > 1 and not seq.request.is_flex for seq, count in to_compute) or any(
            not seq.request.is_flex for seq in self._queues.waiting
        )

    def _fill(self, builder: PlanBuilder, to_compute: list[tuple[Sequence, int]]) -> None:
        if builder.holds_flex:
            to_compute = [entry for entry in to_compute if not entry[0].request.is_flex]
        # Decode comes before prefill, so that a long prompt does not stall the sequences that decode.
        decodes = [seq for seq, count in to_compute if count == 1][: self._budget.max_decodes()]
        prefills = [entry for entry in to_compute if entry[1] > 1]
        builder.budget = self._budget.tokens(len(decodes), sum([count for _seq, count in prefills]))
        for seq in decodes:
            if not builder.budget or seq.state is not SequenceState.RUNNING:
                continue
            end = seq.num_computed + 1
            if end > seq.max_tokens:  # the device computes nothing beyond it; `num_computed` is an upper bound
                end = seq.max_tokens
            if end <= seq.room or self._residency.extend(seq, end, builder):
                builder.schedule(seq, 1)
        self._add_drafts(builder, mixed=bool(prefills or self._queues.waiting))
        self._prefill.fill(builder, [seq for seq, _ in prefills])

    def _add_drafts(self, builder: PlanBuilder, mixed: bool) -> None:
        """Add drafts to the scheduled sequences, all of which decode.

        `mixed`: prompts compete for this step's tokens. Drafts then take at most a part of what is left.
        """
        budget = builder.budget // _MIXED_DRAFT_PART if mixed else builder.budget
        costs = self._step_size.costs if self._drafting.uses_costs else _NO_COSTS
        wanted = self._drafting.plan(list(builder.counts), budget, costs)
        for seq, num_drafts in wanted.items():
            # Drafts after the sequence's last token would be useless.
            num_drafts = min(num_drafts, builder.budget, seq.max_tokens - len(seq.token_ids) - seq.num_pending - 1)
            room = self._make_draft_room(seq, num_drafts, builder)
            if min(num_drafts, room) > 0:
                builder.add_drafts(seq, min(num_drafts, room))

    def _make_draft_room(self, seq: Sequence, num_drafts: int, builder: PlanBuilder) -> int:
        """Take free blocks for a scheduled sequence's drafts. No sequence is preempted for them.

        Return for how many drafts there is room.
        """
        first = seq.num_computed + 1
        # The device computes nothing beyond the sequence's limit, even if `first` is an upper bound beyond it.
        end = min(first + num_drafts, seq.max_tokens)
        if end > seq.room and not self._residency.extend_if_free(seq, end, builder):
            return seq.room - first
        return num_drafts
