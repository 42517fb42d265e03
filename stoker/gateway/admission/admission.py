"""Admits requests: first the limits of the API key, then the fair queue of the model.

`rate_limits.py` and `fair_queue.py` make the decisions. This file holds the waiting tasks with their deadlines and wake-ups.
`enter()` does not suspend if there is room and the queue is empty, so the usual request costs no task switch.
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


class AdmittedRequest(msgspec.Struct, eq=False):
    """An admitted request. Its owner must call `done()` on every path; a second call does nothing."""

    _clock: Callable[[], float]
    _caller: Caller
    _queue: FairQueue
    _ticket: Ticket
    waited_s: float

    def first_token(self) -> None:
        """Note that the prompt is computed, which frees its prefill capacity."""
        if self._ticket.held_tokens:
            self._queue.first_token(self._ticket, self._clock())

    def done(self, uncached_tokens: int | None = None, output_tokens: int = 0) -> None:
        """End the request with the tokens that it used. If `uncached_tokens` is None, the estimate is kept."""
        ticket, now = self._ticket, self._clock()
        if ticket.state is ADMITTED:
            self._queue.end(ticket, uncached_tokens, now)
            used = (ticket.tokens if uncached_tokens is None else uncached_tokens) + output_tokens
            self._caller.limiter.end(ticket.tokens, used, now)


class Admission:
    """Admits requests, with one fair queue per lane.

    `lane(model, now)` names the queue of a model; models served by the same workers share one. It returns None if no worker
    serves the model; the router then reports that. `capacity(lane, now)` returns how much the lane's workers may hold.
    `gate()` returns an error if all requests must be refused.
    """

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
        self._open = FairQueue(settings, lambda now: Capacity())  # for models without a worker: never full
        self._timer: asyncio.TimerHandle | None = None

    async def enter(
        self,
        caller: Caller,
        uncached_tokens: int,
        *,
        lane: str = "",
        reject_if_busy: bool = False,
        priority: int | None = None,
    ) -> AdmittedRequest:
        """Wait until the request is admitted. `lane` is the requested model.

        Raises Overloaded with a retry time if the request is refused.
        """
        refusal = self._gate()
        if refusal is not None:
            raise refusal
        now = self._clock()
        limit = caller.limiter.begin(uncached_tokens, now)
        if limit is not None:
            raise Overloaded(limit.message, retry_after_s=limit.retry_after_s, code="rate_limited")
        queue = self._queue_of(lane, now)
        queue_s, priority = self._settings.queue_s, caller.best_priority(priority)
        try:
            ticket = queue.offer(caller.tenant, caller.weight, uncached_tokens, priority, now, queue_s, reject_if_busy)
            if ticket.state is WAITING:
                await self._wait(queue, ticket)
                if ticket.refusal is not None:
                    raise ticket.refusal
        except (Overloaded, asyncio.CancelledError):
            caller.limiter.refund(uncached_tokens, self._clock())
            raise
        return AdmittedRequest(self._clock, caller, queue, ticket, ticket.admitted_s - now)

    async def _wait(self, queue: FairQueue, ticket: Ticket) -> None:
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not woken.done():  # the task may have been cancelled in the same turn of the event loop
                woken.set_result(None)

        ticket.wake = wake
        if self._timer is None:
            self._timer = loop.call_later(_TICK_S, self._tick)
        try:
            await woken
        except asyncio.CancelledError:
            # Also if the request was admitted in the same turn of the event loop; otherwise its slot would leak.
            queue.end(ticket, 0, self._clock())
            raise

    def _tick(self) -> None:
        """While requests wait, apply deadlines and use capacity that appeared without an event, such as a new worker."""
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
        """Return the queues as JSON values for the admin API."""
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
