"""The contract of every registered routing policy.

The same requests get the same choices, scoring changes nothing, dead workers get no requests, no reservation leaks, and a
simulated trace of 10,000 requests completes.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook, LoadTotals
from stoker.fleet.spec import LoadReport, Role, WorkerSpec
from stoker.routing.candidate import Candidate, PrefixInfo
from stoker.routing.policy import POLICIES, LegChoice, Policy
from stoker.routing.query import NoWorker, Reason, Route, RouteQuery
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import RouterSettings

NAMES = [WorkerId(f"w{number}") for number in range(4)]
BLOCK = 64
TOKENS_PER_S = 20_000.0


@dataclass
class Recorder:
    """A policy that scores every request several times, and records what is committed."""

    policy: Policy
    commits: list[Sequence[LegChoice]] = field(default_factory=list)

    @property
    def in_seconds(self) -> bool:
        return self.policy.in_seconds

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], prefix: PrefixInfo, now: float) -> list[Reason]:
        first, again = (self.policy.score(query, candidates, prefix, now) for _ in range(2))
        assert first == again
        return first

    def commit(self, query: RouteQuery, choices: Sequence[LegChoice], now: float) -> None:
        self.commits.append(choices)
        self.policy.commit(query, choices, now)


@dataclass
class World:
    policy: str
    roles: Sequence[Role] = (Role.UNIFIED,) * len(NAMES)
    scores_twice: bool = False

    def __post_init__(self) -> None:
        self.fleet, self.load_book, self.indexes = Fleet(), LoadBook(), PrefixIndexes()
        settings = RouterSettings(policy=self.policy)
        made = POLICIES.get(self.policy)(settings)
        self.recorder = Recorder(made)
        policy = self.recorder if self.scores_twice else made
        self.router = Router(self.fleet, self.load_book, self.indexes, policy, settings)
        for name, role in zip(NAMES, self.roles, strict=True):
            self.fleet.add(WorkerSpec(worker_id=name, url="", models=("m",), role=role), 0.0)
            self.fleet.saw_report(name, LoadReport(prefill_tokens_per_s=TOKENS_PER_S), 0.0)


@dataclass(frozen=True)
class Ask:
    at: float
    session: int
    blocks: int


def trace(count: int, seed: int = 1) -> list[Ask]:
    """Sessions with a shared prefix of 20 blocks, growing conversations and pauses."""
    rng, asks, session = random.Random(seed), [], 0
    while len(asks) < count:
        session += 1
        at, blocks = rng.uniform(0, count / 20), 20 + rng.randint(1, 60)
        for _ in range(rng.randint(1, 20)):
            asks.append(Ask(at, session, blocks))
            at += rng.uniform(1, 20)
            blocks += rng.randint(0, 12)
    return sorted(asks[:count], key=lambda ask: ask.at)


def query(ask: Ask) -> RouteQuery:
    keys = [at if at < 20 else ask.session << 20 | at for at in range(ask.blocks)]
    return RouteQuery(
        model="m",
        keys=keys,
        block_tokens=BLOCK,
        num_tokens=ask.blocks * BLOCK + 7,
        max_output_tokens=64,
        session=f"s{ask.session}" if ask.session % 2 else None,
    )


@dataclass
class Report:
    chosen: list[str]
    hit: float
    mean_wait_s: float
    p90_wait_s: float


def play(world: World, asks: list[Ask], dead: WorkerId | None = None) -> Report:
    """Play a trace on workers that prefill one prompt at a time. The worker `dead` fails halfway and loses its cache."""
    free_at = dict.fromkeys(NAMES, 0.0)
    running: list[tuple[float, int, Route]] = []
    chosen, waits, cached, total = [], [], 0, 0
    for number, ask in enumerate(asks):
        if dead is not None and number == len(asks) // 2:
            world.fleet.saw_probe(dead, live=False, ready=False, now=ask.at)
            world.indexes.forget(dead)
        while running and running[0][0] <= ask.at:
            at, _, route = heapq.heappop(running)
            route.first_token(at)
            route.end(at)
        route = world.router.route(query(ask), ask.at)
        name = route.decode.worker.worker_id
        assert dead is None or number < len(asks) // 2 or name != dead
        free_at[name] = max(free_at[name], ask.at) + route.decode.reservation.prefill_tokens / TOKENS_PER_S
        heapq.heappush(running, (free_at[name], number, route))
        chosen.append(str(name))
        waits.append(free_at[name] - ask.at)
        cached += route.decode.cached_tokens
        total += ask.blocks * BLOCK
    for at, _, route in running:
        route.end(at)
    waits.sort()
    return Report(chosen, cached / total, sum(waits) / len(waits), waits[int(0.9 * len(waits))])


@pytest.fixture(params=list(POLICIES))
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_same_requests_get_the_same_choices(policy: str) -> None:
    asks = trace(500)
    assert play(World(policy), asks).chosen == play(World(policy), asks).chosen


def test_scoring_changes_nothing(policy: str) -> None:
    asks = trace(500)
    assert play(World(policy, scores_twice=True), asks).chosen == play(World(policy), asks).chosen


def test_each_route_is_committed_once_with_all_its_legs(policy: str) -> None:
    world = World(policy, [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE], scores_twice=True)
    for number, ask in enumerate(trace(100), start=1):
        route = world.router.route(query(ask), ask.at)
        legs = [leg.worker.worker_id for leg in (route.prefill, route.decode) if leg is not None]
        assert len(world.recorder.commits) == number
        committed = world.recorder.commits[-1]
        assert [choice.candidates[choice.chosen].worker_id for choice in committed] == legs
        route.end(ask.at)


def test_every_candidate_has_a_reason_and_the_lowest_cost_wins(policy: str) -> None:
    world = World(policy)
    for ask in trace(50):
        route = world.router.route(query(ask), ask.at)
        assert [reason.worker_id for reason in route.reasons] == NAMES
        best = min(route.reasons, key=lambda reason: reason.cost_s)
        assert best.worker_id == route.decode.worker.worker_id


def test_a_dead_worker_gets_no_requests_and_leaks_no_reservations(policy: str) -> None:
    world = World(policy)
    play(world, trace(1000), dead=NAMES[1])
    assert world.load_book.totals() == LoadTotals(0, 0, 0, 0)
    for name in NAMES:
        world.fleet.saw_probe(name, live=False, ready=False, now=1e6)
    with pytest.raises(NoWorker):
        world.router.route(query(Ask(1e6, 1, 30)), 1e6)
    assert world.load_book.totals() == LoadTotals(0, 0, 0, 0)


def test_a_trace_of_10_000_requests_completes(policy: str, record_property: pytest.RecordProperty) -> None:
    world, asks = World(policy), trace(10_000)
    report = play(world, asks)
    assert world.load_book.totals() == LoadTotals(0, 0, 0, 0)
    counts = [report.chosen.count(name) for name in NAMES]
    record_property(
        "report", f"hit {report.hit:.3f}, wait {report.mean_wait_s:.3f}/{report.p90_wait_s:.3f} s, {counts}"
    )
    assert min(counts) > 0.5 * max(counts) or policy == "consistent_hash"
    assert report.mean_wait_s < 60


def test_the_default_policy_waits_less_and_hits_more_than_the_others() -> None:
    asks = trace(3000)
    reports = {name: play(World(name), asks) for name in POLICIES}
    ours = reports.pop("cost")
    for name, other in reports.items():
        assert ours.mean_wait_s < other.mean_wait_s, name
        assert ours.hit > other.hit - 0.001 or name == "consistent_hash", name
