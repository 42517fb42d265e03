"""CPU time of one routing decision: Router.route with 8, 64 and 1,000 workers, without and with session keys.

400 conversations over a shared prefix of 20 blocks send 6,000 requests. The first 1,000 are not counted. The result of each
case is the lowest mean of the rounds. Run it alternately on two commits to compare them.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque

from bench.contract import Needs, Report, Result
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.spec import LoadReport, WorkerSpec
from stoker.routing.query import Route, RouteQuery
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import RouterSettings

NAME = "route_time"
HELP = "CPU time of one routing decision with 8, 64 and 1,000 workers"
NEEDS = Needs()
BLOCK, SHARED_BLOCKS, NUM_CONVERSATIONS = 64, 20, 400
NUM_REQUESTS, NUM_WARMUP, PAUSE_S = 6000, 1000, 0.01


def queries(with_session: bool) -> list[RouteQuery]:
    rng, turns, made = random.Random(1), [0] * NUM_CONVERSATIONS, []
    for _ in range(NUM_REQUESTS):
        number = rng.randrange(NUM_CONVERSATIONS)
        turns[number] += 1
        num_blocks = SHARED_BLOCKS + 4 + 2 * (turns[number] % 30)
        keys = [at if at < SHARED_BLOCKS else (number + 1) << 20 | at for at in range(num_blocks)]
        made.append(
            RouteQuery(
                model="m",
                keys=keys,
                block_tokens=BLOCK,
                num_tokens=num_blocks * BLOCK + 5,
                max_output_tokens=64,
                session=f"s{number}" if with_session else None,
            )
        )
    return made


def route_us(num_workers: int, with_session: bool, policy: str) -> float:
    """Return the mean CPU time of a decision in microseconds."""
    fleet = Fleet()
    for number in range(num_workers):
        worker_id = WorkerId(f"w{number}")
        fleet.add(WorkerSpec(worker_id=worker_id, url="", models=("m",)), 0.0)
        fleet.saw_report(worker_id, LoadReport(prefill_tokens_per_s=8000.0, step_s=0.02, kv_used=0.3), 0.0)
    router = Router(fleet, LoadBook(), PrefixIndexes(), settings=RouterSettings(policy=policy))
    running: deque[Route] = deque()
    total_ns = 0
    for number, query in enumerate(queries(with_session)):
        now = number * PAUSE_S
        begin_ns = time.process_time_ns()
        route = router.route(query, now)
        if number >= NUM_WARMUP:
            total_ns += time.process_time_ns() - begin_ns
        running.append(route)
        if len(running) > 2 * num_workers:
            oldest = running.popleft()
            oldest.first_token(now)
            oldest.end(now)
    return total_ns / 1e3 / (NUM_REQUESTS - NUM_WARMUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 1000], help="default: 8 64 1000")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--policy", default="cost", help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    results = []
    for num_workers in args.workers:
        for with_session in (False, True):
            case = f"{num_workers} workers, {'session key' if with_session else 'no session key'}"
            times_us = [route_us(num_workers, with_session, args.policy) for _ in range(args.rounds)]
            results.append(Result(case, "CPU per routing decision", "us", min(times_us)))
    return Report(results)
