"""A gateway and workers as real processes that tests can kill."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from signing import signed
from sse_reader import SseReader
from stopping import stopped
from worker.real import CHAT, STOKER, children, wait_for

ADMIN_TOKEN = "a-token-for-tests"
# In float64 the batch does not change sampled tokens, so answers can be compared exactly.
# Tests stop engines (SIGSTOP) for longer than the watchdog of a worker allows.
WORKER_OPTIONS = (
    *("--threads", "1", "--dtype", "float64", "--kv-blocks", "4000", "--served-name", "tiny"),
    *("--engine-silent-s", "300"),
)
LEASE_S = 4.0  # of pairs: leases expire within a test
# Otherwise a decode worker computes short prompts itself, and longer ones on an idle fleet.
_ALWAYS_HAND_OFF = "[routing]\nlocal_prefill_tokens = 0\nlocal_prefill_share = 1000.0\n"
# Internal fields of hand-offs and of the gateway protocol, which a client must never see.
_INTERNAL = (b'"kv_transfer', b'"transfer_id', b'"remote_', b'"do_remote', b'"prompt_token_ids', b'"resume"', b"\n:")


@dataclass
class Process:
    """A `stoker COMMAND` process, which is restarted on the same port."""

    arguments: list[str]
    log_path: Path
    port: int = 0
    process: subprocess.Popen[str] | None = None
    environ: dict[str, str] = field(default_factory=dict)  # what differs from this process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, start_s: float = 180.0) -> None:
        command = [STOKER, *self.arguments, "--port", str(self.port)]
        with self.log_path.open("a") as log:
            environ = {**os.environ, **self.environ}
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ)
        watchdog = threading.Timer(start_s, self.process.kill)
        watchdog.start()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"http://[^/\s]+:(\d+)/v1/", line):
                self.port = int(found[1])
                break
        watchdog.cancel()
        assert self.port, self.log_path.read_text()
        # Further output must not fill the pipe.
        threading.Thread(target=_drain, args=(self.process.stdout,), daemon=True).start()

    def kill(self) -> None:
        """Kill the process with SIGKILL; its engine ends with it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    @contextmanager
    def stopped(self, *, engine: bool = False) -> Iterator[None]:
        """Send SIGSTOP: connections stay open without output. With `engine`: requests are accepted, but none advances."""
        assert self.process is not None
        with stopped(*(children(self.process.pid) if engine else [self.process.pid])):
            yield

    def kill_engine(self) -> None:
        assert self.process is not None
        for pid in children(self.process.pid):
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            engines = children(self.process.pid)
            for _ in range(2):
                self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
            for pid in engines:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signed(self, path: str, data: bytes | None = None) -> dict[str, str]:
        """Return the headers that a worker with a secret needs."""
        if self.arguments[0] != "serve" or "--secret-file" not in self.arguments:
            return {}
        secret = Path(self.arguments[self.arguments.index("--secret-file") + 1]).read_text()
        return signed(self.url, secret, path, data)

    def get(self, path: str, token: str | None = None) -> Any:
        request = urllib.request.Request(self.url + path, headers=self.signed(path))
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def metrics(self) -> dict[str, float]:
        request = urllib.request.Request(self.url + "/metrics", headers=self.signed("/metrics"))
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    @property
    def is_idle(self) -> bool:
        """Return True if nothing runs, waits or is leased, and every block is free."""
        values = self.metrics()
        nothing = ("running_requests", "running_sequences", "waiting_sequences", "kv_leases", "kv_loading_sequences")
        return (
            "stoker_kv_blocks" in values  # a newly started engine has not reported yet
            and not any(values[f"stoker_{name}"] for name in nothing)
            and values["stoker_kv_blocks_free"] == values["stoker_kv_blocks"]
        )

    @property
    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=30) as answer:
                return answer.status == 200  # type: ignore[no-any-return]
        except (urllib.error.URLError, OSError):
            return False


def _drain(stream: IO[str]) -> None:
    with stream:
        stream.read()


@dataclass
class Exchange:
    """One request whose answer a thread reads as it arrives."""

    port: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    path: str = CHAT
    status: int = 0
    events: list[str] = field(default_factory=list)
    answer: bytes = b""  # unchanged
    broken: str = ""
    answer_headers: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    _thread: threading.Thread = field(init=False)
    _connection: http.client.HTTPConnection | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection = self._connection = http.client.HTTPConnection(self.host, self.port, timeout=180)
        try:
            connection.request(
                "POST", self.path, json.dumps(self.body), {"Content-Type": "application/json"} | self.headers
            )
            response = connection.getresponse()
            self.answer_headers = {name.lower(): value for name, value in response.getheaders()}
            self.status = response.status
            if self.body.get("stream") and response.status == 200:
                reader = SseReader()
                while part := response.read1(1 << 16):
                    self.answer += part
                    self.events += [bytes(event.data).decode() for event in reader.push(part)]
            else:
                self.answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.broken = repr(error)
        finally:
            connection.close()

    def leave(self) -> None:
        """Disconnect like a client that vanishes, once the request has arrived."""
        wait_for(lambda: self.is_over or (self._connection is not None and self._connection.sock is not None))
        if self._connection is not None and self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self.wait()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float = 120.0) -> None:
        self._thread.join(timeout_s)
        assert self.is_over, "no end of the answer"

    @property
    def json(self) -> Any:
        return json.loads(self.answer)

    @property
    def usage(self) -> Any:
        assert self.status == 200, (self.status, self.answer, self.broken)
        if not self.body.get("stream"):
            return self.json["usage"]
        (usage,) = [chunk["usage"] for chunk in map(json.loads, self.events[:-1]) if chunk.get("usage")]
        return usage

    def check(self) -> None:
        """Check that the answer is complete and has no internal fields."""
        assert self.status == 200, (self.status, self.answer, self.broken)
        assert not self.broken, self.broken
        leaked = [word for word in _INTERNAL if word in self.answer]
        assert not leaked, (leaked, self.answer)
        ours = {name for name in self.answer_headers if name.startswith("x-stoker")}
        assert ours <= {"x-stoker-route"}, ours  # which the client requested

    @property
    def said(self) -> Any:
        """Return the comparable part of an answer, streamed or not: its choices with joined deltas, and its usage."""
        self.check()
        if not self.body.get("stream"):
            return _joined([self.json], "message")
        assert self.events, "an empty stream"
        assert self.events[-1] == "[DONE]", self.events[-3:]
        return _joined([json.loads(event) for event in self.events[:-1]], "delta")


def _joined(chunks: Sequence[Any], part: str) -> Any:
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        assert "error" not in chunk, chunk
        assert not {"kv_transfer_params", "prompt_token_ids"} & set(chunk), chunk
        usage = chunk.get("usage") or usage
        for one in chunk["choices"]:
            assert "token_ids" not in one
            said = one[part]
            mine = choices.setdefault(one["index"], {"content": "", "name": "", "arguments": "", "finish": None})
            mine["content"] += said.get("content") or ""
            for call in said.get("tool_calls") or ():
                mine["name"] += call["function"].get("name") or ""
                mine["arguments"] += call["function"].get("arguments") or ""
            mine["finish"] = one.get("finish_reason") or mine["finish"]
    counts = None if usage is None else (usage["prompt_tokens"], usage["completion_tokens"])
    return choices, counts


@dataclass
class RealFleet:
    workers: list[Process]
    gateway: Process
    ledger_path: Path
    reference: Process | None = None  # a worker that is not behind the gateway

    def ask(self, body: dict[str, Any], **headers: str) -> Exchange:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Exchange(self.gateway.port, {"model": "tiny"} | body, named)

    def direct(self, body: dict[str, Any], worker: int = 0) -> Exchange:
        """Send a request directly to the reference worker."""
        undisturbed = self.reference or self.workers[worker]
        return Exchange(undisturbed.port, {"model": "tiny"} | body)

    def of_role(self, role: str) -> list[Process]:
        return [worker for worker in self.workers if role in worker.arguments]

    def in_flight(self) -> Any:
        return self.gateway.get("/admin/ledger", ADMIN_TOKEN)

    def serving_worker(self) -> Process:
        """Return the worker that runs a request."""
        found: list[Process] = []

        def look() -> bool:
            found[:] = [worker for worker in self.workers if worker.is_running and _running(worker)]
            return bool(found)

        wait_for(look)
        return found[0]

    def last_route(self) -> tuple[Process | None, Process]:
        """Return the workers of the last request: prefill, if there is one, and decode."""
        route = self.gateway.get("/admin/routes?last=1", ADMIN_TOKEN)["routes"][0]
        by_id = {f"127.0.0.1:{worker.port}": worker for worker in self.workers}
        return by_id.get(route["prefill"]), by_id[route["decode"]]

    def last_reasons(self) -> list[dict[str, Any]]:
        reasons: list[dict[str, Any]] = self.gateway.get("/admin/routes?last=1", ADMIN_TOKEN)["routes"][0]["reasons"]
        return reasons

    def settle(self, timeout_s: float) -> None:
        """Wait until nothing is reserved, running or leased. A killed engine may take a while to restart."""
        wait_for(lambda: not any(self.in_flight()["reserved"].values()), timeout_s)
        wait_for(lambda: all(worker.is_ready for worker in self.workers if worker.is_running), 90)
        wait_for(lambda: all(worker.is_idle for worker in self.workers if worker.is_running), timeout_s)

    def heal(self) -> None:
        """Restart everything, and wait until the gateway knows it."""
        for process in [*self.workers, self.gateway]:
            if not process.is_running:
                process.start()
        wait_for(lambda: all(process.is_ready for process in [*self.workers, self.gateway]), 120)
        wait_for(lambda: usable_workers(self.gateway) == len(self.workers))


def usable_workers(gateway: Process) -> int:
    """Return the number of usable workers."""
    workers = gateway.get("/admin/fleet", ADMIN_TOKEN)["workers"]
    return sum(bool(worker["usable"] and worker["models"]) for worker in workers)


def _running(worker: Process) -> bool:
    try:
        return bool(worker.get("/health")["running_requests"])
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def real_fleet(
    folder: Path,
    work: Path,
    num_workers: int = 2,
    worker_options: Sequence[str] = (),
    gateway_options: Sequence[str] = (),
    roles: Sequence[str] = (),
    lease_s: float = LEASE_S,
) -> Iterator[RealFleet]:
    """Start a fleet. With `roles`, one per worker: a fleet that hands off every prompt, with a reference worker."""
    token = work / "admin-token"
    token.write_text(ADMIN_TOKEN)
    ledger = work / "ledger.sqlite"
    with ExitStack() as stack:
        serve = ["serve", str(folder), *WORKER_OPTIONS, *worker_options]
        workers = [Process(serve, work / f"worker-{number}.log") for number in range(num_workers)]
        reference = None
        if roles:
            (work / "secret").write_text("a secret of this test")
            (work / "gateway.toml").write_text(_ALWAYS_HAND_OFF)
            secret = ["--secret-file", str(work / "secret")]
            gateway_options = [*gateway_options, *secret, "--config", str(work / "gateway.toml")]
            serve += ["--kv-lease-s", f"{lease_s:g}"]
            workers = [
                Process([*serve, *secret, "--role", role], work / f"{role}-{i}.log") for i, role in enumerate(roles)
            ]
            reference = Process(serve, work / "reference.log")  # needs no secret: the tests call it themselves
        starting = workers if reference is None else [*workers, reference]
        for worker in starting:
            stack.callback(worker.stop)
        starts = [threading.Thread(target=worker.start) for worker in starting]
        for start in starts:
            start.start()
        for start in starts:
            start.join()
        arguments = ["gateway", "--admin-token-file", str(token), "--store", str(ledger), *gateway_options]
        for number, worker in enumerate(workers):
            assert worker.port, worker.log_path.read_text()
            arguments += ["--worker", f"{worker.url},role={roles[number]}" if roles else worker.url]
        gateway = Process(arguments, work / "gateway.log")
        stack.callback(gateway.stop)
        gateway.start()
        fleet = RealFleet(workers, gateway, ledger, reference)
        fleet.heal()
        yield fleet
