"""Admits requests: first the limits of the API key, then the fair queue of the model.

`rate_limits.py` and `fair_queue.py` make the decisions. This file holds the waiting tasks with their deadlines and wake-ups.

- `claim()` checks the key's limits when a request arrives, before its body is parsed, tokenized or hashed.
- `enter()` charges the prompt tokens, which are known by then, and waits for capacity. It does not suspend if there is room
  and the queue is empty, so the usual request costs no task switch.
- While requests of a key with a token limit run, their output is charged once per second.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from stoker.base.errors import Overloaded
from stoker.base.log import EventLog
from stoker.gateway.admission.admission_settings import AdmissionSettings
from stoker.gateway.admission.api_keys import Caller
from stoker.gateway.admission.budgets import Budget
from stoker.gateway.admission.fair_queue import WAITING, Capacity, FairQueue, Ticket
from stoker.gateway.admission.flex import FlexGate, FlexSlot
from stoker.gateway.admission.limit_leases import LimitLeases, NoLeases
from stoker.gateway.admission.prices import FREE, Price
from stoker.gateway.admission.rate_limits import Refusal

_TICK_S = 0.05
_MAX_FREE_MODELS = 64  # the log names at most this many, because a client may make up names
_CHARGE_S = 1.0  # how often the output of running requests is charged

log = EventLog("admission")


def rate_limited(limit: Refusal) -> Overloaded:
    """Return the client's error for a key above a limit."""
    return Overloaded(limit.message, retry_after_s=limit.retry_after_s, code="rate_limited")


class AdmittedRequest(msgspec.Struct, eq=False):
    """A request that its key's limits allow, and later one that is admitted.

    Its owner must call `done()` on every path; a second call does nothing.
    """

    _admission: Admission
    caller: Caller
    _queue: FairQueue | None = None
    _ticket: Ticket | None = None
    _charged: int = 0
    _ended: bool = False
    waited_s: float = 0.0
    # The budgets that the request is charged to: the key's, and its session's.
    _budgets: tuple[Budget, ...] = ()
    _price: Price | None = None
    _cost: int = 0  # charged so far
    # How many tokens a running request has produced so far. The owner sets it if the key limits tokens.
    output_tokens: Callable[[], int] | None = None

    @property
    def tracks_output(self) -> bool:
        """True if its output is charged while it runs."""
        return self.caller.limiter.limits_tokens or bool(self._budgets)

    def first_token(self) -> None:
        """Note that the prompt is computed, which frees its prefill capacity."""
        ticket = self._ticket
        if ticket is not None and self._queue is not None and ticket.held_tokens:
            self._queue.first_token(ticket, self._admission.clock())

    def charge_output(self, now: float) -> None:
        """Charge the output since the last call."""
        if self.output_tokens is None or self._ticket is None:
            return
        new = self._ticket.tokens + self.output_tokens() - self._charged
        if new > 0:
            self._charged += new
            self.caller.limiter.charge(new, now)
            self._charge_money(0 if self._price is None else self._price.output * new, now)

    def _charge_money(self, cost: int, now: float) -> None:
        self._cost += cost
        for budget in self._budgets:
            budget.charge(cost, now)

    def done(self, uncached_tokens: int | None = None, output_tokens: int = 0, cached_tokens: int = 0) -> None:
        """End the request with the tokens that it used. If `uncached_tokens` is None, what was charged so far is kept.

        A request that was not admitted is still counted in the key's requests per minute, because its body was processed.
        """
        if self._ended:
            return
        self._ended = True
        ticket, now = self._ticket, self._admission.clock()
        cost = 0
        if self._price is not None and uncached_tokens is not None:
            cost = self._price.units(uncached_tokens + cached_tokens, cached_tokens, output_tokens)
        for budget in self._budgets:
            budget.end(self._cost, cost, now)
        if ticket is None or self._queue is None:
            self.caller.limiter.end(self._charged, 0, now)
            return
        self._queue.end(ticket, uncached_tokens, now)
        used = self._charged if uncached_tokens is None else uncached_tokens + output_tokens
        limiter = self.caller.limiter
        limiter.end(self._charged, used, now)
        self._admission.running.discard(self)


class Admission:
    """Admits requests, with one fair queue per lane.

    `lane(model, now)` names the queue of a model; models served by the same workers share one. It returns None if no worker
    serves the model; the router then reports that. `capacity(lane, now)` returns how much the lane's workers may hold.
    `gate()` returns an error if all requests must be refused. `price(model)` is what budgets are charged.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        capacity: Callable[[str, float], Capacity],
        *,
        clock: Callable[[], float],
        lane: Callable[[str, float], str | None] = lambda model, now: model,
        gate: Callable[[], Overloaded | None] = lambda: None,
        leases: LimitLeases | NoLeases | None = None,
        price: Callable[[str], Price] = lambda model: FREE,
    ) -> None:
        self._settings = settings
        self._capacity = capacity
        self.clock = clock
        self._lane = lane
        self._gate = gate
        self._leases = leases or NoLeases()
        self._price = price
        self._queues: dict[str, FairQueue] = {}
        self._open = FairQueue(settings, lambda now: Capacity())  # for models without a worker: never full
        self._timer: asyncio.TimerHandle | None = None
        self.running: set[AdmittedRequest] = set()  # the admitted requests of keys with a token limit or a budget
        self._charging: asyncio.TimerHandle | None = None
        self._free_models: set[str] = set()  # models without a price that the log has named

    async def prepare(self, caller: Caller) -> None:
        """Lease the key's limits from the store, if they are not leased yet. Call it before `claim`."""
        limiter, own = caller.limiter, caller.budgets.own
        if limiter.unlimited and not own:
            return
        await self._leases.ensure((*limiter.leased, *own), lambda: self._refusal(caller) is not None)

    async def charge_session(self, claim: AdmittedRequest, session: str | None) -> None:
        """Also charge the request to its session's budget. Call it before `enter`."""
        budgets = claim.caller.budgets.of_session(session)
        if budgets:
            await self._leases.ensure(budgets, lambda: budgets[0].refusal(1, self.clock()) is not None)
            claim._budgets += budgets

    def _refusal(self, caller: Caller) -> Overloaded | None:
        now = self.clock()
        limit = caller.limiter.refusal(now)
        if limit is not None:
            return rate_limited(limit)
        return _over_budget(caller.budgets.own, 1, now)

    def claim(self, caller: Caller) -> AdmittedRequest:
        """Count a request that has arrived. Raises Overloaded with a retry time if its key is above a limit."""
        refusal = self._gate()
        if refusal is not None:
            raise refusal
        limit = caller.limiter.begin(self.clock())
        if limit is not None:
            raise rate_limited(limit)
        claim = AdmittedRequest(self, caller)
        own = caller.budgets.own
        if own:
            claim._budgets = own
            refusal = _over_budget(own, 1, self.clock())
            if refusal is not None:
                claim.done()
                raise refusal
        return claim

    async def enter(
        self,
        claim: AdmittedRequest,
        uncached_tokens: int,
        *,
        lane: str = "",
        reject_if_busy: bool = False,
        priority: int | None = None,
    ) -> None:
        """Wait until a claimed request is admitted. `lane` is the requested model.

        Raises Overloaded with a retry time if the request is refused. It is charged no tokens then, but it counts as a
        request, as it does if the client leaves the queue: otherwise a busy fleet would turn off `requests_per_minute`.
        """
        caller, now = claim.caller, self.clock()
        self._charge_prompt(claim, uncached_tokens, lane, now)
        queue = self._queue_of(lane, now)
        queue_s, priority = self._settings.queue_s, caller.best_priority(priority)
        try:
            ticket = queue.offer(caller.tenant, caller.weight, uncached_tokens, priority, now, queue_s, reject_if_busy)
            if ticket.state is WAITING:
                await self._wait(queue, ticket)
                if ticket.refusal is not None:
                    raise ticket.refusal
        except (Overloaded, asyncio.CancelledError):
            claim.done()
            raise
        claim._queue, claim._ticket, claim.waited_s = queue, ticket, ticket.admitted_s - now
        self._watch_output(claim)

    async def enter_idle(
        self,
        claim: AdmittedRequest,
        uncached_tokens: Callable[[], int],
        flex: FlexGate,
        on_preempt: Callable[[], object] | None,
        *,
        lane: str,
    ) -> FlexSlot:
        """Admit a claimed flex request, which waits for idle capacity instead of for its turn in the queue.

        While it waits, it is not a concurrent request of its key. The owner must call `end` of the slot on every path. Raises
        Overloaded if there is no idle capacity, or if there is and the key is above a limit.
        """
        caller, slot = claim.caller, None
        caller.limiter.pause()
        try:
            slot = await flex.enter(lane, on_preempt)
            await self.prepare(caller)  # a lease may have ended while it waited
        except BaseException:
            caller.limiter.resume(self.clock())
            if slot is not None:
                slot.end()
            raise
        try:
            now = self.clock()
            if (limit := caller.limiter.resume(now)) is not None:
                raise rate_limited(limit)
            num_tokens = uncached_tokens()
            self._charge_prompt(claim, num_tokens, lane, now)
            claim._queue = self._open
            claim._ticket = self._open.offer(caller.tenant, caller.weight, num_tokens, 0, now, 0.0, False)
            self._watch_output(claim)
        except Exception:
            slot.end()
            raise
        return slot

    def _charge_prompt(self, claim: AdmittedRequest, uncached_tokens: int, lane: str, now: float) -> None:
        limiter = claim.caller.limiter
        if limiter.limits_tokens and (limit := limiter.estimate(uncached_tokens, now)) is not None:
            raise rate_limited(limit)
        claim._charged = uncached_tokens
        if claim._budgets:
            claim._price = self._price(lane)
            if claim._price == FREE:
                self._say_free(lane, claim.caller)
            cost = claim._price.input * uncached_tokens
            if (refusal := _over_budget(claim._budgets, cost, now)) is not None:
                raise refusal
            claim._charge_money(cost, now)

    def _say_free(self, model: str, caller: Caller) -> None:
        """Log once for each model that budgets are not charged for it."""
        if model not in self._free_models and len(self._free_models) < _MAX_FREE_MODELS:
            self._free_models.add(model)
            hint = "add a [[price]] for it, or one for all models (*)"
            log.warning("budget_without_price", model=model[:256], key=caller.key_id, hint=hint)

    def _watch_output(self, claim: AdmittedRequest) -> None:
        if claim.tracks_output:
            self.running.add(claim)
            if self._charging is None:
                self._charging = asyncio.get_running_loop().call_later(_CHARGE_S, self._charge)

    def charge_running(self, now: float) -> None:
        """Charge the output of all running requests whose keys have a token limit."""
        for request in self.running:
            request.charge_output(now)

    def _charge(self) -> None:
        self.charge_running(self.clock())
        again = bool(self.running)
        self._charging = asyncio.get_running_loop().call_later(_CHARGE_S, self._charge) if again else None

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
            queue.end(ticket, 0, self.clock())
            raise

    def _tick(self) -> None:
        """While requests wait, apply deadlines and use capacity that appeared without an event, such as a new worker."""
        now = self.clock()
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
        now = self.clock()
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


def _over_budget(budgets: Iterable[Budget], cost: int, now: float) -> Overloaded | None:
    """Return the client's error if a request of this cost exceeds one of the budgets."""
    for budget in budgets:
        if (over := budget.refusal(cost, now)) is not None:
            return Overloaded(over.message, retry_after_s=over.retry_after_s, code="insufficient_quota")
    return None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
