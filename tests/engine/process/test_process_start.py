"""Where an engine's process begins."""

from __future__ import annotations

import socket
import subprocess
import sys

_THEN_TELL = "import sys; from stoker.engine.process.start import main; main(); print(sys.getswitchinterval())"


def test_threads_beside_the_engine_keep_the_interpreter_for_short_turns() -> None:
    """While a grammar is made, each of a step's calls to the card would wait 5 ms to go on."""
    ours, theirs = socket.socketpair()
    ours.close()  # so that it ends before it serves
    with theirs:
        command = [sys.executable, "-c", _THEN_TELL, str(theirs.fileno())]
        told = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, check=True)
    assert float(told.stdout) <= 0.001
