"""Two gateways behind HAProxy with one store. HAProxy runs with examples/haproxy.cfg, with the ports of the run."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.contract import ROOT, BenchmarkError
from bench.support.postgres_server import PostgresServer, installed
from bench.support.processes import environment, free_port, free_ports, python_module, started, wait_for_port

STORES = ("sqlite", "postgres")
_START_S = _STOP_S = 60.0
_USABLE = re.compile(rb"^stoker_gateway_worker_usable\{[^\n]*\} 1(?:\.0)?$", re.MULTILINE)


@dataclass
class Gateway:
    """A gateway that is started again after each end."""

    port: int
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=out, env=environment())

    def wait_until_ready(self) -> None:
        """Wait until `/ready` returns 200, as the operator of a rolling restart does."""
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise BenchmarkError(f"the gateway on port {self.port} is not ready after {_START_S:g} s; see {self.log}")

    def wait_until_usable(self, num_workers: int) -> None:
        """Wait until all workers may get requests. `/ready` returns 200 with the first one."""
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as page:
                if len(_USABLE.findall(page.read())) == num_workers:
                    return
            time.sleep(0.05)
        raise BenchmarkError(f"the gateway on port {self.port} has not {num_workers} usable workers; see {self.log}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """End it however the run ended."""
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def stop(self) -> int:
        """Let it drain and end. Return its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()


@dataclass
class GatewayPair:
    gateways: list[Gateway]
    port: int  # of HAProxy
    store: str  # where the store is


def check_installed(stores: Sequence[str] = ()) -> None:
    """Raise a BenchmarkError if a program that the run needs is missing."""
    if shutil.which("haproxy") is None:
        raise BenchmarkError("haproxy is not installed (Debian, as root: apt-get install haproxy)")
    if "postgres" in stores and installed() is None:
        raise BenchmarkError("no PostgreSQL server is installed (Debian, as root: apt-get install postgresql)")


@contextmanager
def mock_workers(count: int, log: Path, *options: object) -> Iterator[list[str]]:
    """Run mock workers (bench/support/mock_worker.py). Yield their URLs."""
    with ExitStack() as held:
        ports = [free_port() for _ in range(count)]
        for port in ports:
            held.enter_context(started(python_module("bench.support.mock_worker", port, *options), log))
        for port in ports:
            wait_for_port(port)
        yield [f"http://127.0.0.1:{port}" for port in ports]


@contextmanager
def gateway_pair(store: str, config: str, log_dir: Path, options: Sequence[object] = ()) -> Iterator[GatewayPair]:
    """Run two gateways with this store and configuration file, and HAProxy in front of them."""
    log_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        location = str(folder / "store.db")
        if store == "postgres":
            programs = installed()
            assert programs is not None, "check_installed was not called"
            server = PostgresServer(programs)
            held.callback(server.close)
            location = server.create_database("stoker")
        (folder / "gateway.toml").write_text(config)
        front, *ports = free_ports(3)
        gateways = []
        for number, port in enumerate(ports):
            command = python_module("stoker.cli.main", "gateway", "--config", folder / "gateway.toml", "--port", port)
            command += ["--store", location, "--no-request-log", *map(str, options)]
            state = f"XDG_STATE_HOME={folder / str(number)}"
            gateways.append(Gateway(port, ["env", state, *command], log_dir / "gateway.log"))
            gateways[-1].start()
            held.callback(gateways[-1].end)
        for gateway in gateways:
            gateway.wait_until_ready()
        proxy = folder / "haproxy.cfg"
        proxy.write_text(_haproxy((ROOT / "examples" / "haproxy.cfg").read_text(), front, ports))
        held.enter_context(started(["haproxy", "-db", "-f", str(proxy)], log_dir / "haproxy.log"))
        wait_for_port(front)
        yield GatewayPair(gateways, front, location)


def _haproxy(text: str, front: int, ports: Sequence[int]) -> str:
    """Return the example's text with other ports."""
    for old, new in zip(("bind :8000", "127.0.0.1:8001", "127.0.0.1:8002"), (front, *ports), strict=True):
        assert old in text, f"examples/haproxy.cfg has no {old!r}"
        text = text.replace(old, f"bind 127.0.0.1:{new}" if old.startswith("bind") else f"127.0.0.1:{new}")
    return text
