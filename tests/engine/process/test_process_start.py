"""The entry point of the engine process."""

from __future__ import annotations

import socket
import subprocess
import sys

_PRINT_SWITCH_INTERVAL = (
    "import sys; from stoker.engine.process.start import main; main(); print(sys.getswitchinterval())"
)


def test_other_threads_hold_the_gil_only_for_short_intervals() -> None:
    """Otherwise, while a grammar is compiled, each call of a step to the GPU would wait 5 ms to continue."""
    ours, theirs = socket.socketpair()
    ours.close()  # so that the process ends before it serves
    with theirs:
        command = [sys.executable, "-c", _PRINT_SWITCH_INTERVAL, str(theirs.fileno())]
        run = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, check=True)
    assert float(run.stdout) <= 0.001
