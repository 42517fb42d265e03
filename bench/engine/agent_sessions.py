"""Sessions of agents over HTTP at three loads: TTFT of first and later turns, time between tokens, wall time and CPU.

    python -m bench make-model DIR --tokenizer SOME_MODEL_DIR --weights
    python -m bench run agent_sessions --model DIR --engine vllm stoker --save       # on one GPU; needs vLLM
    python -m bench run agent_sessions --small --server 'stoker=stoker serve --port {port}' --ready stoker=/ready \\
        --server 'llama.cpp=python -m bench.support.llamacpp_server SMOLLM2.gguf {port} --context 2048' \\
        --ready llama.cpp=/health                                                    # on a CPU
    python -m bench run agent_sessions --target stoker=URL --target other=URL        # servers that run already

The servers are started one after the other and get the same sessions, generated from --seed by
bench/support/agent_load.py. Light, full and overload are 24, 96 and 192 agents at once. A session has 4 to 8 turns: 4,000
tokens that all sessions share, a task, then tool results of 50 to 6,000 tokens, answers of 40 to 300 tokens, and a think
time of 0.5 to 8 s before each later turn. --small divides lengths by 16 and the number of sessions by 8 or more.

Requests are sampled at temperature 1: with random weights, a greedy answer often repeats one token, which may have no text.
Wall time is from the first request of a load to the end of its last one, think time included. Time between tokens is the
time between two chunks of an answer. `stoker` is compared with each of the others.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contract import BenchmarkError, Better, Needs, Report, Result
from bench.support import http_servers
from bench.support.agent_load import LOADS, SMALL, SMALL_LOADS, AgentLoad, AgentProfile, agent_sessions, paced, scaled
from bench.support.gpu_server import SERVERS, server_command
from bench.support.http_servers import RunningServer, ServerUnderTest, play_loads, running
from bench.support.processes import free_port, named_values

if TYPE_CHECKING:
    from stoker.loadgen.session import LoadSession, Turn
    from stoker.loadgen.stream import Record
    from stoker.loadgen.summary import LoadSummary, Spread

NAME = "agent_sessions"
HELP = "sessions of agents over HTTP at three loads: TTFT of first and later turns, time between tokens, wall time, CPU"
NEEDS = Needs(packages=("aiohttp", "msgspec", "uvloop"), programs="the servers to compare; a GPU for the full loads")
_OWN = "stoker"
_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
_READY = {"stoker": "/ready", "vllm": "/health"}
_VLLM_ARGUMENTS = ("--enable-prompt-tokens-details",)  # without it, vLLM does not report cached tokens


@dataclass(frozen=True, slots=True)
class AgentMeasurement:
    """One server under one load."""

    server: str
    load: str
    wall_s: float
    cpu_s: float | None  # None: the server was not started by this run
    first_ttft_ms: Spread | None
    later_ttft_ms: Spread | None
    summary: LoadSummary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model folder with weights, for --engine")
    parser.add_argument("--engine", nargs="+", choices=SERVERS, default=[], help="servers of --model on this GPU")
    parser.add_argument("--serve", default="", help="more arguments of Stoker for --engine, as one string")
    http_servers.add_arguments(parser)
    parser.add_argument("--loads", nargs="+", choices=tuple(LOADS), default=list(LOADS), help="default: all")
    parser.add_argument("--share", type=float, default=1.0, help="play this share of the sessions")
    parser.add_argument("--think-scale", type=float, default=1.0, help="multiply think times and the ramp by this")
    parser.add_argument("--small", action="store_true", help="short prompts and few sessions, for CPUs")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--case", help="the model's name in the results (default: the folder's name)")
    parser.add_argument("--version", action="append", default=[], metavar="NAME=TEXT", help="a server's version")
    parser.add_argument("--log-dir", type=Path, default=Path("build/agent_sessions"), help="output of the servers")


def run(args: argparse.Namespace) -> Report:
    if args.engine and args.model is None:
        raise BenchmarkError("--engine needs --model DIR")
    profile, loads = (SMALL, SMALL_LOADS) if args.small else (AgentProfile(), LOADS)
    profile = paced(profile, args.think_scale)
    chosen = [scaled(loads[name], args.share) for name in args.loads]
    servers = _engines(args, profile)
    if not servers or args.server or args.target:
        servers += http_servers.parse(args)
    measurements: list[AgentMeasurement] = []
    problems: list[str] = []
    for server in servers:
        try:
            with running(server, args.log_dir, args.ready_timeout_s) as state:
                _warm_up(server, state, profile, args)
                for load in chosen:
                    measurements.append(_measure(server, state, load, profile, args))
                    print(_line(measurements[-1]), flush=True)
        except BenchmarkError as error:  # the other servers are still worth measuring
            problems.append(f"{server.name}: {error}; see {args.log_dir}")
    problems += [
        f"{one.server}, {one.load}: {one.summary.failed} requests failed: {one.summary.errors}"
        for one in measurements
        if one.summary.failed
    ]
    case = args.case or (args.model.name if args.model else "SmolLM2" if args.small else "model")
    versions = named_values(args.version, "--version")
    return Report(_results(case, measurements, versions), [asdict(one) for one in measurements], problems)


def _engines(args: argparse.Namespace, profile: AgentProfile) -> list[ServerUnderTest]:
    found = []
    for kind in args.engine:
        port = free_port()
        more = shlex.split(args.serve) if kind == _OWN else list(_VLLM_ARGUMENTS)
        command = server_command(kind, args.model, profile.context_tokens, port, more)
        found.append(ServerUnderTest(kind, f"http://127.0.0.1:{port}", command, _READY[kind]))
    return found


def _warm_up(server: ServerUnderTest, state: RunningServer, profile: AgentProfile, args: argparse.Namespace) -> None:
    """Play a few sessions that share nothing with the measured ones, then wait until the server is idle."""
    short = replace(profile, turns=(2, 2), think_s=(0.01, 0.02), ramp_s=0.1)
    _play(server, agent_sessions(AgentLoad("warm-up", 4), short, args.seed + 1), args.timeout_s)
    state.settle()


def _play(server: ServerUnderTest, sessions: Sequence[LoadSession], timeout_s: float) -> list[tuple[Turn, Record]]:
    from stoker.loadgen.client import Target
    from stoker.loadgen.load import LoadPlan

    options = {"temperature": 1.0, "ignore_eos": True}
    [played] = play_loads(Target(server.url, timeout_s=timeout_s), [(LoadPlan(), sessions)], options)
    return played


def _measure(
    server: ServerUnderTest, state: RunningServer, load: AgentLoad, profile: AgentProfile, args: argparse.Namespace
) -> AgentMeasurement:
    from stoker.loadgen.summary import spread_ms, summarize

    sessions = agent_sessions(load, profile, args.seed)
    first_turns = {id(turn) for session in sessions for turn in session.turns[:1]}
    before_s = state.cpu_s()
    played = _play(server, sessions, args.timeout_s)
    after_s = state.cpu_s()
    used_s = after_s - before_s if before_s is not None and after_s is not None else None
    summary = summarize([record for _, record in played])
    ttft_s: dict[bool, list[float]] = {True: [], False: []}
    for turn, record in played:
        if record.error is None and record.ttft_s is not None:
            ttft_s[id(turn) in first_turns].append(record.ttft_s)
    return AgentMeasurement(
        server.name,
        load.describe(),
        summary.duration_s,
        used_s,
        spread_ms(ttft_s[True]),
        spread_ms(ttft_s[False]),
        summary,
    )


def _line(one: AgentMeasurement) -> str:
    def times(spread: Spread | None) -> str:
        return "-" if spread is None else f"{spread.p50:.0f}/{spread.p90:.0f}/{spread.p99:.0f}"

    itl, hit = one.summary.itl_ms, one.summary.hit_ratio
    gaps = "-" if itl is None else f"{itl.p50:.1f}/{itl.p90:.1f}/{itl.p99:.1f}"
    return (
        f"{one.server}, {one.load}: wall {one.wall_s:.1f} s, TTFT p50/p90/p99 first {times(one.first_ttft_ms)} "
        f"later {times(one.later_ttft_ms)} ms, between tokens {gaps} ms, CPU {one.cpu_s or 0:.1f} s, "
        f"{one.summary.prompt_tokens:,} in, {'-' if hit is None else f'{hit:.1%}'} cached, "
        f"{one.summary.output_tokens:,} out, {one.summary.requests} answered, {one.summary.failed} failed"
    )


def _at(spread: Spread | None, name: str) -> float | None:
    return None if spread is None else float(getattr(spread, name))


_Value = Callable[[AgentMeasurement], float | None]
# Metric, unit, which is better, value, and the least ratio that is asked for: 2.0 is half of the competitor's time.
_METRICS: list[tuple[str, str, Better, _Value, float | None]] = [
    ("wall time", "s", "lower", lambda m: m.wall_s, 1 / 0.9),
    ("TTFT of first turns p50", "ms", "lower", lambda m: _at(m.first_ttft_ms, "p50"), None),
    ("TTFT of first turns p90", "ms", "lower", lambda m: _at(m.first_ttft_ms, "p90"), None),
    ("TTFT of first turns p99", "ms", "lower", lambda m: _at(m.first_ttft_ms, "p99"), None),
    ("TTFT of later turns p50", "ms", "lower", lambda m: _at(m.later_ttft_ms, "p50"), 1.0),
    ("TTFT of later turns p90", "ms", "lower", lambda m: _at(m.later_ttft_ms, "p90"), 1.0),
    ("TTFT of later turns p99", "ms", "lower", lambda m: _at(m.later_ttft_ms, "p99"), None),
    ("time between tokens p50", "ms", "lower", lambda m: _at(m.summary.itl_ms, "p50"), None),
    ("time between tokens p90", "ms", "lower", lambda m: _at(m.summary.itl_ms, "p90"), 1.0),
    ("time between tokens p99", "ms", "lower", lambda m: _at(m.summary.itl_ms, "p99"), 2.0),
    ("server CPU", "s", "lower", lambda m: m.cpu_s, 4.0),
    ("cached share of prompt tokens", "%", "higher", lambda m: _percent(m.summary.hit_ratio), None),
    ("requests failed", "requests", "lower", lambda m: float(m.summary.failed), None),
]  # fmt: skip


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _results(case: str, measurements: Sequence[AgentMeasurement], versions: dict[str, str]) -> list[Result]:
    """Stoker's numbers, beside those of each other server under the same load."""
    by_server: dict[str, dict[str, AgentMeasurement]] = {}
    for one in measurements:
        by_server.setdefault(one.server, {})[one.load] = one
    ours = by_server.pop(_OWN, {})
    found = []
    for name, theirs in (by_server or {"": {}}).items():
        title = " ".join(filter(None, [_TITLES.get(name, name), versions.get(name)]))
        for load, mine in ours.items():
            other = theirs.get(load)
            for metric, unit, better, value_of, target in _METRICS:
                value = value_of(mine)
                their_value = None if other is None else value_of(other)
                if value is None:
                    continue
                known = title if their_value is not None else ""
                goal = target if known else None
                found.append(Result(f"{case}, {load}", metric, unit, value, better, known, their_value, target=goal))
    return found
