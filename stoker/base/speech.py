"""Words for people, on a stream that may end before we do: the terminal was closed, Ctrl-C ended the `tee` behind the pipe first,
the disk of the log is full. What nobody can read must not end what runs; but who asked for it must hear that it is not whole."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import IO

from stoker.base.errors import StokerError

_GONE = (errno.EPIPE, errno.EIO)  # as a pipe says it, and as a terminal does


def say(text: str, file: IO[str], end: str = "\n") -> None:
    try:
        print(text, end=end, file=file, flush=True)
    except OSError as error:
        if error.errno in _GONE:
            _to_nowhere(file)


class AnswerLost(StokerError):
    """What a command was asked for could not be written."""

    code = "answer_lost"


def answer(text: str) -> None:
    """What a command was asked for, on stdout. Who stops reading, as `head` does, has what they wanted."""
    try:
        print(text, flush=True)
    except OSError as error:
        _to_nowhere(sys.stdout)
        if error.errno not in _GONE:
            raise AnswerLost(f"stdout cannot be written: {error.strerror}") from error


def _to_nowhere(file: IO[str]) -> None:
    """What is left in its buffer would be written when the process ends, and change its exit code."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)
