"""`stoker COMMAND`: finds the commands, runs one, and turns how it ended into an exit code.

A command is a module of this package that defines NAME, HELP, add_arguments(parser) and run(args) -> exit code. All of
them are imported for `--help`, so what is slow to import is imported inside run().
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Protocol, cast

import stoker
from stoker import cli
from stoker.base.errors import StokerError
from stoker.base.speech import say

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # as a shell reports a process ended by Ctrl-C


class Command(Protocol):
    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def find_commands() -> list[Command]:
    modules = (importlib.import_module(f"{cli.__name__}.{info.name}") for info in pkgutil.iter_modules(cli.__path__))
    return sorted((cast(Command, m) for m in modules if hasattr(m, "NAME")), key=lambda command: command.NAME)


def build_parser(commands: Sequence[Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stoker", description=stoker.__doc__)
    parser.add_argument("--version", action="version", version=f"stoker {stoker.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in commands:
        subparser = subparsers.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    _open_standard_streams()
    parser = build_parser(find_commands())
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return EXIT_ERROR
    try:
        return int(args.run(args))
    except StokerError as error:
        say(f"stoker: {error.message}", sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _open_standard_streams() -> None:
    """Some who start daemons close them. The next socket would have such a number; libraries would write into it, and libuv,
    which is asked to close it, ends the process."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: the one that is missing
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


if __name__ == "__main__":
    sys.exit(main())
