"""Letting requests in: the key's limits, then a place among the others. What is decided how is in limits.py and fair_queue.py;
here are the waiting tasks, their deadlines and their wake-ups.

`enter()` does not suspend when nobody waits and there is room: the usual request pays no task switch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import msgspec

from stoker.base.errors import Overloaded
from stoker.gateway.admission.api_keys import Caller
from stoker.gateway.admission.fair_queue import ADMITTED, WAITING, Capacity, FairQueue, Ticket
from stoker.gateway.config import AdmissionSettings

_TICK_S = 0.05


class Pass(msgspec.Struct, eq=False):
    """Somebody who was let in. `done()` on every path; a second time it does nothing."""

    _clock: Callable[[], float]
    _caller: Caller
    _queue: FairQueue
    _ticket: Ticket
    waited_s: float

    def first_token(self) -> None:
        """Its prompt is computed."""
        if self._ticket.held_tokens:
            self._queue.first_token(self._ticket, self._clock())

    def done(self, uncached_tokens: int | None = None, output_tokens: int = 0) -> None:
        """What it really used; None: not known, so the estimate stands."""
        ticket, now = self._ticket, self._clock()
        if ticket.state is ADMITTED:
            self._queue.end(ticket, uncached_tokens, now)
            used = (ticket.tokens if uncached_tokens is None else uncached_tokens) + output_tokens
            self._caller.limiter.end(ticket.tokens, used, now)


class Admission:
    """`lane(model, now)` names the queue: models that the same workers serve share one; None: nobody serves it, which is the
    router's to say. `capacity(lane, now)` says what its workers may hold. `gate()` may refuse everybody."""

    def __init__(
        self,
        settings: AdmissionSettings,
        capacity: Callable[[str, float], Capacity],
        *,
        clock: Callable[[], float],
        lane: Callable[[str, float], str | None] = lambda model, now: model,
        gate: Callable[[], Overloaded | None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._capacity = capacity
        self._clock = clock
        self._lane = lane
        self._gate = gate
        self._queues: dict[str, FairQueue] = {}
        self._open = FairQueue(settings, lambda now: Capacity())  # for models that nobody serves: never full
        self._timer: asyncio.TimerHandle | None = None
        self.num_admitted = 0

    async def enter(
        self,
        caller: Caller,
        uncached_tokens: int,
        *,
        lane: str = "",
        reject_if_busy: bool = False,
        deadline_s: float | None = None,
        priority: int | None = None,
    ) -> Pass:
        """`lane` is the model that is asked for, `deadline_s` the longest wait (never above the queue's own). Overloaded, with
        its Retry-After, if the request is not to be served now."""
        refusal = self._gate()
        if refusal is not None:
            raise refusal
        now = self._clock()
        limit = caller.limiter.begin(uncached_tokens, now)
        if limit is not None:
            raise Overloaded(limit.message, retry_after_s=limit.retry_after_s, code="rate_limited")
        queue = self._queue_of(lane, now)
        wait_s = self._settings.queue_s if deadline_s is None else min(deadline_s, self._settings.queue_s)
        priority = caller.best_priority(priority)
        try:
            ticket = queue.offer(caller.tenant, caller.weight, uncached_tokens, priority, now, wait_s, reject_if_busy)
            if ticket.state is WAITING:
                await self._wait(queue, ticket)
                if ticket.refusal is not None:
                    raise ticket.refusal
        except (Overloaded, asyncio.CancelledError):
            caller.limiter.give_back(uncached_tokens, self._clock())
            raise
        self.num_admitted += 1
        return Pass(self._clock, caller, queue, ticket, ticket.admitted_s - now)

    async def _wait(self, queue: FairQueue, ticket: Ticket) -> None:
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not woken.done():  # it may have been cancelled in this very turn of the loop
                woken.set_result(None)

        ticket.wake = wake
        if self._timer is None:
            self._timer = loop.call_later(_TICK_S, self._tick)
        try:
            await woken
        except asyncio.CancelledError:
            # Also when it was admitted in the same turn of the loop: nobody would return that place.
            queue.end(ticket, 0, self._clock())
            raise

    def _tick(self) -> None:
        """While somebody waits: deadlines, and room that came without an event (a worker that is back)."""
        now = self._clock()
        self._timer = None
        for queue in self._queues.values():
            if queue.num_waiting:
                queue.expire(now)
                queue.pump(now)
        if any(queue.num_waiting for queue in self._queues.values()):
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _queue_of(self, model: str, now: float) -> FairQueue:
        name = self._lane(model, now)
        if name is None:
            return self._open
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = FairQueue(self._settings, lambda now: self._capacity(name, now))
        return queue

    @property
    def num_waiting(self) -> int:
        return sum(queue.num_waiting for queue in self._queues.values())

    @property
    def num_in_flight(self) -> int:
        return sum(queue.num_in_flight for queue in (self._open, *self._queues.values()))

    @property
    def tokens_in_flight(self) -> int:
        return sum(queue.tokens_in_flight for queue in (self._open, *self._queues.values()))

    def describe(self) -> list[dict[str, Any]]:
        """For the admin view."""
        now = self._clock()
        return [
            {
                "lane": name,
                "waiting": queue.num_waiting,
                "waiting_by_tenant": queue.waiting_by_tenant(),
                "in_flight": queue.num_in_flight,
                "prefill_tokens_in_flight": queue.tokens_in_flight,
                "capacity_requests": _finite(self._capacity(name, now).requests),
                "capacity_prefill_tokens": _finite(self._capacity(name, now).prefill_tokens),
            }
            for name, queue in self._queues.items()
        ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
