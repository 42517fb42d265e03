"""`stoker COMMAND`: finds the commands, runs one, and turns how it ended into an exit code.

A command is a module of this package that defines NAME, HELP, add_arguments(parser) and run(args) -> exit code. All of
them are imported for `--help`, so what is slow to import is imported inside run().
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from typing import Protocol, cast

import stoker
from stoker import cli
from stoker.base.errors import StokerError

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
    parser = build_parser(find_commands())
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return EXIT_ERROR
    try:
        return int(args.run(args))
    except StokerError as error:
        print(f"stoker: {error.message}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
