"""Launched steps are read in their order."""

from __future__ import annotations

from typing import ClassVar

from stoker.engine.runner import PendingStep
from stoker.sched.plan import StepPlan, StepResult


class NotedStep(PendingStep):
    read: ClassVar[list[NotedStep]] = []

    def _read(self) -> StepResult:
        self.read.append(self)
        return super()._read()


def test_waiting_for_a_step_reads_those_before_it_first() -> None:
    """A grammar's row that the last step passed over drew in the one before: its mask must know of that token."""
    steps: list[NotedStep] = []
    for _ in range(4):
        steps.append(NotedStep(StepPlan([], []), None, [], 0.0, None, before=steps[-1] if steps else None))
    steps[0].wait()
    steps[2].wait()
    assert NotedStep.read == steps[:3]
    assert all(step.before is None for step in steps[:3])
    steps[1].wait()
    assert NotedStep.read == steps[:3]
