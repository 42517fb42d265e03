"""Where does our router put agent sessions? The placement benchmark in virtual time, with the real Router.

  python bench/placement_sim.py [--seeds 7,1,2,3] [--cases A1,A2,A3] [--session] [--policy cost]

Mock workers with LRU prefix caches of 256-character blocks, agents that resend a growing conversation, 32 requests in
flight at most. A request takes 10 ms and 0.4 ms a block not found, plus what gateway and machine take (`--noise-ms`).
The router sees 1 KiB text blocks and what it routed itself, as with workers that have no KV events. Sizes and pauses are
drawn as the benchmark draws them, so that a seed means the same sessions; only the letters are left out.

Printed for each case and seed: hit (blocks found / asked), same (turns on the previous turn's worker), skew (max / mean
requests a worker).
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.spec import WorkerSpec
from stoker.routing.query import RouteQuery
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import RouterSettings

BLOCK_CHARS, KEY_CHARS, CHARS_A_TOKEN = 256, 1024, 4
JSON_CHARS = 34  # around a message's content, in the body
SYSTEM_HEAD = len("You are an agent. ")


@dataclass(frozen=True)
class Case:
    system: int
    turn: tuple[int, int]
    cache_blocks: int
    stagger_s: float


CASES = {
    "A1": Case(16_000, (1_500, 7_000), 3_600, 0.0),
    "A2": Case(64_000, (400, 2_500), 6_000, 0.0),
    "A3": Case(64_000, (400, 2_500), 6_000, 0.15),
}


@dataclass(frozen=True)
class Turn:
    chars: int  # of the conversation as the worker counts it
    body_chars: int  # as the gateway sees it
    pause_s: float


@cache
def sessions(case_name: str, seed: int, count: int = 64) -> list[list[Turn]]:
    case, made = CASES[case_name], []
    for index in range(count):
        rng = random.Random(seed * 1000 + index)
        chars = len("system") + SYSTEM_HEAD + case.system
        body_chars = JSON_CHARS + SYSTEM_HEAD + case.system
        turns = []
        for turn in range(rng.randint(6, 18)):
            size = rng.randint(*case.turn)
            for _ in range(size):
                rng.random()
            size += len(f"s{index}t{turn} ")
            chars += len("user") + size
            body_chars += JSON_CHARS + size
            turns.append(Turn(chars, body_chars, rng.uniform(0.05, 0.4)))
            chars += len("assistantok")
            body_chars += JSON_CHARS + 2
        made.append(turns)
    return made


@dataclass
class Worker:
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
    """Blocks that lie in the system prompt are everybody's, the others the session's own."""
    return [at if (at + 1) * block <= shared_chars else (session + 1) << 20 | at for at in range(chars // block)]


@dataclass(frozen=True)
class Outcome:
    hit: float
    same: float
    skew: float
    counts: list[int]


class Run:
    def __init__(self, case_name: str, seed: int, *, with_session: bool, policy: str, noise_s: float) -> None:
        self.case, self.with_session, self.noise_s = CASES[case_name], with_session, noise_s
        self.turns = sessions(case_name, seed)
        self.rng = random.Random(seed)
        fleet = self.fleet = Fleet()
        self.workers = {WorkerId(f"w{n}"): Worker(self.case.cache_blocks) for n in range(4)}
        for worker_id in self.workers:
            fleet.add(WorkerSpec(worker_id=worker_id, url="", models=("mock",)), 0.0)
        self.load_book = LoadBook()
        self.router = Router(fleet, self.load_book, PrefixIndexes(), settings=RouterSettings(policy=policy))
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.num_events, self.in_flight = 0, 0
        self.waiting: deque[Callable[[float], None]] = deque()
        self.found = self.asked = self.same = self.follow_ups = 0
        self.last: dict[int, WorkerId] = {}

    def at(self, time: float, act: Callable[[float], None]) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time, self.num_events, act))

    def outcome(self) -> Outcome:
        for index in range(len(self.turns)):
            self.at(index * self.case.stagger_s, partial(self.ask, index, 0))
        while self.events:
            time, _, act = heapq.heappop(self.events)
            act(time)
        assert self.load_book.totals().requests == 0
        counts = [worker.requests for worker in self.workers.values()]
        skew = max(counts) * len(counts) / sum(counts)
        return Outcome(self.found / self.asked, self.same / self.follow_ups, skew, counts)

    def ask(self, session: int, turn: int, now: float) -> None:
        if self.in_flight == 32:
            self.waiting.append(lambda later: self.ask(session, turn, later))
            return
        self.in_flight += 1
        what = self.turns[session][turn]
        keys = keys_of(session, what.body_chars, JSON_CHARS + SYSTEM_HEAD + self.case.system, KEY_CHARS)
        num_tokens = what.body_chars // CHARS_A_TOKEN
        query = RouteQuery(
            model="mock",
            keys=keys,
            block_tokens=KEY_CHARS // CHARS_A_TOKEN,
            num_tokens=num_tokens,
            max_output_tokens=1,
            session=f"session-{session}" if self.with_session else None,
        )
        route = self.router.route(query, now)
        worker_id = route.decode.reservation.worker_id
        worker = self.workers[worker_id]
        worker.requests += 1
        shared = len("system") + SYSTEM_HEAD + self.case.system
        blocks = keys_of(session, what.chars, shared, BLOCK_CHARS)
        found = worker.touch(blocks)
        self.found += found
        self.asked += len(blocks)
        if turn:
            self.follow_ups += 1
            self.same += worker_id == self.last[session]
        self.last[session] = worker_id
        took_s = 0.01 + 0.0004 * (len(blocks) - found) + self.rng.random() * self.noise_s

        def answered(later: float) -> None:
            route.first_token(later)
            route.end(later)
            uncached = num_tokens - found * BLOCK_CHARS // CHARS_A_TOKEN
            self.fleet.saw_prefill(worker_id, max(1, uncached), took_s)
            self.in_flight -= 1
            if turn + 1 < len(self.turns[session]):
                self.at(later + what.pause_s, lambda then: self.ask(session, turn + 1, then))
            if self.waiting:
                self.at(later, self.waiting.popleft())

        self.at(now + took_s, answered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="7,1,2,3,4,5,6,8,9,10")
    parser.add_argument("--cases", default="A1,A2,A3")
    parser.add_argument("--session", choices=("with", "without", "both"), default="both")
    parser.add_argument("--policy", default="cost")
    parser.add_argument("--noise-ms", type=float, default=4.0)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    for with_session in [
        value for value, name in ((False, "without"), (True, "with")) if args.session in (name, "both")
    ]:
        for case in args.cases.split(","):
            outcomes = []
            for seed in map(int, args.seeds.split(",")):
                noise_s = args.noise_ms / 1e3
                run = Run(case, seed, with_session=with_session, policy=args.policy, noise_s=noise_s)
                outcomes.append(run.outcome())
                if args.verbose:
                    one = outcomes[-1]
                    print(f"   seed {seed}: hit {one.hit:.4f} same {one.same:.3f} skew {one.skew:.3f} {one.counts}")
            hits, skews = [one.hit for one in outcomes], sorted(one.skew for one in outcomes)
            print(
                f"{case} {'session key' if with_session else 'no key':11} hit mean {sum(hits) / len(hits):.4f} "
                f"worst {min(hits):.4f}   skew mean {sum(skews) / len(skews):.3f} worst {skews[-1]:.3f}   "
                f"same {sum(one.same for one in outcomes) / len(outcomes):.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
