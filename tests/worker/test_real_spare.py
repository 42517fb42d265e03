"""A worker with a spare engine process: it replaces an engine that dies, and a spare that fails is no reason to fail."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from real import RealServer, children, is_alive, serving, wait_for

OPTIONS = (
    "--threads",
    "1",
    "--dtype",
    "float64",
    "--kv-blocks",
    "500",
    "--spare-engine",
    "on",
    "--engine-silent-s",
    "2",
)


def spare_pids(server: RealServer) -> list[int]:
    """Return the process ids of all spares that were ready, the newest last."""
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    return [line["pid"] for line in lines if line["event"] == "spare_engine_ready"]


def wait_for_spare(server: RealServer, number: int) -> int:
    """Wait until spare `number` is ready, counted from one, and return its process id."""
    wait_for(lambda: len(spare_pids(server)) >= number, 120)
    return spare_pids(server)[number - 1]


def wait_for_restart(server: RealServer, number: int) -> None:
    wait_for(lambda: server.metrics()["stoker_engine_restarts_total"] >= number and server.is_ready, 120)


def answer(server: RealServer) -> str:
    return server.complete("Hello", max_tokens=20, seed=3, ignore_eos=True).text


def test_the_spare_replaces_a_dead_engine_and_a_failed_spare_is_replaced(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path / "log", *OPTIONS) as server:
        before, first = answer(server), server.engine_pid
        spare = wait_for_spare(server, 1)
        assert set(children(server.process.pid)) == {first, spare}

        os.kill(first, signal.SIGKILL)
        wait_for_restart(server, 1)
        assert children(server.process.pid) == [spare], "the spare serves now"
        assert answer(server) == before

        stopped = wait_for_spare(server, 2)
        os.kill(stopped, signal.SIGSTOP)
        os.kill(spare, signal.SIGKILL)
        wait_for_restart(server, 3)
        assert answer(server) == before
        assert not is_alive(stopped)
        assert "silent for 2 s while it started" in server.log

        last = {server.engine_pid, wait_for_spare(server, 3)}
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert not any(is_alive(pid) for pid in last)


def test_a_spare_that_died_is_not_used(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path / "log", *OPTIONS) as server:
        before, spare = answer(server), wait_for_spare(server, 1)
        (engine,) = set(children(server.process.pid)) - {spare}
        os.kill(spare, signal.SIGKILL)
        os.kill(engine, signal.SIGKILL)
        wait_for_restart(server, 1)
        assert answer(server) == before
        assert '"spare_engine_lost"' in server.log
        assert "engine_restart_failed" not in server.log
