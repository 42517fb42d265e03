from __future__ import annotations

from collections import Counter

import pytest
from routing_world import World, where

from stoker.base.ids import WorkerId
from stoker.fleet.spec import Role
from stoker.routing.hashing import rendezvous


@pytest.fixture
def world() -> World:
    made = World()
    for cluster in ("east", "west"):
        for number in range(2):
            made.add(WorkerId(f"{cluster}{number}"), cluster=cluster)
    return made


def cluster_of(world: World, session: str | None, start: int = 0, now: float = 0.0) -> str:
    route = world.route(range(start, start + 20), now, session=session)
    route.end(now)
    return where(route)[1][:-1]


def test_a_session_has_one_home_cluster_and_every_gateway_agrees(world: World) -> None:
    other = World()
    for cluster in ("west", "east"):
        for number in (1, 0):
            other.add(WorkerId(f"{cluster}{number}"), cluster=cluster)
    homes = {f"s{n}": cluster_of(world, f"s{n}", n * 100) for n in range(40)}
    assert Counter(homes.values()).keys() == {"east", "west"}
    for session, home in homes.items():
        assert cluster_of(world, session, 5000) == cluster_of(other, session) == home


def test_a_session_leaves_a_cluster_without_usable_workers_and_returns_later(world: World) -> None:
    session = next(name for name in map(str, range(99)) if cluster_of(world, name, 900) == "east")
    for number in range(2):
        world.fleet.saw_probe(WorkerId(f"east{number}"), live=False, ready=False, now=0.0)
    assert cluster_of(world, session) == "west"
    world.fleet.saw_probe(WorkerId("east0"), live=True, ready=True, now=1.0)
    assert cluster_of(world, session, now=60.0) == "east"


def test_a_session_leaves_a_cluster_whose_decode_workers_lost_their_prefill_workers() -> None:
    world = World()
    world.add(WorkerId("east0"), Role.PREFILL, "east")
    world.add(WorkerId("east1"), Role.DECODE, "east", decodes_alone=False)
    world.add(WorkerId("west0"), cluster="west")
    session = next(name for name in map(str, range(99)) if cluster_of(world, name, 900) == "east")
    world.fleet.saw_probe(WorkerId("east0"), live=False, ready=False, now=0.0)
    assert cluster_of(world, session) == "west"


def test_a_session_leaves_its_cluster_only_when_the_queue_exceeds_the_bound(world: World) -> None:
    session = next(name for name in map(str, range(99)) if cluster_of(world, name, 900) == "east")
    for seconds, expected in ((4, "east"), (4, "west")):
        for number in range(2):
            world.load_book.reserve(
                WorkerId(f"east{number}"), prefill_tokens=seconds * 1000, context_tokens=0, output_tokens=0, now=0.0
            )
        assert cluster_of(world, session, seconds) == expected


def test_without_a_session_key_the_home_cluster_has_the_blocks(world: World) -> None:
    home = cluster_of(world, None, 7000)
    assert {cluster_of(world, None, 7000, now) for now in (1.0, 2.0, 3.0)} == {home}


def test_a_cluster_with_twice_the_weight_gets_twice_the_sessions() -> None:
    counts = Counter(
        min(("small", 1.0), ("large", 2.0), key=lambda one: rendezvous(f"s{n}", *one))[0] for n in range(3000)
    )
    assert counts["large"] / counts["small"] == pytest.approx(2.0, rel=0.15)


def test_a_worker_that_leaves_moves_only_its_own_sessions() -> None:
    names = ["a", "b", "c", "d"]
    before = {n: min(names, key=lambda name: rendezvous(n, name)) for n in range(500)}
    after = {n: min(names[:3], key=lambda name: rendezvous(n, name)) for n in range(500)}
    assert all(after[n] == before[n] for n in range(500) if before[n] != "d")
