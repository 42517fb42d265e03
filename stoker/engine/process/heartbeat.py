"""The engine process's heartbeat: a thread that tells the server that this process runs, and whether its loop advances."""

from __future__ import annotations

import threading
from contextlib import suppress

from stoker.proto.messages import Beat
from stoker.proto.pipe import EngineEnd, FrameEnd

_BEAT_EVERY_S = 0.5


class LoopProgress:
    """What the loop is doing. Only the loop writes it, and the heartbeat's thread reads it."""

    def __init__(self) -> None:
        self.round = 0
        self.busy = False

    def begin(self) -> None:
        """A round of the loop begins: messages, a step, and what it sends."""
        self.round += 1
        self.busy = True

    def end(self) -> None:
        """The loop waits for messages."""
        self.busy = False


class Heartbeat:
    """Sends a beat every _BEAT_EVERY_S while the `with` block runs."""

    def __init__(self, pipe: EngineEnd, progress: LoopProgress) -> None:
        self._pipe = pipe
        self._progress = progress
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()

    def _run(self) -> None:
        with suppress(FrameEnd):  # the server has ended; the mailbox ends this process
            while not self._stop.wait(_BEAT_EVERY_S):
                self._pipe.send(Beat(round=self._progress.round, busy=self._progress.busy))
