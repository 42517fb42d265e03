"""Start and stop the programs that a benchmark measures, and read their CPU time and memory from /proc."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.contract import ROOT, BenchmarkError

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    [port] = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def python_module(module: str, *arguments: object) -> list[str]:
    """The command that runs a module of the repository with this interpreter."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def environment() -> dict[str, str]:
    """This process's environment, in which the repository can be imported."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def stoker_command() -> str:
    """`stoker` as a shell command, run by this interpreter from this repository."""
    return f"{shlex.quote(sys.executable)} -m stoker.cli.main"


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group of its own. Its output goes to the log; at the end the whole group is stopped."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(list(command), stdout=out, stderr=out, env=environment(), start_new_session=True)
    try:
        yield process
    finally:
        stop_group(process)


def stop_group(process: subprocess.Popen[bytes], patience_s: float = 20.0) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    # Children can outlive the leader for a moment, and would take CPU time from the next measurement.
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.1)


def wait_for_http(url: str, process: subprocess.Popen[bytes], name: str, timeout_s: float) -> None:
    """Wait until the URL answers with status 200."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise BenchmarkError(f"{name} ended with {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise BenchmarkError(f"{name} was not ready within {timeout_s:g} s")


def wait_for_port(port: int, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                return
        except OSError:
            time.sleep(0.05)
    raise BenchmarkError(f"no process listens on port {port} after {timeout_s:g} s")


def process_tree(root: int) -> set[int]:
    """The ids of the process and of all its descendants."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        if fields := _stat_fields(stat):
            parents[int(stat.parent.name)] = int(fields[1])
    found, grew = {root}, True
    while grew:
        new = {pid for pid, parent in parents.items() if parent in found} - found
        found |= new
        grew = bool(new)
    return found


def cpu_s(root: int) -> float:
    """User and system time of the process and its living descendants."""
    ticks = 0
    for pid in process_tree(root):
        if fields := _stat_fields(Path(f"/proc/{pid}/stat")):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S


def rss_mib(root: int) -> float:
    """Resident memory of the process and its descendants."""
    pages = 0
    for pid in process_tree(root):
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _stat_fields(stat: Path) -> list[str]:
    """The fields of /proc/PID/stat behind the command's name; empty if the process has ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def named_values(given: Sequence[str], option: str) -> dict[str, str]:
    """Parse repeated NAME=VALUE options."""
    named: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name or not value:
            raise BenchmarkError(f"{option} {item!r}: expected NAME=VALUE")
        named[name] = value
    return named
