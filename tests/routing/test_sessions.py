from __future__ import annotations

import random
from collections import Counter
from math import inf

import pytest
from routing_world import World, where

from stoker.base.ids import WorkerId
from stoker.routing.sessions import Sessions
from stoker.routing.settings import CostSettings, RouterSettings

A, B = WorkerId("a"), WorkerId("b")


def test_a_session_ends_when_its_pause_is_longer_than_usual() -> None:
    sessions = Sessions()
    for turn in range(20):
        sessions.placed("long", [A], (A, B), turn * 1.0)
    sessions.placed("short", [B], (A, B), 18.0)
    assert (sessions.home("long", (A, B), 19.5), sessions.home("short", (A, B), 19.5)) == (A, B)
    assert sessions.alive((A, B), 19.5) == [1, 1]
    assert sessions.timeout_s < 10
    assert sessions.alive((A, B), 40.0) == [0, 0]
    assert sessions.home("long", (A, B), 40.0) is None


def test_sessions_of_workers_that_left_are_forgotten() -> None:
    sessions = Sessions()
    for number in range(50):
        worker = WorkerId(f"w{number}")
        for turn in range(20):
            sessions.placed(f"{number} {turn}", [worker], (worker,), number * 1000.0 + turn)
    assert sum(map(len, sessions._last_seen.values())) == 20
    assert sessions.home("49 3", (WorkerId("w49"),), 49_020.0) == "w49"


def test_a_session_that_moves_is_counted_once() -> None:
    sessions = Sessions()
    sessions.placed("s", [A], (A, B), 0.0)
    sessions.placed("s", [B], (A, B), 1.0)
    assert sessions.alive((A, B), 1.0) == [0, 1]
    assert sessions.mean_requests == 2


def test_a_burst_of_new_sessions_spreads_evenly() -> None:
    world = World()
    for number in range(4):
        world.add(WorkerId(f"w{number}"))
    homes = Counter(
        where(world.route([*range(20), 1000 + number], session=f"session-{number}"))[1] for number in range(64)
    )
    assert sorted(homes.values()) == [16] * 4


@pytest.mark.parametrize(("balance_s", "least", "most"), [(1.0, 2, 6), (0.4, 0, 0)])
def test_sessions_move_away_from_the_worker_with_the_most_expected_requests(
    balance_s: float, least: int, most: int
) -> None:
    """Two workers have eight sessions each, and those of one worker end early.

    Some of the remaining sessions move there and stay. None moves if computing its lost tokens again takes longer than
    `balance_s`; it would take half a second by then.
    """
    world = World(settings=RouterSettings(cost=CostSettings(balance_s=balance_s)))
    for worker_id in (A, B):
        world.add(worker_id)
    home: dict[int, str] = {}
    first_home: dict[int, str] = {}
    for turn in range(30):
        living = [session for session in range(16) if turn < 4 or first_home[session] == B]
        for session in living:
            now = turn + session / 100
            own = range(session * 1000 + 100, session * 1000 + 101 + turn)
            route = world.route([*range(40), *own], now, session=str(session))
            route.end(now + 0.005)
            home[session] = where(route)[1]
        if turn == 0:
            first_home = dict(home)
            assert sorted(home.values()) == [A] * 8 + [B] * 8
        if turn == 3:
            assert home == first_home
    moved = sum(home[session] == A for session in living)
    assert least <= moved <= most, moved


@pytest.mark.parametrize("seed", range(4))
def test_a_session_is_found_as_by_a_scan_of_all_workers(seed: int) -> None:
    """Candidates come and go, so that some workers remember a session that has moved on without them."""
    rng = random.Random(seed)
    workers = [WorkerId(f"w{number}") for number in range(6)]
    sessions, now = Sessions(), 0.0
    for _ in range(2000):
        now += rng.expovariate(4.0)
        session = f"s{int(rng.triangular(0, 60, 5))}"
        candidates = rng.sample(workers, rng.randint(1, 6))
        ended_at = now - sessions.timeout_s
        seen = [one for one in candidates if sessions._last_seen.get(one, {}).get(session, ended_at) > ended_at]
        assert sessions.home(session, candidates, now) == (seen[0] if seen else None)
        oldest = min((min(one.values()) for one in sessions._last_seen.values() if one), default=inf)
        assert sessions._oldest_s <= oldest, "an ended session would not be forgotten"
        sessions.placed(session, rng.sample(candidates, min(len(candidates), rng.randint(1, 2))), candidates, now)
        assert sessions.total == sum(map(len, sessions._last_seen.values()))
        remembered = {(one, worker) for worker, seen_on in sessions._last_seen.items() for one in seen_on}
        assert remembered == {(one, worker) for one, seen_on in sessions._seen_on.items() for worker in seen_on}
