"""Admission: which requests are admitted, in which order, and that every slot is returned. The clock is virtual."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import LONG_S

from stoker.base.clock import VirtualClock
from stoker.base.errors import Overloaded
from stoker.gateway.admission.admission import Admission, AdmittedRequest
from stoker.gateway.admission.admission_settings import AdmissionSettings
from stoker.gateway.admission.api_keys import Caller
from stoker.gateway.admission.budgets import KeyBudgets
from stoker.gateway.admission.fair_queue import Capacity, FairQueue, Ticket, TicketState
from stoker.gateway.admission.prices import FREE, Price
from stoker.gateway.admission.rate_limits import KeyLimiter
from stoker.gateway.key_settings import KeySettings

BIG = AdmissionSettings(queue_s=1e6, standing_s=1e6, queue_requests=10**6)


async def enter(admission: Admission, caller: Caller, tokens: int, **more: Any) -> AdmittedRequest:
    claimed = admission.claim(caller)
    await admission.enter(claimed, tokens, **more)
    return claimed


@dataclass
class World:
    """A fleet that serves `capacity.requests` requests at a time, each for `service_s` seconds."""

    settings: AdmissionSettings
    capacity: Capacity
    service_s: Callable[[Ticket], float] = lambda ticket: 1.0
    now: float = 0.0
    running: list[tuple[float, Ticket]] = field(default_factory=list)
    admitted: list[Ticket] = field(default_factory=list)
    refused: list[Overloaded] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = FairQueue(self.settings, lambda now: self.capacity)

    def ask(self, tenant: str, tokens: int = 100, *, weight: float = 1.0, priority: int = 0) -> Ticket | None:
        try:
            ticket = self.queue.offer(tenant, weight, tokens, priority, self.now, self.settings.queue_s, False)
        except Overloaded as refusal:
            self.refused.append(refusal)
            return None
        ticket.wake = lambda: self._woken(ticket)
        if ticket.state is TicketState.ADMITTED:
            self._woken(ticket)
        return ticket

    def _woken(self, ticket: Ticket) -> None:
        if ticket.state is TicketState.ADMITTED:
            self.admitted.append(ticket)
            self.running.append((self.now + self.service_s(ticket), ticket))
        else:
            assert ticket.refusal is not None
            self.refused.append(ticket.refusal)

    def run_until(self, end_s: float) -> None:
        while True:
            done = min(self.running, key=lambda one: one[0], default=None)
            if done is None or done[0] > end_s:
                self.now = end_s
                self.queue.expire(end_s)
                self.queue.pump(end_s)
                return
            self.running.remove(done)
            self.now = done[0]
            self.queue.end(done[1], done[1].tokens, self.now)
            self.queue.expire(self.now)
            self.queue.pump(self.now)

    def drain(self) -> None:
        while self.running or self.queue.num_waiting:
            self.run_until(self.now + 10)


def tokens_by_tenant(tickets: list[Ticket]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for ticket in tickets:
        counts[ticket.tenant] += ticket.tokens
    return counts


def test_no_request_waits_while_there_is_capacity() -> None:
    world = World(BIG, Capacity(requests=3))
    assert [world.ask("a").state for _ in range(4)] == [TicketState.ADMITTED] * 3 + [TicketState.WAITING]  # type: ignore[union-attr]
    world.drain()
    assert len(world.admitted) == 4
    assert (world.queue.num_in_flight, world.queue.tokens_in_flight, world.queue.num_waiting) == (0, 0, 0)


def test_a_heavy_tenant_does_not_hold_up_a_light_one() -> None:
    world = World(BIG, Capacity(requests=2))
    for _ in range(500):
        world.ask("heavy", 5000)
    late = world.ask("light", 100)
    assert late is not None
    world.run_until(2.0)
    assert late.state in (TicketState.ADMITTED, TicketState.DONE)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5),
    slots=st.integers(1, 8),
)
def test_backlogged_tenants_share_uncached_tokens_by_weight(seed: int, weights: list[float], slots: int) -> None:
    """Between any two tenants that always have requests waiting, the tokens by weight differ by at most one request plus the
    requests in flight."""
    rng = random.Random(seed)
    world = World(BIG, Capacity(requests=slots), service_s=lambda ticket: ticket.tokens / 1000)
    largest = 4000
    names = [f"t{index}" for index in range(len(weights))]
    for _ in range(300):
        for name, weight in zip(names, weights, strict=True):
            world.ask(name, rng.randint(50, largest), weight=weight)
    backlog_tokens = 40_000.0
    while sum(tokens_by_tenant(world.admitted).values()) < backlog_tokens:
        world.run_until(world.now + 1)
    counts = tokens_by_tenant(world.admitted)
    shares = [counts[name] / weight for name, weight in zip(names, weights, strict=True)]
    # The slots that were free at first went to the first requests, before the other tenant had any.
    slack = largest * (slots + 1) / min(weights) + largest / min(weights)
    assert max(shares) - min(shares) <= slack
    world.drain()
    assert (world.queue.num_in_flight, world.queue.tokens_in_flight) == (0, 0)


def test_within_a_tenant_the_fewest_uncached_tokens_go_first() -> None:
    world = World(BIG, Capacity(requests=1))
    world.ask("a", 10)
    for tokens in (9000, 300, 4000, 300):
        world.ask("a", tokens)
    world.drain()
    assert [ticket.tokens for ticket in world.admitted] == [10, 300, 300, 4000, 9000]


@pytest.mark.parametrize("seed", range(10))
def test_no_request_is_overtaken_by_more_than_the_bound(seed: int) -> None:
    """Short requests arrive faster than they are served. Later requests of the tenant get less than
    3 (W + prefill_tokens) + C tokens before a request is admitted; W are the tokens of the request and of those that waited
    before it, C is the largest request."""
    print("seed", seed)
    rng = random.Random(seed)
    world = World(BIG, Capacity(requests=rng.choice([1, 3])), service_s=lambda ticket: ticket.cost / 1000)
    work: dict[int, int] = {}
    asked: list[Ticket] = []
    for _ in range(600):
        ticket = world.ask("a", rng.choice([*[rng.randint(1, 300)] * 9, rng.randint(300, 20_000)]))
        assert ticket is not None
        work[ticket.number] = sum(t.cost for t in [*asked, ticket] if t.state is TicketState.WAITING)
        asked.append(ticket)
        world.run_until(world.now + rng.expovariate(2.0))
    world.drain()
    places = {ticket.number: place for place, ticket in enumerate(world.admitted)}
    largest = max(ticket.cost for ticket in asked)
    for ticket in asked:
        earlier = world.admitted[: places[ticket.number]]
        overtaken = sum(t.cost for t in earlier if t.number > ticket.number)
        assert overtaken < 3 * (work[ticket.number] + BIG.prefill_tokens) + largest


def test_a_short_request_is_not_refused_for_the_long_ones_that_it_overtakes() -> None:
    rules = AdmissionSettings(queue_s=10, standing_s=10)
    world = World(rules, Capacity(prefill_tokens=10_000), service_s=lambda ticket: 1.0)
    for _ in range(30):
        world.ask("a", 10_000)
        world.run_until(world.now + 0.3)
    while world.ask("a", 10_000) is not None:
        pass
    short = world.ask("a", 100)
    assert short is not None
    world.run_until(world.now + 2)
    assert short.state in (TicketState.ADMITTED, TicketState.DONE)


def test_what_a_request_really_cost_settles_the_share() -> None:
    """Both estimate 1,000 tokens; tenant a's are all cached, so a is due nearly all of the slots."""
    world = World(BIG, Capacity(requests=1))
    for _ in range(200):
        world.ask("a", 1000)
        world.ask("b", 1000)
    for _ in range(100):
        ticket = world.running.pop()[1]
        world.now += 1
        world.queue.end(ticket, 0 if ticket.tenant == "a" else 1000, world.now)
        world.queue.pump(world.now)
    counts = Counter(ticket.tenant for ticket in world.admitted)
    assert counts["a"] > 90


def test_better_priorities_go_first_and_none_starves() -> None:
    rules = AdmissionSettings(queue_s=1e6, standing_s=1e6, queue_requests=10**6, priority_age_s=5)
    world = World(rules, Capacity(requests=1))
    world.ask("x")  # takes the slot
    low = world.ask("low", priority=1)
    for _ in range(5):
        world.ask("urgent", priority=0)
    world.run_until(4.0)
    assert low is not None
    assert low.state is TicketState.WAITING
    # More urgent requests arrive than can be served; the other class is served once it is 5 s older.
    for _ in range(200):
        world.ask("urgent", priority=0)
        world.ask("urgent", priority=0)
        world.run_until(world.now + 1)
        if low.state is not TicketState.WAITING:
            break
    assert low.state is not TicketState.WAITING
    assert low.admitted_s - low.arrived_s < 20


def test_deadlines_end_the_wait() -> None:
    rules = AdmissionSettings(queue_s=3, standing_s=3)
    world = World(rules, Capacity(requests=1), service_s=lambda ticket: 100.0)
    world.ask("a")
    ticket = world.ask("a")
    assert ticket is not None
    world.run_until(2.9)
    assert ticket.state is TicketState.WAITING
    world.run_until(3.1)
    assert ticket.state is TicketState.REFUSED
    assert ticket.refusal is not None
    assert ticket.refusal.code == "queue_timeout"
    assert ticket.refusal.retry_after_s >= 1
    assert world.queue.num_waiting == 0


def test_overload_is_refused_at_once_and_the_admitted_wait_stays_flat() -> None:
    """One slot of 0.1 s serves 10 requests per second. At two, four and ten times that load, admitted requests wait no
    longer, the slot is never idle, and the other requests are refused at once with a retry time."""
    waits = {}
    for rate in (20, 40, 100):
        rng = random.Random(rate)
        rules = AdmissionSettings(queue_s=10, standing_s=1)
        world = World(rules, Capacity(requests=1), service_s=lambda ticket: 0.1)
        asked = 0
        while world.now < 120:
            world.run_until(world.now + rng.expovariate(rate))
            world.ask("a")
            asked += 1
        late = [ticket.admitted_s - ticket.arrived_s for ticket in world.admitted if ticket.arrived_s > 40]
        waits[rate] = sorted(late)[int(len(late) * 0.99)]
        assert len(late) > 75 * 10  # 80 s of work for a slot that was never idle
        assert len(world.admitted) + len(world.refused) + world.queue.num_waiting == asked
        assert all(refusal.code == "queue_full" and refusal.retry_after_s > 0 for refusal in world.refused)
    assert max(waits.values()) < 1.5, waits


def test_a_burst_may_wait_as_long_as_the_queue_allows() -> None:
    rules = AdmissionSettings(queue_s=10, standing_s=1)
    world = World(rules, Capacity(requests=1), service_s=lambda ticket: 0.1)
    for _ in range(5):
        world.ask("a")
        world.run_until(world.now + 1)
    for _ in range(90):
        world.ask("a")
    world.drain()
    assert world.refused == []


def test_a_full_queue_drops_from_the_tenant_with_most_queued_work() -> None:
    rules = AdmissionSettings(queue_requests=10)
    world = World(rules, Capacity(requests=1), service_s=lambda ticket: 0.001)
    world.ask("a")
    heavy = [world.ask("heavy", 1000) for _ in range(10)]
    light = world.ask("light", 10)
    assert light is not None
    assert heavy[-1] is not None
    assert heavy[-1].state is TicketState.REFUSED
    assert world.queue.num_waiting == 10
    assert world.ask("heavy", 1000) is None
    important = world.ask("heavy", 1000, priority=-1)
    assert important is not None
    world.drain()
    assert len(world.admitted) == 1 + 8 + 1 + 1


def test_prefill_tokens_in_flight_are_bounded_until_the_first_token() -> None:
    world = World(BIG, Capacity(prefill_tokens=10_000), service_s=lambda ticket: 1e9)
    first = world.ask("a", 9_000)
    second = world.ask("a", 9_000)  # some capacity is free, so it is admitted however large it is
    third = world.ask("a", 1)
    assert first is not None
    assert second is not None
    assert third is not None
    assert [t.state for t in (first, second, third)] == [
        TicketState.ADMITTED,
        TicketState.ADMITTED,
        TicketState.WAITING,
    ]
    world.queue.first_token(first, 1.0)
    world.queue.first_token(first, 1.0)
    assert world.queue.tokens_in_flight == 9_001
    assert third.state is TicketState.ADMITTED


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_any_order_of_events_leaves_nothing_behind(seed: int) -> None:
    """Requests arrive, get their first token, end, are cancelled or expire, and the capacity changes. No request waits while
    it could run, and at the end every count is zero."""
    rng = random.Random(seed)
    rules = AdmissionSettings(queue_s=20, standing_s=5, queue_requests=rng.choice([0, 3, 50]), priority_age_s=2)
    capacity = [Capacity(requests=2, prefill_tokens=5000)]
    queue = FairQueue(rules, lambda now: capacity[0])
    tickets: list[Ticket] = []
    now = 0.0
    for _ in range(300):
        now += rng.expovariate(3)
        match rng.randrange(6):
            case 0 | 1:
                tenant, weight, priority = rng.choice("abc"), rng.choice([1, 2]), rng.randrange(3)
                with suppress(Overloaded):
                    tickets.append(queue.offer(tenant, weight, rng.randrange(4000), priority, now, 10, False))
            case 2 if tickets:
                queue.end(tickets.pop(rng.randrange(len(tickets))), rng.choice([None, 0, 100, 9000]), now)
                queue.pump(now)
            case 3 if tickets:
                queue.first_token(rng.choice(tickets), now)
                queue.pump(now)
            case 4:
                queue.expire(now)
            case 5:
                capacity[0] = Capacity(requests=rng.randint(1, 4), prefill_tokens=rng.choice([1000, 5000]))
                now += 0.1
                queue.pump(now)
        now += 0.06  # the capacity it uses is at most this old
        queue.pump(now)
        in_flight = [ticket for ticket in tickets if ticket.state is TicketState.ADMITTED]
        assert queue.num_in_flight == len(in_flight)
        assert queue.tokens_in_flight == sum(ticket.held_tokens for ticket in in_flight)
        assert queue.num_waiting == sum(ticket.state is TicketState.WAITING for ticket in tickets)
        if queue.num_waiting:
            limit = capacity[0]
            assert queue.num_in_flight >= limit.requests or queue.tokens_in_flight >= limit.prefill_tokens
    for ticket in tickets:
        queue.end(ticket, None, now)
        queue.end(ticket, None, now)
    assert (queue.num_waiting, queue.num_in_flight, queue.tokens_in_flight) == (0, 0, 0)


# ---- with tasks


def make(capacity: Capacity, rules: AdmissionSettings | None = None, **more: object) -> Admission:
    loop = asyncio.get_running_loop()
    return Admission(rules or AdmissionSettings(), lambda lane, now: capacity, clock=loop.time, **more)  # type: ignore[arg-type]


def test_enter_does_not_suspend_when_there_is_room() -> None:
    async def main() -> None:
        admission = make(Capacity(requests=1))
        entering = enter(admission, Caller("k", "t"), 10, lane="m")
        with pytest.raises(StopIteration) as ended:
            entering.send(None)
        got: AdmittedRequest = ended.value.value
        assert got.waited_s == 0
        got.done()

    asyncio.run(main())


def test_waiting_tasks_are_woken_in_order_and_every_slot_is_returned() -> None:
    async def main() -> None:
        admission = make(Capacity(requests=3), AdmissionSettings(queue_s=1e6, standing_s=1e6))
        peak = num_done = 0

        async def one(index: int) -> None:
            nonlocal peak, num_done
            got = await enter(admission, Caller(f"k{index % 4}", f"t{index % 4}"), 100, lane="m")
            peak = max(peak, admission.num_in_flight)
            await asyncio.sleep(0.001 * (index % 3))
            got.first_token()
            await asyncio.sleep(0.001 * (index % 2))
            got.done(100, 5)
            got.done(100, 5)
            num_done += 1

        await asyncio.wait_for(asyncio.gather(*(one(index) for index in range(200))), LONG_S)
        assert peak == 3
        assert (admission.num_waiting, admission.num_in_flight, admission.tokens_in_flight) == (0, 0, 0)
        assert num_done == 200

    asyncio.run(main())


def test_a_cancelled_waiter_leaves_no_trace_even_when_it_was_just_admitted() -> None:
    async def main() -> None:
        admission = make(Capacity(requests=1))
        caller = Caller("k", "t", limiter=KeyLimiter(concurrency=10))
        first = await enter(admission, caller, 10, lane="m")
        waiting = asyncio.create_task(enter(admission, caller, 10, lane="m"))
        behind = asyncio.create_task(enter(admission, caller, 10, lane="m"))
        await asyncio.sleep(0)
        first.done()  # admits `waiting`, whose task has not run yet
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        last = await asyncio.wait_for(behind, LONG_S)
        gone = asyncio.create_task(enter(admission, caller, 10, lane="m"))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        last.done()
        assert (admission.num_waiting, admission.num_in_flight, caller.limiter.num_open) == (0, 0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("leaves", [True, False])
def test_requests_that_a_busy_fleet_did_not_take_count_as_requests(leaves: bool) -> None:
    async def main() -> None:
        admission = make(Capacity(requests=1))
        other = await enter(admission, Caller("o", "o"), 10, lane="m")
        caller = Caller("k", "t", limiter=KeyLimiter(requests_per_minute=3, tokens_per_minute=100))
        for _ in range(3):
            asked = asyncio.create_task(enter(admission, caller, 60, lane="m", reject_if_busy=not leaves))
            await asyncio.sleep(0)
            if leaves:
                asked.cancel()
            with pytest.raises(asyncio.CancelledError if leaves else Overloaded):
                await asked
        with pytest.raises(Overloaded) as refused:
            admission.claim(caller)
        assert "3 requests per minute" in refused.value.message
        other.done()
        assert (admission.num_waiting, admission.num_in_flight, caller.limiter.num_open) == (0, 0, 0)

    asyncio.run(main())


def test_a_request_without_known_usage_keeps_what_it_was_charged_while_it_ran() -> None:
    async def main() -> None:
        admission = make(Capacity(requests=1))
        caller = Caller("k", "t", limiter=KeyLimiter(tokens_per_minute=100))
        admitted = await enter(admission, caller, 10, lane="m")
        admitted.output_tokens = lambda: 90
        admission.charge_running(admission.clock())
        admitted.done()  # the client left before it got anything
        with pytest.raises(Overloaded) as refused:
            admission.claim(caller)
        assert "100 tokens per minute" in refused.value.message

    asyncio.run(main())


def test_capacity_that_appears_without_an_event_is_used() -> None:
    async def main() -> None:
        capacity = Capacity(requests=1)
        loop = asyncio.get_running_loop()
        admission = Admission(AdmissionSettings(), lambda lane, now: capacity, clock=loop.time)
        first = await enter(admission, Caller("k", "t"), 10, lane="m")
        second = asyncio.create_task(enter(admission, Caller("k", "t"), 10, lane="m"))
        await asyncio.sleep(0)
        capacity = Capacity(requests=2)  # a worker came back
        (await asyncio.wait_for(second, LONG_S)).done()
        first.done()

    asyncio.run(main())


def test_refusals_say_which_limit_and_when() -> None:
    async def main() -> None:
        admission = make(Capacity(requests=1), AdmissionSettings(queue_s=0.2, standing_s=0.2))
        poor = Caller("k", "t", limiter=KeyLimiter(requests_per_minute=1))
        first = await enter(admission, poor, 10, lane="m")
        with pytest.raises(Overloaded) as limited:
            await enter(admission, poor, 10, lane="m")
        assert limited.value.code == "rate_limited"
        assert limited.value.retry_after_s > 1
        other = Caller("o", "o", limiter=KeyLimiter(concurrency=1))
        with pytest.raises(Overloaded) as busy:
            await enter(admission, other, 10, lane="m", reject_if_busy=True)
        assert busy.value.code == "busy"
        with pytest.raises(Overloaded) as late:
            await enter(admission, other, 10, lane="m")
        assert late.value.code == "queue_timeout"
        assert other.limiter.num_open == 0
        first.done()
        (await enter(admission, other, 10, lane="m")).done()

    asyncio.run(main())


def test_models_without_a_worker_are_left_to_the_router() -> None:
    async def main() -> None:
        admission = make(Capacity(requests=1), lane=lambda model, now: "m" if model == "m" else None)
        passes = [await enter(admission, Caller("k", "t"), 10, lane=f"invented-{index}") for index in range(50)]
        assert admission.num_in_flight == 50
        for one in passes:
            one.done()
        assert admission.num_in_flight == 0
        assert admission.describe() == []

    asyncio.run(main())


def test_a_shut_gate_refuses_before_anything_is_counted() -> None:
    async def main() -> None:
        shut = Overloaded("draining", code="draining")
        caller = Caller("k", "t")
        admission = make(Capacity(), gate=lambda: shut)
        with pytest.raises(Overloaded) as refused:
            await enter(admission, caller, 10)
        assert refused.value is shut
        assert caller.limiter.num_open == 0

    asyncio.run(main())


def test_the_virtual_clock_is_enough() -> None:
    async def main() -> None:
        clock = VirtualClock()
        admission = Admission(AdmissionSettings(), lambda lane, now: Capacity(requests=1), clock=clock.now)
        first = await enter(admission, Caller("k", "t"), 10)
        second = asyncio.create_task(enter(admission, Caller("k", "t"), 10))
        await asyncio.sleep(0)
        clock.advance(2.5)
        first.done()
        assert (await second).waited_s == 2.5

    asyncio.run(main())


def test_the_output_of_running_requests_is_charged_before_they_end() -> None:
    async def main() -> None:
        clock = VirtualClock(start_s=0.0)
        admission = Admission(AdmissionSettings(), lambda lane, now: Capacity(), clock=clock.now)
        caller = Caller("k", "t", limiter=KeyLimiter(tokens_per_minute=600))
        streams = [await enter(admission, caller, 10) for _ in range(3)]
        produced = 0
        for stream in streams:
            assert stream.caller.limiter.limits_tokens
            stream.output_tokens = lambda: produced
        admission.charge_running(clock.now())
        admission.claim(caller).done()  # 570 tokens are left
        produced = 300
        admission.charge_running(clock.now())
        admission.charge_running(clock.now())  # nothing is charged twice
        with pytest.raises(Overloaded) as refused:
            admission.claim(caller)
        assert refused.value.code == "rate_limited"
        assert refused.value.retry_after_s == pytest.approx(33.1)  # 600 - 30 - 900 = -330, and 10 tokens per second
        clock.advance(33.1)
        last = admission.claim(caller)
        last.done()
        for stream in streams:
            stream.done(10, 300)  # as charged already, so the level does not change
        assert not admission.running
        assert caller.limiter.begin(clock.now()) is None
        assert caller.limiter.estimate(2, clock.now()) is not None

    asyncio.run(main())


def test_a_request_refused_for_its_tokens_still_counts_as_a_request() -> None:
    async def main() -> None:
        admission = make(Capacity())
        caller = Caller("k", "t", limiter=KeyLimiter(requests_per_minute=2, tokens_per_minute=100))
        (await enter(admission, caller, 60)).done()
        claimed = admission.claim(caller)
        with pytest.raises(Overloaded, match="needs about 60 uncached tokens"):
            await admission.enter(claimed, 60)
        claimed.done()
        assert caller.limiter.num_open == 0
        with pytest.raises(Overloaded, match="2 requests per minute"):
            admission.claim(caller)

    asyncio.run(main())


def test_a_long_prompt_is_not_refused_for_its_own_tokens() -> None:
    """The fleet computes 26,000 tokens per second. The long prompt alone takes 38 s, but it waits for 1.5 s at most."""
    world = World(AdmissionSettings(), Capacity(requests=100, prefill_tokens=40_000), service_s=lambda ticket: 1e9)
    for _ in range(3):
        world.now += 1.5
        for ticket in world.admitted:
            world.queue.first_token(ticket, world.now)
        for _ in range(2):
            assert world.ask("a", 20_000) is not None
    long = world.ask("b", 1_000_000)
    assert long is not None
    assert long.state is TicketState.WAITING
    world.queue.first_token(world.admitted[-1], world.now + 1.5)
    assert long.state is TicketState.ADMITTED


def test_a_prompt_beyond_the_capacity_does_not_make_later_predictions_too_long() -> None:
    """The fleet computes 1,000 tokens per second. One prompt of 100,000 tokens stays ten times as long as the capacity."""
    world = World(AdmissionSettings(), Capacity(requests=100, prefill_tokens=10_000), service_s=lambda ticket: 1e9)
    long = world.ask("a", 100_000)
    assert long is not None
    world.now = 100.0
    world.queue.first_token(long, world.now)
    tickets = [world.ask("b", 1000) for _ in range(16)]
    assert [ticket is not None and ticket.state for ticket in tickets[10:]] == [TicketState.WAITING] * 6
    assert tickets[-1] is not None
    assert world.queue.predicted_wait_s(tickets[-1]) == pytest.approx(6.0)


async def _charged_models(admission: Admission, caller: Caller, models: list[str]) -> None:
    for model in models:
        (await enter(admission, caller, 5, lane=model)).done()


def test_a_budget_of_a_model_without_a_price_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    price = {"priced": Price(1, 1, 1)}
    admission = Admission(
        BIG, lambda lane, now: Capacity(), clock=lambda: 0.0, price=lambda model: price.get(model, FREE)
    )
    caller = Caller("k", "t", budgets=KeyBudgets(KeySettings("k", "0" * 64, budget=5.0)))
    asyncio.run(_charged_models(admission, caller, ["priced", "free", "free", "other"]))
    asyncio.run(_charged_models(admission, Caller("plain", "t"), ["third"]))
    told = [record.fields["model"] for record in caplog.records if record.getMessage() == "budget_without_price"]
    assert told == ["free", "other"]
