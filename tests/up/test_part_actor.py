"""The process that runs on a node, without Ray: its files are in memory and private, and an actor can start it again."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from contextlib import closing
from pathlib import Path

import pytest

from stoker.base.bound_socket import bound_socket
from stoker.up.part import GATEWAY_LIST, HOST, PYTHON, SECRET_FILE
from stoker.up.placement.memory_files import MemoryFiles
from stoker.up.placement.ray_actor import PartActor
from stoker.up.ports import ReservedPorts
from stoker.up.supervisor import StopMode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files in memory are a feature of Linux")

# A process that it starts reads the files too. It writes what it sees whenever the list changes.
PROGRAM = """
import pathlib, subprocess, sys, time
host, *paths = sys.argv[1:]
read = subprocess.run(["cat", *paths], capture_output=True, text=True, check=True).stdout
print(host, read, file=sys.stderr, flush=True)
while pathlib.Path(paths[1]).read_text().split() == ["old", "list"]:
    time.sleep(0.01)
print(pathlib.Path(paths[1]).read_text().split(), file=sys.stderr, flush=True)
time.sleep(100)
"""


def content(path: str) -> bytes:
    return Path(path).read_bytes()


async def output(actor: PartActor, num_lines: int) -> list[str]:
    lines = b""
    async with asyncio.timeout(60):
        while lines.count(b"\n") < num_lines:
            more, code = await actor.poll(0.1)
            lines += more
            assert code is None
    return lines.decode().splitlines()


def test_a_process_gets_its_files_and_can_be_started_again() -> None:
    command = (PYTHON, "-c", PROGRAM, HOST, SECRET_FILE, GATEWAY_LIST, "<table>")
    files, texts = {SECRET_FILE: b"the secret\n"}, {GATEWAY_LIST: "old\nlist\n", "<table>": f"file = '{SECRET_FILE}'\n"}

    async def main() -> None:
        actor = PartActor()
        for _ in range(2):
            pid = await actor.start(command, {}, files, texts, {HOST: "10.0.0.2"})
            said = await output(actor, 5)
            assert said[:3] == ["10.0.0.2 the secret", "old", "list"]
            path = said[3].split("'")[1]
            assert content(path) == b"the secret\n"
            words = content(f"/proc/{pid}/cmdline").split(b"\0")
            assert b"the secret" not in words
            assert path.encode() in words
            await actor.write(GATEWAY_LIST, "new\n")  # shorter than before
            assert await output(actor, 1) == ["['new']"]
            await actor.stop(StopMode.KILL)
            async with asyncio.timeout(60):
                while (await actor.poll(0.1))[1] is None:
                    pass

    asyncio.run(main())


def test_files_are_private_and_gone_with_their_owner() -> None:
    files = MemoryFiles()
    path = Path(files.create("<secret>", b"x" * 100_000))
    assert path.stat().st_size == 100_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(os.lstat(path.parent).st_mode) == 0o500
    files.close()
    assert not path.exists()


def test_a_port_that_is_taken_is_replaced_by_the_next_free_one() -> None:
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with closing(ReservedPorts()) as ports:
            assert ports.take_or_next("127.0.0.1", port) > port
            assert ports.take_or_next("127.0.0.1", 0) not in (0, port)
