"""Tests of the cost terms for later turns and for recent work."""

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
    """A world where one conversation had `turns` turns on one worker, which had a queue until now."""
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


def test_a_new_conversation_expects_as_many_turns_as_others_had() -> None:
    for turns, expected in ((2, 3.0), (5, 6.0)):  # one of all requests was new
        assert later_turns(world_with(turns), range(1000, 1050)) == pytest.approx(expected, rel=0.01)
    assert later_turns(world_with(100), range(1000, 1050)) == pytest.approx(CostSettings().most_later_turns)


def test_a_conversation_that_continues_expects_few_more_turns() -> None:
    assert later_turns(world_with(5), range(60)) == pytest.approx(CostSettings().later_turns)


def test_a_prompt_without_a_full_block_expects_no_later_turns() -> None:
    assert later_turns(world_with(5), range(0)) == 0.0


def test_recent_tokens_count_only_where_they_evict_blocks() -> None:
    def recent_s(evicts: bool) -> float:
        world = world_with(5)
        index = world.indexes["m"]
        for worker_id in (A, B):
            index.stored(worker_id, range(2000, 2100))
            index.removed(worker_id, range(2000, 2100) if evicts else ())
        return abs(reason(world.route(range(1000, 1050), 20.0), A).recent_s)

    assert recent_s(evicts=True) > 1.0
    assert recent_s(evicts=False) == 0.0


def test_the_explained_terms_add_up_to_the_cost() -> None:
    world = world_with(5)
    world.route(range(1000, 1050), 20.0)
    for told in world.router.explain_last(1)[0]["reasons"]:  # type: ignore[attr-defined]
        terms = [value for name, value in told.items() if name.endswith("_s") and name != "cost_s"]
        assert sum(terms) == pytest.approx(told["cost_s"], abs=1e-5)
