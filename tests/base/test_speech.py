"""Words that nobody can read are lost, and nothing else is."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from stoker.base.speech import say


def test_what_is_said_is_there_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    say("half a", sys.stderr, end=" ")
    say("line", sys.stderr)
    assert capfd.readouterr().err == "half a line\n"


def test_a_full_disk_is_no_error() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        say("lost", full)
        say("lost too", full)


def test_who_speaks_to_nobody_ends_as_it_would_have() -> None:
    talk = "import sys; from stoker.base.speech import say; sys.stdin.read(); [say('x', s) for s in (sys.stdout, sys.stderr) * 2]"
    command = [sys.executable, "-c", talk]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for stream in (process.stdout, process.stderr, process.stdin):
        assert stream is not None
        stream.close()
    assert process.wait(60) == 0
