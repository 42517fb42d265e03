"""A message that cannot be written does not end the program."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from stoker.base.output import print_message


def test_a_message_is_flushed_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    print_message("half a", sys.stderr, end=" ")
    print_message("line", sys.stderr)
    assert capfd.readouterr().err == "half a line\n"


def test_a_full_disk_is_ignored() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        print_message("lost", full)
        print_message("lost too", full)


def test_closed_streams_do_not_change_the_exit_code() -> None:
    talk = (
        "import sys; from stoker.base.output import print_message; sys.stdin.read(); "
        "[print_message('x', s) for s in (sys.stdout, sys.stderr) * 2]"
    )
    command = [sys.executable, "-c", talk]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for stream in (process.stdout, process.stderr, process.stdin):
        assert stream is not None
        stream.close()
    assert process.wait(60) == 0
