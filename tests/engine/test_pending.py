"""Launched steps are waited for and read in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from stoker.base.ids import Row
from stoker.engine.grammar import NoGrammars
from stoker.engine.rows import RowTable
from stoker.engine.runner import PendingStep, Runner
from stoker.engine.threads import FixedThreads
from stoker.kv.blocks.layout import KvLayout
from stoker.sched.plan import NewRow, Span, StepPlan, StepResult
from stoker.sched.request import SamplingParams


class RecordedStep(PendingStep):
    read: ClassVar[list[RecordedStep]] = []

    def _read(self) -> StepResult:
        self.read.append(self)
        return super()._read()


def test_waiting_for_a_step_reads_earlier_steps_first() -> None:
    """A row with a grammar may be missing in the last step. Its mask then depends on a token of the step before."""
    steps: list[RecordedStep] = []
    for _ in range(4):
        steps.append(RecordedStep(StepPlan([], []), None, [], 0.0, None, before=steps[-1] if steps else None))
    steps[0].wait()
    steps[2].wait()
    assert RecordedStep.read == steps[:3]
    assert all(step.before is None for step in steps[:3])
    steps[1].wait()
    assert RecordedStep.read == steps[:3]


def test_a_gpu_step_is_waited_for_even_if_it_samples_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all steps of a long prompt would be launched at once, and the next request would wait for all of them."""
    events: list[str] = []

    class FakeEvent:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self) -> None:
            events.append("recorded")

        def synchronize(self) -> None:
            events.append("synchronized")

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    # float64 uses the reference kernels, without graphs.
    blocks = SimpleNamespace(is_cuda=True, dtype=torch.float64, device="cuda")
    group = SimpleNamespace(block_tokens=4, width=2, kind="full")
    kv: Any = SimpleNamespace(
        sets=[],
        device="cuda",
        like=blocks,
        all_groups=[group],
        layout=KvLayout.of(1, 1, 2, 4, "float64", 8),
    )
    model: Any = None
    rows = RowTable(1, 1, 10, torch.device("cpu"), NoGrammars())
    runner = Runner(model, 1, kv, rows, FixedThreads(torch.get_num_threads()), 16)
    monkeypatch.setattr(runner, "_step", lambda plan, states: lambda: None)
    row = Row(0)
    plan = StepPlan([Span(row, 0, 2, False)], [1, 2], new_rows=[NewRow(row, SamplingParams(), [1, 2, 3], 3, 1)])
    step = runner.launch(plan)
    assert events == ["recorded"]
    assert step.wait().token_ids == [[]]
    assert events == ["recorded", "synchronized"]
