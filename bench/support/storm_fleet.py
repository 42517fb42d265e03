"""A fleet of `stoker up` whose processes the `kill_storm` benchmark kills, stops and counts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.support.processes import environment, free_port, process_tree, python_module, rss_mib

_FLEET = """
[gateway]
store = "{ledger}"

[[workers]]
role = "prefill"
{worker}
[[workers]]
role = "decode"
{worker}
[[workers]]
role = "unified"
{worker}
[store]
host_gib = 0.05
{store}
[up]
first_pause_s = 0.1
longest_pause_s = 1.0
healthy_s = 1.0
"""
_WORKER = """model = "{folder}"
served_name = ["tiny"]
threads = 1
dtype = "float64"
kv_blocks = 2000
"""
_UP_SHARE = 0.03  # how often `stoker up` itself is killed
_WORKER_ROLES = ("prefill", "decode", "unified")


class StormFleet:
    """`stoker up` with its processes, on one port for its whole life, however often it is started."""

    def __init__(self, folder: Path, model: Path, mooncake: bool) -> None:
        self._folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ledger = folder / "usage.db"
        self._log = folder / "up.log"
        self._process: asyncio.subprocess.Process | None = None
        store = 'mooncake = "start"\nsegment_gib = 0.1' if mooncake else ""
        worker = _WORKER.format(folder=model)
        (folder / "fleet.toml").write_text(_FLEET.format(ledger=self.ledger, worker=worker, store=store))

    async def start(self) -> None:
        command = python_module("stoker.cli.main", "up", self._folder / "fleet.toml", "--port", self.port)
        command += ["--log-dir", str(self._folder / "logs")]
        marked = {**environment(), "XDG_STATE_HOME": str(self._folder / "state")}
        with self._log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdout=out, stderr=out, env=marked, start_new_session=True
            )

    @property
    def up_pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def parts(self) -> list[dict[str, Any]]:
        """Return the processes that `stoker up` runs, from its state file; none before it wrote the file."""
        for path in (self._folder / "state" / "stoker" / "fleets").glob("*/state.json"):
            with contextlib.suppress(OSError, ValueError):
                state = json.loads(path.read_text())
                if state["pid"] == self.up_pid:
                    return list(state["parts"])
        return []

    def is_ready(self) -> bool:
        parts = self.parts()
        if not parts or any(part["phase"] != "ready" or not _is_alive(part["pid"]) for part in parts):
            return False
        workers = [part["address"] for part in parts if part["role"] in _WORKER_ROLES]
        return all(map(_answers_ready, [self.url, *workers]))

    async def wait_ready(self, timeout_s: float) -> float:
        """Return after how many seconds every part is ready; more than `timeout_s` if that is not reached."""
        assert self._process is not None
        begin_s = time.monotonic()
        while not await asyncio.to_thread(self.is_ready):
            if self._process.returncode is not None:
                tail = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"stoker up ended with {self._process.returncode}: {tail}")
            if time.monotonic() - begin_s > timeout_s:
                break
            await asyncio.sleep(0.1)
        return round(time.monotonic() - begin_s, 2)

    def memory_mib(self) -> dict[str, float]:
        parts = {part["name"]: rss_mib(part["pid"]) for part in self.parts() if part["pid"]}
        return parts | {"up": rss_mib(self.up_pid) - sum(parts.values())}

    async def kill_up(self) -> None:
        """Kill `stoker up`, whose processes end with it, and start it again."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()
        await self._wait_gone(10.0)
        await self.start()

    async def stop(self, timeout_s: float) -> int:
        assert self._process is not None
        self._process.terminate()
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()

    async def sweep(self) -> dict[str, list[str]]:
        """Return the processes and the shared memory that are left, and remove them."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        await self._wait_gone(5.0)
        left = self._marked()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return {"processes": [f"{pid} {name}" for pid, name in left.items()], "shared_memory": self._free_shared()}

    def _free_shared(self) -> list[str]:
        shared = list(Path("/dev/shm").glob(f"*-stoker-{self.port}-*"))
        for path in shared:
            path.unlink(missing_ok=True)
        return [path.name for path in shared]

    async def _wait_gone(self, timeout_s: float) -> None:
        for _ in range(int(timeout_s / 0.1)):
            if not self._marked():
                return
            await asyncio.sleep(0.1)

    def _marked(self) -> dict[int, str]:
        """Return the living processes that inherited this fleet's environment, orphans included."""
        mark = str(self._folder / "state").encode()
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes() and _is_alive(int(path.name)):
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
        return found


def _answers_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _is_alive(pid: int | None) -> bool:
    """Return True if the process exists and is no zombie."""
    try:
        return pid is not None and Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


class Storm:
    """Chooses what to kill. It goes through all parts of the fleet in a random order, then starts over."""

    def __init__(
        self, fleet: StormFleet, rng: random.Random, stop_share: float, only: Sequence[str] | None = None
    ) -> None:
        self._fleet, self._rng, self._stop_share, self._only = fleet, rng, stop_share, only
        self._deck: list[tuple[str, bool]] = []

    def _shuffled(self) -> list[tuple[str, bool]]:
        """Return (part, whether its engine is meant). The gateway is there twice: it has no engine."""
        names = [part["name"] for part in self._fleet.parts()]
        deck = [(name, engine) for name in self._only or names for engine in (False, True)]
        self._rng.shuffle(deck)
        return deck

    async def disturb(self) -> dict[str, Any]:
        """Kill or stop one process; return what was done. A stopped process continues after a while."""
        if self._rng.random() < _UP_SHARE and not self._only:
            await self._fleet.kill_up()
            return {"victim": "up", "signal": "SIGKILL"}
        self._deck = self._deck or self._shuffled()
        name, engine = self._deck.pop()
        victim = next((part["pid"] for part in self._fleet.parts() if part["name"] == name), None)
        if victim is None:
            return {"victim": name, "signal": "none, it does not run"}
        below = sorted(process_tree(victim) - {victim})
        if engine and below:
            victim, name = self._rng.choice(below), f"{name} engine"
        if self._rng.random() >= self._stop_share:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            await asyncio.sleep(0.3)  # until it is noticed
            return {"victim": name, "signal": "SIGKILL"}
        seconds = round(self._rng.uniform(0.5, 8.0), 2)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(victim, signal.SIGCONT)
        return {"victim": name, "signal": "SIGSTOP", "seconds": seconds}
