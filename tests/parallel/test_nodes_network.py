"""Two machines as network namespaces: a worker whose ranks are split over both, a node that is killed, and a cut cable.

Slow: it starts a dozen processes that load torch. It needs root and `ip`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from worker.real import children, is_alive, wait_for

LONG_S = 120.0
API_KEY = "fedcba9876543210fedcba9876543210"
HEAD_IP, NODE_IP = "10.231.7.1", "10.231.7.2"
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


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Machine:
    """A network namespace, and the `stoker serve` in it."""

    name: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    options: list[str] = field(default_factory=list)

    def inside(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def serve(self, *options: str) -> None:
        self.options = list(options)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.inside(*STOKER, *options), stdout=log, stderr=log)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        address = f"http://127.0.0.1:8000{path}"
        text = "" if body is None else json.dumps(body)
        command = self.inside(sys.executable, "-c", ASK, address, text, API_KEY)
        return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=True).stdout)

    def pids(self) -> list[int]:
        assert self.process is not None
        return [self.process.pid, *children(self.process.pid)]

    def kill(self) -> None:
        """Kill all processes at once, as a power failure does."""
        for pid in self.pids() if self.process is not None and self.process.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        if self.process is not None:
            self.process.wait(LONG_S)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip`")
    head, node = (Machine(f"stoker-{name}-{os.getpid()}", tmp_path / f"{name}.log") for name in ("head", "node"))
    try:
        try:
            for one in (head, node):
                ip("netns", "add", one.name)
                ip("-n", one.name, "link", "set", "lo", "up")
            ip("-n", head.name, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", node.name)
            for one, address in ((head, HEAD_IP), (node, NODE_IP)):
                ip("-n", one.name, "address", "add", f"{address}/24", "dev", "cable")
                ip("-n", one.name, "link", "set", "cable", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr}")
        yield head, node
    finally:
        for one in (head, node):
            one.kill()
            subprocess.run(["ip", "netns", "del", one.name], capture_output=True, check=False)


PROMPTS = ["Hello there", "The quick brown fox", "One two three four five six seven", "x"]


def texts(machine: Machine) -> list[str]:
    found = []
    for number, prompt in enumerate(PROMPTS):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0.7 * (number % 2), "seed": 5}
        found.append(machine.ask("/v1/completions", body)["choices"][0]["text"])
    return found


def is_ready(machine: Machine) -> bool:
    return "error" not in machine.ask("/ready")


@pytest.mark.slow
def test_a_worker_on_two_machines_answers_like_one_process(
    machines: tuple[Machine, Machine], tiny_folder: Path, tmp_path: Path
) -> None:
    head, node = machines
    one = (str(tiny_folder), "--device", "cpu", "--threads", "1", "--kv-blocks", "200", "--dtype", "float64")
    head.serve(*one)
    wait_for(lambda: is_ready(head), LONG_S)
    wanted = texts(head)
    head.kill()

    files = []
    for name, text in (("--secret-file", "0123456789abcdef0123456789abcdef"), ("--api-key-file", API_KEY)):
        (tmp_path / name).write_text(text)
        files += [name, str(tmp_path / name)]
    both = (*one, *files, "--tp", "2", "--pp", "2", "--nodes", "2", "--head", f"{HEAD_IP}:7000")
    node.serve(*both, "--node-rank", "1")
    head.serve(*both)
    wait_for(lambda: is_ready(head), LONG_S)
    assert texts(head) == wanted

    # A machine that loses its power: its processes are gone, and it is started again by its operator.
    pids = node.pids()
    node.kill()
    lost_s = time.monotonic()
    wait_for(lambda: not is_ready(head), LONG_S)
    assert time.monotonic() - lost_s < 5.5
    assert not any(map(is_alive, pids))
    node.serve(*node.options)
    wait_for(lambda: is_ready(head), LONG_S)
    assert texts(head) == wanted

    # A cut cable closes no connection. Both sides notice it by the missing heartbeats, and find each other again.
    ip("-n", head.name, "link", "set", "cable", "down")
    lost_s = time.monotonic()
    wait_for(lambda: not is_ready(head), LONG_S)
    assert time.monotonic() - lost_s < 6
    ip("-n", head.name, "link", "set", "cable", "up")
    wait_for(lambda: is_ready(head), LONG_S)
    assert texts(head) == wanted

    # A stopped head stops its nodes.
    pids = [*head.pids(), *node.pids()]
    assert head.process is not None
    assert node.process is not None
    head.process.terminate()
    assert head.process.wait(LONG_S) == 0
    assert node.process.wait(LONG_S) == 0
    assert not any(map(is_alive, pids))
