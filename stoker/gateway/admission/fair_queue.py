"""The fair queue in front of the workers of one model: decides which requests are admitted, wait, or are refused. Pure.

Capacity is counted in requests and in uncached prompt tokens in flight. When it is used up, requests wait:

- a better (lower) priority first;
- within a priority, tenants share by uncached tokens and weight (base/fair_shares.py);
- within a tenant, the request with the fewest uncached tokens first, with ageing (base/shortest_first.py). Its step is
  `prefill_tokens`.

The engine's scheduler orders prompts by the same rule. Here, the uncached tokens are those at the worker with the longest
cached prefix when the request arrived.

A priority class counts as one step better for each `priority_age_s` that its oldest request has waited. This prevents
starvation.

The wait is predicted before a request enters the queue, from the measured time that requests and prompt tokens stay in
flight. In a burst, requests may wait up to `queue_s`. If the queue has not been empty for that long, it is an overload: from
then on only requests with a predicted wait of at most `standing_s` are queued. So admitted requests are served soon, and the
others are refused at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import msgspec

from stoker.base.errors import Overloaded
from stoker.base.fair_shares import FairShares
from stoker.base.shortest_first import OVERTAKING_RATIO, ShortestFirst
from stoker.gateway.admission.admission_settings import AdmissionSettings

MIN_COST_TOKENS = 32  # charged even for a fully cached request
_CAPACITY_AGE_S = 0.05  # the capacity is read again after this time
_CALM_S = 5.0  # a queue that was empty for less than this time continues the same backlog
_SMOOTHING = 0.05
_MAX_BITS = 32


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much the workers may hold at a time. Infinite means unknown, hence unlimited."""

    requests: float = math.inf
    prefill_tokens: float = math.inf


class TicketState(Enum):
    WAITING = "waiting"
    ADMITTED = "admitted"
    REFUSED = "refused"
    DONE = "done"


# Module names, because enum attribute access is slow and every request needs several.
WAITING, ADMITTED, DONE = TicketState.WAITING, TicketState.ADMITTED, TicketState.DONE


class Ticket(msgspec.Struct, eq=False):
    """One request in the queue, and later in flight."""

    tenant: str
    weight: float
    tokens: int
    cost: int
    priority: int
    number: int  # order of arrival
    arrived_s: float
    expires_s: float
    state: TicketState = WAITING
    admitted_s: float = 0.0
    held_tokens: int = 0
    fullness: float = 1.0  # prompt tokens in flight at its admission relative to the capacity, at least 1
    refusal: Overloaded | None = None
    wake: Callable[[], None] | None = None


@dataclass(slots=True)
class _Mean:
    """An exponential moving average over the last few dozen values; None before the first one."""

    value: float | None = None

    def add(self, value: float, weight: float = _SMOOTHING) -> None:
        if self.value is None:
            self.value = value
        else:
            self.value += weight * (value - self.value)


class _Line:
    """The waiting tickets of one tenant at one priority."""

    __slots__ = ("_tokens_by_bits", "tickets", "tokens", "weight")

    def __init__(self, weight: float, step_tokens: int) -> None:
        self.weight = weight
        self.tickets: ShortestFirst[Ticket] = ShortestFirst(step_tokens)
        self.tokens = 0
        self._tokens_by_bits = [0] * _MAX_BITS  # by the number of bits of a ticket's cost

    def add(self, ticket: Ticket) -> None:
        self.tickets.add(ticket, ticket.cost, ticket.number)
        self.tokens += ticket.cost
        self._tokens_by_bits[_bits(ticket.cost)] += ticket.cost

    def remove(self, ticket: Ticket) -> None:
        self.tickets.remove(ticket)
        self.tokens -= ticket.cost
        self._tokens_by_bits[_bits(ticket.cost)] -= ticket.cost

    def ahead_of(self, cost: int) -> tuple[float, float]:
        """Estimate how many requests and tokens go before a new ticket: the smaller ones, and what ageing adds to them."""
        ageing = 1 + 1 / OVERTAKING_RATIO
        tokens = ageing * sum(self._tokens_by_bits[: _bits(cost) + 1])
        return min(len(self.tickets), ageing * self.tickets.num_before(cost)), min(self.tokens, tokens)


def _bits(cost: int) -> int:
    return min(cost.bit_length(), _MAX_BITS - 1)


class FairQueue:
    """The queue of one lane."""

    def __init__(self, settings: AdmissionSettings, capacity: Callable[[float], Capacity]) -> None:
        self._settings = settings
        self._read_capacity = capacity
        self._capacity = Capacity()
        self._capacity_s = -math.inf
        self._classes: dict[int, dict[str, _Line]] = {}
        self._shares = FairShares()
        self._service_s = _Mean()
        self._prefill_s = _Mean()
        self._backlog_since_s = 0.0
        self._emptied_s = -math.inf
        self._num_offered = 0
        self.num_waiting = 0
        self.num_in_flight = 0
        self.tokens_in_flight = 0

    def offer(
        self, tenant: str, weight: float, tokens: int, priority: int, now: float, wait_s: float, reject_if_busy: bool
    ) -> Ticket:
        """Return a ticket that is admitted or waits. Raises Overloaded if the request must not wait."""
        cost = tokens if tokens > MIN_COST_TOKENS else MIN_COST_TOKENS
        self._num_offered += 1
        ticket = Ticket(tenant, weight, tokens, cost, priority, self._num_offered, now, now + wait_s)
        if self.num_waiting:
            self.pump(now)  # capacity may have become free since the last event
        if self.num_waiting == 0 and self._has_room(now):
            self._admit(ticket, now)
            return ticket
        if reject_if_busy:
            message = "All workers are busy, and the request was sent with rejectIfBusy."
            raise Overloaded(message, retry_after_s=self.predicted_wait_s(ticket), code="busy")
        predicted_s = self.predicted_wait_s(ticket)
        limit_s = min(wait_s, self._limit_s(now))
        if predicted_s > limit_s:
            raise Overloaded(
                f"The predicted wait of {predicted_s:.1f} s exceeds the current limit of {limit_s:.1f} s; retry later.",
                retry_after_s=predicted_s,
                code="queue_full",
            )
        if self.num_waiting >= self._settings.queue_requests and not self._make_room(ticket, now):
            message = f"The queue is full with {self.num_waiting} waiting requests; retry later."
            raise Overloaded(message, retry_after_s=max(predicted_s, 1.0), code="queue_full")
        self._push(ticket, now)
        return ticket

    def first_token(self, ticket: Ticket, now: float) -> None:
        """Note that the ticket's prompt is computed, which frees its prompt tokens for other requests."""
        if ticket.state is ADMITTED and ticket.held_tokens:
            self.tokens_in_flight -= ticket.held_tokens
            # The average is over tokens, so a long prompt counts more than a short one. It is for a capacity that is just
            # used up: a prompt that alone exceeds the capacity stays longer, but its tokens are not slower.
            prefill_s = (now - ticket.admitted_s) / ticket.fullness
            self._prefill_s.add(prefill_s, min(0.5, _SMOOTHING * (1 + ticket.held_tokens / 1024)))
            ticket.held_tokens = 0
            if self.num_waiting:
                self.pump(now)

    def end(self, ticket: Ticket, uncached_tokens: int | None, now: float) -> None:
        """End a ticket, waiting or admitted. `uncached_tokens` is its actual cost, if known."""
        if ticket.state is WAITING:
            self._remove(ticket, now)
        elif ticket.state is ADMITTED:
            self.tokens_in_flight -= ticket.held_tokens
            self.num_in_flight -= 1
            self._service_s.add(now - ticket.admitted_s)
            if uncached_tokens is not None:
                actual = uncached_tokens if uncached_tokens > MIN_COST_TOKENS else MIN_COST_TOKENS
                if actual != ticket.cost:
                    self._shares.correct(ticket.tenant, actual - ticket.cost, ticket.weight)
        ticket.held_tokens = 0
        ticket.state = DONE
        if self.num_waiting:
            self.pump(now)

    def pump(self, now: float) -> None:
        """Admit waiting tickets while there is capacity, and wake their tasks."""
        while self.num_waiting and self._has_room(now):
            ticket = self._next(now)
            self._classes[ticket.priority][ticket.tenant].tickets.charge(ticket, ticket.cost)
            self._remove(ticket, now)
            self._admit(ticket, now)
            if ticket.wake is not None:
                ticket.wake()

    def expire(self, now: float) -> None:
        """Refuse tickets whose deadline has passed. It scans all waiting tickets, so call it a few times per second."""
        for ticket in [ticket for ticket in self._tickets() if ticket.expires_s <= now]:
            self._remove(ticket, now)
            waited_s = now - ticket.arrived_s
            message = f"No worker had capacity within the queue timeout of {waited_s:.1f} s; retry later."
            self._refuse(ticket, message, "queue_timeout")

    def predicted_wait_s(self, ticket: Ticket) -> float:
        """Predict a ticket's wait from the measured turnover (Little's law).

        A tenant's queue advances at the tenant's share of the capacity, so other tenants' queued work counts only up to
        their shares. The ticket needs a slot, so it counts as a request. Its own tokens do not count: it is admitted as soon
        as any token of the capacity is free.
        """
        ahead_requests, ahead_tokens, weights = 1.0, 0.0, ticket.weight
        own_requests, own_tokens = 1.0, 0.0
        for priority, lines in self._classes.items():
            if priority > ticket.priority:
                continue
            for tenant, line in lines.items():
                if tenant != ticket.tenant:
                    ahead_requests += len(line.tickets)
                    ahead_tokens += line.tokens
                    weights += line.weight
                    continue
                # Of a better priority, all go first.
                is_same = priority == ticket.priority
                requests, line_tokens = line.ahead_of(ticket.cost) if is_same else (len(line.tickets), line.tokens)
                ahead_requests += requests
                ahead_tokens += line_tokens
                own_requests += requests
                own_tokens += line_tokens
        share = weights / ticket.weight
        by_requests = min(ahead_requests, own_requests * share) * (self._service_s.value or 0.0)
        by_tokens = min(ahead_tokens, own_tokens * share) * (self._prefill_s.value or 0.0)
        return max(
            by_requests / max(1.0, min(self._capacity.requests, self.num_in_flight)),
            by_tokens / max(1.0, self._capacity.prefill_tokens),
        )

    def _limit_s(self, now: float) -> float:
        standing = self.num_waiting and now - self._backlog_since_s > self._settings.queue_s
        return self._settings.standing_s if standing else self._settings.queue_s

    def _has_room(self, now: float) -> bool:
        if now - self._capacity_s >= _CAPACITY_AGE_S:
            self._capacity = self._read_capacity(now)
            self._capacity_s = now
        # A request may exceed the remaining capacity: if it had to wait until it fits, smaller ones would pass it forever.
        return self.num_in_flight < self._capacity.requests and self.tokens_in_flight < self._capacity.prefill_tokens

    def _admit(self, ticket: Ticket, now: float) -> None:
        self._shares.trim()
        self._shares.charge(ticket.tenant, ticket.cost, ticket.weight)
        self.num_in_flight += 1
        self.tokens_in_flight += ticket.tokens
        ticket.held_tokens = ticket.tokens
        if self.tokens_in_flight > self._capacity.prefill_tokens:
            ticket.fullness = self.tokens_in_flight / self._capacity.prefill_tokens
        ticket.admitted_s = now
        ticket.state = ADMITTED

    def _refuse(self, ticket: Ticket, message: str, code: str) -> None:
        ticket.state = TicketState.REFUSED
        ticket.refusal = Overloaded(message, retry_after_s=max(1.0, self.predicted_wait_s(ticket)), code=code)
        if ticket.wake is not None:
            ticket.wake()

    def _push(self, ticket: Ticket, now: float) -> None:
        if self.num_waiting == 0 and now - self._emptied_s > _CALM_S:
            self._backlog_since_s = now
        lines = self._classes.setdefault(ticket.priority, {})
        line = lines.get(ticket.tenant)
        if line is None:
            line = lines[ticket.tenant] = _Line(ticket.weight, self._settings.prefill_tokens)
        line.add(ticket)
        self.num_waiting += 1

    def _remove(self, ticket: Ticket, now: float) -> None:
        lines = self._classes[ticket.priority]
        line = lines[ticket.tenant]
        line.remove(ticket)
        self.num_waiting -= 1
        if not line.tickets:
            del lines[ticket.tenant]
            if not lines:
                del self._classes[ticket.priority]
        if self.num_waiting == 0:
            self._emptied_s = now

    def _next(self, now: float) -> Ticket:
        age_s = self._settings.priority_age_s

        def rank(priority: int) -> tuple[int, int]:
            oldest_s = min(line.tickets.oldest.arrived_s for line in self._classes[priority].values())
            return priority - int((now - oldest_s) / age_s), priority

        lines = self._classes[min(self._classes, key=rank)]

        def turn(tenant: str) -> tuple[float, float]:
            return self._shares.start(tenant), lines[tenant].tickets.oldest.arrived_s

        return lines[min(lines, key=turn)].tickets.next

    def _make_room(self, ticket: Ticket, now: float) -> bool:
        """Make room in a full queue: drop the newest ticket of the tenant with the most queued work at the worst priority.

        Return False if that would be the new ticket itself.
        """
        if not self._classes:
            return False
        worst = max(self._classes)
        lines = self._classes[worst]
        largest = max(lines, key=lambda tenant: lines[tenant].tokens / lines[tenant].weight)
        if worst < ticket.priority:
            return False
        if worst == ticket.priority:
            own = lines.get(ticket.tenant)
            own_cost = (ticket.cost + (own.tokens if own else 0)) / ticket.weight
            if largest == ticket.tenant or lines[largest].tokens / lines[largest].weight <= own_cost:
                return False
        newest = lines[largest].tickets.newest
        self._remove(newest, now)
        message = "The queue is full, and this tenant has the most work queued; retry later."
        self._refuse(newest, message, "queue_full")
        return True

    def _tickets(self) -> Iterator[Ticket]:
        for lines in self._classes.values():
            for line in lines.values():
                yield from line.tickets.items()

    def waiting_by_tenant(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for ticket in self._tickets():
            counts[ticket.tenant] = counts.get(ticket.tenant, 0) + 1
        return counts
