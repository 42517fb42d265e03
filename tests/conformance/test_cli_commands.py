"""What every command of `stoker` must hold. A new module in stoker/cli is tested without an edit here."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from stoker import cli
from stoker.base.errors import ConfigError
from stoker.cli import main as cli_main
from stoker.cli.main import Command, build_parser, find_commands, main

MEMBERS = ("NAME", "HELP", "add_arguments", "run")
COMMANDS = {command.NAME: command for command in find_commands()}
HEAVY = ("torch", "aiohttp", "transformers", "numpy")


def _parsers(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yield a parser and those of its sub-commands, each with the words that lead to it."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _parsers(below, (*words, name))


PARSERS = {" ".join(words): parser for words, parser in _parsers(build_parser(find_commands())) if words}


def _is_sentence(text: str | None) -> bool:
    """Return True for one or more sentences. A sentence may start with the value of another flag: `random: mean length.`"""
    return text is not None and re.match(r"[A-Z`]|[a-z ]+: ", text) is not None and text.rstrip().endswith(".")


class FakeCommand:
    NAME = "fake"
    HELP = "return or raise what it is given"

    def __init__(self, outcome: BaseException | int) -> None:
        self._outcome = outcome

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--number", type=int)

    def run(self, args: argparse.Namespace) -> int:
        if isinstance(self._outcome, int):
            return self._outcome
        raise self._outcome


@pytest.mark.parametrize("module", [info.name for info in pkgutil.iter_modules(cli.__path__)])
def test_a_command_module_defines_all_members(module: str) -> None:
    defined = vars(importlib.import_module(f"{cli.__name__}.{module}"))
    missing = [member for member in MEMBERS if member not in defined]
    if missing == list(MEMBERS):
        return  # a module that commands use
    assert not missing, (
        f"stoker/cli/{module}.py is a command only if it also defines {', '.join(missing)}; "
        "see `Command` in stoker/cli/main.py"
    )
    assert defined["NAME"] == module.replace("_", "-"), "a command has the name of its file"
    assert defined["NAME"] in COMMANDS


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_list_of_commands_says_what_it_does(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f" {command.NAME} {command.HELP} " in f"{shown} "
    assert len(command.HELP.split()) > 2
    assert not command.HELP.endswith("."), "HELP is a part of a list; the parser makes a sentence of it"


@pytest.mark.parametrize("words", PARSERS)
def test_help_is_in_sentences_and_explains_every_argument(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: stoker {words} ")
    parser = PARSERS[words]
    assert _is_sentence(parser.description), (
        f"the description of `stoker {words}` is not a sentence: {parser.description}"
    )
    wrong = [
        f"{'/'.join(action.option_strings) or action.dest}: {action.help}"
        for action in parser._actions
        if not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
        and action.help != argparse.SUPPRESS
        and not _is_sentence(action.help)
    ]
    assert wrong == [], f"arguments of `stoker {words}` whose help is missing or is not a sentence"


@pytest.mark.parametrize("words", [words for words, parser in PARSERS.items() if not parser._subparsers])
def test_an_unknown_flag_is_refused_by_name_in_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["x" for action in PARSERS[words]._actions if not action.option_strings and action.required]
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), *needed, "--no-such-flag"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stoker {words}: ")
    assert "--no-such-flag" in error
    assert error.count("\n") == 1


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import contextlib, importlib, io, json, sys
slow = {{}}
def check(name):
    slow[name] = [one for one in {HEAVY} if one in sys.modules and not any(one in found for found in slow.values())]
for name in {sorted(command.__name__ for command in find_commands())}:
    importlib.import_module(name)
    check(name)
from stoker.cli.main import main
for words in {list(PARSERS)}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main([*words.split(), "--help"])
    check("stoker " + words + " --help")
print(json.dumps({{name: found for name, found in slow.items() if found}}))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(shown) == {}, "import these modules inside run()"


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        (0, 0, ""),
        (3, 3, ""),
        (ConfigError("block_tokens=0: give at least 1"), 2, "stoker: block_tokens=0: give at least 1\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_the_result_of_a_command_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: BaseException | int,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(cli_main, "find_commands", lambda: [FakeCommand(outcome)])
    assert main(["fake"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("argv", [["nonsense"], ["fake", "--number", "x"], ["fake", "--unknown"], ["--unknown"]])
def test_wrong_arguments_exit_with_2_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    monkeypatch.setattr(cli_main, "find_commands", lambda: [FakeCommand(0)])
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert argv[-1] in error
    assert error.count("\n") == 1
