"""`stoker` as a process. tests/conformance/test_cli_commands.py tests what holds for every command."""

from __future__ import annotations

import subprocess
import sys

import pytest

import stoker
from stoker.cli.main import main


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"stoker {stoker.__version__}\n"


def test_no_command_shows_the_help(capsys):
    assert main([]) == 2
    assert "usage: stoker" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--max-rwos=3"], "stoker serve: unknown arguments: --max-rwos=3 (did you mean --max-rows?). "),
        (["top", "--onec=1"], "stoker top: unknown arguments: --onec=1 (did you mean --once?). "),
        (["status", "--frobnicate"], "stoker status: unknown arguments: --frobnicate. "),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_one(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(message)


def test_closed_standard_streams_are_opened_also_for_child_processes():
    code = (
        "import os\n"
        "from stoker.cli.main import main\n"
        "main([])\n"
        "nowhere = os.stat(os.devnull).st_rdev\n"
        "print([os.fstat(fd).st_rdev == nowhere and os.get_inheritable(fd) for fd in (0, 2)])"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, code]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == "[True, True]\n"


def test_a_reader_that_stops_reading_causes_no_error(tmp_path):
    command = [sys.executable, "-m", "stoker.cli.main", "up", "--check", "--unified", "1", "--cache-dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == (b"", 0)
    process.stderr.close()


def test_output_to_a_full_disk_is_an_error(tmp_path):
    command = [sys.executable, "-m", "stoker.cli.main", "up", "--check", "--unified", "1", "--cache-dir", str(tmp_path)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "stoker: stdout cannot be written: No space left on device\n")
