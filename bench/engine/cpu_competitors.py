"""Several servers over the same small model on one machine, measured in one run.

    python -m bench run cpu_competitors --rounds 5 --requests-per-slot 2 \\
        --server 'stoker=stoker serve --port {port}' --ready stoker=/ready \\
        --server 'vllm=env VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=2 GOMP_SPINCOUNT=0
                  vllm serve SMOLLM2_DIR --port {port} --max-model-len 2048 --max-num-seqs 32 --dtype float32
                  --enforce-eager' --ready vllm=/health \\
        --server 'llama.cpp=python -m bench.support.llamacpp_server SMOLLM2.gguf {port}' --ready llama.cpp=/health

All servers are started and warmed up first. Then they are measured in turn, one at a time, at each concurrency of each
round, so that measurements that are compared lie seconds apart: the machine's speed may drift by the minute. Every
second round uses the reverse order. A server given as --target NAME=URL runs already and is only measured.

The load: streamed chats of about 130 prompt tokens that no earlier request shares, 32 tokens out, greedy, one
connection per request. Results are medians over the rounds; `stoker` is compared with each of the others.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contract import Better, Needs, Report, Result
from bench.support import http_servers
from bench.support.http_servers import RunningServer, ServerUnderTest, play_loads, running

if TYPE_CHECKING:
    from stoker.loadgen.session import LoadSession
    from stoker.loadgen.stream import Record
    from stoker.loadgen.summary import LoadSummary

NAME = "cpu_competitors"
HELP = "TTFT, time between tokens and throughput of several servers over one small model on a CPU"
NEEDS = Needs(packages=("aiohttp", "msgspec", "uvloop"), programs="the servers to compare with")
NOTES = (
    "Summarise the following notes in one paragraph: "
    + "the quick brown fox jumps over the lazy dog near the river bank while the sun sets slowly. " * 5
)


@dataclass(frozen=True, slots=True)
class ServerMeasurement:
    server: str
    round: int
    concurrency: int
    start_s: float | None  # from the command to the first successful answer
    cpu_s: float | None  # of all processes of the server, during the measurement
    summary: LoadSummary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    http_servers.add_arguments(parser)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32], help="default: 1 4 16 32")
    parser.add_argument("--requests-per-slot", type=int, default=3, help="requests: this times the concurrency")
    parser.add_argument("--min-requests", type=int, default=8, help="and at least this many (default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--warmup", type=int, default=5, help="requests to each server first (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--model", default="SmolLM2", help="the model's name in the results (default: %(default)s)")
    parser.add_argument("--log-dir", type=Path, default=Path("build/cpu_competitors"), help="output of the servers")


def run(args: argparse.Namespace) -> Report:
    measurements: list[ServerMeasurement] = []
    servers = http_servers.parse(args)
    with ExitStack() as stack:
        states = {}
        for server in servers:
            state = states[server.name] = stack.enter_context(running(server, args.log_dir, args.ready_timeout_s))
            warmup = _sessions(args.warmup, state.serial, args.output_tokens)
            _play(server.url, [(1, warmup[:1]), (4, warmup[1:])], args.timeout_s)
        for number in range(args.rounds):
            for concurrency in args.concurrency:
                for server in servers if number % 2 == 0 else reversed(servers):
                    measurements.append(_measure(server, states[server.name], number, concurrency, args))
                    print(_line(measurements[-1]), flush=True)
    return Report(_results(args.model, measurements), [asdict(one) for one in measurements])


def _sessions(num: int, serial: Iterator[int], out_tokens: int) -> list[LoadSession]:
    """Each prompt begins with its own number, so that none finds another's text in a cache."""
    from stoker.loadgen.session import LoadSession, Messages, Turn

    made = []
    for _ in range(num):
        number = next(serial)
        messages = [{"role": "user", "content": f"[{number}] {NOTES}"}]
        made.append(LoadSession([Turn(Messages(messages, 1), session=str(number), max_tokens=out_tokens)]))
    return made


def _play(url: str, loads: Sequence[tuple[int, list[LoadSession]]], timeout_s: float) -> list[list[Record]]:
    """Play each (concurrency, sessions) after the one before it; return the records of each."""
    from stoker.loadgen.client import Target
    from stoker.loadgen.load import LoadPlan

    target = Target(url, timeout_s=timeout_s, new_connections=True)
    plans = [(LoadPlan(slots=concurrency), sessions) for concurrency, sessions in loads]
    found = play_loads(target, plans, {"temperature": 0, "ignore_eos": True})
    return [[record for _, record in records] for records in found]


def _measure(
    server: ServerUnderTest, state: RunningServer, number: int, concurrency: int, args: argparse.Namespace
) -> ServerMeasurement:
    from stoker.loadgen.summary import summarize

    num = max(args.min_requests, args.requests_per_slot * concurrency)
    sessions = _sessions(num, state.serial, args.output_tokens)
    before_s = state.cpu_s()
    [records] = _play(server.url, [(concurrency, sessions)], args.timeout_s)
    after_s = state.cpu_s()
    used_s = after_s - before_s if before_s is not None and after_s is not None else None
    return ServerMeasurement(server.name, number, concurrency, state.start_s, used_s, summarize(records))


def _line(measurement: ServerMeasurement) -> str:
    found = measurement.summary
    ttft = f"{found.ttft_ms.p50:.0f}/{found.ttft_ms.p99:.0f}" if found.ttft_ms else "-"
    itl = f"{found.itl_ms.p50:.1f}/{found.itl_ms.p99:.1f}" if found.itl_ms else "-"
    return (
        f"round {measurement.round} {measurement.server} c={measurement.concurrency}: TTFT {ttft} ms, ITL {itl} ms, "
        f"{found.output_tokens_per_s:.1f} tok/s, {found.failed} failed {found.errors or ''}"
    )


def _cpu_ms_per_token(measurement: ServerMeasurement) -> float | None:
    num_tokens = measurement.summary.output_tokens
    return measurement.cpu_s * 1e3 / num_tokens if measurement.cpu_s and num_tokens else None


_Metric = Callable[[ServerMeasurement], float | None]
_METRICS: list[tuple[str, str, Better, _Metric]] = [
    ("TTFT p50", "ms", "lower", lambda m: m.summary.ttft_ms.p50 if m.summary.ttft_ms else None),
    ("TTFT p99", "ms", "lower", lambda m: m.summary.ttft_ms.p99 if m.summary.ttft_ms else None),
    ("time between tokens p50", "ms", "lower", lambda m: m.summary.itl_ms.p50 if m.summary.itl_ms else None),
    ("time between tokens p99", "ms", "lower", lambda m: m.summary.itl_ms.p99 if m.summary.itl_ms else None),
    ("output throughput", "tokens/s", "higher", lambda m: m.summary.output_tokens_per_s),
    ("CPU per token", "ms", "lower", _cpu_ms_per_token),
]  # fmt: skip


def _results(model: str, measurements: Sequence[ServerMeasurement]) -> list[Result]:
    """Medians over the rounds: Stoker's, beside each other server's."""
    names = list(dict.fromkeys(one.server for one in measurements))
    others = [name for name in names if name != "stoker"] or [""]

    def median(server: str, concurrency: int | None, metric: _Metric) -> float | None:
        same = [m for m in measurements if m.server == server and concurrency in (None, m.concurrency)]
        known = [value for value in map(metric, same) if value is not None]
        return statistics.median(known) if known else None

    results = []
    for other in others:
        for concurrency in dict.fromkeys(one.concurrency for one in measurements):
            streams = "1 stream" if concurrency == 1 else f"{concurrency} streams"
            for metric, unit, better, value_of in _METRICS:
                ours, theirs = median("stoker", concurrency, value_of), median(other, concurrency, value_of)
                if ours is not None:
                    results.append(Result(f"{model}, {streams}", metric, unit, ours, better, other, theirs))
        start_s = median("stoker", None, lambda m: m.start_s)
        if start_s is not None:
            other_s = median(other, None, lambda m: m.start_s)
            results.append(Result(model, "start until ready", "s", start_s, "lower", other, other_s))
    return results
