"""Two machines as network namespaces: a worker whose ranks are split over both, a node that is killed, and a cut cable.

Slow: it starts a dozen processes that load torch. It needs root and `ip`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from net_machines import Machine, network
from worker.real import is_alive, wait_for

LONG_S = 120.0
API_KEY = "fedcba9876543210fedcba9876543210"
STOKER = (sys.executable, "-m", "stoker.cli.main", "serve")
ASK = """
import json, sys, urllib.error, urllib.request
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.argv[3]}
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode() or None, headers)
try:
    with urllib.request.urlopen(request, timeout=60) as answer:
        print(answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.read().decode())
except OSError as error:
    print(json.dumps({"error": {"code": "connection", "message": str(error)}}))
"""


@dataclass
class Server:
    """The `stoker serve` of a machine."""

    machine: Machine
    log: Path
    process: subprocess.Popen[bytes] | None = None
    options: list[str] = field(default_factory=list)

    def serve(self, *options: str) -> None:
        self.options = list(options)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.machine.inside(*STOKER, *options), stdout=log, stderr=log)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        address = f"http://127.0.0.1:8000{path}"
        text = "" if body is None else json.dumps(body)
        command = self.machine.inside(sys.executable, "-c", ASK, address, text, API_KEY)
        return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=True).stdout)

    def kill(self) -> None:
        self.machine.kill()
        if self.process is not None:
            self.process.wait(LONG_S)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    with network("10.231.7", 2) as (head, node):
        yield Server(head, tmp_path / "head.log"), Server(node, tmp_path / "node.log")


PROMPTS = ["Hello there", "The quick brown fox", "One two three four five six seven", "x"]


def texts(server: Server) -> list[str]:
    found = []
    for number, prompt in enumerate(PROMPTS):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0.7 * (number % 2), "seed": 5}
        found.append(server.ask("/v1/completions", body)["choices"][0]["text"])
    return found


def is_ready(server: Server) -> bool:
    return "error" not in server.ask("/ready")


@pytest.mark.slow
def test_a_worker_on_two_machines_answers_like_one_process(
    servers: tuple[Server, Server], tiny_folder: Path, tmp_path: Path
) -> None:
    head, node = servers
    one = (str(tiny_folder), "--device", "cpu", "--threads", "1", "--kv-blocks", "200", "--dtype", "float64")
    head.serve(*one)
    wait_for(lambda: is_ready(head), LONG_S)
    wanted = texts(head)
    head.kill()

    files = []
    for name, text in (("--secret-file", "0123456789abcdef0123456789abcdef"), ("--api-key-file", API_KEY)):
        (tmp_path / name).write_text(text)
        files += [name, str(tmp_path / name)]
    both = (*one, *files, "--tp", "2", "--pp", "2", "--nodes", "2", "--head", f"{head.machine.address}:7000")
    node.serve(*both, "--node-rank", "1")
    head.serve(*both)
    wait_for(lambda: is_ready(head), LONG_S)
    assert texts(head) == wanted

    # A machine that loses its power: its processes are gone, and it is started again by its operator.
    pids = node.machine.pids()
    node.kill()
    lost_s = time.monotonic()
    wait_for(lambda: not is_ready(head), LONG_S)
    assert time.monotonic() - lost_s < 5.5
    assert not any(map(is_alive, pids))
    node.serve(*node.options)
    wait_for(lambda: is_ready(head), LONG_S)
    assert texts(head) == wanted

    # A cut cable closes no connection. Both sides notice it by the missing heartbeats, and find each other again.
    head.machine.cut()
    lost_s = time.monotonic()
    wait_for(lambda: not is_ready(head), LONG_S)
    assert time.monotonic() - lost_s < 6
    head.machine.mend()
    wait_for(lambda: is_ready(head), LONG_S)
    assert texts(head) == wanted

    # A stopped head stops its nodes.
    pids = [*head.machine.pids(), *node.machine.pids()]
    assert head.process is not None
    assert node.process is not None
    head.process.terminate()
    assert head.process.wait(LONG_S) == 0
    assert node.process.wait(LONG_S) == 0
    assert not any(map(is_alive, pids))
