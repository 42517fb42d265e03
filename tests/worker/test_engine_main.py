"""Where an engine's process begins."""

from __future__ import annotations

import signal
import socket
import sys

import pytest

from stoker.worker import engine_main


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the process would end here, its pipe open
def test_threads_beside_the_engine_keep_the_interpreter_for_short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a grammar is made, each of a step's calls to the card would wait 5 ms to go on."""
    usual, on_interrupt = sys.getswitchinterval(), signal.getsignal(signal.SIGINT)
    ours, theirs = socket.socketpair()
    theirs.close()
    monkeypatch.setattr(sys, "argv", ["engine", str(ours.fileno())])
    monkeypatch.setattr(socket, "socket", lambda fileno: ours)
    try:
        engine_main.main()
        assert sys.getswitchinterval() <= 0.001
    finally:
        sys.setswitchinterval(usual)
        signal.signal(signal.SIGINT, on_interrupt)
        ours.close()
