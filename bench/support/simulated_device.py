"""A simulated device under the real scheduler: step times come from a cost model, and the clock is virtual.

The cost models have the published shapes' weights and the measured rates of an H200 (bench/results/offline.json) and of
two CPU cores. They are good enough to compare policies. They do not predict a benchmark's result.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.base.ids import RequestId
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.plan import StepPlan, StepResult
from stoker.sched.request import GenerateRequest
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig
from stoker.sched.step_size import StepSize


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """What a step costs. A step is bound by memory or by arithmetic, whichever takes longer."""

    launch_s: float
    weights_s: float  # reading all weights
    token_s: float  # the arithmetic of one token
    kv_token_s: float  # reading the KV of one token
    attention_s: float  # the arithmetic of one token's attention to another one
    overlap: float = 3.0  # how well reading and arithmetic overlap: 1 not at all, infinity perfectly
    idle_experts: float = 0.0  # share of the experts that one token does not use

    def step_s(self, plan: StepPlan) -> float:
        tokens = plan.num_tokens
        read_s = self.weights_s * (1.0 - self.idle_experts**tokens)
        matmul_s: float = (read_s**self.overlap + (self.token_s * tokens) ** self.overlap) ** (1 / self.overlap)
        attention_s = 0.0
        for span in plan.spans:
            if span.count == 1:
                attention_s += self.kv_token_s * span.start
            else:
                attention_s += self.attention_s * span.count * (span.start + span.count / 2)
        return self.launch_s + matmul_s + attention_s


DEVICES: dict[str, DeviceModel] = {
    "8B dense, H200": DeviceModel(4e-4, 3.8e-3, 23e-6, 3.3e-8, 9e-10),
    "30B-A3B MoE, H200": DeviceModel(8e-4, 14e-3, 11e-6, 2.5e-8, 1.3e-9, 1.5, 1 - 8 / 128),
    "135M, two CPU cores": DeviceModel(1e-3, 15e-3, 7e-4, 1e-6, 3e-8),
}


@dataclass(slots=True)
class SimulatedRequest:
    """A request with its arrival, its tokens and their times."""

    request: GenerateRequest
    arrival_s: float
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.arrival_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.times_s)]


class Simulation:
    """The engine's loop on a simulated device, with a virtual clock."""

    def __init__(
        self, config: SchedulerConfig, device: DeviceModel, num_blocks: int, steps_ahead: int, seed: int = 0
    ) -> None:
        self.scheduler = Scheduler(config, BlockPool(num_blocks))
        self.now_s = 0.0
        self.finished: list[SimulatedRequest] = []
        self.steps: list[tuple[StepPlan, float]] = []  # each step with its time
        self._device = device
        self._steps_ahead = steps_ahead
        self._rng = random.Random(seed)
        self._free_s = 0.0  # when the device has executed all launched steps
        self._launched: deque[tuple[float, StepResult]] = deque()  # end of the step, its result
        self._to_come: list[tuple[float, int, SimulatedRequest]] = []
        self._num_added = 0
        self._open: dict[RequestId, SimulatedRequest] = {}

    def add(self, request: GenerateRequest, arrival_s: float) -> None:
        """Let a request arrive at a time that is not in the past."""
        self._num_added += 1
        heapq.heappush(self._to_come, (arrival_s, self._num_added, SimulatedRequest(request, arrival_s)))

    def run(self, on_finish: Callable[[SimulatedRequest], None] = lambda request: None) -> None:
        """Run until no request is left. `on_finish` is called with each finished request, and may add others."""
        while self._to_come or self._open:
            if not self._open:
                self.now_s = max(self.now_s, self._to_come[0][0])
            while self._to_come and self._to_come[0][0] <= self.now_s:
                arrived = heapq.heappop(self._to_come)[2]
                self._open[arrived.request.request_id] = arrived
                self.scheduler.add(arrived.request)
            plan = self.scheduler.plan()
            if plan is not None:
                self._launch(plan)
            while self._launched and (plan is None or len(self._launched) > self._steps_ahead):
                self._commit(on_finish)

    def _launch(self, plan: StepPlan) -> None:
        step_s = self._device.step_s(plan) * self._rng.lognormvariate(0.0, 0.02)
        self._free_s = max(self._free_s, self.now_s) + step_s
        tokens = [[self._rng.randrange(10, 1000)] if span.samples else [] for span in plan.spans]
        self._launched.append((self._free_s, StepResult(tokens, step_s)))
        self.steps.append((plan, step_s))

    def _commit(self, on_finish: Callable[[SimulatedRequest], None]) -> None:
        ended_s, result = self._launched.popleft()
        self.now_s = max(self.now_s, ended_s)
        for chunk in self.scheduler.commit(result):
            request = self._open[chunk.request_id]
            request.token_ids += chunk.token_ids
            request.times_s += [self.now_s] * len(chunk.token_ids)
            if chunk.finish is not None:
                del self._open[chunk.request_id]
                self.finished.append(request)
                on_finish(request)


class FixedSize(StepSize):
    """A fixed token limit for mixed steps, for comparison."""

    def __init__(self, mixed_tokens: int) -> None:
        super().__init__(math.inf, mixed_tokens)

    def limit(self, num_decodes: int, queued_tokens: int) -> int:
        return max(self._step_tokens, num_decodes + self._step_tokens // 4)
