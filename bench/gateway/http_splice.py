"""What the gateway's HTTP layer costs alone: bytes pass from its server to its client, with no routing between.

    python -m bench run http_splice

Two mock workers, the splice and the client run in processes of their own. The result is the splice's own CPU time (user
and system, after a warm-up) for each whole request, each streamed chunk, and each chunk sent every 20 ms. With
--program, another gateway is measured in its place; it is called as `PROGRAM PORT WORKER_PORT ...`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import shlex
import signal
import sys
from itertools import cycle
from pathlib import Path

from bench.contract import Needs, Report, Result
from bench.support.processes import free_ports, python_module, started, wait_for_port
from bench.support.router_client import closed_loop
from stoker.gateway.http import (
    AnswerAborted,
    ClientLimits,
    Origin,
    Pool,
    Request,
    Server,
    ServerLimits,
    end_to_end,
    header_block,
)

NAME = "http_splice"
HELP = "CPU time of the gateway's HTTP layer alone, per request and per streamed chunk"
NEEDS = Needs(packages=("uvloop",))
_LOADS = {"request": ("full", 0), "chunk": ("stream", 0), "paced": ("stream", 20)}  # name -> mode, ms between chunks


async def serve(port: int, workers: list[int]) -> None:
    pools = cycle([Pool(Origin.from_url(f"http://127.0.0.1:{worker}"), ClientLimits()) for worker in workers])

    async def handle(request: Request) -> None:
        headers = header_block(end_to_end(request.headers))
        answer = await next(pools).send(request.method, request.path, headers, request.body, connect_s=1, head_s=60)
        request.on_gone = answer.abort
        request.on_pause = answer.pause
        request.on_resume = answer.resume
        if answer.ended:
            request.respond(answer.status, end_to_end(answer.headers), await answer.read(64 << 20))
            return
        request.start(answer.status, end_to_end(answer.headers))
        with contextlib.suppress(AnswerAborted):
            await answer.relay(request.write)
            request.finish()

    server = Server(handle, ServerLimits(), on_bad=lambda peer, reason: print(peer, reason, file=sys.stderr))
    await server.listen("127.0.0.1", port)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.close(0)


def cpu_s(pid: int) -> float:
    """User and system time of all threads, in nanoseconds: clock ticks are too coarse for short runs."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5, help="of each load (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--profile", action="store_true", help="print where the splice spends its time")
    parser.add_argument("--program", help="measure this command instead")
    parser.add_argument("--only", nargs="+", choices=tuple(_LOADS), default=list(_LOADS), help="default: all")
    parser.add_argument("--log", type=Path, default=Path("build/http_splice.log"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    splice = shlex.split(args.program) if args.program else python_module("bench.gateway.http_splice")
    results = []
    for name in args.only:
        mode, delay_ms = _LOADS[name]
        port, *workers = free_ports(3)
        mocks = [python_module("bench.support.mock_worker", worker, "--delay-ms", delay_ms) for worker in workers]
        command = [*splice, str(port), *map(str, workers), *(["--profile"] if args.profile else [])]
        with started(mocks[0], args.log), started(mocks[1], args.log), started(command, args.log) as process:
            for each in (*workers, port):
                wait_for_port(each)
            closed_loop(port, args.connections, 1.0, mode)
            before_s = cpu_s(process.pid)
            counted = closed_loop(port, args.connections, args.seconds, mode)
            used_s = cpu_s(process.pid) - before_s
        count = counted["requests"] if mode == "full" else counted["chunks"]
        metric = "CPU per request" if name == "request" else "CPU per chunk"
        case = "one every 20 ms" if name == "paced" else "as fast as possible"
        results.append(Result(case, metric, "us", used_s / max(count, 1) * 1e6))
    return Report(results)


def main() -> None:
    """The splice itself: PORT WORKER_PORT [WORKER_PORT ...] [--profile]."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("workers", type=int, nargs="+")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()

    import uvloop

    if not args.profile:
        uvloop.run(serve(args.port, args.workers))
        return
    profile = cProfile.Profile()
    profile.runcall(uvloop.run, serve(args.port, args.workers))
    profile.print_stats("tottime")


if __name__ == "__main__":
    main()
