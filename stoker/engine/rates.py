"""How fast the engine has been lately: prompt tokens a second, and the time of a step that only decodes."""

from __future__ import annotations

from stoker.sched.plan import StepPlan

_KEPT = 0.9  # of what was known, at each new step
_FEWEST_PROMPT_TOKENS = 16  # a step with less tells of its fixed cost, not of a rate


class StepRates:
    """Means that forget: each is a sum over steps, of which the older count less."""

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

    def saw(self, plan: StepPlan, step_s: float) -> None:
        if plan.num_tokens == len(plan.spans):
            self._decode_steps = _KEPT * self._decode_steps + 1
            self._decode_s = _KEPT * self._decode_s + step_s
            return
        prompt_tokens = sum(span.count for span in plan.spans if span.count > 1)
        if 2 * prompt_tokens >= plan.num_tokens and prompt_tokens >= _FEWEST_PROMPT_TOKENS:
            # The decoding rows of the step had their share of its time: they count as tokens, too.
            self._prompt_tokens = _KEPT * self._prompt_tokens + plan.num_tokens
            self._prompt_s = _KEPT * self._prompt_s + step_s
