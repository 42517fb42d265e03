"""An engine process that stops or hangs while it starts is killed, so that the worker can try again."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from stoker.base.config import EngineSettings
from stoker.base.errors import EngineDied
from stoker.proto.messages import EngineArguments
from stoker.worker.service import EngineService
from stoker.worker.spawn import SpawnedEngine


def test_an_engine_that_is_silent_while_it_starts_is_killed() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        arguments = EngineArguments(folder="/nowhere", settings=EngineSettings())
        service = EngineService(arguments, environment={}, start_silent_s=0.2, spawned=SpawnedEngine(process, ours))
        try:
            with pytest.raises(EngineDied, match=r"silent for 0\.2 s while it started"):
                asyncio.run(service.start())
            assert process.wait(30) == -9
        finally:
            process.kill()
            process.wait()
