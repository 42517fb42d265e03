"""Engine: the one loop. Requests in, chunks out; plans are launched ahead of the device, results taken in behind it."""

from __future__ import annotations

from collections import deque

from stoker.base.clock import Clock
from stoker.base.errors import InvalidRequest
from stoker.base.ids import RequestId
from stoker.engine.rates import StepRates
from stoker.engine.runner import PendingStep, Runner
from stoker.sched.request import Finish, GenerateRequest, TokenChunk, Usage
from stoker.sched.scheduler import Scheduler


class Engine:
    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock, steps_ahead: int) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._steps_ahead = steps_ahead
        self._launched: deque[PendingStep] = deque()
        self._chunks: list[TokenChunk] = []  # made between steps
        self.num_steps = 0
        self.step_s = 0.0
        self.rates = StepRates()

    @property
    def has_work(self) -> bool:
        return bool(self._chunks) or self._scheduler.has_work

    def add(self, request: GenerateRequest) -> None:
        """A request that cannot run ends at once, with a chunk that says why."""
        try:
            self._scheduler.add(request)
        except InvalidRequest as error:
            self.refuse(request, error)

    def refuse(self, request: GenerateRequest, error: InvalidRequest) -> None:
        finish = Finish("error", error_code=error.code, error_message=error.message)
        self._chunks.append(TokenChunk(request.request_id, [], Usage(request.num_prompt, 0, 0), None, finish))

    def cancel(self, request_id: RequestId) -> None:
        self._chunks += self._scheduler.cancel(request_id)

    def step(self) -> list[TokenChunk]:
        """Launch one plan, if there is anything to compute, and take in what is due."""
        self._chunks += self._scheduler.expire(self._clock.now())
        plan = self._scheduler.plan()
        if plan is not None:
            self._launched.append(self._runner.launch(plan))
        while self._launched and (plan is None or len(self._launched) > self._steps_ahead):
            step = self._launched.popleft()
            result = step.wait()
            self.num_steps += 1
            self.step_s += result.step_s
            self.rates.saw(step.plan, result.step_s)
            self._chunks += self._scheduler.commit(result)
        chunks, self._chunks = self._chunks, []
        return chunks
