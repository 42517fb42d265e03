"""Print to streams that may be closed or full: a closed terminal or pipe, or a full disk under a log file.

A message that cannot be written must not end the program. A result that cannot be written is an error.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import IO

from stoker.base.errors import StokerError

_CLOSED = (errno.EPIPE, errno.EIO)  # for a pipe, and for a terminal


class OutputError(StokerError):
    """The result of a command could not be written to stdout."""

    code = "output_error"


def print_message(text: str, file: IO[str], end: str = "\n") -> None:
    """Print a message for the user. Ignore a stream that cannot be written."""
    try:
        print(text, end=end, file=file, flush=True)
    except OSError as error:
        if error.errno in _CLOSED:
            _redirect_to_null(file)


def print_result(text: str) -> None:
    """Print the result of a command to stdout. Raise OutputError if it cannot be written.

    A closed pipe is not an error: the reader, such as `head`, has all that it wants.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        _redirect_to_null(sys.stdout)
        if error.errno not in _CLOSED:
            raise OutputError(f"stdout cannot be written: {error.strerror}") from error


def _redirect_to_null(file: IO[str]) -> None:
    """Discard the stream's buffer, which Python would write at exit: the error would change the exit code."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, file.fileno())
        os.close(null)
