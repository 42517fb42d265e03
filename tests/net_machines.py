"""Machines for tests: network namespaces that share a switch, each with an address of its own. They need root and `ip`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

HERE = 254  # the last number of the address of the tests' own namespace
_LONG_S = 60.0


@dataclass
class Machine:
    name: str
    address: str

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs `command` on this machine."""
        return ["ip", "netns", "exec", self.name, *command]

    def pids(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(word) for word in listed.stdout.split()]

    def kill(self) -> None:
        """Kill all processes at once, as a power failure does."""
        until_s = time.monotonic() + _LONG_S
        while pids := [pid for pid in self.pids() if not _has_ended(pid)]:
            assert time.monotonic() < until_s, f"{pids} do not end"
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def cut(self) -> None:
        """Pull the cable. This closes no connection."""
        _ip("-n", self.name, "link", "set", "cable", "down")

    def mend(self) -> None:
        _ip("-n", self.name, "link", "set", "cable", "up")


@contextmanager
def network(subnet: str, count: int) -> Iterator[list[Machine]]:
    """Make machines with the addresses SUBNET.1, SUBNET.2 and so on; the tests are at SUBNET.254.

    Skips the test where this is not permitted.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip`")
    own = f"stoker{os.getpid()}"
    switch = f"{own}-switch"
    machines = [Machine(f"{own}-{number}", f"{subnet}.{number}") for number in range(1, count + 1)]
    try:
        _ip("netns", "add", switch)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr}")
    try:
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        _ip("link", "add", own, "type", "veth", "peer", "name", "here", "netns", switch)
        _ip("address", "add", f"{subnet}.{HERE}/24", "dev", own)
        _ip("link", "set", own, "up")
        _plug(switch, "here")
        for number, one in enumerate(machines):
            _ip("netns", "add", one.name)
            _ip("-n", one.name, "link", "set", "lo", "up")
            port = f"port{number}"
            _ip("-n", one.name, "link", "add", "cable", "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", one.name, "address", "add", f"{one.address}/24", "dev", "cable")
            one.mend()
            _plug(switch, port)
        yield machines
    finally:
        for one in machines:
            with suppress(subprocess.CalledProcessError):  # it was not made
                one.kill()
        # Without this, it exists until the kernel has ended the switch's namespace, and the next network cannot have its name.
        subprocess.run(["ip", "link", "del", own], capture_output=True, check=False)
        for name in (switch, *(one.name for one in machines)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _plug(switch: str, port: str) -> None:
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _has_ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
