"""`stoker serve` refuses wrong limits before it loads a model, and reacts to Ctrl-C during a download."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from stoker.base.config import KvSettings
from stoker.base.errors import ConfigError
from stoker.cli.main import main


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--max-open", "0", "--max-open 0: give a whole number, at least 1"),
        ("--max-body-mib", "nan", "--max-body-mib nan: give a number of MiB above 0"),
        ("--drain-s", "nan", "--drain-s nan: give a number of seconds, at least 0"),
        ("--drain-s", "inf", "--drain-s inf: give a number of seconds, at least 0"),
        ("--drain-s", "-1", "--drain-s -1: give a number of seconds, at least 0"),
        ("--port", "70000", "--port 70000: give a whole number from 0 to 65535"),
    ],
)
def test_wrong_limits_are_refused_by_name(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/no/such/model", f"{flag}={value}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("gib", [0.0, -1.0, float("nan")])
def test_wrong_memory_sizes_are_refused_by_name(gib: float) -> None:
    with pytest.raises(ConfigError, match=r"kv\.memory_gib=.*: give a number of GiB above 0"):
        KvSettings(memory_gib=gib)
    with pytest.raises(ConfigError, match=r"kv\.gpu_memory_gib=.*: give a number of GiB above 0"):
        KvSettings(gpu_memory_gib=gib)


FETCH = """
import sys, time
from stoker.checkpoint import source
from stoker.cli.main import main
source.resolve_model = lambda *_: [print("fetching", flush=True), time.sleep(300)]
sys.exit(main(["serve", "some/model", "--port", "0"]))
"""


def test_ctrl_c_does_not_wait_for_a_download() -> None:
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


def test_the_server_raises_its_limit_of_open_files() -> None:
    """Each connection is an open file, and the default limit is often 1,024."""
    told = subprocess.run([sys.executable, "-c", FILES], capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout == "512 512\n", told.stderr
