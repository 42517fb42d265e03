"""What the dashboard costs the gateway: CPU time for each request, without a viewer and with one.

    python -m bench run dashboard_cost --workers 1 --workers 64 --seconds 30

Mock workers stand behind the gateway, which has no requests except health checks, and a small steady load of streams if `--rate`
is given. The viewer does what the page does: it reads /admin/stream, and the fleet every 2 s. The arms alternate over the rounds:
without a viewer, and with one on each page. The target is at most 0.02 cores more with a viewer. The time for a request and for a
piece of a stream is that of the classes alone, in this process.
"""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
import tempfile
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

from bench.contract import Needs, Report, Result
from bench.support.processes import (
    cpu_s,
    free_ports,
    python_module,
    started,
    stoker_command,
    wait_for_http,
    wait_for_port,
)

NAME = "dashboard_cost"
HELP = "CPU time of the gateway without and with a viewer of the dashboard"
NEEDS = Needs(packages=("msgspec", "uvloop"))
MOST_CORES = 0.02
BLOCK_TOKENS, REQUESTS, PIECES = 16, 2_560, 500_000
START_S = 60.0
# What each page of the dashboard reads besides the stream: path -> seconds between two reads.
PAGES: dict[str, dict[str, float]] = {
    "no viewer": {},
    "Now": {},
    "Fleet": {"/admin/fleet": 2.0},
    "KV": {"/admin/kv": 5.0, "/admin/misses": 5.0},
    "Requests": {"/admin/requests?n=100": 2.0},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, action="append", default=[], help="default: 1 and 64; may be repeated")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each arm (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second (default: %(default)s)")
    parser.add_argument("--log-dir", type=Path, default=Path("build/dashboard_cost"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    results, details = _own_times(), []
    for count in args.workers or [1, 64]:
        cores = _measure(count, args)
        details.append({"workers": count, "cores": cores})
        idle = statistics.median(cores["no viewer"])
        for page in PAGES:
            value = statistics.median(cores[page])
            case = f"{count} workers, {args.rate:g} requests/s, {page}"
            results.append(Result(case, "CPU time of the gateway", "cores", value))
            if page != "no viewer":
                results.append(Result(case, "more than without a viewer", "cores", max(0.0, value - idle)))
    problems = [
        f"{one.case}: {one.value:.3f} cores more, above {MOST_CORES}"
        for one in results
        if one.metric.startswith("more") and one.value > MOST_CORES
    ]
    return Report(results, details, problems)


def _own_times() -> list[Result]:
    """Return the time that the series, the lists and the reuse curve take for a request, and the histogram for a piece."""
    from stoker.base.histogram import Histogram
    from stoker.fleet.fleet import Fleet
    from stoker.fleet.load_book import LoadBook
    from stoker.gateway.admission.prices import PriceList
    from stoker.gateway.insight.canary_watch import no_canaries
    from stoker.gateway.insight.fleet_gauges import read_fleet_gauges
    from stoker.gateway.insight.insight_book import InsightBook
    from stoker.gateway.insight.latency_goals import LatencyGoals
    from stoker.gateway.insight.request_digest import RequestTimes
    from stoker.gateway.records.metrics import GatewayMetrics
    from stoker.gateway.records.usage_row import UsageRow
    from stoker.routing.query import RouteQuery

    results = []
    for num_tokens in (1_000, 16_000, 128_000):
        metrics = GatewayMetrics()
        gauges = partial(read_fleet_gauges, Fleet(), LoadBook(), time.monotonic, lambda: 0, lambda: 0)
        book = InsightBook(metrics, PriceList(), LatencyGoals(), gauges, no_canaries())
        numbers = random.Random(1)
        keys = [numbers.getrandbits(64) for _ in range(num_tokens // BLOCK_TOKENS)]
        query = RouteQuery(model="m", keys=keys, block_tokens=BLOCK_TOKENS, num_tokens=num_tokens)
        row = UsageRow("r", 1.0, "k", "t", "m", "t:s", "w", "chat", 200, num_tokens, 0, 99, 100.0, 900.0)
        began_s = time.process_time()
        for _ in range(REQUESTS):
            book.ended(row, None, query, RequestTimes(0.0, 0.01, None, 0.1), 0)
        book.tick(1.0)
        us = 1e6 * (time.process_time() - began_s) / REQUESTS
        results.append(Result(f"a request of {num_tokens} tokens", "CPU time of the dashboard's data", "us", us))
    histogram, clock = Histogram(GatewayMetrics().itl_s.bounds), time.monotonic
    began_s = time.process_time()
    for _ in range(PIECES):
        histogram.observe(clock())
    us = 1e6 * (time.process_time() - began_s) / PIECES
    return [*results, Result("a piece of a stream", "CPU time of the dashboard's data", "us", us)]


def _measure(count: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the cores that the gateway used in each round, by page."""
    port, worker = free_ports(2)
    mock = python_module("bench.support.mock_worker", worker, "--chunks", 32, "--delay-ms", 5, "--addresses", count)
    found: dict[str, list[float]] = {page: [] for page in PAGES}
    with tempfile.TemporaryDirectory(prefix="stoker-dashboard-") as folder:
        token = Path(folder) / "token"
        token.write_text("the-admin-token-of-this-benchmark")
        # One mock process stands for all workers, with a loopback address for each.
        urls = [f"--worker http://127.0.0.{number + 1}:{worker},dialect=openai" for number in range(count)]
        command = f"{stoker_command()} gateway --port {port} {' '.join(urls)} --admin-token-file {token} --store none"
        log = args.log_dir / f"{count}.log"
        with started(mock, log), started(shlex.split(f"{command} --no-request-log"), log) as gateway:
            wait_for_port(worker)
            wait_for_http(f"http://127.0.0.1:{port}/ready", gateway, "the gateway", START_S)
            stop = threading.Event()
            load = threading.Thread(target=_load, args=(port, args.rate, stop), daemon=True)
            load.start()
            time.sleep(2.0)
            for number in range(args.rounds):
                for page in PAGES if number % 2 == 0 else reversed(PAGES):
                    found[page].append(_arm(port, token.read_text(), page, gateway.pid, args.seconds))
            stop.set()
            load.join(30.0)
    return found


def _arm(port: int, token: str, page: str, pid: int, seconds: float) -> float:
    stop = threading.Event()
    readers = [threading.Thread(target=_poll, args=(port, token, *one, stop)) for one in PAGES[page].items()]
    if page != "no viewer":
        readers.append(threading.Thread(target=_watch, args=(port, token, stop)))
    for reader in readers:
        reader.start()
    time.sleep(1.0)
    before, began_s = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    cores = (cpu_s(pid) - before) / (time.monotonic() - began_s)
    stop.set()
    for reader in readers:
        reader.join(30.0)
    return cores


def _get(port: int, token: str, path: str) -> urllib.request.Request:
    return urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {token}"})


def _watch(port: int, token: str, stop: threading.Event) -> None:
    with urllib.request.urlopen(_get(port, token, "/admin/stream"), timeout=30.0) as stream:
        while not stop.is_set() and stream.readline():
            pass


def _poll(port: int, token: str, path: str, every_s: float, stop: threading.Event) -> None:
    while not stop.wait(every_s):
        with urllib.request.urlopen(_get(port, token, path), timeout=30.0) as answer:
            answer.read()


def _load(port: int, rate: float, stop: threading.Event) -> None:
    """Send streamed chats one after the other, at most `rate` per second."""
    body = b'{"model":"mock","stream":true,"user":"u","messages":[{"role":"user","content":"%b"}]}' % (b"word " * 400)
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
    )
    senders = [threading.Thread(target=_send, args=(request, 4 / rate, stop), daemon=True) for _ in range(4)]
    if rate:
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()


def _send(request: urllib.request.Request, every_s: float, stop: threading.Event) -> None:
    while not stop.wait(every_s):
        try:
            with urllib.request.urlopen(request, timeout=30.0) as answer:
                answer.read()
        except (OSError, urllib.error.URLError):
            continue
