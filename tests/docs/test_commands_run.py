"""Runs the commands of the documentation that tables.toml marks with `run`, most of them against a real fleet."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from markdown_pages import ROOT, Found, python_blocks
from test_commands import COMMANDS, row_of

START_S = 180.0
RUN_S = 120.0


@dataclass(frozen=True)
class Fleet:
    """`stoker up` with its default model, on a free port."""

    address: str  # HOST:PORT of the gateway
    environ: dict[str, str]

    def run(self, command: list[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, env=self.environ)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def here(self, text: str) -> str:
        """Return `text` with the address of this fleet."""
        return text.replace("127.0.0.1:8000", self.address).replace("localhost:8000", self.address)


def environment(state_home: Path) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "XDG_STATE_HOME": str(state_home)}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    environ, log = environment(folder), folder / "stderr"
    command = ["stoker", "up", "--port", "0", "--log-dir", str(folder / "logs")]
    with log.open("w") as errors:
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True)
    giving_up = threading.Timer(START_S, process.kill)
    giving_up.start()
    try:
        assert process.stdout is not None
        found = next(
            (one for line in process.stdout if (one := re.search(r"http://(127\.0\.0\.1:\d+)/v1/", line))), None
        )
        giving_up.cancel()
        assert found is not None, f"`stoker up` did not get ready:\n{log.read_text()}"
        (state,) = (folder / "stoker" / "fleets").glob("*/state.json")
        token = Path(json.loads(state.read_text())["admin_token_file"]).read_text().strip()
        yield Fleet(found[1], {**environ, "ADMIN_TOKEN": token})
    finally:
        giving_up.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.communicate()


def commands(where: str) -> list[Any]:
    found = {command.text: command for command in COMMANDS if (row_of(command) or {}).get("run") == where}
    return [pytest.param(command, id=text) for text, command in found.items()]


def check(output: str, command: Found) -> None:
    expected = (row_of(command) or {}).get("expect", "")
    assert re.search(expected, output), f"{command}\nThe output does not match {expected!r}:\n{output}"


@pytest.mark.parametrize("command", commands("fleet"))
def test_the_command_works_with_a_fleet(command: Found, fleet: Fleet) -> None:
    check(fleet.run(["bash", "-c", fleet.here(command.text)]), command)


@pytest.mark.parametrize("command", commands("alone"))
def test_the_command_works_alone(command: Found, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", command.text],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout, command)


@pytest.mark.parametrize("program", list(python_blocks(ROOT / "README.md")), ids=lambda found: f"line {found.line}")
def test_the_readmes_python_works_with_a_fleet(program: Found, fleet: Fleet) -> None:
    assert fleet.run([sys.executable, "-W", "error", "-c", fleet.here(program.text)]).strip()
