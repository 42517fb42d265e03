"""The quick check before `even_out` never stops a move that `even_out` would make."""

from __future__ import annotations

import random

import pytest

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Member
from stoker.fleet.health import HealthSettings, WorkerHealth
from stoker.fleet.load_book import WorkerLoad
from stoker.fleet.spec import WorkerSpec
from stoker.routing.candidate import Candidate, PrefixInfo
from stoker.routing.cost import build_scene, costs
from stoker.routing.query import RouteQuery
from stoker.routing.session_placement import even_out, is_exceeded
from stoker.routing.settings import CostSettings

QUERY = RouteQuery(model="m", keys=range(40), block_tokens=100, num_tokens=4001, session="s")


def candidates(rng: random.Random) -> list[Candidate]:
    found = []
    for number in range(rng.randrange(2, 8)):
        spec = WorkerSpec(worker_id=WorkerId(f"w{number}"), url="")
        health = WorkerHealth(HealthSettings(), 0.0)
        member = Member(spec, health, frozenset({"m"}), 0.0, tokens_per_s=1000.0, weight=rng.choice((0.5, 1.0, 2.0)))
        load = WorkerLoad(decay_per_s=0.01, recent_requests=rng.choice((0.0, 5.0, 20.0 * rng.random())))
        cached = rng.randrange(0, 40) * 100
        found.append(
            Candidate(member, spec.worker_id, load, cached_tokens=cached, compute_tokens=QUERY.num_tokens - cached)
        )
    return found


@pytest.mark.parametrize("seed", range(4))
def test_nothing_moves_from_a_home_that_another_worker_exceeds(seed: int) -> None:
    rng, settings = random.Random(seed), CostSettings(bound_requests=0.0)
    num_moves = num_exceeded = 0
    for _ in range(400):
        ways = candidates(rng)
        alive = {one.worker_id: rng.randrange(4) for one in ways}
        scene = build_scene(QUERY, ways, PrefixInfo(1), settings)
        reasons, home = costs(QUERY, ways, scene), rng.randrange(len(ways))
        alive[ways[home].worker_id] += 1  # the session itself
        further = rng.choice((1.0, 4.0))
        moved = even_out(ways, scene, reasons, list(alive.values()), home, further, 1e9, QUERY.num_tokens)
        exceeded = is_exceeded(ways, home, further, alive.__getitem__)
        assert moved is None or not exceeded
        num_moves += moved is not None
        num_exceeded += exceeded
    assert num_moves > 5, "the loads are too similar to test anything"
    assert num_exceeded > 50
