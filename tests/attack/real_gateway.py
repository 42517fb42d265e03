"""A real `stoker gateway` process with API keys before mock workers in their own processes, and raw connections to it."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.faults.attacks import KEYS, gateway_config
from bench.support.processes import free_ports, python_module, started, wait_for_port
from bench.support.router_client import wait_until_answering

CHAT = "/v1/chat/completions"
LONG_S = 8.0  # for what takes milliseconds: only a test that fails waits so long


@dataclass
class RealGateway:
    port: int
    log: Path

    def chat(self, key: str = KEYS["paying"], headers: dict[str, str] | None = None, **fields: object) -> int:
        """Return the status of a chat."""
        body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], **fields}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{CHAT}", json.dumps(body).encode())
        sent = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", **(headers or {})}
        for name, value in sent.items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=LONG_S) as answer:
                answer.read()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.read()
            return error.code

    def health(self) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=LONG_S) as answer:
            return int(answer.status)

    def raw(self, data: bytes, address: str = "127.0.1.1") -> bytes:
        """Send bytes without closing; return what the gateway answers until it closes or pauses."""
        with self.connection(address) as wire:
            try:
                wire.sendall(data)
                answer = wire.recv(65536)
            except ConnectionError:
                return b""
            return answer

    def connection(self, address: str = "127.0.1.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), LONG_S, (address, 0))


@contextmanager
def running_gateway(folder: Path, num_workers: int) -> Iterator[RealGateway]:
    with ExitStack() as held:
        port, *worker_ports = free_ports(1 + num_workers)
        for worker_port in worker_ports:
            command = python_module("bench.support.mock_worker", worker_port, "--chunks", 2)
            held.enter_context(started(command, folder / "workers.log"))
        for worker_port in worker_ports:
            wait_for_port(worker_port)
        config = folder / "gateway.toml"
        urls = [f"http://127.0.0.1:{number}" for number in worker_ports]
        config.write_text(gateway_config(urls, KEYS, "stoker"))
        log = folder / "gateway.log"
        command = python_module("stoker.cli.main", "gateway", "--config", config, "--port", port)
        held.enter_context(started([*command, "--store", str(folder / "usage.db")], log))
        wait_until_answering(port, "mock", 60)
        yield RealGateway(port, log)
