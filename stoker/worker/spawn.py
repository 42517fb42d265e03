"""Starting an engine's process. It may be started before it is known what it is to be: importing takes it longer than
anything the server does meanwhile."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SpawnedEngine:
    process: subprocess.Popen[bytes]
    pipe: socket.socket  # the server's end; EngineArguments come first

    def kill(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.wait()


def spawn_engine(environment: Mapping[str, str], folder: Path | None = None) -> SpawnedEngine:
    """`folder`: the model's, if it is known already: reading it begins at once."""
    ours, theirs = socket.socketpair()
    # OpenMP's threads spin at barriers, by default for so long that on a busy machine they keep the thread they wait
    # for from running. They spin for the time of a small operation, then sleep; the engine finds out how many pay.
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "stoker.engine.process.start",
                str(theirs.fileno()),
                *([str(folder)] if folder else []),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={"GOMP_SPINCOUNT": "10000", **environment},
            start_new_session=True,
        )
    return SpawnedEngine(process, ours)
