"""Time to first token of agents' sessions by the order of prefill: the real scheduler in virtual time.

Agents send a growing conversation: a head that all share, a task of their own, then tool results of 50 to 6,000 tokens, with
think time in between. Before --stagger-s have passed, all sessions have started. A step takes a fixed time, plus a time
per prompt token and per decoding row; the defaults resemble an 8B model on one H200. Sampled tokens are random, so only
times are measured, and nothing about answers.

Each seed runs twice on the same sessions: in order of arrival (the baseline), and in the scheduler's own order.
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import asdict, dataclass, field

from bench.contract import Needs, Report, Result
from stoker.base.ids import RequestId
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.plan import StepPlan, StepResult
from stoker.sched.prefill_order import PrefillOrder
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig
from stoker.sched.sequence import Sequence

NAME = "prefill_order"
HELP = "time to first token of agents' first and later turns, by the order of prefill, in virtual time"
NEEDS = Needs()
BLOCK_TOKENS = 16
VOCAB = 32_000
_FAR = 1 << 32  # more than ageing changes


@dataclass
class Session:
    """One agent: the tokens so far, and the sizes of the turns to come."""

    token_ids: list[int]
    tool_tokens: list[int]  # of each later turn
    output_tokens: list[int]  # of each turn
    think_s: list[float]
    turn: int = 0
    sent_s: float = 0.0


@dataclass
class Times:
    first_turn_s: list[float] = field(default_factory=list)
    later_turn_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0


def make_sessions(args: argparse.Namespace, seed: int) -> list[Session]:
    rng = random.Random(seed)
    head = [rng.randrange(VOCAB) for _ in range(args.head_tokens)]
    sessions = []
    for _ in range(args.sessions):
        task = [rng.randrange(VOCAB) for _ in range(rng.randint(*args.task_tokens))]
        turns = rng.randint(*args.turns)
        tools = [round(50 * 120 ** rng.random()) for _ in range(turns - 1)]  # log-uniform from 50 to 6,000
        outputs = [rng.randint(*args.output_tokens) for _ in range(turns)]
        think_s = [rng.uniform(*args.think_s) for _ in range(turns - 1)]
        sessions.append(Session(head + task, tools, outputs, think_s))
    return sessions


class ArrivalOrder(PrefillOrder):
    """The baseline."""

    def _size(self, seq: Sequence, tokens_left: int) -> int:
        return _FAR * seq.arrival


class Simulation:
    """Sessions on one scheduler. Steps take as long as the options say."""

    def __init__(self, args: argparse.Namespace, seed: int, by_arrival: bool) -> None:
        self._args = args
        self._rng = random.Random(seed)
        pool = BlockPool(args.kv_tokens // BLOCK_TOKENS)
        config = SchedulerConfig(BLOCK_TOKENS, args.step_tokens, args.max_rows, target_itl_s=args.target_itl_ms / 1e3)
        self._scheduler = Scheduler(config, pool, order=ArrivalOrder if by_arrival else PrefillOrder)
        self._sessions = make_sessions(args, seed)
        self._turns: list[tuple[float, int]] = []  # when each session sends its next turn
        self.times = Times()

    def run(self) -> Times:
        now, args = 0.0, self._args
        for index in range(len(self._sessions)):
            heapq.heappush(self._turns, (self._rng.uniform(0, args.stagger_s), index))
        while self._turns or self._scheduler.has_work:
            while self._turns and self._turns[0][0] <= now:
                self._send(*heapq.heappop(self._turns))
            self._scheduler.expire(now)
            plan = self._scheduler.plan()
            if plan is None:
                now = self._turns[0][0]
                continue
            step_s = self._step_s(plan)
            now += step_s
            token_ids = [[self._rng.randrange(VOCAB)] if span.samples else [] for span in plan.spans]
            for chunk in self._scheduler.commit(StepResult(token_ids, step_s)):
                session = self._sessions[int(chunk.request_id)]
                session.token_ids += chunk.token_ids
                if chunk.usage is not None and chunk.usage.completion_tokens == 1:
                    times = self.times.later_turn_s if session.turn else self.times.first_turn_s
                    times.append(now - session.sent_s)
                if chunk.finish is not None:
                    self._end_turn(int(chunk.request_id), now)
        self.times.wall_s = now
        return self.times

    def _step_s(self, plan: StepPlan) -> float:
        decodes = sum(span.count == 1 for span in plan.spans)
        args = self._args
        fixed_s: float = args.step_ms / 1e3 + decodes * args.row_us / 1e6
        return fixed_s + (plan.num_tokens - decodes) / float(args.prefill_rate)

    def _send(self, now: float, index: int) -> None:
        session = self._sessions[index]
        session.sent_s = now
        token_ids = list(session.token_ids)
        max_new = session.output_tokens[session.turn]
        self._scheduler.add(
            GenerateRequest(RequestId(str(index)), token_ids, len(token_ids), SamplingParams(), max_new)
        )

    def _end_turn(self, index: int, now: float) -> None:
        session = self._sessions[index]
        if session.turn < len(session.tool_tokens):
            session.token_ids += [self._rng.randrange(VOCAB) for _ in range(session.tool_tokens[session.turn])]
            heapq.heappush(self._turns, (now + session.think_s[session.turn], index))
            session.turn += 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def numbers(text: str) -> list[float]:
        first, last = text.split(",")
        return [float(first), float(last)]

    def counts(text: str) -> list[int]:
        return [int(number) for number in numbers(text)]

    parser.add_argument("--seeds", default="1,2,3", help="default: %(default)s")
    parser.add_argument("--sessions", type=int, default=192, help="default: %(default)s")
    parser.add_argument("--stagger-s", type=float, default=20.0, help="default: %(default)s")
    parser.add_argument("--head-tokens", type=int, default=2000, help="shared by all sessions (default: %(default)s)")
    parser.add_argument("--task-tokens", type=counts, default="500,4000", help="from,to (default: %(default)s)")
    parser.add_argument("--turns", type=counts, default="4,8", help="from,to (default: %(default)s)")
    parser.add_argument("--output-tokens", type=counts, default="50,250", help="from,to (default: %(default)s)")
    parser.add_argument("--think-s", type=numbers, default="0.5,4", help="from,to (default: %(default)s)")
    parser.add_argument("--kv-tokens", type=int, default=900_000, help="default: %(default)s")
    parser.add_argument("--step-tokens", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--target-itl-ms", type=float, default=75.0, help="default: %(default)s")
    parser.add_argument("--max-rows", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--step-ms", type=float, default=6.0, help="fixed time of a step (default: %(default)s)")
    parser.add_argument("--row-us", type=float, default=40.0, help="time per decoding row (default: %(default)s)")
    parser.add_argument("--prefill-rate", type=float, default=40_000, help="tokens per second (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    seeds = [int(seed) for seed in args.seeds.split(",")]
    ours, theirs = Times(), Times()
    for seed in seeds:
        for total, by_arrival in ((theirs, True), (ours, False)):
            times = Simulation(args, seed, by_arrival).run()
            total.first_turn_s += times.first_turn_s
            total.later_turn_s += times.later_turn_s
            total.wall_s += times.wall_s / len(seeds)
    case = f"{args.sessions} sessions, KV for {args.kv_tokens:,} tokens, {len(seeds)} seeds, virtual time"
    report = Report(details={"ours": asdict(ours), "by_arrival": asdict(theirs)})

    def add(metric: str, unit: str, value: float, other: float) -> None:
        report.results.append(
            Result(case, metric, unit, value, "lower", "order of arrival", other, comparison="baseline")
        )

    for turns, our_s, their_s in (
        ("first", ours.first_turn_s, theirs.first_turn_s),
        ("later", ours.later_turn_s, theirs.later_turn_s),
    ):
        for name, share in (("p50", 50), ("p90", 90), ("p99", 99), ("worst", 100)):
            add(f"TTFT of {turns} turns, {name}", "ms", _percentile_ms(our_s, share), _percentile_ms(their_s, share))
    add("wall time", "s", ours.wall_s, theirs.wall_s)
    return report


def _percentile_ms(values: list[float], share: int) -> float:
    return 1e3 * sorted(values)[min(len(values) - 1, len(values) * share // 100)]
