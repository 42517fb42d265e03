"""`stoker COMMAND`: finds the commands, runs one, and returns its exit code.

A command is a module of this package that defines NAME, HELP, add_arguments(parser) and run(args) -> exit code. All command
modules are imported for `--help`, so slow imports belong inside run().
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, cast

import stoker
from stoker import cli
from stoker.base.errors import StokerError
from stoker.base.output import print_message

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # as a shell reports a process that Ctrl-C ended
DESCRIPTION = """Stoker serves open-weight language models with an OpenAI-compatible API, on GPUs or on a CPU.
`stoker up` starts a whole system on this machine: a gateway, workers and a KV store. `stoker serve` starts one worker,
and `stoker gateway` routes requests to any number of workers, also to vLLM and SGLang. Requests go to the worker that
has their conversation in its KV cache, and prefill and decode can run on different workers."""
EPILOG = "`stoker COMMAND --help` explains one command. docs/settings.md lists all settings."


class Command(Protocol):
    """What a command module defines."""

    NAME: str
    HELP: str  # a few words for the list of commands, without a capital and a period

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments. `parser.description` may be replaced: without that, it is HELP as a sentence."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command and return its exit code."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line. The usage of a command with many flags would fill the screen."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        # Unknown arguments of a command are reported here, by the command's own parser, and not by the parser of `stoker`.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}{self._nearest(unknown)}")
        return parsed, unknown

    def _nearest(self, unknown: Sequence[str]) -> str:
        """Return a hint at the existing flag that the first unknown one resembles, or nothing."""
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
        near = difflib.get_close_matches(flag, self._option_string_actions, 1)
        return f" (did you mean {near[0]}?)" if near else ""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_ERROR, f"{self.prog}: {message}. `{self.prog} --help` shows the arguments.\n")


def find_commands() -> list[Command]:
    modules = (importlib.import_module(f"{cli.__name__}.{info.name}") for info in pkgutil.iter_modules(cli.__path__))
    return sorted((cast(Command, m) for m in modules if hasattr(m, "NAME")), key=lambda command: command.NAME)


def build_parser(commands: Sequence[Command], words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Build the parser. With `words` from the command line, only the commands among them get their arguments."""
    parser = _Parser(prog="stoker", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"stoker {stoker.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in commands:
        sentence = f"{command.HELP[:1].upper()}{command.HELP[1:]}."
        subparser = subparsers.add_parser(command.NAME, help=command.HELP, description=sentence)
        if words is None or command.NAME in words:
            command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    _open_standard_streams()
    words = sys.argv[1:] if argv is None else argv
    parser = build_parser(find_commands(), words)
    try:
        args = parser.parse_args(words)
        if not hasattr(args, "run"):
            parser.print_help(sys.stderr)
            return EXIT_ERROR
        return int(args.run(args))
    except StokerError as error:
        print_message(f"stoker: {error.message}", sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _open_standard_streams() -> None:
    """Open /dev/null for standard streams that are closed, as some daemon managers leave them.

    Otherwise the next socket would get the number of a standard stream. Libraries would write into it, and libuv aborts the
    process when it closes such a number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is the missing one
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


if __name__ == "__main__":
    sys.exit(main())
