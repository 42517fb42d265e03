"""FlexSteps: how large steps are that have flex sequences only. Pure.

An interactive request that arrives waits for the launched steps. While interactive requests come now and then, such a step has a
goal for its time, and no further step is launched behind it. After some time without any, steps are as large as others.
"""

from __future__ import annotations

import math

from stoker.sched.request import GenerateRequest
from stoker.sched.step_size import StepSize

_QUIET_S = 10.0  # after this time without interactive requests, flex sequences get steps of any size


class FlexSteps:
    """Counts the flex sequences, and limits the steps that have no others."""

    def __init__(self, goal_s: float, step_size: StepSize) -> None:
        self._goal_s = goal_s
        self._step_size = step_size
        self._now_s = 0.0
        self._interactive_s = -math.inf
        self.num_flex = 0

    @property
    def is_quiet(self) -> bool:
        """True if no interactive request was here for some time."""
        return self._now_s - self._interactive_s > _QUIET_S

    def set_time(self, now_s: float) -> None:
        self._now_s = now_s

    def added(self, request: GenerateRequest) -> None:
        self._count(request, 1)

    def ended(self, request: GenerateRequest) -> None:
        self._count(request, -1)

    def _count(self, request: GenerateRequest, change: int) -> None:
        if request.is_flex:
            self.num_flex += change
        else:
            self._interactive_s = self._now_s

    def limit(self, num_decodes: int, step_tokens: int) -> int:
        """Return the token limit of a step in which `num_decodes` flex sequences decode, and no others."""
        if self.is_quiet or self._goal_s == math.inf:
            return step_tokens
        return min(step_tokens, self._step_size.limit_within(self._goal_s, num_decodes))
