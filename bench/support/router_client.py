"""Load on a router: closed-loop load from another process, and latency over one plain socket."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

from bench.contract import BenchmarkError
from bench.support.processes import environment, python_module

_NOT_COUNTED = 5  # requests that open connections and fill caches


def wait_until_answering(port: int, model: str, timeout_s: float) -> None:
    """Wait until a chat is answered: a router may listen long before it knows its workers."""
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
    raise BenchmarkError(f"no answer on port {port} within {timeout_s:g} s")


def closed_loop(port: int, connections: int, seconds: float, mode: str, model: str = "mock") -> dict[str, Any]:
    """Run bench/support/closed_loop_client.py in a process of its own; return its counts."""
    command = python_module("bench.support.closed_loop_client", port, connections, seconds, mode, "--model", model)
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False, env=environment())
    if done.returncode:
        raise BenchmarkError(f"the client failed: {done.stderr[-400:]}")
    counted: dict[str, Any] = json.loads(done.stdout)
    if not counted["requests"] and not counted["chunks"]:
        raise BenchmarkError(f"no request was answered within {seconds:g} s; {counted['first_failure']}")
    return counted


def latency_ms(port: int, body_kb: int, count: int, model: str) -> tuple[float, float]:
    """p50 and p99 of `count` chats one after the other on one connection. Each differs at its end, as a next turn does."""
    text = "x" * (body_kb * 1024 - 200)
    samples = []
    with socket.create_connection(("127.0.0.1", port)) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(count + _NOT_COUNTED):
            content = f"{text} {number:06d}"
            body = json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}).encode()
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                f"Authorization: Bearer sk-1234\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            begin_s = time.perf_counter()
            wire.sendall(head.encode() + body)
            _read_answer(wire)
            samples.append((time.perf_counter() - begin_s) * 1e3)
    samples = sorted(samples[_NOT_COUNTED:])
    return samples[len(samples) // 2], samples[int(len(samples) * 0.99)]


def _read_answer(wire: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _received(wire)
    head, _, rest = data.partition(b"\r\n\r\n")
    if b"200" not in head.split(b"\r\n")[0]:
        raise BenchmarkError(f"the router answered {head[:200]!r}")
    lower = head.lower()
    at = lower.find(b"content-length:")
    if at >= 0:
        missing = int(lower[at + 15 :].split(b"\r\n")[0]) - len(rest)
        while missing > 0:
            missing -= len(_received(wire))
        return
    while not rest.endswith(b"0\r\n\r\n"):
        rest += _received(wire)


def _received(wire: socket.socket) -> bytes:
    data = wire.recv(65536)
    if not data:
        raise BenchmarkError("the router closed the connection in the middle of an answer")
    return data
