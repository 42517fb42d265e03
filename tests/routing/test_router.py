from __future__ import annotations

import pytest
from routing_world import BLOCK, World, where

from stoker.base.errors import ConfigError
from stoker.base.ids import WorkerId
from stoker.fleet.load_book import LoadTotals
from stoker.fleet.spec import LoadReport, Role
from stoker.routing.query import ModelNotFound, NoWorker
from stoker.routing.settings import CostSettings, RouterSettings

A, B, P, D = WorkerId("a"), WorkerId("b"), WorkerId("p"), WorkerId("d")


@pytest.fixture
def pair() -> World:
    world = World()
    world.add(A)
    world.add(B)
    return world


def test_a_conversation_returns_to_its_blocks_and_a_new_one_goes_elsewhere(pair: World) -> None:
    first = pair.route(range(50))
    first.end(1.0)
    again = pair.route(range(55), 2.0)
    assert where(again) == where(first)
    assert again.decode.cached_tokens == 5000
    again.end(3.0)
    other = pair.route(range(1000, 1050), 4.0)
    assert where(other) != where(first)


def test_reservations_spread_a_burst(pair: World) -> None:
    routes = [pair.route(range(start, start + 50)) for start in range(0, 10_000, 1000)]
    assert sorted(where(route)[1] for route in routes) == [A] * 5 + [B] * 5
    for route in routes:
        route.first_token(1.0)
        route.end(2.0)
        route.end(3.0)
    assert pair.load_book.totals() == LoadTotals(0, 0, 0, 0)


def test_a_conversation_leaves_an_overloaded_worker_and_stays_on_a_busy_one(pair: World) -> None:
    home = pair.route(range(10))
    home.end(0.0)
    reservation = pair.load_book.reserve(
        home.decode.worker.worker_id, prefill_tokens=500, context_tokens=0, output_tokens=0, now=1.0
    )
    stays = pair.route(range(11), 1.0)
    assert where(stays) == where(home)
    stays.end(1.0)
    reservation.end(1.0)
    pair.load_book.reserve(
        home.decode.worker.worker_id, prefill_tokens=90_000, context_tokens=0, output_tokens=0, now=1.0
    )
    assert where(pair.route(range(12), 1.0)) != where(home)


def test_a_session_leaves_a_dead_worker_at_once(pair: World) -> None:
    home = pair.route(range(50), session="s")
    home.end(0.0)
    pair.fleet.saw_failure(home.decode.worker.worker_id, 1.0, "connect")
    assert where(pair.route(range(51), 1.0, session="s")) != where(home)


def test_excluded_workers_and_other_dialects_are_not_candidates(pair: World) -> None:
    pair.add(WorkerId("v"), dialect="vllm")
    assert where(pair.route([], excluded=frozenset({A, B})))[1] == "v"
    assert where(pair.route([], needs_dialect=frozenset({"vllm"})))[1] == "v"
    with pytest.raises(NoWorker, match="2 workers have already failed it"):
        pair.route([], excluded=frozenset({A, B}), needs_dialect=frozenset({"stoker"}))


def test_an_unknown_model_is_not_found_and_a_model_without_usable_workers_is_retried_later(pair: World) -> None:
    with pytest.raises(ModelNotFound, match="'other' is not served here; served models: m"):
        pair.route([], model="other")
    for worker_id in (A, B):
        pair.fleet.saw_failure(worker_id, 0.0, "connect")
    with pytest.raises(NoWorker, match="none of the 2 workers") as caught:
        pair.route([], 0.1)
    assert caught.value.retry_after_s >= 0.9
    assert pair.load_book.totals().requests == 0


def test_full_kv_memory_and_slow_disks_raise_the_cost(pair: World) -> None:
    pair.fleet.saw_report(A, LoadReport(kv_used=0.99), 0.0)
    assert where(pair.route([]))[1] == B
    pair.fleet.saw_report(A, LoadReport(), 0.0)
    index = pair.indexes["m"]
    index.stored(A, range(500), "DISK")
    index.stored(B, range(500), "GPU")
    assert where(pair.route(range(500), 1.0))[1] == B


def test_a_worker_is_credited_with_the_blocks_of_its_shared_store(pair: World) -> None:
    """Blocks computed on A are a hit on B, so the request neither waits in A's queue nor computes them again."""
    index = pair.indexes["m"]
    for worker in (A, B):
        index.share(worker, {"CPU": "ram"})
    index.stored(A, range(50), "GPU")
    index.stored(A, range(50), "CPU")
    pair.fleet.saw_report(A, LoadReport(waiting_tokens=60_000), 0.0)
    route = pair.route(range(50))
    assert where(route)[1] == B
    assert route.decode.cached_tokens == 50 * BLOCK


def split_world() -> World:
    world = World()
    world.add(P, Role.PREFILL)
    world.add(D, Role.DECODE)
    return world


def test_a_hand_off_reserves_work_on_both_legs() -> None:
    world = split_world()
    route = world.route(range(50))
    assert where(route) == (P, D)
    assert route.prefill is not None
    assert (route.prefill.reservation.prefill_tokens, route.decode.reservation.prefill_tokens) == (5001, 0)
    route.first_token(1.0)
    assert world.load_book.totals() == LoadTotals(0, 5001, 10, 1)
    route.end(2.0)
    assert world.load_book.totals() == LoadTotals(0, 0, 0, 0)


def test_a_few_uncached_tokens_are_computed_by_the_decode_worker() -> None:
    world = split_world()
    world.route(range(50)).end(0.0)
    route = world.route(range(52), 1.0)
    assert where(route) == (None, D)
    assert route.decode.reservation.prefill_tokens == 201


def test_a_decode_worker_that_cannot_prefill_always_gets_a_prefill_worker() -> None:
    world = World()
    world.add(P, Role.PREFILL)
    world.add(D, Role.DECODE, decodes_alone=False)
    assert where(world.route(range(1))) == (P, D)
    world.fleet.saw_probe(P, live=False, ready=False, now=0.0)
    with pytest.raises(NoWorker):
        world.route(range(1))


def test_both_legs_have_the_same_dialect() -> None:
    world = World()
    for dialect in ("stoker", "sglang"):
        world.add(WorkerId(f"p-{dialect}"), Role.PREFILL, dialect=dialect)
    world.add(D, Role.DECODE, dialect="sglang", decodes_alone=False)
    world.load_book.reserve(WorkerId("p-sglang"), prefill_tokens=9000, context_tokens=0, output_tokens=0, now=0.0)
    assert where(world.route(range(5))) == ("p-sglang", D)
    world.fleet.saw_probe(WorkerId("p-sglang"), live=False, ready=False, now=0.0)
    with pytest.raises(NoWorker):
        world.route(range(5))


def test_the_decode_worker_prefills_when_the_prefill_worker_is_busier() -> None:
    world = split_world()
    world.load_book.reserve(P, prefill_tokens=60_000, context_tokens=0, output_tokens=0, now=0.0)
    assert where(world.route(range(50))) == (None, D)


def test_a_decode_worker_replaces_a_dead_prefill_worker_but_not_the_reverse() -> None:
    world = split_world()
    world.fleet.saw_probe(P, live=False, ready=False, now=0.0)
    assert where(world.route(range(50))) == (None, D)
    world.fleet.saw_probe(P, live=True, ready=True, now=0.0)
    world.fleet.saw_probe(D, live=False, ready=False, now=0.0)
    with pytest.raises(NoWorker):
        world.route(range(50))


def test_unified_workers_compete_with_prefill_decode_pairs() -> None:
    world = split_world()
    world.add(A)
    world.load_book.reserve(A, prefill_tokens=20_000, context_tokens=0, output_tokens=0, now=0.0)
    assert where(world.route(range(50))) == (P, D)
    world.load_book.reserve(P, prefill_tokens=90_000, context_tokens=0, output_tokens=0, now=0.0)
    world.load_book.reserve(D, prefill_tokens=90_000, context_tokens=0, output_tokens=0, now=0.0)
    assert where(world.route(range(1000, 1050))) == (None, A)


@pytest.mark.parametrize("policy", ["round_robin", "least_tokens", "random", "consistent_hash"])
def test_other_policies_use_hand_offs_too(policy: str) -> None:
    world = World(RouterSettings(policy=policy))
    for number in range(2):
        world.add(WorkerId(f"p{number}"), Role.PREFILL)
        world.add(WorkerId(f"d{number}"), Role.DECODE)
    for start in range(0, 8000, 1000):
        prefill, decode = where(world.route(range(start, start + 20)))
        assert prefill is not None
        assert prefill.startswith("p")
        assert decode.startswith("d")


def test_decisions_can_be_explained() -> None:
    world = split_world()
    world.route(range(50), session="s").end(0.0)
    world.route(range(60), 1.0)
    latest, before = world.router.explain_last(5)
    assert (before["session"], before["prefill"], before["decode"]) == ("s", "p", "d")
    assert latest["num_tokens"] == 6001
    reasons = before["reasons"]
    assert isinstance(reasons, list)
    assert [(reason["worker"], reason["part"]) for reason in reasons] == [
        ("p", "prefill"),
        ("d", "decode"),
        ("d", "whole"),
    ]
    assert reasons[0]["compute_s"] == pytest.approx(5.001)
    assert world.router.explain_last(1) == [latest]
    assert world.router.explain_last(0) == []


def test_measured_prefill_rates_are_used(pair: World) -> None:
    pair.fleet.saw_prefill(A, 1000, 10.0)
    pair.fleet.saw_prefill(B, 1000, 0.1)
    assert where(pair.route(range(50)))[1] == B


def test_tokens_queued_by_other_gateways_count_until_they_are_computed(pair: World) -> None:
    pair.fleet.saw_report(A, LoadReport(waiting_tokens=50_000, prefill_tokens_per_s=1000.0), 0.0)
    pair.fleet.saw_report(B, LoadReport(waiting_tokens=1_000, prefill_tokens_per_s=1000.0), 0.0)
    route = pair.route(range(50), 0.1)
    assert where(route)[1] == B
    route.end(0.1)
    queues = {reason.worker_id: reason.queue_s for reason in pair.route(range(900, 950), 20.0).reasons}
    assert queues == {A: pytest.approx(30.0), B: 0.0}


def test_a_common_prefix_spreads_over_an_idle_fleet(pair: World) -> None:
    """Sessions with pauses over one system prompt: no worker is ever loaded, and both still get their share."""
    counts = {A: 0, B: 0}
    for number in range(60):
        for turn in range(4):
            keys = [*range(40), *range(number * 1000 + 100, number * 1000 + 101 + turn)]
            route = pair.route(keys, number + turn / 5)
            route.end(number + turn / 5 + 0.05)
            counts[route.decode.worker.worker_id] += 1
    assert max(counts.values()) < 1.1 * 120


def test_two_gateways_agree_on_most_new_sessions() -> None:
    """The gateways do not know of each other's requests. They agree because homes are chosen by a hash."""
    first, second = World(), World()
    for world in (first, second):
        for number in range(4):
            world.add(WorkerId(f"w{number}"))
    agreed = 0
    for number in range(200):
        homes = []
        for world in (first, second)[:: 1 if number % 2 else -1]:
            keys = range(number * 100, number * 100 + 5)
            route = world.route(keys, number * 0.5, session=f"s{number}")
            route.end(number * 0.5 + 0.01)
            homes.append(where(route))
        agreed += homes[0] == homes[1]
    assert agreed > 180


@pytest.mark.parametrize(
    ("setting", "value"),
    [("crowd_tokens", 0.0), ("pull_tokens_per_s", -1.0), ("bound_requests", float("nan")), ("even_s", -0.5)],
)
def test_an_invalid_cost_setting_is_rejected_by_name(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"routing.cost.{setting}="):
        CostSettings(**{setting: value})
