"""The OpenAI-compatible servers that one run compares: commands to start, or URLs of servers that run already."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import BenchmarkError
from bench.support.processes import cpu_s, free_port, named_values, started, wait_for_http

if TYPE_CHECKING:
    from stoker.loadgen.client import Target
    from stoker.loadgen.load import LoadPlan
    from stoker.loadgen.session import LoadSession, Turn
    from stoker.loadgen.stream import Record

_SETTLE_TIMEOUT_S = 30.0
_BUSY_SHARE = 0.1  # of one core; a server below this is idle


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    name: str
    url: str
    command: list[str] | None = None  # None: it runs already
    ready_path: str = "/v1/models"


@dataclass(slots=True, eq=False)
class RunningServer:
    process: subprocess.Popen[bytes] | None = None
    start_s: float | None = None  # from the command to the first successful answer
    serial: Iterator[int] = field(default_factory=count)  # no prompt is sent twice to the same server process

    def cpu_s(self) -> float | None:
        return cpu_s(self.process.pid) if self.process is not None else None

    def settle(self, quiet_s: float = 3.0) -> None:
        """Wait until the server has done nothing by itself for a while: some prepare kernels when they are idle."""
        last_s, idle_s = self.cpu_s(), 0.0
        deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
        while last_s is not None and idle_s < quiet_s and time.monotonic() < deadline_s:
            time.sleep(0.5)
            now_s = self.cpu_s() or 0.0
            idle_s = idle_s + 0.5 if now_s - last_s < 0.5 * _BUSY_SHARE else 0.0
            last_s = now_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND", help="{port} is filled in")
    parser.add_argument("--target", action="append", default=[], metavar="NAME=URL", help="a server that runs already")
    parser.add_argument(
        "--ready",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="path that answers 200 when the server is ready",
    )
    parser.add_argument("--ready-path", default="/v1/models", help="for servers without --ready (default: %(default)s)")
    parser.add_argument("--ready-timeout-s", type=float, default=300.0, help="default: %(default)s")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for one answer (default: %(default)s)")


def parse(args: argparse.Namespace) -> list[ServerUnderTest]:
    """Return the servers that the options name."""
    ready = named_values(args.ready, "--ready")
    found = [ServerUnderTest(name, url.rstrip("/")) for name, url in named_values(args.target, "--target").items()]
    for name, command in named_values(args.server, "--server").items():
        port = free_port()
        words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
        found.append(ServerUnderTest(name, f"http://127.0.0.1:{port}", words, ready.get(name, args.ready_path)))
    if not found:
        raise BenchmarkError("no server to measure: name one with --server or --target")
    return found


@contextmanager
def running(server: ServerUnderTest, log_dir: Path, ready_timeout_s: float) -> Iterator[RunningServer]:
    """Start the server, wait until it is ready, and stop it at the end."""
    if server.command is None:
        yield RunningServer()
        return
    begin_s = time.monotonic()
    with started(server.command, log_dir / f"{server.name}.log") as process:
        wait_for_http(server.url + server.ready_path, process, server.name, ready_timeout_s)
        yield RunningServer(process, time.monotonic() - begin_s)


def play_loads(
    target: Target, loads: Sequence[tuple[LoadPlan, Sequence[LoadSession]]], options: Mapping[str, Any]
) -> list[list[tuple[Turn, Record]]]:
    """Play each load after the one before it; return the turns of each load with their records.

    `options` are the fields of every body, besides the model, which is the first one that the server lists.
    """
    import uvloop

    from stoker.base.clock import RealClock
    from stoker.loadgen.client import Client
    from stoker.loadgen.player import play

    async def play_all() -> list[list[tuple[Turn, Record]]]:
        clock, found = RealClock(), list[list[tuple["Turn", "Record"]]]()
        async with Client(target, clock) as client:
            body = {"model": await client.first_model(), **options}
            for plan, sessions in loads:
                records: list[tuple[Turn, Record]] = []
                found.append(records)

                def observe(turn: Turn, record: Record, to: list[tuple[Turn, Record]] = records) -> None:
                    to.append((turn, record))

                await play(sessions, client, plan, body, observe, clock)
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(play_all())
