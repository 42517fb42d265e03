"""Single steps of a built engine, launched directly at its runner. Imports torch: import this module inside `run`.

A step is given as spans: (tokens before, tokens) for each row. No other code may use the runner meanwhile.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from bench.support.model_shapes import SHAPES
from stoker.base.config import EngineSettings, SchedSettings
from stoker.base.ids import BlockId, Row
from stoker.engine.llm import LLM
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.plan import BlockTableChange, NewRow, Span, StepPlan
from stoker.sched.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
Spans = list[tuple[int, int]]
T = TypeVar("T")


def build_llm(model: Path | None, shape: str, max_model_tokens: int, numerics: str = "auto") -> LLM:
    """A model folder, or a published shape with random weights."""
    settings = EngineSettings(max_model_tokens=max_model_tokens, numerics=numerics, sched=SchedSettings(max_rows=512))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        return LLM(model or folder, settings, random_weights_seed=None if model else 0)


class EngineSteps:
    def __init__(self, llm: LLM) -> None:
        self._built = llm.built
        self._runner = llm.built.engine._runner
        assert self._runner._gpu_steps is not None, "these benchmarks need a GPU"
        self._gpu_steps = self._runner._gpu_steps
        self._graphs = self._gpu_steps._graphs

    @property
    def _pools(self) -> list[BlockPool]:
        return [self._built.pool, *self._built.local_pools]

    def _numbers(self, pool: BlockPool, span: tuple[int, int]) -> range:
        """The numbers of the blocks that a row needs in a pool."""
        block_tokens, (before, count) = self._built.layout.block_tokens, span
        return range(pool.reach.first_block(before, block_tokens), -(-(before + count) // block_tokens))

    def fits(self, spans: Spans) -> bool:
        """Whether the KV pools have enough blocks for these rows."""
        return all(sum(len(self._numbers(pool, span)) for span in spans) <= pool.num_blocks for pool in self._pools)

    def plans(self, spans: Spans, sampling: SamplingParams = GREEDY) -> tuple[StepPlan, StepPlan]:
        """A plan that creates the rows and runs the step, and one that runs the same step again."""
        assert self.fits(spans)
        changes = []
        planned = [Span(Row(number), before, count, True) for number, (before, count) in enumerate(spans)]
        for kv_set, pool in enumerate(self._pools):
            next_block = 0
            for row, span in enumerate(spans):
                numbers = self._numbers(pool, span)
                blocks = [BlockId(next_block + at) for at in range(len(numbers))]
                changes.append(BlockTableChange(Row(row), numbers.start, blocks, kv_set))
                next_block += len(numbers)
        new_rows = [NewRow(Row(number), sampling, [1], 1, 10) for number in range(len(spans))]
        # Different tokens, so that rows are routed to different experts.
        token_ids = [7 + 11 * at % 40_000 for at in range(sum(count for _, count in spans))]
        again = StepPlan(planned, token_ids)
        return StepPlan(planned, token_ids, new_rows=new_rows, block_table_changes=changes), again

    def ahead_ms(self, spans: Spans, sampling: SamplingParams = GREEDY, repeats: int = 20) -> dict[str, float]:
        """Time of a step when the engine launches one step ahead: `ms` of the whole step, `host_us` of its launch."""
        plan = self._prepare(spans, sampling)
        begin_s, host_s, before = time.perf_counter(), 0.0, None
        for _ in range(repeats):
            launched_s = time.perf_counter()
            step = self._runner.launch(plan)
            host_s += time.perf_counter() - launched_s
            if before is not None:
                before.wait()
            before = step
        step.wait()
        found = {"ms": (time.perf_counter() - begin_s) / repeats * 1e3, "host_us": host_s / repeats * 1e6}
        self._free(len(spans))
        return found

    def queued_s(self, spans: Spans, repeats: int = 20) -> float:
        """Time of a step when all repeats are launched before the first is awaited: the GPU never waits for the host."""
        plan = self._prepare(spans, GREEDY)
        begin_s = time.perf_counter()
        for step in [self._runner.launch(plan) for _ in range(repeats)]:
            step.wait()
        seconds = (time.perf_counter() - begin_s) / repeats
        self._free(len(spans))
        return seconds

    def alone_s(self, spans: Spans, repeats: int = 3) -> float:
        """Median time of a step that is awaited before the next one is launched."""
        plan = self._prepare(spans, GREEDY)
        times = []
        for _ in range(repeats):
            begin_s = time.perf_counter()
            self._runner.launch(plan).wait()
            times.append(time.perf_counter() - begin_s)
        self._free(len(spans))
        return median(times)

    def kernels(self, spans: Spans, repeats: int = 5) -> list[dict[str, Any]]:
        """GPU time of one step by kernel, the longest first."""
        plan = self._prepare(spans, GREEDY)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(repeats):
                self._runner.launch(plan).wait()
        self._free(len(spans))
        table = [
            {"kernel": event.key[:70], "calls": event.count / repeats, "us": event.self_device_time_total / repeats}
            for event in profile.key_averages()
            if event.self_device_time_total
        ]
        return sorted(table, key=lambda line: -line["us"])

    def logits(self, spans: Spans) -> Tensor:
        first, plan = self.plans(spans)
        self._runner.launch(first).wait()
        num_sampling = sum(span.samples for span in plan.spans)
        with torch.inference_mode():
            logits = self._gpu_steps.run(plan, False).logits
        assert logits is not None
        found = logits[:num_sampling].float()
        self._free(len(spans))
        return found

    def eagerly(self, run: Callable[[], T]) -> T:
        """Call `run` while no shape counts as captured, so that every kernel is launched by the host."""
        kept = self._graphs._by_cost
        self._graphs._by_cost = []
        try:
            return run()
        finally:
            self._graphs._by_cost = kept

    def _prepare(self, spans: Spans, sampling: SamplingParams) -> StepPlan:
        """Create the rows and warm the step up."""
        first, plan = self.plans(spans, sampling)
        for one in (first, plan, plan):
            self._runner.launch(one).wait()
        return plan

    def _free(self, num_rows: int) -> None:
        self._runner.launch(StepPlan([], [], freed_rows=[Row(row) for row in range(num_rows)])).wait()
