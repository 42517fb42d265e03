"""What the gateway's HTTP module alone costs: a byte splice from its server to its client, with no routing in between.

    python bench/gateway_splice.py serve PORT WORKER_PORT [WORKER_PORT …]
    python bench/gateway_splice.py measure --mock MOCK.py --load LOAD.py [--seconds 5] [--profile] [--program OTHER.py]

`measure` starts two mock workers, the splice and the load, each in a process of its own, and prints the splice's own CPU time
(user + system, read from /proc before and after, warmed up) for each whole request, streamed chunk, and chunk paced at 20 ms. With
`--program`, another gateway is measured in its place, called as `OTHER.py PORT WORKER_PORT …`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import uvloop

from stoker.gateway.http import (
    ClientLimits,
    ConnectionPool,
    HttpRequest,
    Origin,
    ResponseAborted,
    Server,
    ServerLimits,
    end_to_end,
    header_block,
)


async def serve(port: int, workers: list[int]) -> None:
    pools = cycle([ConnectionPool(Origin.from_url(f"http://127.0.0.1:{worker}"), ClientLimits()) for worker in workers])

    async def handle(request: HttpRequest) -> None:
        headers = header_block(end_to_end(request.headers))
        answer = await next(pools).send(request.method, request.path, headers, request.body, connect_s=1, head_s=60)
        request.on_gone = answer.abort
        request.on_pause = answer.pause
        request.on_resume = answer.resume
        if answer.ended:
            request.respond(answer.status, end_to_end(answer.headers), await answer.read(64 << 20))
            return
        request.start(answer.status, end_to_end(answer.headers))
        with contextlib.suppress(ResponseAborted):
            await answer.relay(request.write)
            request.finish()

    server = Server(handle, ServerLimits(), on_bad=lambda peer, reason: print(peer, reason, file=sys.stderr))
    await server.listen("127.0.0.1", port)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.close(0)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@contextlib.contextmanager
def running(*command: str, quiet: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL if quiet else None)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_for(port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nothing listens on {port} after 10 s")


def cpu_s(pid: int) -> float:
    """User and system time of all threads, in nanoseconds' resolution: clock ticks are too coarse for short runs."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def measure(mock: str, load: str, seconds: float, connections: int, program: list[str], only: list[str]) -> None:
    for name, mode, delay_ms in (("request", "full", 0), ("chunk", "stream", 0), ("paced", "stream", 20)):
        if name not in only:
            continue
        port, *ports = free_ports(3)
        with (
            running(mock, str(ports[0]), "64", str(delay_ms), quiet=True),
            running(mock, str(ports[1]), "64", str(delay_ms), quiet=True),
            running(*program, str(port), *map(str, ports)) as splice,
        ):
            for each in (*ports, port):
                wait_for(each)
            command = [sys.executable, load, str(port), str(connections)]
            subprocess.run([*command, "1", mode], check=True, capture_output=True)  # warms up; opens connections
            before = cpu_s(splice.pid)
            line = subprocess.run([*command, str(seconds), mode], check=True, capture_output=True, text=True).stdout
            used = cpu_s(splice.pid) - before
            result = json.loads(line.split("}")[0] + "}")
            rate = result["rps"] if mode == "full" else result["chunks_s"]
            print(f"{name}: {used / (rate * seconds) * 1e6:.1f} us CPU   {rate:.0f}/s   {line.strip()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    served = commands.add_parser("serve")
    served.add_argument("port", type=int)
    served.add_argument("workers", type=int, nargs="+")
    served.add_argument("--profile", action="store_true")
    measured = commands.add_parser("measure")
    measured.add_argument("--mock", required=True)
    measured.add_argument("--load", required=True)
    measured.add_argument("--seconds", type=float, default=5)
    measured.add_argument("--connections", type=int, default=32)
    measured.add_argument("--profile", action="store_true")
    measured.add_argument("--program")
    measured.add_argument("--only", nargs="+", default=["request", "chunk", "paced"])
    options = parser.parse_args()
    if options.command == "measure":
        program = [options.program] if options.program else [__file__, "serve", *(["--profile"] * options.profile)]
        measure(options.mock, options.load, options.seconds, options.connections, program, options.only)
        return
    if not options.profile:
        uvloop.run(serve(options.port, options.workers))
        return
    profile = cProfile.Profile()
    profile.runcall(uvloop.run, serve(options.port, options.workers))
    profile.print_stats("tottime")


if __name__ == "__main__":
    main()
