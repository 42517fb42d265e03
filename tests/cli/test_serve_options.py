"""Flags of `stoker serve` with which nobody could be served, or nothing ended: refused by name, before anything is loaded."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from stoker.base.config import EngineSettings, KvSettings
from stoker.base.errors import ConfigError
from stoker.cli.main import main


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--max-open", "0", "--max-open 0: it must be above zero"),
        ("--max-body-mib", "nan", "--max-body-mib nan: it must not be below zero, nor without end"),
        ("--drain-s", "nan", "--drain-s nan: it must not be below zero, nor without end"),
        ("--drain-s", "inf", "--drain-s inf: it must not be below zero, nor without end"),
        ("--drain-s", "-1", "--drain-s -1: it must not be below zero, nor without end"),
        ("--port", "70000", "--port 70000: a port is 0 to 65535"),
    ],
)
def test_limits_that_cannot_be_meant(flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/model", f"{flag}={value}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("gib", [0.0, -1.0, float("nan")])
def test_memory_that_cannot_be_meant(gib: float) -> None:
    for kv in (KvSettings(memory_gib=gib), KvSettings(card_gib=gib)):
        with pytest.raises(ConfigError, match=r"kv\.(memory|card)_gib=.*: it must be above zero"):
            EngineSettings(kv=kv)


FETCH = """
import sys, time
from stoker.checkpoint import source
from stoker.cli.main import main
source.resolve_model = lambda *_: [print("fetching", flush=True), time.sleep(300)]
sys.exit(main(["serve", "some/model", "--port", "0"]))
"""


def test_ctrl_c_does_not_wait_for_the_model_to_be_fetched() -> None:
    process = subprocess.Popen([sys.executable, "-c", FETCH], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "fetching\n"
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(60) == 130
        finally:
            process.kill()
            process.wait()


FILES = """
import resource, sys
from stoker.base.errors import ModelFilesError
from stoker.checkpoint import source
from stoker.cli.main import main
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
def told(*_):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
    raise ModelFilesError("no model")
source.resolve_model = told
main(["serve", "some/model", "--port", "0"])
"""


def test_a_server_may_have_as_many_connections_as_the_system_allows() -> None:
    """Not only as many as a process has files without asking."""
    told = subprocess.run([sys.executable, "-c", FILES], capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout == "512 512\n", told.stderr
