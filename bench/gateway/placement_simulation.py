"""Where our router places agent sessions: the placement benchmark in virtual time, with the real Router.

The mock workers and the sessions are those of bench/support/placement_load.py: LRU prefix caches of 256-character
blocks, agents that resend a growing conversation, at most 32 requests in flight. A request takes 10 ms and 0.4 ms for
each uncached block, plus a random time for gateway and machine (--noise-ms). The router sees text blocks of 1 KiB and
what it routed itself, as with workers that have no KV events. Sizes and pauses come from the same random numbers as in
`placement`, so that a seed means the same sessions; only the letters are left out.

With N gateways (`--gateways`), requests go round robin to them, each with a router, load book and prefix index of its own. What
a worker publishes reaches all of them after `--publish-ms`: accept and end of each request (`proto/work.py`), and the blocks that
it has stored. This is what Stoker workers publish.

For each case and seed: hit (cached blocks over all blocks), same (turns on the previous turn's worker), skew (requests
of the busiest worker over the mean).
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cache, partial

from bench.contract import Needs, Report, Result
from bench.support.placement_load import (
    BASE_S,
    BLOCK_CHARS,
    CASES,
    MISSED_BLOCK_S,
    MOST_IN_FLIGHT,
    NUM_SESSIONS,
    PAUSE_S,
    SYSTEM_HEAD,
    TURNS,
)
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.prefix_index import PrefixIndex
from stoker.fleet.spec import WorkerSpec
from stoker.gateway.watch.other_work import OtherWork
from stoker.proto.work import WorkChange
from stoker.routing.query import RouteQuery
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import RouterSettings

NAME = "placement_simulation"
HELP = "hit ratio and load skew of agent sessions through the real router in virtual time, for many seeds"
NEEDS = Needs()
KEY_CHARS, CHARS_PER_TOKEN = 1024, 4  # of the router's text blocks
JSON_CHARS = 34  # around a message's content, in the body


@dataclass(frozen=True)
class SimulatedTurn:
    chars: int  # of the conversation as the worker counts it
    body_chars: int  # of the conversation as the gateway sees it
    pause_s: float


@cache
def sessions(case_name: str, seed: int, count: int = NUM_SESSIONS) -> list[list[SimulatedTurn]]:
    case, made = CASES[case_name], []
    for index in range(count):
        rng = random.Random(seed * 1000 + index)
        chars = len("system") + len(SYSTEM_HEAD) + case.system_chars
        body_chars = JSON_CHARS + len(SYSTEM_HEAD) + case.system_chars
        turns = []
        for turn in range(rng.randint(*TURNS)):
            size = rng.randint(*case.turn_chars)
            for _ in range(size):
                rng.random()
            size += len(f"s{index}t{turn} ")
            chars += len("user") + size
            body_chars += JSON_CHARS + size
            turns.append(SimulatedTurn(chars, body_chars, rng.uniform(*PAUSE_S)))
            chars += len("assistantok")
            body_chars += JSON_CHARS + 2
        made.append(turns)
    return made


@dataclass
class SimulatedWorker:
    cache_blocks: int
    requests: int = 0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def touch(self, keys: list[int]) -> int:
        found = next((at for at, key in enumerate(keys) if key not in self.cache), len(keys))
        for key in keys:
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > self.cache_blocks:
            self.cache.popitem(last=False)
        return found


def keys_of(session: int, chars: int, shared_chars: int, block: int) -> list[int]:
    """Blocks inside the system prompt are shared by all sessions; the others belong to the session."""
    return [at if (at + 1) * block <= shared_chars else (session + 1) << 20 | at for at in range(chars // block)]


class SimulatedGateway:
    """One gateway's own view of the workers."""

    def __init__(self, name: str, workers: Iterable[WorkerId], policy: str) -> None:
        self.name = name
        self.fleet = Fleet()
        for worker_id in workers:
            self.fleet.add(WorkerSpec(worker_id=worker_id, url="", models=("mock",)), 0.0)
        self.load_book, self.indexes = LoadBook(), PrefixIndexes()
        self.other_work = OtherWork(self.load_book, name)
        self.router = Router(self.fleet, self.load_book, self.indexes, settings=RouterSettings(policy=policy))


@dataclass(frozen=True)
class Placement:
    hit: float
    same: float
    skew: float
    counts: list[int]


class Simulation:
    def __init__(
        self,
        case_name: str,
        seed: int,
        *,
        with_session: bool,
        policy: str,
        noise_s: float,
        num_gateways: int = 1,
        publish_s: float = 0.0,
    ) -> None:
        self.case, self.with_session, self.noise_s = CASES[case_name], with_session, noise_s
        self.turns = sessions(case_name, seed)
        self.rng = random.Random(seed)
        self.publish_s = publish_s
        self.workers = {WorkerId(f"w{n}"): SimulatedWorker(self.case.cache_blocks) for n in range(4)}
        self.gateways = [SimulatedGateway(f"g{n}", self.workers, policy) for n in range(num_gateways)]
        self.num_requests = 0
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.num_events, self.in_flight = 0, 0
        self.waiting: deque[Callable[[float], None]] = deque()
        self.found = self.asked = self.same = self.follow_ups = 0
        self.last: dict[int, WorkerId] = {}

    def at(self, time: float, act: Callable[[float], None]) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time, self.num_events, act))

    def placement(self) -> Placement:
        for index in range(len(self.turns)):
            self.at(index * self.case.stagger_s, partial(self.send, index, 0))
        while self.events:
            time, _, act = heapq.heappop(self.events)
            act(time)
        assert [one.load_book.totals().requests for one in self.gateways] == [0] * len(self.gateways)
        counts = [worker.requests for worker in self.workers.values()]
        skew = max(counts) * len(counts) / sum(counts)
        return Placement(self.found / self.asked, self.same / self.follow_ups, skew, counts)

    def send(self, session: int, turn: int, now: float) -> None:
        if self.in_flight == MOST_IN_FLIGHT:
            self.waiting.append(lambda later: self.send(session, turn, later))
            return
        self.in_flight += 1
        what = self.turns[session][turn]
        keys = keys_of(session, what.body_chars, JSON_CHARS + len(SYSTEM_HEAD) + self.case.system_chars, KEY_CHARS)
        num_tokens = what.body_chars // CHARS_PER_TOKEN
        query = RouteQuery(
            model="mock",
            keys=keys,
            block_tokens=KEY_CHARS // CHARS_PER_TOKEN,
            num_tokens=num_tokens,
            max_output_tokens=1,
            session=f"session-{session}" if self.with_session else None,
        )
        gateway = self.gateways[self.num_requests % len(self.gateways)]
        self.num_requests += 1
        route = gateway.router.route(query, now)
        reservation = route.decode.reservation
        worker_id = reservation.worker_id
        tokens = (reservation.prefill_tokens, reservation.context_tokens, reservation.output_tokens)
        number = self.num_requests
        self.publish(worker_id, WorkChange(number, "accept", gateway.name, *tokens), now)
        worker = self.workers[worker_id]
        worker.requests += 1
        shared = len("system") + len(SYSTEM_HEAD) + self.case.system_chars
        blocks = keys_of(session, what.chars, shared, BLOCK_CHARS)
        found = worker.touch(blocks)
        self.found += found
        self.asked += len(blocks)
        if turn:
            self.follow_ups += 1
            self.same += worker_id == self.last[session]
        self.last[session] = worker_id
        took_s = BASE_S + MISSED_BLOCK_S * (len(blocks) - found) + self.rng.random() * self.noise_s

        def answered(later: float) -> None:
            route.first_token(later)
            route.end(later)
            uncached = num_tokens - found * BLOCK_CHARS // CHARS_PER_TOKEN
            for one in self.gateways:
                one.fleet.saw_prefill(worker_id, max(1, uncached), took_s)
            self.publish(worker_id, WorkChange(number, "end", gateway.name, *tokens), later)
            self.publish_blocks(worker_id, keys, gateway, later)
            self.in_flight -= 1
            if turn + 1 < len(self.turns[session]):
                self.at(later + what.pause_s, lambda then: self.send(session, turn + 1, then))
            if self.waiting:
                self.at(later, self.waiting.popleft())

        self.at(now + took_s, answered)

    def publish(self, worker_id: WorkerId, change: WorkChange, now: float) -> None:
        """Let the other gateways know what happened to a request."""
        for one in self.gateways:
            if one.name != change.gateway:
                self.at(now + self.publish_s, partial(one.other_work.saw, worker_id, [change], None))

    def publish_blocks(self, worker_id: WorkerId, keys: list[int], sender: SimulatedGateway, now: float) -> None:
        """Let the other gateways know which blocks a worker has stored."""

        def stored(index: PrefixIndex, later: float) -> None:
            index.routed(worker_id, keys, later)

        for one in self.gateways:
            if one is not sender:
                self.at(now + self.publish_s, partial(stored, one.indexes["mock"]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", default="7,1,2,3,4,5,6,8,9,10", help="default: %(default)s")
    parser.add_argument("--cases", default="A1,A2,A3", help="default: %(default)s")
    parser.add_argument(
        "--session", choices=("with", "without", "both"), default="both", help="session keys (default: %(default)s)"
    )
    parser.add_argument("--policy", default="cost", help="the router's policy (default: %(default)s)")
    parser.add_argument("--noise-ms", type=float, default=4.0, help="default: %(default)s")
    parser.add_argument("--gateways", default="1,2", help="numbers of gateways (default: %(default)s)")
    parser.add_argument("--publish-ms", type=float, default=2.0, help="default: %(default)s")
    parser.add_argument("--verbose", action="store_true", help="print each seed")


def run(args: argparse.Namespace) -> Report:
    seeds = [int(seed) for seed in args.seeds.split(",")]
    report = Report(details=[])
    for num_gateways in map(int, args.gateways.split(",")):
        for with_session, name in ((False, "without"), (True, "with")):
            if args.session not in (name, "both"):
                continue
            options = {"with_session": with_session, "policy": args.policy, "noise_s": args.noise_ms / 1e3}
            options |= {"num_gateways": num_gateways, "publish_s": args.publish_ms / 1e3}
            for case in args.cases.split(","):
                placements = [Simulation(case, seed, **options).placement() for seed in seeds]
                for seed, one in zip(seeds, placements, strict=True):
                    row = {"case": case, "session": with_session, "gateways": num_gateways, "seed": seed}
                    report.details.append({**row, **asdict(one)})
                    if args.verbose:
                        print(f"   seed {seed}: hit {one.hit:.4f} same {one.same:.3f} skew {one.skew:.3f} {one.counts}")
                gateways = "" if num_gateways == 1 else f", {num_gateways} gateways"
                report.results += _results(f"{case}, {name} session key, {len(seeds)} seeds{gateways}", placements)
    return report


def _results(case: str, placements: list[Placement]) -> list[Result]:
    hits, skews = [one.hit for one in placements], [one.skew for one in placements]
    count = len(placements)
    return [
        Result(case, "hit ratio, mean", "share", sum(hits) / count, "higher"),
        Result(case, "hit ratio, worst seed", "share", min(hits), "higher"),
        Result(case, "skew, mean", "x mean", sum(skews) / count),
        Result(case, "skew, worst seed", "x mean", max(skews)),
        Result(case, "turns on the previous worker", "share", sum(one.same for one in placements) / count, "higher"),
    ]
