from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

import stoker
from stoker.base.errors import ConfigError
from stoker.cli import main as cli_main
from stoker.cli.main import find_commands, main


class FakeCommand:
    NAME = "fake"
    HELP = "returns or raises what it is given"

    def __init__(self, outcome: BaseException | int) -> None:
        self._outcome = outcome

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--number", type=int)

    def run(self, args: argparse.Namespace) -> int:
        if isinstance(self._outcome, int):
            return self._outcome
        raise self._outcome


def test_each_command_is_listed_with_its_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    commands = find_commands()
    assert {"bench", "chat"} <= {command.NAME for command in commands}
    for command in commands:
        assert command.NAME in shown


def test_each_command_has_help_of_its_own(capsys):
    for command in find_commands():
        with pytest.raises(SystemExit) as ended:
            main([command.NAME, "--help"])
        assert ended.value.code == 0
        assert f"usage: stoker {command.NAME}" in capsys.readouterr().out


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"stoker {stoker.__version__}\n"


def test_no_command_shows_the_help(capsys):
    assert main([]) == 2
    assert "usage: stoker" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        (0, 0, ""),
        (3, 3, ""),
        (
            ConfigError("block_tokens=0: no block could ever fill"),
            2,
            "stoker: block_tokens=0: no block could ever fill\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_the_result_of_a_command_is_the_exit_code(monkeypatch, capsys, outcome, code, message):
    monkeypatch.setattr(cli_main, "find_commands", lambda: [FakeCommand(outcome)])
    assert main(["fake"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("argv", [["nonsense"], ["fake", "--number", "x"], ["fake", "--unknown"]])
def test_wrong_arguments_exit_with_2(monkeypatch, argv):
    monkeypatch.setattr(cli_main, "find_commands", lambda: [FakeCommand(0)])
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from stoker.cli.main import build_parser, find_commands\n"
        "build_parser(find_commands())\n"
        "print(sorted({'torch', 'aiohttp', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "[]\n"


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
