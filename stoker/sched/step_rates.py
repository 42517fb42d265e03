"""StepRates: the engine's recent speed, as prefill tokens per second and as the time of a decode-only step."""

from __future__ import annotations

from stoker.sched.plan import StepPlan

_DECAY = 0.9  # weight of the old sums at each new step
_MIN_PROMPT_TOKENS = 16  # the time of a shorter prefill is mostly fixed cost, and says little about the rate


class StepRates:
    """Moving averages over steps. Each sum decays exponentially, so that older steps count less."""

    def __init__(self) -> None:
        self._prompt_tokens = 0.0
        self._prompt_s = 0.0
        self._decode_steps = 0.0
        self._decode_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self._prompt_tokens / self._prompt_s if self._prompt_s else None

    @property
    def decode_step_s(self) -> float | None:
        return self._decode_s / self._decode_steps if self._decode_steps else None

    def record(self, plan: StepPlan, step_s: float) -> None:
        if plan.num_tokens - plan.num_drafts == len(plan.spans):
            self.record_decode(step_s, 1)
            return
        prompt_tokens = sum(span.count for span in plan.spans if span.count - span.num_drafts > 1)
        if 2 * prompt_tokens >= plan.num_tokens and prompt_tokens >= _MIN_PROMPT_TOKENS:
            # The step's decoding rows took a share of its time, so their tokens count too.
            self.record_prefill(plan.num_tokens, step_s, 1)

    def record_prefill(self, num_tokens: int, step_s: float, count: int) -> None:
        """Add `count` steps of `num_tokens` tokens and this time, most of which were prompt tokens."""
        kept, steps = _faded(count)
        self._prompt_tokens = kept * self._prompt_tokens + steps * num_tokens
        self._prompt_s = kept * self._prompt_s + steps * step_s

    def record_decode(self, step_s: float, count: int) -> None:
        """Add `count` decode-only steps of this time."""
        kept, steps = _faded(count)
        self._decode_steps = kept * self._decode_steps + steps
        self._decode_s = kept * self._decode_s + steps * step_s


def _faded(count: int) -> tuple[float, float]:
    """Return what `count` steps leave of the old sums, and how many steps they count as."""
    kept = _DECAY**count
    return kept, (1 - kept) / (1 - _DECAY)
