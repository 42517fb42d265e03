"""Large pools: routing over a shortlist chooses as routing over all workers does."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import pytest

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.spec import LoadReport, WorkerSpec
from stoker.routing import router as router_module
from stoker.routing.policies.random import Random
from stoker.routing.query import Route, RouteQuery
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import RouterSettings
from stoker.routing.shortlist import MIN_WORKERS, ShortlistPolicy

BLOCK, SHARED = 64, 20


def make_router(num_workers: int) -> Router:
    rng = random.Random(5)
    fleet = Fleet()
    for number in range(num_workers):
        worker_id = WorkerId(f"w{number:04}")
        fleet.add(WorkerSpec(worker_id=worker_id, url="", models=("m",)), 0.0)
        speed = rng.uniform(0.8, 1.2)
        fleet.saw_report(worker_id, LoadReport(prefill_tokens_per_s=8000 * speed, step_s=0.02, kv_used=0.3), 0.0)
    return Router(fleet, LoadBook(), PrefixIndexes(), settings=RouterSettings())


def queries(count: int, sessions: int, with_key: bool, seed: int) -> Iterator[RouteQuery]:
    """Agents' conversations over a shared system prompt. One in eight requests begins a new conversation."""
    rng, turns = random.Random(seed), [0] * sessions
    for _ in range(count):
        number = rng.randrange(sessions)
        if rng.random() < 0.125:
            turns.append(0)
            number = len(turns) - 1
        turns[number] += 1
        blocks = SHARED + rng.randint(1, 8) + 3 * turns[number]
        keys = [at if at < SHARED else (number + 1) << 20 | at for at in range(blocks)]
        session = f"s{number}" if with_key else None
        yield RouteQuery(
            model="m",
            keys=keys,
            block_tokens=BLOCK,
            num_tokens=blocks * BLOCK + 5,
            max_output_tokens=64,
            session=session,
        )


def same_choices(num_workers: int, with_key: bool, pause_s: float) -> float:
    """Return the share of requests for which the shortlist gives the choice of a full scan in the very same state.

    The state is that of the router with the shortlist. Each choice is compared with that of a scan of all workers.
    """
    router, same, count = make_router(num_workers), 0, 0
    running: deque[Route] = deque()
    for number, query in enumerate(queries(500, 3 * num_workers, with_key, seed=int(1e3 * pause_s))):
        now = number * pause_s
        if number >= 200:  # before, nearly all workers are equal
            count += 1
            pool = router._fleet.pool("m", now)
            lookup = router._look_up(query, now)
            candidates = [router._candidate(lookup, member, 64) for member in pool.members]
            full = router._choose(lookup, candidates)
            best = full.reasons[full.chosen]
        route = router.route(query, now)
        if number >= 200:
            chosen = next(one for one in full.reasons if one.worker_id == route.decode.worker.worker_id)
            # Workers whose costs differ by less than a microsecond are equal.
            same += chosen.cost_s - best.cost_s <= 1e-6 * max(1.0, abs(best.cost_s))
        running.append(route)
        if len(running) > num_workers:
            oldest = running.popleft()
            oldest.first_token(now)
            oldest.end(now)
    return same / count


@pytest.mark.parametrize("with_key", [False, True], ids=["no key", "session key"])
@pytest.mark.parametrize("pause_s", [0.002, 0.01, 0.05])
def test_a_shortlist_chooses_as_a_full_scan_does(
    with_key: bool, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert same_choices(200, with_key, pause_s) >= 0.99


def test_small_pools_are_scored_completely() -> None:
    router = make_router(MIN_WORKERS)
    query = next(queries(1, 1, False, 1))
    assert len(router.route(query, 1.0).reasons) == MIN_WORKERS


def test_large_pools_are_scored_in_part() -> None:
    router = make_router(MIN_WORKERS + 100)
    query = next(queries(1, 1, False, 1))
    assert len(router.route(query, 1.0).reasons) < 100


def test_a_policy_that_needs_all_workers_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(Random(RouterSettings()), ShortlistPolicy)
    monkeypatch.setattr(router_module, "MIN_WORKERS", 4)
    router = make_router(20)
    router._policy = Random(RouterSettings())
    router._shortlist = None
    assert len(router.route(next(queries(1, 1, False, 1)), 1.0).reasons) == 20
