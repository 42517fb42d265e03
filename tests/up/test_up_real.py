"""`stoker up` with real processes: a tiny model behind a gateway, asked, killed in parts, stopped, killed as a whole."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
from gateway.real_fleet import Exchange
from stopping import stopped
from worker.real import children, is_alive, wait_for

STOKER = (sys.executable, "-m", "stoker.cli.main")
LONG_S = 60.0  # for what takes a second or two: only a test that fails waits so long


@dataclass
class RealUp:
    process: subprocess.Popen[str]
    state_home: Path
    words: Path  # what it said on stderr
    out: list[str]

    @property
    def url(self) -> str:
        found = re.search(r"curl -s (http://\S+?)/v1/", "".join(self.out))
        return found[1] if found else ""

    def state(self) -> Any:
        (path,) = (self.state_home / "stoker" / "fleets").glob("*/state.json")
        return json.loads(path.read_text())

    def part(self, name: str) -> Any:
        return next(part for part in self.state()["parts"] if part["name"] == name)

    def ask(self) -> str:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(json.loads(answer.read())["choices"][0]["text"])

    def answers(self, expected: str | None = None) -> bool:
        try:
            return self.ask() == expected or expected is None
        except (urllib.error.URLError, OSError):
            return False

    def status(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [*STOKER, "status", *options]
        return subprocess.run(command, env=_environment(self.state_home), capture_output=True, text=True, timeout=120)

    def descendants(self) -> set[int]:
        found: set[int] = set()
        left = [self.process.pid]
        while left:
            try:
                new = children(left.pop())
            except OSError:
                continue
            found.update(new)
            left += new
        return found


def _environment(state_home: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(state_home)}


@contextmanager
def up(tmp_path: Path, fleet: str) -> Iterator[RealUp]:
    file = tmp_path / "fleet.toml"
    file.write_text(fleet)
    words = tmp_path / "words"
    with words.open("w") as errors:
        process = subprocess.Popen(
            [*STOKER, "up", str(file), "--port", "0", "--log-dir", str(tmp_path / "logs")],
            env=_environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    real = RealUp(process, tmp_path, words, [])
    reader = threading.Thread(target=_read, args=(process.stdout, real.out), daemon=True)
    reader.start()
    try:
        yield real
    finally:
        left = real.descendants()
        process.kill()
        process.wait()
        reader.join(10)
        for pid in left:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def _read(stream: IO[str], into: list[str]) -> None:
    with stream:
        for line in stream:
            into.append(line)


def fleet_of(folder: Path, more: str = "") -> str:
    return f"""
[[workers]]
model = "{folder}"
served_name = ["tiny"]
threads = 1
kv_blocks = 200
{more}
[up]
first_pause_s = 0.1
"""


def test_a_fleet_answers_restarts_killed_parts_and_leaves_nothing_behind(tmp_path: Path, tiny_folder: Path) -> None:
    with up(tmp_path, fleet_of(tiny_folder) + "[store]\nhost_gib = 0.05\n") as fleet:
        wait_for(lambda: bool(fleet.url), 120)
        wait_for(fleet.answers, LONG_S)
        expected = fleet.ask()
        shared = f"*-stoker-{fleet.url.rpartition(':')[2]}-*"
        assert len(list(Path("/dev/shm").glob(shared))) == 1
        shown = fleet.status()
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert re.search(r"unified-0 +unified +ready +http://127\.0\.0\.1:\d+ +\d+ +0 ", shown.stdout)

        worker, gateway = fleet.part("unified-0"), fleet.part("gateway")
        os.kill(worker["pid"], signal.SIGKILL)
        wait_for(lambda: fleet.part("unified-0")["pid"] not in (None, worker["pid"]), LONG_S)
        again = fleet.part("unified-0")
        assert again["restarts"] == 1
        with stopped(again["pid"]):  # it is not to be ready before it was looked at
            shown = fleet.status("--json")
        assert shown.returncode == 1
        assert json.loads(shown.stdout)[0]["healthy"] is False
        os.kill(gateway["pid"], signal.SIGKILL)
        wait_for(lambda: fleet.answers(expected), 2 * LONG_S)
        wait_for(lambda: {part["phase"] for part in fleet.state()["parts"]} == {"ready"}, LONG_S)
        assert [part["restarts"] for part in fleet.state()["parts"]] == [1, 1]
        assert fleet.part("unified-0")["address"] == worker["address"]

        below = fleet.descendants()
        assert len(below) == 3, "gateway, server and engine"
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
        running = Exchange(int(fleet.url.rpartition(":")[2]), body, path="/v1/completions")
        wait_for(lambda: len(running.events) > 1, LONG_S)
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(LONG_S) == 0
        running.wait()
        assert running.events[-1] == "[DONE]", "what ran was finished first"
        assert not [pid for pid in below if is_alive(pid)]
        said = fleet.words.read_text()
        assert re.search(r"unified-0: exited by signal 9; restarting it in 0\.\d s", said)
        assert said.index("stopping: the gateway finishes") < said.index("all processes have exited")
    assert list(Path("/dev/shm").glob(shared)) == []
    assert list((tmp_path / "stoker" / "fleets").iterdir()) == []
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"gateway.log", "unified-0.log"}


def test_no_process_outlives_a_killed_fleet_and_the_next_fleet_cleans_up(tmp_path: Path, tiny_folder: Path) -> None:
    with up(tmp_path, fleet_of(tiny_folder)) as fleet:
        wait_for(lambda: len(fleet.descendants()) == 3, 120)  # the engine has been started, and loads
        below = fleet.descendants()
        fleet.process.kill()
        fleet.process.wait()
        wait_for(lambda: not any(map(is_alive, below)), LONG_S)
        assert len(list((tmp_path / "stoker" / "fleets").glob("*/state.json"))) == 1
    with up(tmp_path, fleet_of(tiny_folder, "max_model_tokens = 10_000_000")) as fleet:
        assert fleet.process.wait(LONG_S) == 2
        said = fleet.words.read_text()
    assert "stoker: unified-0 cannot run: it exited with code 2 before it was ready. The end of " in said
    assert "max_model_tokens=10000000" in said
    assert list((tmp_path / "stoker" / "fleets").iterdir()) == []


def test_ctrl_c_during_the_start_stops_at_once(tmp_path: Path, tiny_folder: Path) -> None:
    with up(tmp_path, fleet_of(tiny_folder)) as fleet:
        wait_for(lambda: "unified-0: starting" in fleet.words.read_text(), LONG_S)
        below = fleet.descendants()
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(LONG_S) == 130
        wait_for(lambda: not any(map(is_alive, below)), LONG_S)


@pytest.mark.slow
def test_a_mooncake_master_can_be_part_of_the_fleet(tmp_path: Path, tiny_folder: Path) -> None:
    pytest.importorskip("mooncake")
    with up(tmp_path, fleet_of(tiny_folder) + "\n[store]\nmooncake = 'start'\nsegment_gib = 0.1\n") as fleet:
        wait_for(lambda: bool(fleet.url), 120)
        wait_for(fleet.answers, LONG_S)
        expected = fleet.ask()
        os.kill(fleet.part("mooncake")["pid"], signal.SIGKILL)
        wait_for(lambda: fleet.part("mooncake")["restarts"] == 1 and fleet.part("mooncake")["phase"] == "ready", 20)
        assert fleet.answers(expected)
        fleet.process.send_signal(signal.SIGTERM)
        assert fleet.process.wait(30) == 0
