"""Two gateways behind HAProxy share a store and are restarted one after the other under load. No request may fail.

    python -m bench run rolling_restart                       PostgreSQL, 3 rounds of two restarts, about a minute
    python -m bench run rolling_restart --store sqlite

A restart is what docs/gateway.md says: SIGTERM, wait until the process has ended, start it, wait until `/ready` returns 200. Two
mock workers (bench/support/mock_worker.py) answer with streams of 2 s and whole answers after 0.2 s. Clients send both. Half of
them keep their connection; the others open one for each request. Every fourth request has a body of 256 KiB, more than HAProxy can
hold to send it a second time.

The run fails if a request gets another status than 200, an answer is not complete, or an answer has not exactly one ledger row.
"""

from __future__ import annotations

import argparse
import http.client
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench.contract import Needs, Report, Result
from bench.support.gateway_pair import STORES, GatewayPair, check_installed, gateway_pair, mock_workers

NAME = "rolling_restart"
HELP = "failed requests while two gateways behind HAProxy are restarted one after the other"
NEEDS = Needs(packages=("msgspec", "uvloop"), programs="haproxy; PostgreSQL with --store postgres")
_CHUNKS, _CHUNK_MS, _WHOLE_MS = 40, 50, 200
_LARGE_BODY_CHARS = 256 << 10
_BETWEEN_S = 1.0  # load on both gateways before the next restart


@dataclass
class Answers:
    """What clients got."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    complete: list[str] = field(default_factory=list)  # their ids
    streamed: int = 0
    failures: Counter[str] = field(default_factory=Counter)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", choices=STORES, default="postgres", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="restarts of each gateway (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--notice-s", type=float, default=2.0, help="--drain-notice-s of the gateways (default: 2)")
    parser.add_argument("--log-dir", type=Path, default=Path("build/rolling_restart"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    check_installed([args.store])
    options = ("--chunks", _CHUNKS, "--delay-ms", _CHUNK_MS, "--whole-ms", _WHOLE_MS)
    with mock_workers(2, args.log_dir / "worker.log", *options) as workers:
        config = "".join(f'[[worker]]\nurl = "{url}"\ndialect = "openai"\n' for url in workers)
        gateway_options = ["--drain-notice-s", args.notice_s] if args.notice_s else []
        with gateway_pair(args.store, config, args.log_dir, gateway_options) as pair:
            answers, statuses, took_s = _restart_all(args, pair)
            for gateway in pair.gateways:
                statuses.append(gateway.stop())
            rows = _rows(pair.store)
    return _judge(args, answers, statuses, took_s, rows)


def _restart_all(args: argparse.Namespace, pair: GatewayPair) -> tuple[Answers, list[int], list[float]]:
    """Restart the gateways under load. Return the answers, the exit statuses, and the time of each restart."""
    answers, stop = Answers(), threading.Event()
    threads = [
        threading.Thread(target=_client, args=(pair.port, number, answers, stop)) for number in range(args.clients)
    ]
    for thread in threads:
        thread.start()
    statuses, took_s = [], []
    try:
        time.sleep(_BETWEEN_S)
        for _ in range(args.rounds):
            for gateway in pair.gateways:
                began_s = time.monotonic()
                statuses.append(gateway.stop())
                gateway.start()
                gateway.wait_until_ready()
                took_s.append(time.monotonic() - began_s)
                print(f"{len(answers.complete)} complete answers, failures: {dict(answers.failures)}", flush=True)
                time.sleep(_BETWEEN_S)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    return answers, statuses, took_s


def _client(port: int, number: int, answers: Answers, stop: threading.Event) -> None:
    """Send requests until `stop`. Clients with an even number keep their connection, as SDKs do."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    sent = 0
    while not stop.is_set():
        request_id, streams = f"c{number}-{sent}", sent % 3 == 0
        failure = _ask(connection, request_id, streams, large=sent % 4 == 0)
        with answers.lock:
            if failure:
                answers.failures[failure] += 1
            else:
                answers.complete.append(request_id)
                answers.streamed += streams
        sent += 1
        if failure or number % 2:
            connection.close()
    connection.close()


def _ask(connection: http.client.HTTPConnection, request_id: str, streams: bool, large: bool) -> str:
    """Send a chat. Return why its answer is not complete, or an empty text."""
    text = request_id + "x" * (_LARGE_BODY_CHARS if large else 0)
    body = {"model": "mock", "stream": streams, "messages": [{"role": "user", "content": text}]}
    headers = {"content-type": "application/json", "x-request-id": request_id}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = response.read()
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__} {'stream' if streams else 'whole'}"
    if response.status != 200:
        return f"{response.status} {answer[:120].decode(errors='replace')}"
    if streams:
        is_complete = answer.count(b'"tok') == _CHUNKS and answer.rstrip().endswith(b"data: [DONE]")
    else:
        is_complete = json.loads(answer)["usage"]["completion_tokens"] == _CHUNKS
    return "" if is_complete else "an answer that is not complete"


def _rows(location: str) -> Counter[str]:
    """Return how many ledger rows with status 200 each id has."""
    from stoker.gateway.store.location import StoreLocation

    store = StoreLocation(location, Path()).open()
    with store.snapshot() as reader:
        found = Counter(str(name) for (name,) in reader.execute("SELECT x_request_id FROM usage WHERE status = 200"))
    store.close()
    return found


def _judge(
    args: argparse.Namespace, answers: Answers, statuses: list[int], took_s: list[float], rows: Counter[str]
) -> Report:
    failed = sum(answers.failures.values())
    not_once = [name for name in answers.complete if rows[name] != 1]
    case = f"{args.store}, {len(took_s)} restarts, {args.clients} clients"
    problems = [f"{count} requests failed: {why}" for why, count in answers.failures.most_common()]
    problems += [f"{len(not_once)} answers do not have one ledger row: {not_once[:3]}"] if not_once else []
    problems += [f"gateways ended with the statuses {statuses}; 0 is a drain"] if any(statuses) else []
    results = [
        Result(
            case, "complete answers", "answers", len(answers.complete), "higher", notes=f"{answers.streamed} streams"
        ),
        Result(case, "failed requests", "requests", failed),
        Result(case, "answers without exactly one ledger row", "answers", len(not_once)),
        Result(case, "longest restart", "s", round(max(took_s), 1)),
    ]
    return Report(results, {"failures": answers.failures, "took_s": took_s}, problems)
