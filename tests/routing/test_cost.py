"""Tests of the pure cost function and of the state that a commit changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from routing_world import World, where

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Member
from stoker.fleet.health import HealthSettings, WorkerHealth
from stoker.fleet.load_book import WorkerLoad
from stoker.fleet.spec import Role, WorkerSpec
from stoker.routing import cost as routing_cost
from stoker.routing.candidate import Candidate, PrefixInfo
from stoker.routing.policies.cost import Cost
from stoker.routing.query import Reason, RouteQuery
from stoker.routing.settings import CostSettings, RouterSettings

QUERY = RouteQuery(model="m", keys=range(40), block_tokens=100, num_tokens=4001)


def candidate(name: str, cached_tokens: int = 0, queued_tokens: float = 0.0, **more: float) -> Candidate:
    """A worker that prefills 1000 tokens per second and takes 20 ms per decode step."""
    spec = WorkerSpec(worker_id=WorkerId(name), url="")
    member = Member(spec, WorkerHealth(HealthSettings(), 0.0), frozenset({"m"}), 0.0, tokens_per_s=1000.0, step_s=0.02)
    made = Candidate(member, spec.worker_id, WorkerLoad(decay_per_s=0.01), queued_tokens, cached_tokens)
    made.compute_tokens = QUERY.num_tokens - cached_tokens
    return replace(made, **more)  # type: ignore[arg-type]


def costs(*candidates: Candidate, branches: int = 1, **changes: float) -> list[Reason]:
    scene = routing_cost.build_scene(QUERY, candidates, PrefixInfo(branches), CostSettings(**changes))
    return routing_cost.costs(QUERY, candidates, scene)


def test_own_time_is_queue_plus_prefill_plus_fetch_plus_decode() -> None:
    [reason] = costs(candidate("a", 3000, 500.0, disk_tokens=600, output_tokens=100), crowd_tokens=4001)
    assert (reason.queue_s, reason.compute_s, reason.fetch_s) == (0.5, 1.001, pytest.approx(600 / 60_000))
    assert reason.decode_s == pytest.approx(100 * 0.02 * 2)  # 4001 resident tokens double a decode step
    assert reason.cost_s == pytest.approx(reason.queue_s + reason.compute_s + reason.fetch_s + reason.decode_s)


def test_a_conversation_waits_up_to_40_times_as_long_for_its_blocks() -> None:
    for queued_tokens, expected in ((35_000.0, "a"), (45_000.0, "b")):
        cheapest = min(costs(candidate("a", 1000, queued_tokens), candidate("b")), key=lambda one: one.cost_s)
        assert cheapest.worker_id == expected


def test_a_shared_prefix_is_worth_less_waiting_with_every_branch() -> None:
    moves = [costs(candidate("a", 1000), candidate("b"), branches=branches)[1].move_s for branches in (1, 2, 10)]
    assert moves == [pytest.approx(40.0), pytest.approx(10.0), pytest.approx(0.4)]


def test_a_prompt_is_charged_for_the_sequences_it_delays() -> None:
    busy = candidate("a")
    busy.load.decoding = 5
    assert costs(busy, candidate("b"))[0].others_s == pytest.approx(5 * 0.1 * 4.001)


def test_the_cost_changes_none_of_its_arguments() -> None:
    one = candidate("a", 1000, 100.0)
    before = repr(one)
    assert costs(one) == costs(one)
    assert repr(one) == before


def test_a_hand_off_counts_as_one_request_of_its_session() -> None:
    """The session has a home among the prefill workers and one among the decode workers."""
    policy = Cost(RouterSettings())
    world = World(policy=policy)
    for number in range(2):
        world.add(WorkerId(f"p{number}"), Role.PREFILL)
        world.add(WorkerId(f"d{number}"), Role.DECODE)
    first = where(world.route(range(50), 0.0, session="s"))
    assert first[0] is not None
    for turn in (1, 2):
        world.route(range(50 + turn), float(turn), session="s")
    assert policy.sessions.mean_requests == 3
    assert policy.sessions.home("s", [WorkerId("p0"), WorkerId("p1")], 2.0) == first[0]
    assert policy.sessions.home("s", [WorkerId("d0"), WorkerId("d1")], 2.0) == first[1]
