"""Several servers over the same small model, on the same machine, in one run: one at a time, in alternating order.

    python bench/cpu_peers.py --rounds 2 --out peers \\
        --server 'stoker=stoker serve MODEL --port {port}' \\
        --server 'vllm=env OMP_NUM_THREADS=1 vllm serve MODEL --port {port}' --ready vllm=/health \\
        --target 'other=http://127.0.0.1:9000'

All servers are started and warmed up first, then measured in turn, one at a time, at each concurrency of each round: what is
compared lies seconds apart, for the machine's speed may drift by the minute. One given as a URL is only measured. The load:
streamed chats of about 130 prompt tokens that no earlier request shares, 32 tokens out, greedy, a connection for each
request. Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

import msgspec
import uvloop
from gateway_overhead import cpu_s as tree_cpu_s

from stoker.base.clock import RealClock
from stoker.base.errors import ConfigError, StokerError
from stoker.loadgen.client import Client, Target
from stoker.loadgen.load import Load
from stoker.loadgen.player import play
from stoker.loadgen.report import Figures, environment, figures
from stoker.loadgen.session import Messages, Session, Turn
from stoker.loadgen.stream import Record

NOTES = (
    "Summarise the following notes in one paragraph: "
    + "the quick brown fox jumps over the lazy dog near the river bank while the sun sets slowly. " * 5
)


@dataclass(frozen=True, slots=True)
class Server:
    """`command` is None where somebody else runs it."""

    name: str
    url: str
    command: list[str] | None = None
    ready_path: str = "/v1/models"


@dataclass(frozen=True, slots=True)
class Measurement:
    server: str
    round: int
    concurrency: int
    start_s: float | None  # from the command to the first ready answer
    cpu_s: float | None  # of the server, all its processes, while it was measured
    figures: Figures


@dataclass(slots=True, eq=False)
class Running:
    process: subprocess.Popen[bytes] | None = None
    start_s: float | None = None
    serial: Iterator[int] = field(default_factory=count)  # a prompt is never sent twice to the same server process

    def cpu_s(self) -> float | None:
        """CPU time of the server and all its processes so far."""
        return tree_cpu_s(self.process.pid) if self.process is not None else None


def sessions(num: int, serial: Iterator[int], out_tokens: int) -> list[Session]:
    """Each prompt begins with a number of its own, so that none finds another's text in a cache."""
    made = []
    for _ in range(num):
        number = next(serial)
        messages = [{"role": "user", "content": f"[{number}] {NOTES}"}]
        made.append(Session([Turn(Messages(messages, 1), session=str(number), max_tokens=out_tokens)]))
    return made


async def measure(url: str, loads: Sequence[tuple[int, list[Session]]], timeout_s: float) -> list[list[Record]]:
    """Plays each (concurrency, sessions) after the one before it."""
    clock = RealClock()
    results: list[list[Record]] = []
    async with Client(Target(url, timeout_s=timeout_s, new_connections=True), clock) as client:
        options = {"model": await client.first_model(), "temperature": 0, "ignore_eos": True}
        for concurrency, load in loads:
            records: list[Record] = []
            await play(load, client, Load(slots=concurrency), options, records.append, clock)
            results.append(records)
    return results


def wait_ready(server: Server, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise StokerError(f"{server.name} ended with {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(server.url + server.ready_path, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise StokerError(f"{server.name} was not ready within {timeout_s:g} s")


@contextmanager
def running(server: Server, log_dir: Path, ready_timeout_s: float) -> Iterator[Running]:
    if server.command is None:
        yield Running()
        return
    log_dir.mkdir(parents=True, exist_ok=True)
    with (log_dir / f"{server.name}.log").open("ab") as log:
        begin_s = time.monotonic()
        # A session of its own: stopping it stops its children.
        process = subprocess.Popen(server.command, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_ready(server, process, ready_timeout_s)
            yield Running(process, time.monotonic() - begin_s)
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    for number, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    # Children may outlive their parent by a moment, and would take CPU time from the next server.
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.1)


def measure_once(
    server: Server, state: Running, number: int, concurrency: int, args: argparse.Namespace
) -> Measurement:
    num = max(args.min_requests, args.requests_per_slot * concurrency)
    load = sessions(num, state.serial, args.output_tokens)
    before_s = state.cpu_s()
    [records] = play_all(server.url, [(concurrency, load)], args.timeout_s)
    after_s = state.cpu_s()
    cpu_s = after_s - before_s if before_s is not None and after_s is not None else None
    return Measurement(server.name, number, concurrency, state.start_s, cpu_s, figures(records))


def play_all(url: str, loads: Sequence[tuple[int, list[Session]]], timeout_s: float) -> list[list[Record]]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure(url, loads, timeout_s))


def measure_all(peers: Sequence[Server], args: argparse.Namespace) -> list[Measurement]:
    measurements: list[Measurement] = []
    with ExitStack() as stack:
        states = {}
        for server in peers:
            states[server.name] = stack.enter_context(running(server, args.log_dir, args.ready_timeout_s))
            warmup = sessions(args.warmup, states[server.name].serial, args.output_tokens)
            play_all(server.url, [(1, warmup[:1]), (4, warmup[1:])], args.timeout_s)
        for number in range(args.rounds):
            for concurrency in args.concurrency:
                # Every other round backwards: what warms or wears the machine meets each server from both sides.
                for server in peers if number % 2 == 0 else reversed(peers):
                    measurements.append(measure_once(server, states[server.name], number, concurrency, args))
                    print(line(measurements[-1]), flush=True)
    return measurements


def line(measurement: Measurement) -> str:
    result = measurement.figures
    ttft = f"{result.ttft_ms.p50:.0f}/{result.ttft_ms.p99:.0f}" if result.ttft_ms else "-"
    itl = f"{result.itl_ms.p50:.1f}/{result.itl_ms.p99:.1f}" if result.itl_ms else "-"
    return (
        f"round {measurement.round} {measurement.server} c={measurement.concurrency}: TTFT {ttft} ms, ITL {itl} ms, "
        f"{result.output_tokens_per_s:.1f} tok/s, {result.failed} failed {result.errors or ''}"
    )


def median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):,.1f}" if known else "-"


def markdown(measurements: Sequence[Measurement]) -> str:
    """Medians over the rounds."""
    rows = [
        "| server | concurrency | TTFT p50 ms | p99 | ITL p50 ms | p99 | tok/s | CPU ms / token | failed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    places = dict.fromkeys((m.concurrency, m.server) for m in measurements)
    for concurrency, server in sorted(places, key=lambda place: place[0]):
        same = [m for m in measurements if (m.concurrency, m.server) == (concurrency, server)]
        results = [m.figures for m in same]
        columns = [
            median([r.ttft_ms.p50 if r.ttft_ms else None for r in results]),
            median([r.ttft_ms.p99 if r.ttft_ms else None for r in results]),
            median([r.itl_ms.p50 if r.itl_ms else None for r in results]),
            median([r.itl_ms.p99 if r.itl_ms else None for r in results]),
            median([r.output_tokens_per_s for r in results]),
            median(
                [m.cpu_s * 1e3 / m.figures.output_tokens if m.cpu_s and m.figures.output_tokens else None for m in same]
            ),
            str(sum(r.failed for r in results)),
        ]
        rows.append(f"| {server} | {concurrency} | {' | '.join(columns)} |")
    starts = {m.server: m.start_s for m in measurements if m.start_s is not None}
    rows.append("")
    rows += [f"{server}: ready {start_s:.1f} s after its start." for server, start_s in starts.items()]
    return "\n".join(rows) + "\n"


def pairs(given: Sequence[str], option: str) -> dict[str, str]:
    named: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name or not value:
            raise ConfigError(f"{option} {item!r}: NAME=VALUE is wanted")
        named[name] = value
    return named


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def servers(args: argparse.Namespace) -> list[Server]:
    ready = pairs(args.ready, "--ready")
    found = [Server(name, url.rstrip("/")) for name, url in pairs(args.target, "--target").items()]
    for name, command in pairs(args.server, "--server").items():
        port = free_port()
        words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
        found.append(Server(name, f"http://127.0.0.1:{port}", words, ready.get(name, args.ready_path)))
    if not found:
        raise ConfigError("nothing to measure: --server or --target names a server")
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND", help="{port} is filled in")
    parser.add_argument("--target", action="append", default=[], metavar="NAME=URL", help="a server that runs already")
    parser.add_argument(
        "--ready", action="append", default=[], metavar="NAME=PATH", help="answers 200 once it is ready"
    )
    parser.add_argument(
        "--ready-path", default="/v1/models", help="where --ready names no other (default: %(default)s)"
    )
    parser.add_argument("--ready-timeout-s", type=float, default=300.0, help="default: %(default)s")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32], help="default: 1 4 16 32")
    parser.add_argument("--requests-per-slot", type=int, default=3, help="requests: this times the concurrency")
    parser.add_argument("--min-requests", type=int, default=8, help="and at least this many (default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--warmup", type=int, default=5, help="requests to each server before (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for one answer (default: %(default)s)")
    parser.add_argument("--log-dir", type=Path, default=Path("build/cpu_peers"), help="what the servers print")
    parser.add_argument("--out", type=Path, default=Path("build/cpu_peers/result"), help="writes OUT.json and OUT.md")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        measurements = measure_all(servers(args), args)
    except StokerError as error:
        print(f"cpu_peers: {error.message}", file=sys.stderr)
        return 2
    config = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    whole = {"config": config, "environment": environment(), "measurements": [asdict(m) for m in measurements]}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")
    args.out.with_suffix(".md").write_text(markdown(measurements))
    print(markdown(measurements))
    return 0


if __name__ == "__main__":
    sys.exit(main())
