"""Drain a worker with running streams: how soon it is empty, and whether clients notice anything.

    python -m bench run move_streams                       32 streams of SmolLM2 on two workers
    python -m bench run move_streams --streams 8 --model FOLDER

Two workers are behind a gateway. One is drained, so that all streams run on the other. After some tokens, the first one gets
requests again, and the other one is drained with `move=1`. The time until the drained worker runs no request is measured. Every
answer is compared with that of the same request on an undisturbed fleet.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.contract import BenchmarkError, Needs, Report, Result
from bench.support.processes import free_ports, python_module, started, wait_for_http

NAME = "move_streams"
HELP = "time until a drained worker is empty, and identity of the moved streams"
NEEDS = Needs(packages=("torch", "aiohttp", "msgspec"))
_TOKEN = "a-token-for-move-streams"
_BEGUN_EVENTS = 8
_WAIT_S = 600.0
_TARGET_S = 2.0


@dataclass
class Stream:
    """One client's stream."""

    port: int
    body: dict[str, Any]
    events: list[str] = field(default_factory=list)
    error: str = ""
    longest_gap_s: float = 0.0

    def run(self) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(self.body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_WAIT_S) as answer:
                last_s = None
                for line in answer:
                    if line.startswith(b"data: "):
                        now_s = time.monotonic()
                        self.longest_gap_s = max(self.longest_gap_s, now_s - (last_s or now_s))
                        last_s = now_s
                        self.events.append(line.decode().strip())
        except OSError as error:
            self.error = repr(error)

    @property
    def text(self) -> str:
        """The answer, or what is wrong with it."""
        if self.error or not self.events or self.events[-1] != "data: [DONE]":
            return self.error or "the stream has no end"
        chunks = [json.loads(event.removeprefix("data: ")) for event in self.events[:-1]]
        if any("error" in chunk for chunk in chunks):
            return self.events[-2]
        return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])

    @property
    def is_complete(self) -> bool:
        return (
            not self.error and self.events[-1:] == ["data: [DONE]"] and not any('"error"' in one for one in self.events)
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, default: %(default)s")
    parser.add_argument("--model", default="", help="default: SmolLM2")
    parser.add_argument("--dtype", default="float32", help="default: %(default)s")
    parser.add_argument("--log-dir", type=Path, default=Path("build/move_streams"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    report = Report()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        (folder / "token").write_text(_TOKEN)
        gateway_port, *ports = free_ports(3)
        model = [args.model] if args.model else []
        workers = []
        for port in ports:
            options = ["--port", str(port), "--threads", "1", "--dtype", args.dtype, "--served-name", "m"]
            command = python_module("stoker.cli.main", "serve", *model, *options)
            workers.append(held.enter_context(started(command, args.log_dir / f"worker-{port}.log")))
        for port, worker in zip(ports, workers, strict=True):
            wait_for_http(f"http://127.0.0.1:{port}/ready", worker, "worker", 300)
        command = python_module("stoker.cli.main", "gateway", "--port", gateway_port, "--store", "none")
        command += ["--admin-token-file", str(folder / "token")]
        for port in ports:
            command += ["--worker", f"http://127.0.0.1:{port}"]
        gateway = held.enter_context(started(command, args.log_dir / "gateway.log"))
        wait_for_http(f"http://127.0.0.1:{gateway_port}/ready", gateway, "gateway", 60)
        _measure(args, gateway_port, ports, report)
    return report


def _measure(args: argparse.Namespace, gateway: int, ports: list[int], report: Report) -> None:
    bodies = [
        {
            "model": "m",
            "messages": [{"role": "user", "content": f"Write a long story about the number {i} and the sea."}],
            "max_tokens": args.tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        for i in range(args.streams)
    ]
    expected = _all([Stream(gateway, body) for body in bodies])
    _admin(gateway, f"drain?worker=127.0.0.1:{ports[1]}")
    streams = [Stream(gateway, body) for body in bodies]
    threads = _begin(streams)
    _wait(lambda: all(len(one.events) >= _BEGUN_EVENTS or one.error for one in streams), "the streams do not begin")
    num_over = sum(one.events[-1:] == ["data: [DONE]"] for one in streams)
    _admin(gateway, f"undrain?worker=127.0.0.1:{ports[1]}")
    _wait(lambda: _fleet(gateway)[f"127.0.0.1:{ports[1]}"]["usable"], "the second worker is not usable")
    began_s = time.monotonic()
    _admin(gateway, f"drain?worker=127.0.0.1:{ports[0]}&move=1")
    _wait(lambda: not _running(ports[0]), "the drained worker is not empty")
    empty_s = time.monotonic() - began_s
    for thread in threads:
        thread.join(_WAIT_S)
    failed = sum(not one.is_complete for one in streams)
    different = sum(one.text != two.text for one, two in zip(streams, expected, strict=True))
    name = Path(args.model).name + " model" if args.model else "SmolLM2"
    case = f"{args.streams} greedy streams, {name}, {args.dtype}"
    report.results += [
        Result(case, "time until the drained worker is empty", "s", empty_s, notes=f"target {_TARGET_S:g} s"),
        Result(case, "failed streams", "streams", failed, notes=f"{num_over} had ended before"),
        Result(case, "streams that differ from an undisturbed run", "streams", different),
        Result(case, "longest gap between two events", "s", max(one.longest_gap_s for one in streams)),
    ]
    if failed or different or empty_s > _TARGET_S or num_over:
        report.problems.append(
            f"empty after {empty_s:.2f} s, {failed} failed, {different} differ, {num_over} were too short"
        )


def _begin(streams: list[Stream]) -> list[threading.Thread]:
    threads = [threading.Thread(target=one.run, daemon=True) for one in streams]
    for thread in threads:
        thread.start()
    return threads


def _all(streams: list[Stream]) -> list[Stream]:
    for thread in _begin(streams):
        thread.join(_WAIT_S)
    return streams


def _wait(condition: Any, trouble: str) -> None:
    until_s = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > until_s:
            raise BenchmarkError(f"{trouble} after {_WAIT_S:g} s")
        time.sleep(0.02)


def _admin(gateway: int, path: str, method: str = "POST") -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{gateway}/admin/{path}",
        None if method == "GET" else b"",
        {"Authorization": f"Bearer {_TOKEN}"},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def _fleet(gateway: int) -> dict[str, Any]:
    return {one["worker"]: one for one in _admin(gateway, "fleet", "GET")["workers"]}


def _running(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as answer:
        return int(json.loads(answer.read())["running_requests"])
