"""`stoker upgrade` against real processes: a new version that answers errors stops it before the next worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

TOKEN = "the-admin-token-of-tests"
_BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
# A worker. Its second argument is the version: `good`, or `bad`, which is ready and answers every request with 500.
_WORKER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Worker(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        if sys.argv[2] == "bad":
            self.reply(500, {"error": {"message": "the new version is broken", "type": "server_error", "code": "broken"}})
            return
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        choice = {"index": 0, "delta": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
        self.reply(200, "data: " + json.dumps({**head, "choices": [choice]}) + "\\n\\ndata: [DONE]\\n\\n", "text/event-stream")

    def reply(self, status, value, kind="application/json"):
        body = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Worker).serve_forever()
"""
# What an operator's --restart does: ends the old process, starts the version that is installed now, and waits until it listens.
_RESTART = """
import os, signal, socket, subprocess, sys, time
folder, port = sys.argv[1:]
pid = int(open(f"{folder}/{port}.pid").read())
os.kill(pid, signal.SIGKILL)
version = open(f"{folder}/installed").read()
quiet = subprocess.DEVNULL  # the pipes of `stoker upgrade` must not stay open
new = subprocess.Popen([sys.executable, f"{folder}/worker.py", port, version], start_new_session=True, stdout=quiet, stderr=quiet)
open(f"{folder}/{port}.pid", "w").write(str(new.pid))
for _ in range(600):
    try:
        socket.create_connection(("127.0.0.1", int(port))).close()
        break
    except OSError:
        time.sleep(0.05)
open(f"{folder}/restarted", "a").write(port + "\\n")
"""


class RealFleet:
    """Two scripted workers behind a real gateway, with clients that send requests all the time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "token").write_text(TOKEN)
        self.admin = ["--admin-token-file", str(folder / "token")]
        (folder / "worker.py").write_text(_WORKER)
        (folder / "restart.py").write_text(_RESTART)
        (folder / "installed").write_text("good")
        (folder / "restarted").touch()
        with ExitStack() as held:
            probes = [held.enter_context(socket.socket()) for _ in range(3)]
            for probe in probes:
                probe.bind(("127.0.0.1", 0))
            self.port, *self.workers = [probe.getsockname()[1] for probe in probes]
        self.first_workers: list[subprocess.Popen[bytes]] = []
        for port in self.workers:
            worker = subprocess.Popen([sys.executable, str(folder / "worker.py"), str(port), "good"])
            self.first_workers.append(worker)
            (folder / f"{port}.pid").write_text(str(worker.pid))
        options = [f"--worker=http://127.0.0.1:{port},dialect=openai" for port in self.workers]
        self.gateway_command = [
            *self.stoker("gateway"),
            "--port",
            str(self.port),
            "--store",
            "none",
            *options,
            *self.admin,
            "--no-request-log",
            "--policy",
            "round_robin",  # the other policies keep equal prompts where they are cached
        ]
        self.gateway = self._start_gateway()
        self.stopping = threading.Event()
        self.answered = 0
        self.failed = 0
        self.lock = threading.Lock()
        self.clients = [threading.Thread(target=self._ask_always) for _ in range(3)]

    def _start_gateway(self) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(self.gateway_command, stdout=quiet, stderr=quiet)

    def restart_gateway(self) -> None:
        self.gateway.kill()
        self.gateway.wait()
        self.gateway = self._start_gateway()

    @staticmethod
    def wait(condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)

    @staticmethod
    def stoker(*words: str) -> list[str]:
        return [sys.executable, "-m", "stoker.cli.main", *words]

    def begin(self) -> None:
        self.wait(lambda: sum(one["usable"] and bool(one["models"]) for one in self.fleet()) == len(self.workers))
        for client in self.clients:
            client.start()
        self.wait(lambda: self.answered >= 20)

    def fleet(self) -> list[dict[str, Any]]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/admin/fleet", headers={"authorization": f"Bearer {TOKEN}"}
        )
        with suppress(OSError), urllib.request.urlopen(request, timeout=30) as answer:
            found: list[dict[str, Any]] = json.loads(answer.read())["workers"]
            return found
        return []

    def _ask_always(self) -> None:
        url, body = f"http://127.0.0.1:{self.port}/v1/chat/completions", json.dumps(_BODY).encode()
        while not self.stopping.is_set():
            try:
                request = urllib.request.Request(url, body, {"content-type": "application/json"})
                with urllib.request.urlopen(request, timeout=30) as answer:
                    good = answer.read().rstrip().endswith(b"[DONE]")
            except urllib.error.HTTPError as error:
                with error:
                    good = False
            except OSError:  # a test restarts the gateway
                good = False
            with self.lock:
                self.answered += good
                self.failed += not good
            time.sleep(0.02)

    def upgrade(self) -> subprocess.CompletedProcess[str]:
        with self.upgrading() as process:
            output, errors = process.communicate(timeout=240)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def upgrading(self) -> subprocess.Popen[str]:
        restart = f"{sys.executable} {self.folder / 'restart.py'} {self.folder} {{port}}"
        url = f"http://127.0.0.1:{self.port}"
        return subprocess.Popen(
            [
                *self.stoker("upgrade"),
                "--url",
                url,
                "--watch-s",
                "8",
                "--ready-s",
                "60",
                *self.admin,
                "--restart",
                restart,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def restarted(self) -> list[int]:
        return [int(line) for line in (self.folder / "restarted").read_text().split()]

    def close(self) -> None:
        self.stopping.set()
        for client in self.clients:
            if client.ident is not None:
                client.join(60)
        self.gateway.kill()
        self.gateway.wait()
        for port in self.workers:
            with suppress(ProcessLookupError):
                os.kill(int((self.folder / f"{port}.pid").read_text()), signal.SIGKILL)
        for worker in self.first_workers:
            worker.kill()
            worker.wait()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[RealFleet]:
    made = RealFleet(tmp_path)
    try:
        made.begin()
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_a_good_version_reaches_every_worker(fleet: RealFleet) -> None:
    done = fleet.upgrade()
    assert done.returncode == 0, done.stderr
    assert fleet.restarted() == fleet.workers
    assert all(one["usable"] for one in fleet.fleet())
    assert fleet.failed == 0


@pytest.mark.slow
def test_a_version_that_answers_errors_stops_the_upgrade(fleet: RealFleet) -> None:
    """The gateway soon avoids such a worker, and tries it again after 1 s and 3 s, which is while it is watched."""
    (fleet.folder / "installed").write_text("bad")
    done = fleet.upgrade()
    assert done.returncode == 1, done.stderr
    first, second = fleet.workers
    assert fleet.restarted() == [first], done.stderr  # the second worker keeps the old version
    assert "stoker: the upgrade has stopped: " in done.stderr
    assert f"127.0.0.1:{first} was upgraded, more than --max-errors 0. It is drained again" in done.stderr
    assert {one["worker"]: one["draining"] for one in fleet.fleet()} == {
        f"127.0.0.1:{first}": True,
        f"127.0.0.1:{second}": False,
    }
    answered = fleet.answered
    fleet.wait(lambda: fleet.answered >= answered + 20)  # the old version serves on
    assert fleet.failed == 0, "the gateway sent the failed requests to the other worker"


@pytest.mark.slow
def test_a_second_upgrade_is_refused_and_a_restarted_gateway_does_not_end_the_first(fleet: RealFleet) -> None:
    with fleet.upgrading() as first:
        fleet.wait(lambda: fleet.restarted() == fleet.workers[:1])
        second = fleet.upgrade()
        assert second.returncode == 2, second.stderr
        assert "Another upgrade of this fleet runs" in second.stderr
        fleet.restart_gateway()
        _, errors = first.communicate(timeout=240)
    assert first.returncode == 0, errors
    assert fleet.restarted() == fleet.workers
    assert [one["draining"] for one in fleet.fleet()] == [False, False]


@pytest.mark.slow
def test_a_worker_that_dies_in_the_middle_of_an_upgrade_stops_it(fleet: RealFleet) -> None:
    """The upgraded worker ends while it is watched, and nothing restarts it."""
    with fleet.upgrading() as upgrade:
        fleet.wait(lambda: fleet.restarted() == fleet.workers[:1])
        fleet.wait(lambda: all(one["usable"] for one in fleet.fleet()))
        os.kill(int((fleet.folder / f"{fleet.workers[0]}.pid").read_text()), signal.SIGKILL)
        _, errors = upgrade.communicate(timeout=240)
    assert upgrade.returncode == 1, errors
    assert fleet.restarted() == fleet.workers[:1], "the only worker that is left keeps serving"
    assert not next(one for one in fleet.fleet() if one["worker"].endswith(str(fleet.workers[1])))["draining"]
