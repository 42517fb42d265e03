"""Two gateways behind HAProxy share a store, and one of them is killed with SIGKILL again and again under load.

    python -m bench run gateway_kills                                       SQLite, 50 kills, about 4 minutes
    python -m bench run gateway_kills --store sqlite --store postgres       then also with a PostgreSQL server of its own

Two mock workers (bench/support/mock_worker.py) answer. Clients send chats, half of them streamed, with an id each; others send as
fast as they can with a key that is limited to `--limit` requests per minute. A killed gateway is started again at once.

Afterwards, each complete answer must have exactly one row in the ledger with the tokens that the client got, each answer that had
begun must have a row, no id may have two, and the sums of hours must agree with the rows. The limited key may be admitted the
refilled minutes, the first minute, and for each kill what a gateway can use between two reports of its lease (one second).
bench/support/gateway_pair.py starts the gateways and HAProxy.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.contract import Needs, Report, Result
from bench.support.gateway_pair import STORES, Gateway, check_installed, gateway_pair, mock_workers

NAME = "gateway_kills"
HELP = "ledger rows and limits while two gateways behind HAProxy are killed again and again"
NEEDS = Needs(packages=("msgspec", "uvloop"), programs="haproxy; PostgreSQL with --store postgres")
KEYS = {"free": "sk-free", "limited": "sk-limited"}
_CHUNKS, _CHUNK_MS = 16, 5
_LEASE_S = 1.0


@dataclass
class Tally:
    """What clients saw, by request id."""

    started: dict[str, int] = field(default_factory=dict)  # pieces of an answer that had begun
    complete: dict[str, int] = field(default_factory=dict)  # completion tokens of a complete answer
    statuses: Counter[str] = field(default_factory=Counter)  # of the limited key
    lost: int = 0
    first_admitted_s: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", action="append", choices=STORES, help="default: sqlite; repeatable")
    parser.add_argument("--kills", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--limit", type=int, default=600, help="requests per minute of the limited key")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--log-dir", type=Path, default=Path("build/gateway_kills"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    stores = args.store or ["sqlite"]
    check_installed(stores)
    report = Report(details=[])
    for store in stores:
        found = _run(args, store)
        report.results += found.results
        report.details += found.details
        report.problems += found.problems
    return report


def _run(args: argparse.Namespace, kind: str) -> Report:
    options = ("--chunks", _CHUNKS, "--delay-ms", _CHUNK_MS, "--whole-ms", 20)
    with (
        mock_workers(2, args.log_dir / "worker.log", *options) as workers,
        gateway_pair(kind, _config(workers, args.limit), args.log_dir) as pair,
    ):
        tally, took_s = _storm(args, pair.gateways, pair.port)
        for gateway in pair.gateways:
            gateway.stop()
        rows, sums = _ledger(pair.store)
    return _judge(args, kind, tally, took_s, rows, sums)


def _storm(args: argparse.Namespace, gateways: list[Gateway], port: int) -> tuple[Tally, float]:
    tally, stop, lock = Tally(), threading.Event(), threading.Lock()
    threads = [
        threading.Thread(target=_client, args=(port, f"c{one}", tally, stop, lock)) for one in range(args.clients)
    ]
    threads += [threading.Thread(target=_limited, args=(port, f"l{one}", tally, stop, lock)) for one in range(2)]
    for thread in threads:
        thread.start()
    rng, began_s = random.Random(args.seed), time.monotonic()
    for number in range(args.kills):
        time.sleep(rng.uniform(0.5, 1.5))
        gateway = rng.choice(gateways)
        gateway.kill()
        gateway.start()
        gateway.wait_until_ready()
        if number % 10 == 9:
            print(f"{number + 1} kills, {len(tally.complete)} complete answers, {tally.lost} lost", flush=True)
    time.sleep(2.0)
    took_s = time.monotonic() - (tally.first_admitted_s or began_s)
    stop.set()
    for thread in threads:
        thread.join(60)
    time.sleep(1.0)
    return tally, took_s


def _client(port: int, name: str, tally: Tally, stop: threading.Event, lock: threading.Lock) -> None:
    number = 0
    while not stop.is_set():
        request_id, streams = f"{name}-{number}", number % 2 == 0
        number += 1
        pieces = _ask(port, request_id, KEYS["free"], streams, tally, lock)
        if pieces is None:
            time.sleep(0.05)


def _limited(port: int, name: str, tally: Tally, stop: threading.Event, lock: threading.Lock) -> None:
    number = 0
    while not stop.is_set():
        status = _status(port, f"{name}-{number}")
        with lock:
            tally.statuses[status] += 1
            if status == "200" and tally.first_admitted_s is None:
                tally.first_admitted_s = time.monotonic()
        number += 1
        time.sleep(0.005 if status != "429" else 0.02)


def _ask(port: int, request_id: str, key: str, streams: bool, tally: Tally, lock: threading.Lock) -> int | None:
    """Send a chat. Return the tokens of a complete answer, or None."""
    pieces = 0
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        response = _send(connection, request_id, key, streams)
        if response.status != 200:
            response.read()
            return None
        with lock:
            tally.started[request_id] = 0
        if not streams:
            tokens = int(json.loads(response.read())["usage"]["completion_tokens"])
            with lock:
                tally.complete[request_id] = tokens
            return tokens
        while line := response.readline():
            pieces += b'"content": "tok' in line or b'"content":"tok' in line
            if line.startswith(b"data: [DONE]"):
                with lock:
                    tally.complete[request_id] = pieces
                return pieces
    except (OSError, http.client.HTTPException, ValueError):
        pass
    finally:
        connection.close()
    with lock:
        tally.lost += 1
        if request_id in tally.started:
            tally.started[request_id] = pieces
    return None


def _status(port: int, request_id: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        response = _send(connection, request_id, KEYS["limited"], False)
        response.read()
        return str(response.status)
    except (OSError, http.client.HTTPException):
        return "lost"
    finally:
        connection.close()


def _send(connection: http.client.HTTPConnection, request_id: str, key: str, streams: bool) -> http.client.HTTPResponse:
    body = {"model": "mock", "stream": streams, "messages": [{"role": "user", "content": request_id}]}
    headers = {"content-type": "application/json", "x-request-id": request_id, "authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection.getresponse()


def _config(workers: list[str], limit: int) -> str:
    lines = []
    for url in workers:
        lines += ["[[worker]]", f'url = "{url}"', 'dialect = "openai"']
    for name, key in KEYS.items():
        lines += ["[[key]]", f'name = "{name}"', f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
        lines += [f"requests_per_minute = {limit}"] if name == "limited" else []
    return "\n".join(lines) + "\n"


def _ledger(location: str) -> tuple[dict[str, list[tuple[int, int]]], int]:
    """Return status and completion tokens of all rows by the client's id, and the requests in the sums of hours."""
    from stoker.gateway.store.location import StoreLocation

    store = StoreLocation(location, Path()).open()
    rows: dict[str, list[tuple[int, int]]] = {}
    with store.snapshot() as reader:
        for name, status, tokens in reader.execute("SELECT x_request_id, status, completion_tokens FROM usage"):
            rows.setdefault(str(name), []).append((int(status), int(tokens)))
        ((sums,),) = reader.execute("SELECT SUM(requests) FROM usage_sums WHERE span_s = 3600")
    store.close()
    return rows, int(sums)


def _judge(
    args: argparse.Namespace,
    kind: str,
    tally: Tally,
    took_s: float,
    rows: dict[str, list[tuple[int, int]]],
    sums: int,
) -> Report:
    missing = [one for one in tally.started if one not in rows]
    doubled = [one for one, found in rows.items() if len(found) > 1]
    wrong = [one for one, tokens in tally.complete.items() if one in rows and rows[one][0] != (200, tokens)]
    admitted = tally.statuses["200"]
    refilled = args.limit * (1 + took_s / 60)
    overshoot = admitted - refilled
    case = f"{kind}, {args.kills} kills"
    total = sum(len(found) for found in rows.values())
    problems = [
        f"{len(found)} rows {what}: {found[:3]}"
        for what, found in (("missing", missing), ("doubled", doubled), ("wrong", wrong))
        if found
    ]
    allowed = args.kills * args.limit / 60 * _LEASE_S
    if overshoot > allowed:
        problems.append(
            f"the limited key was admitted {overshoot:.0f} requests above its limit; {allowed:.0f} are leases"
        )
    if sums != total:
        problems.append(f"the sums of hours have {sums} requests, the ledger has {total}")
    details: list[dict[str, Any]] = [
        {"limited": dict(tally.statuses), "took_s": took_s, "lost": tally.lost, "rows": total}
    ]
    results = [
        Result(case, "complete answers", "answers", len(tally.complete), "higher"),
        Result(case, "ledger rows missing", "rows", len(missing)),
        Result(case, "ledger rows doubled", "rows", len(doubled)),
        Result(case, "ledger rows with other counts", "rows", len(wrong)),
        Result(case, "answers lost with their gateway", "answers", tally.lost),
        Result(
            case, "limited key: admitted over its limit", "share", admitted / refilled, notes=f"{admitted} admitted"
        ),
    ]
    return Report(results, details, problems)
