"""StepSize: how many tokens a mixed step has. Pure.

Every decoding sequence waits for the whole step, and every queued prompt token waits for the steps before its own. The
number of prompt tokens in a mixed step is the largest of three:

- goal: the step takes as long as the goal for the time between tokens allows.
- queue: the optimum between both waits. A step of C prompt tokens takes T = D + c*C, where D is the time that the
  decoding sequences take alone, and c the time per prompt token. A queue of Q tokens takes T*Q/C. The step's time over
  its goal plus the queue's time over its goal is smallest at C = sqrt(D*Q/c * itl_goal/queue_goal). So a long queue
  gets large steps, which cost less per token, and throughput wins in a pure batch load. It never gets more than 8*D/c.
  Then decoding takes a ninth of the step, and larger steps would gain little.
- floor: prompt tokens take about a third of the step, even if the decoding sequences alone exceed the goal.
"""

from __future__ import annotations

import math

from stoker.sched.step_costs import StepCosts, StepTimes

_QUEUE_GOAL_S = 0.1  # a queue that takes this long is as bad as a step that takes the goal for the time between tokens
# The time of the prompt tokens relative to that of the decoding sequences. A larger maximum would gain little throughput.
_MIN_SHARE, _MAX_SHARE = 0.5, 8.0
_MIN_PROMPT_TOKENS = 16
_MAX_GROWTH = 4  # a step has at most this many times the tokens of the largest measured one
_FIRST_PART = 16  # before any measurement, one in this many of the maximum tokens counts as measured


class StepSize:
    """Chooses the token limit of mixed steps from measured step times, the queue, and a goal."""

    def __init__(self, target_itl_s: float, step_tokens: int) -> None:
        """`target_itl_s` is the goal for the time between tokens; infinity: no goal, steps are as large as possible."""
        self._target_itl_s = target_itl_s
        self._step_tokens = step_tokens
        self._times = StepTimes()
        self.mixed_tokens = step_tokens
        """The limit of the last mixed step."""

    @property
    def costs(self) -> StepCosts:
        return self._times.costs

    def record(self, num_tokens: int, num_rows: int, step_s: float, num_guesses: int = 0, count: int = 1) -> None:
        """Take in the measured time of a step, or of `count` equal ones."""
        self._times.record(num_tokens, num_rows, step_s, num_guesses, count)

    def limit(self, num_decodes: int, queued_tokens: int) -> int:
        """Return the token limit of a step in which `num_decodes` sequences decode and `queued_tokens` wait for prefill."""
        if self._target_itl_s == math.inf:
            return self._step_tokens
        measured = max(self._times.largest_tokens, self._step_tokens // _FIRST_PART)
        prompt_tokens = int(min(self._prompt_tokens(num_decodes, queued_tokens), _MAX_GROWTH * measured))
        tokens = max(_captured_size(num_decodes + prompt_tokens), num_decodes + prompt_tokens // 2)
        self.mixed_tokens = min(self._step_tokens, max(tokens, num_decodes + _MIN_PROMPT_TOKENS))
        return self.mixed_tokens

    def limit_within(self, goal_s: float, num_decodes: int) -> int:
        """Return how many tokens a step of `num_decodes` decoding sequences and one prompt can have to take up to `goal_s`.

        It is at least what all of them and a small part of the prompt need. Before any measurement, that is the limit.
        """
        costs = self._times.costs
        left_s = goal_s - costs.decode_s(num_decodes) - costs.row_s
        prompt_tokens = int(min(left_s / costs.token_s, self._step_tokens)) if costs.token_s else 0
        return min(self._step_tokens, num_decodes + max(prompt_tokens, _MIN_PROMPT_TOKENS))

    def _prompt_tokens(self, num_decodes: int, queued_tokens: int) -> float:
        costs, goal_s = self._times.costs, self._target_itl_s
        if not costs.token_s:
            return math.inf
        decode_s = costs.decode_s(num_decodes)
        by_goal = (goal_s - decode_s) / costs.token_s
        by_queue = math.sqrt(decode_s * queued_tokens / costs.token_s * goal_s / _QUEUE_GOAL_S)
        floor, ceiling = (share * decode_s / costs.token_s for share in (_MIN_SHARE, _MAX_SHARE))
        return max(by_goal, min(by_queue, ceiling), floor)


def _captured_size(tokens: int) -> int:
    """Round down to a quarter of a power of two, the sizes of captured steps. A size between them would be padded."""
    return tokens >> (shift := max(0, tokens.bit_length() - 3)) << shift
