"""StepBudget: how many tokens a step computes, and which decoding sequences a pipeline's step has. Pure.

A pipeline's step has one of `_STAGE_PARTS` parts of the prompt tokens that its stages could compute, and at least the minimum.
So neighbouring steps take similar times, and no stage waits for a long step between short ones.

Prompts alone take as long as one stage needs for all of their steps, and the time of the largest step once more for each later
stage. So the more stages there are, the more small steps pay, although each step has a fixed cost.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import islice

from stoker.sched.flex_steps import FlexSteps
from stoker.sched.row_pool import RowPool
from stoker.sched.scheduler_config import Counters, SchedulerConfig
from stoker.sched.sequence import Sequence
from stoker.sched.sequence_queues import SequenceQueues
from stoker.sched.step_size import StepSize

_MAX_COUNTED = 256  # waiting sequences whose tokens are counted in each mixed step; more is a long queue in any case

_STAGE_PARTS = 16
# Without sequences that decode, steps need not be as similar, and larger ones cost less per token.
_STAGE_PARTS_ALONE = 6
_MIN_STAGE_TOKENS = 64
_MIN_ALL_STAGES_TOKENS = 256  # the minimum of a step without sequences that decode, times the number of stages


def plans_in_flight(stages: int) -> int:
    """Return how many plans a pipeline of this many stages has in flight. With many stages there are more plans than stages,
    because steps do not all take the same time."""
    return stages + stages // 4


class StepBudget:
    """Derives a step's limits from measured step times, the queues, and the goals of the config."""

    def __init__(
        self,
        config: SchedulerConfig,
        queues: SequenceQueues,
        rows: RowPool,
        flex: FlexSteps,
        step_size: StepSize,
        counters: Counters,
    ) -> None:
        self._step_tokens, self._stages = config.step_tokens, config.stages
        self._queues = queues
        self._rows = rows
        self._flex = flex
        self._step_size = step_size
        self._counters = counters

    def plannable(self) -> Items[Sequence]:
        """Return the running sequences that the next step may compute tokens of.

        While a pipeline samples a sequence's next token, the later stages do not know it.
        """
        running = self._queues.running
        return running if self._stages == 1 else [seq for seq in running if not seq.num_pending]

    def max_decodes(self) -> int:
        """Return how many decoding sequences one plan has. The plans that a pipeline has in flight together have them all."""
        num_running = len(self._queues.running)
        return num_running if self._stages == 1 else -(-num_running // plans_in_flight(self._stages))

    def tokens(self, num_decodes: int, prefill_tokens: int) -> int:
        """Return the step's token limit.

        `prefill_tokens` are the prompt tokens that running sequences have left to compute. A step with decoding sequences
        is limited, because all of them wait for it. The stages of a pipeline get steps of similar size: a long one between
        short ones would leave stages idle.
        """
        step_tokens, stages = self._step_tokens, self._stages
        if self._queues.has_only_flex:
            step_tokens = self._flex.limit(num_decodes, step_tokens)
        if not (prefill_tokens or self._queues.waiting) or (not num_decodes and stages == 1):
            return step_tokens
        limit = step_tokens
        if num_decodes:
            queued = prefill_tokens + self._uncached_waiting(_MAX_COUNTED)
            limit = min(limit, self._step_size.limit(num_decodes, queued))
        if stages == 1:
            return limit
        startable = prefill_tokens + self._uncached_waiting(min(_MAX_COUNTED, self._rows.num_free))
        if num_decodes:
            parts, least = stages * _STAGE_PARTS, _MIN_STAGE_TOKENS
        else:
            parts, least = stages * _STAGE_PARTS_ALONE, max(_MIN_STAGE_TOKENS, _MIN_ALL_STAGES_TOKENS // stages)
        return min(limit, num_decodes + max(least, -(-startable // parts)))

    def _uncached_waiting(self, max_sequences: int) -> int:
        """Return how many prompt tokens are left to compute of at most `max_sequences` sequences that wait."""
        # What the cache holds of the waiting prompts is not known yet. They are assumed to be like the earlier ones.
        uncached = 1 - self._counters.cached_tokens / max(1, self._counters.prompt_tokens)
        return int(uncached * sum(len(seq.token_ids) for seq in islice(self._queues.waiting, max_sequences)))
