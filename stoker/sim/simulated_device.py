"""SimulatedDevice: what a step plan would take and sample on a calibrated worker, without computing anything.

A run of decode-only steps is one plan: its rows have drafts, one for each further step, and all of them are accepted. So the
scheduler is called when something changes, and not for each token. The times of the steps are those of single steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate

from stoker.base.ids import Row
from stoker.routing.hashing import uniform
from stoker.sched.drafting import NoDrafting
from stoker.sched.plan import Span, StepPlan
from stoker.sched.sequence import Sequence
from stoker.sched.step_costs import StepCosts
from stoker.sched.step_work import work_of
from stoker.sim.calibration import Calibration

_MAX_RUN = 64  # decode-only steps in one plan


class StepRuns(NoDrafting):
    """Plans runs of decode-only steps as drafts, while `is_allowed`."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` limits the tokens of all rows in a run, because their blocks are taken at its start."""
        self._max_tokens = max_tokens
        self.is_allowed = False

    def plan(self, seqs: list[Sequence], budget: int, costs: StepCosts) -> Mapping[Sequence, int]:
        if not self.is_allowed or not seqs:
            return {}
        left = min([seq.max_tokens - len(seq.token_ids) for seq in seqs])
        num_steps = min(left, _MAX_RUN, 1 + min(budget, self._max_tokens) // len(seqs))
        return dict.fromkeys(seqs, num_steps - 1) if num_steps > 1 else {}


class Speculation(NoDrafting):
    """Plans the same number of drafts for every decoding row."""

    def __init__(self, drafts: int) -> None:
        self._drafts = drafts
        self.is_allowed = False  # for StepRuns; a step with real drafts is planned alone

    def plan(self, seqs: list[Sequence], budget: int, costs: StepCosts) -> Mapping[Sequence, int]:
        return dict.fromkeys(seqs[: budget // self._drafts], self._drafts) if self._drafts else {}


class RunningStep:
    """A plan on the device: the end of each of its steps, and how many of them run before something else is planned."""

    __slots__ = ("ends_s", "num_steps", "plan", "start_s")

    def __init__(self, plan: StepPlan, start_s: float, durations_s: Iterable[float]) -> None:
        self.plan = plan
        self.start_s = start_s
        self.ends_s = list(accumulate(durations_s, initial=start_s))
        del self.ends_s[0]
        self.num_steps = len(self.ends_s)

    @property
    def end_s(self) -> float:
        return self.ends_s[self.num_steps - 1]

    def stop_after(self, time_s: float, further_steps: int) -> bool:
        """End the run with the step that runs at `time_s`, and `further_steps` more. Return True if it becomes shorter."""
        num_steps = self.current(time_s) + 1 + further_steps
        if num_steps >= self.num_steps:
            return False
        self.num_steps = num_steps
        return True

    def current(self, time_s: float) -> int:
        """Return the number of the step that runs at `time_s`."""
        return min(bisect_right(self.ends_s, time_s), self.num_steps - 1)


class SimulatedDevice:
    """The timing and the sampling of one worker. `slowdown` multiplies the time of the steps that start from now on."""

    def __init__(self, calibration: Calibration, seed: int) -> None:
        self._step = calibration.step
        self._bounds = calibration.bounds
        self._speculation = calibration.speculation
        self._seed = seed
        self._tokens: dict[Row, int] = {}  # what each row samples
        self._curve: dict[int, float] = {}
        self.slowdown = 1.0
        self.num_steps = 0
        self.num_outside = 0  # steps beyond the calibrated bounds

    def take_rows(self, plan: StepPlan) -> None:
        """Take in the new rows of a plan. The seed of a row is the token that it samples."""
        for new in plan.new_rows:
            self._tokens[new.row] = new.sampling.seed

    def start(self, plan: StepPlan, now_s: float) -> RunningStep:
        """Start a plan that has spans."""
        num_drafts = plan.num_drafts
        tokens, rows, context, pairs, longest = work_of(plan)
        is_run = num_drafts > 0 and not self._speculation.drafts
        num_tokens = tokens - num_drafts if is_run else tokens
        first_s = (self._curve_s(num_tokens) + self._step.row_s * rows + self._step.attention_s * pairs) * self.slowdown
        context_s = self._step.context_s * self.slowdown
        num_steps = 1 + min([span.num_drafts for span in plan.spans]) if is_run else 1
        durations_s = [first_s + context_s * (context + i * rows) for i in range(num_steps)]
        if self._step.jitter and not pairs:
            durations_s = [self._jittered(one_s, self.num_steps + i) for i, one_s in enumerate(durations_s)]
        self.num_steps += num_steps
        bounds = self._bounds
        if rows > bounds.rows or num_tokens > bounds.step_tokens or longest > bounds.context_tokens:
            self.num_outside += num_steps
        return RunningStep(plan, now_s, durations_s)

    @property
    def is_steady(self) -> bool:
        """True if the times of the steps in a run rise evenly."""
        return not self._step.jitter

    def _jittered(self, step_s: float, number: int) -> float:
        jitter = self._step.jitter
        return step_s * jitter[int(uniform(self._seed, "jitter", number) * len(jitter))]

    def sampled(self, step: RunningStep) -> list[list[int]]:
        """Return the tokens of each span of a step that has ended."""
        tokens, num_steps = self._tokens, step.num_steps
        if self._speculation.drafts:
            return [self._accepted(span) for span in step.plan.spans]
        return [[tokens[span.row]] * num_steps if span.samples else [] for span in step.plan.spans]

    def _accepted(self, span: Span) -> list[int]:
        if not span.samples:
            return []
        token, count = self._tokens[span.row], 1
        while (
            count <= span.num_drafts and uniform(self._seed, token, span.start + count) < self._speculation.acceptance
        ):
            count += 1
        return [token] * count

    def _curve_s(self, num_tokens: int) -> float:
        seconds = self._curve.get(num_tokens)
        if seconds is None:
            seconds = self._curve[num_tokens] = self._step.curve_s(num_tokens)
        return seconds
