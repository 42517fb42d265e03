"""Starts an engine process. It can start before its settings are known, because its imports take longest."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.base.orphans import die_with


@dataclass(frozen=True, slots=True)
class SpawnedEngine:
    process: subprocess.Popen[bytes]
    pipe: socket.socket  # the server's end; send `EngineArguments` first

    def kill(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.wait()


def spawn_engine(
    environment: Mapping[str, str], folder: Path | None = None, prepare: str | None = None
) -> SpawnedEngine:
    """Start an engine process. It begins to read the model `folder` at once, if it is given.

    With a device in `prepare`, it makes its context on that device and sends `Prepared` before it waits for its arguments.
    """
    ours, theirs = socket.socketpair()
    # OpenMP threads spin at barriers. On a busy machine, with the default count, they take the CPU from the thread that they
    # wait for. With this count they spin about as long as a small operation takes, and then sleep.
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "stoker.engine.process.start",
                str(theirs.fileno()),
                *(["--folder", str(folder)] if folder else []),
                *(["--prepare", prepare] if prepare else []),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={"GOMP_SPINCOUNT": "10000", **environment},
            start_new_session=True,
            # An engine that runs ends with the pipe. One that is stopped would keep its memory after the server has ended.
            preexec_fn=die_with(os.getpid()) if sys.platform == "linux" else None,
        )
    return SpawnedEngine(process, ours)
