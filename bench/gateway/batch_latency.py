"""What a batch costs interactive clients: their time to first token with and without a batch in the background.

    python -m bench run batch_latency --requests 60 --rate 0.3

One worker and one gateway with a store. Interactive requests arrive at random times, with gaps in which the lines of the batch
run. Both arms have the same times and other prompts, so that none is cached. The arms alternate over the rounds. The target is a
p99 with a batch of at most 1.05 times the p99 without one. Client, gateway and worker share the machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shlex
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench.contract import BenchmarkError, Needs, Report, Result
from bench.support.processes import free_ports, started, stoker_command, wait_for_http

NAME = "batch_latency"
HELP = "interactive time to first token with and without a batch in the background"
NEEDS = Needs(packages=("torch", "msgspec", "uvloop"))
TARGET = 1 / 1.05
WORDS = ["river", "stone", "lamp", "garden", "signal", "copper", "winter", "orbit", "pepper", "violin"]
BOUNDARY = "batch-latency"
START_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="", help="folder or name of a model (default: the default of `stoker serve`)"
    )
    parser.add_argument(
        "--requests", type=int, default=60, help="interactive requests of each arm (default: %(default)s)"
    )
    parser.add_argument("--rate", type=float, default=0.3, help="requests per second (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--prompt-words", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--line-words", type=int, default=30, help="of a prompt of the batch (default: %(default)s)")
    parser.add_argument("--line-tokens", type=int, default=12, help="of each line of the batch (default: %(default)s)")
    parser.add_argument("--worker-options", default="--threads 1", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--log-dir", type=Path, default=Path("build/batch_latency"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    worker, gateway = free_ports(2)
    stoker = shlex.split(stoker_command())
    with tempfile.TemporaryDirectory(prefix="stoker-batch-") as folder:
        serve = [*stoker, "serve", *filter(None, [args.model]), "--port", str(worker), "--served-name", "m"]
        front = [*stoker, "gateway", "--port", str(gateway), "--worker", f"http://127.0.0.1:{worker}"]
        with (
            started([*serve, *shlex.split(args.worker_options)], args.log_dir / "worker.log") as server,
            started([*front, "--store", str(Path(folder) / "store.db")], args.log_dir / "gateway.log") as router,
        ):
            wait_for_http(f"http://127.0.0.1:{worker}/ready", server, "the worker", START_S)
            wait_for_http(f"http://127.0.0.1:{gateway}/ready", router, "the gateway", START_S)
            _interactive(gateway, args, 5, args.seed + 1000, "warm-up")
            alone, beside, lines = [], [], 0
            for number in range(args.rounds):
                count, seed = args.requests // args.rounds, args.seed + number
                alone += _interactive(gateway, args, count, seed, "alone")
                batch = _begin_batch(gateway, args)
                beside += _interactive(gateway, args, count, seed, "beside")
                lines += _post(gateway, f"/v1/batches/{batch}/cancel", b"")["request_counts"]["completed"]
                _wait_ended(gateway, batch)
    return Report(_results(args, alone, beside, lines), [{"alone_ms": alone, "beside_ms": beside, "lines": lines}])


def _results(args: argparse.Namespace, alone: list[float], beside: list[float], lines: int) -> list[Result]:
    case = f"{len(beside)} requests at {args.rate:g}/s"
    found = []
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        found.append(
            Result(
                case,
                f"time to first token, {name}",
                "ms",
                _quantile(beside, share),
                competitor="without a batch",
                competitor_value=_quantile(alone, share),
                comparison="baseline",
                target=TARGET if name == "p99" else None,
            )
        )
    found.append(Result(case, "lines of the batch completed meanwhile", "lines", float(lines), better="higher"))
    found.append(Result(case, "time to first token, mean", "ms", statistics.fmean(beside), notes="with a batch"))
    return found


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _interactive(port: int, args: argparse.Namespace, count: int, seed: int, arm: str) -> list[float]:
    """Send requests at random times, with prompts of this arm only, and return their times to the first token in milliseconds."""
    rng, words = random.Random(seed), random.Random(f"{arm} {seed}")
    times: list[float] = []
    threads = []
    for _ in range(count):
        time.sleep(rng.expovariate(args.rate))
        text = " ".join(words.choice(WORDS) for _ in range(args.prompt_words))
        thread = threading.Thread(target=lambda given: times.append(_ttft_ms(port, given, args)), args=(text,))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join(120)
    if len(times) != count:
        raise BenchmarkError(f"{count - len(times)} of {count} interactive requests got no answer")
    return times


def _ttft_ms(port: int, text: str, args: argparse.Namespace) -> float:
    body = {"model": "m", "stream": True, "max_tokens": args.output_tokens, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": text}]
    began_s = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise BenchmarkError(f"an interactive request got status {answer.status}: {answer.read()[:200]!r}")
        answer.readline()
        first_s = time.perf_counter()
        answer.read()
    finally:
        connection.close()
    return (first_s - began_s) * 1e3


def _begin_batch(port: int, args: argparse.Namespace) -> str:
    rng = random.Random(args.seed)
    lines = []
    for number in range(5000):
        text = " ".join(rng.choice(WORDS) for _ in range(args.line_words))
        body = {"model": "m", "max_tokens": args.line_tokens, "ignore_eos": True}
        body["messages"] = [{"role": "user", "content": text}]
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line))
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{BOUNDARY}\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
    form = f"{head}{chr(10).join(lines)}\r\n--{BOUNDARY}--\r\n"
    file = _post(port, "/v1/files", form.encode(), f"multipart/form-data; boundary={BOUNDARY}")
    new = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch: str = _post(port, "/v1/batches", json.dumps(new).encode())["id"]
    _wait_for(port, batch, ("in_progress",))
    time.sleep(2.0)  # its first lines run
    return batch


def _wait_ended(port: int, batch: str) -> None:
    _wait_for(port, batch, ("cancelled", "completed"))


def _wait_for(port: int, batch: str, statuses: tuple[str, ...]) -> None:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/batches/{batch}", timeout=60) as answer:
            if json.loads(answer.read())["status"] in statuses:
                return
        time.sleep(0.2)
    raise BenchmarkError(f"the batch did not become {' or '.join(statuses)} within 120 s")


def _post(port: int, path: str, body: bytes, kind: str = "application/json") -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"content-type": kind}, method="POST")
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())
