"""What a router adds: latency, and its own CPU time for a request and for a streamed chunk. Several routers in one run.

    python bench/gateway_overhead.py --mock MOCK.py --load LOAD.py --out overhead \\
        --router 'stoker=stoker gateway --port {port} --worker {worker0},dialect=openai --worker {worker1},dialect=openai' \\
        --router 'vllm-router=vllm-router --host 127.0.0.1 --port {port} --worker-urls {worker0} {worker1} --policy round_robin'

MOCK and LOAD are a raw worker (`MOCK PORT CHUNKS DELAY_MS`) and a closed-loop client (`LOAD PORT CONNECTIONS SECONDS
stream|full`). Two mocks stand behind each router, one router runs at a time, in alternating order over the rounds. CPU time is
user + system of the router's whole process tree over the run, divided by what the client counted. Latency is measured one
request after the other on one connection, beside the same requests sent straight to a mock. Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import json
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
BODY_KB = (2, 40, 400)


@dataclass(slots=True)
class Result:
    router: str
    round: int
    requests_per_s: float
    us_per_request: float
    chunks_per_s: float
    us_per_chunk: float
    paced_chunks_per_s: float
    us_per_paced_chunk: float
    rss_mib: float
    failed: int
    latency_ms: dict[str, tuple[float, float]] = field(default_factory=dict)  # body -> p50, p99 through the router
    direct_ms: dict[str, tuple[float, float]] = field(default_factory=dict)  # the same without it


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tree(root: int) -> set[int]:
    """The process and all below it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found, grew = {root}, True
    while grew:
        grew = False
        for pid, parent in parents.items():
            if parent in found and pid not in found:
                found.add(pid)
                grew = True
    return found


def cpu_s(root: int) -> float:
    ticks = 0
    for pid in tree(root):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / CLOCK_TICKS


def rss_mib(root: int) -> float:
    pages = 0
    for pid in tree(root):
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as out:
        started = subprocess.Popen(list(command), stdout=out, stderr=out, start_new_session=True)
    try:
        yield started
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(started.pid, number)
            except ProcessLookupError:
                break
            try:
                started.wait(5)
            except subprocess.TimeoutExpired:
                continue


def wait_ready(port: int, model: str, timeout_s: float) -> None:
    """Until a chat is answered: a router may listen long before it knows its workers."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer sk-1234"}
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                answer.read()
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise SystemExit(f"no answer on port {port} within {timeout_s:g} s")


def load(args: argparse.Namespace, port: int, connections: int, seconds: float, mode: str) -> dict[str, float]:
    command = [sys.executable, str(args.load), str(port), str(connections), str(seconds), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=True)
    answer: dict[str, float] = json.JSONDecoder().raw_decode(done.stdout)[0]
    return answer


def latency(port: int, kilobytes: int, num: int, model: str) -> tuple[float, float]:
    """p50 and p99 in ms of `num` chats one after the other on one connection; each differs at its end, as a next turn does."""
    text = "x" * (kilobytes * 1024 - 200)
    samples = []
    with socket.create_connection(("127.0.0.1", port)) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(num + 5):
            content = f"{text} {number:06d}"
            body = json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}).encode()
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                f"Authorization: Bearer sk-1234\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            begin_s = time.perf_counter()
            wire.sendall(head.encode() + body)
            read_answer(wire)
            samples.append((time.perf_counter() - begin_s) * 1e3)
    samples = sorted(samples[5:])
    return samples[len(samples) // 2], samples[int(len(samples) * 0.99)]


def read_answer(wire: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data:
        data += wire.recv(65536)
    head, _, rest = data.partition(b"\r\n\r\n")
    lower = head.lower()
    if b"200" not in head.split(b"\r\n")[0]:
        raise SystemExit(f"answered {head[:200]!r}")
    at = lower.find(b"content-length:")
    if at >= 0:
        missing = int(lower[at + 15 :].split(b"\r\n")[0]) - len(rest)
        while missing > 0:
            missing -= len(wire.recv(65536))
        return
    while not rest.endswith(b"0\r\n\r\n"):
        rest += wire.recv(65536)


def measure(name: str, command: str, number: int, args: argparse.Namespace) -> Result:
    args.log_dir.mkdir(parents=True, exist_ok=True)
    ports = [free_port() for _ in range(5)]
    mock = [sys.executable, str(args.mock)]
    log = args.log_dir / f"{name}.log"
    with (
        process([*mock, str(ports[0]), "64"], log),
        process([*mock, str(ports[1]), "64"], log),
        process([*mock, str(ports[2]), "64", "20"], log),
        process([*mock, str(ports[3]), "64", "20"], log),
    ):
        time.sleep(1.0)
        fast = [f"http://127.0.0.1:{port}" for port in ports[:2]]
        paced = [f"http://127.0.0.1:{port}" for port in ports[2:4]]
        with process(fill(command, ports[4], fast), log) as router:
            wait_ready(ports[4], args.model, args.ready_timeout_s)
            load(args, ports[4], args.connections, 1.0, "full")
            before_s = cpu_s(router.pid)
            full = load(args, ports[4], args.connections, args.seconds, "full")
            full_s = cpu_s(router.pid) - before_s
            before_s = cpu_s(router.pid)
            streamed = load(args, ports[4], args.connections, args.seconds, "stream")
            streamed_s = cpu_s(router.pid) - before_s
            through = {f"{kb} KB": latency(ports[4], kb, args.samples, args.model) for kb in BODY_KB}
            direct = {f"{kb} KB": latency(ports[0], kb, args.samples, args.model) for kb in BODY_KB}
            memory = rss_mib(router.pid)
        with process(fill(command, ports[4], paced), log) as router:
            wait_ready(ports[4], args.model, args.ready_timeout_s)
            before_s = cpu_s(router.pid)
            slow = load(args, ports[4], args.paced_connections, args.seconds, "stream")
            slow_s = cpu_s(router.pid) - before_s
    return Result(
        router=name,
        round=number,
        requests_per_s=full["rps"],
        us_per_request=full_s / max(full["n"], 1) * 1e6,
        chunks_per_s=streamed["chunks_s"],
        us_per_chunk=streamed_s / max(streamed["chunks_s"] * args.seconds, 1) * 1e6,
        paced_chunks_per_s=slow["chunks_s"],
        us_per_paced_chunk=slow_s / max(slow["chunks_s"] * args.seconds, 1) * 1e6,
        rss_mib=memory,
        failed=int(full["errs"] + streamed["errs"] + slow["errs"]),
        latency_ms=through,
        direct_ms=direct,
    )


def fill(command: str, port: int, workers: Sequence[str]) -> list[str]:
    values = {"port": str(port), "port2": str(free_port()), "worker0": workers[0], "worker1": workers[1]}
    return [part.format(**values) for part in shlex.split(command)]


def markdown(results: Sequence[Result]) -> str:
    """Medians over the rounds."""
    lines = [
        "| router | req/s | CPU us/request | chunks/s | CPU us/chunk | CPU us/chunk paced | added ms p50 (p99) "
        + " | ".join(f"{kb} KB" for kb in BODY_KB)
        + " | RSS MiB | failed |",
        "|---|--:|--:|--:|--:|--:|" + "--:|" * len(BODY_KB) + "--:|--:|",
    ]
    for name in dict.fromkeys(result.router for result in results):
        mine = [result for result in results if result.router == name]

        def mid(field_name: str, mine: Sequence[Result] = mine) -> float:
            return statistics.median(getattr(result, field_name) for result in mine)

        added = []
        for kb in BODY_KB:
            body = f"{kb} KB"
            p50 = statistics.median(r.latency_ms[body][0] - r.direct_ms[body][0] for r in mine)
            p99 = statistics.median(r.latency_ms[body][1] - r.direct_ms[body][1] for r in mine)
            added.append(f"{p50:.2f} ({p99:.2f})")
        lines.append(
            f"| {name} | {mid('requests_per_s'):,.0f} | {mid('us_per_request'):,.0f} | {mid('chunks_per_s'):,.0f} | "
            f"{mid('us_per_chunk'):.1f} | {mid('us_per_paced_chunk'):.1f} | {' | '.join(added)} | {mid('rss_mib'):.0f} | "
            f"{sum(r.failed for r in mine)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--mock", type=Path, required=True)
    parser.add_argument("--load", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--paced-connections", type=int, default=200)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--model", default="mock")
    parser.add_argument("--ready-timeout-s", type=float, default=120.0)
    parser.add_argument("--log-dir", type=Path, default=Path("build/gateway_overhead"))
    parser.add_argument("--out", type=Path, default=Path("build/gateway_overhead/result"))
    args = parser.parse_args()
    routers = dict(given.split("=", 1) for given in args.router)
    results: list[Result] = []
    for number in range(args.rounds):
        for name in routers if number % 2 == 0 else reversed(list(routers)):
            results.append(measure(name, routers[name], number, args))
            print(json.dumps(asdict(results[-1])), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps([asdict(result) for result in results], indent=1))
    args.out.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
