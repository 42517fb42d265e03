"""A second process with an engine of its own, which works while this process measures: what two processes reach on one machine
if they never wait for each other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Work = Callable[[Any, int], Any]  # gets the opened engine and a number


class IndependentProcess:
    """`open_engine()` and `work(engine, number)` run in the process, so both must be importable there."""

    def __init__(self, open_engine: Callable[[], Any], work: Work) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._number = context.Value("q", 0)
        arguments = (open_engine, work, theirs, self._number)
        self._process = context.Process(target=_repeat, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._ours.recv()  # the engine is open; EOFError if it cannot be opened

    @contextmanager
    def working(self, number: int) -> Iterator[None]:
        """Let the process repeat `work(engine, number)` for the duration of a block."""
        self._number.value = number
        self._ours.send(None)
        self._ours.recv()  # it has worked once
        try:
            yield
        finally:
            self._number.value = 0
            self._ours.recv()

    def close(self) -> None:
        self._ours.close()
        self._process.join()


def _repeat(open_engine: Callable[[], Any], work: Work, connection: Any, number: Any) -> None:
    engine = open_engine()
    try:
        connection.send(None)
        while True:
            connection.recv()
            work(engine, number.value)
            connection.send(None)
            while wanted := number.value:
                work(engine, wanted)
            connection.send(None)
    except EOFError:  # the other side has closed
        pass
    finally:
        engine.close()
