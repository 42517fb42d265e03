"""What the cost policy makes of a conversation's turns to come, and of full caches."""

from __future__ import annotations

import pytest
from routing_world import World, where

from stoker.base.ids import WorkerId
from stoker.routing.query import Reason, Route
from stoker.routing.settings import CostSettings

A, B = WorkerId("a"), WorkerId("b")


def reason(route: Route, worker_id: WorkerId) -> Reason:
    return next(one for one in route.reasons if one.worker_id == worker_id)


def world_with(turns: int) -> World:
    """Conversations had `turns` turns each, all on the same worker, where a queue stood until just now."""
    world = World()
    world.add(A)
    world.add(B)
    for number in range(turns):
        world.route(range(50 + number)).end(0.0)
    busy = where(world.route(range(50 + turns)))[1]
    queue = world.load_book.reserve(
        WorkerId(busy), prefill_tokens=30_000, context_tokens=0, output_tokens=0, now=0.0, returning=True
    )
    world.load_book.load(WorkerId(busy), 20.0, 1000.0)
    queue.end(20.0)
    return world


def later_turns(world: World, keys: range) -> float:
    route = world.route(keys, 20.0)
    worker_id = max((A, B), key=lambda one: world.load_book.load(one, 20.0).mean_queued_tokens)
    return reason(route, worker_id).later_s / (world.load_book.load(worker_id, 20.0).mean_queued_tokens / 1000)


def test_a_new_conversation_is_expected_to_go_on_as_others_did() -> None:
    for turns, expected in ((2, 3.0), (5, 6.0)):  # of all that came, one was new
        assert later_turns(world_with(turns), range(1000, 1050)) == pytest.approx(expected, rel=0.01)
    assert later_turns(world_with(100), range(1000, 1050)) == pytest.approx(CostSettings().most_later_turns)


def test_one_that_goes_on_stays_for_what_it_has_and_not_for_what_may_come() -> None:
    assert later_turns(world_with(5), range(60)) == pytest.approx(CostSettings().later_turns)


def test_a_prompt_that_leaves_no_block_will_not_come_back() -> None:
    assert later_turns(world_with(5), range(0)) == 0.0


def test_recent_tokens_count_only_where_they_push_something_out() -> None:
    def recent_s(evicts: bool) -> float:
        world = world_with(5)
        index = world.indexes["m"]
        for worker_id in (A, B):
            index.stored(worker_id, range(2000, 2100))
            index.removed(worker_id, range(2000, 2100) if evicts else ())
        return abs(reason(world.route(range(1000, 1050), 20.0), A).recent_s)

    assert recent_s(evicts=True) > 1.0
    assert recent_s(evicts=False) == 0.0


def test_an_explanation_has_all_that_a_cost_is_made_of() -> None:
    world = world_with(5)
    world.route(range(1000, 1050), 20.0)
    for told in world.router.explain_last(1)[0]["reasons"]:  # type: ignore[attr-defined]
        terms = [value for name, value in told.items() if name.endswith("_s") and name != "cost_s"]
        assert sum(terms) == pytest.approx(told["cost_s"], abs=1e-5)
