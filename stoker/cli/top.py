"""`stoker top`: latency, hit ratio, bottleneck and workers of a gateway in the terminal, once per second."""

from __future__ import annotations

import argparse
import os
import select
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stoker.base.errors import ConfigError
from stoker.base.output import print_result
from stoker.cli.gateway_admin import GatewayAdmin, add_gateway_arguments

if TYPE_CHECKING:
    from stoker.up.top_view import TopState

NAME = "top"
HELP = "show latency, cache hits, the bottleneck and all workers, live"
DESCRIPTION = """Show what a gateway and its workers do, like the pages Now and Fleet of the dashboard. q quits. If stdout is not a
terminal, or with --once, print it once."""

_ENTER, _LEAVE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"  # the alternate screen without a cursor, and back
_HOME, _TO_LINE_END, _TO_SCREEN_END = "\033[H", "\033[K", "\033[J"
_QUIT = frozenset(b"qQ\x03\x04")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    add_gateway_arguments(parser)
    parser.add_argument("--once", action="store_true", help="Print one frame as plain text and exit.")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="Seconds between two frames, 0.2 to 60. Default: 1."
    )


def run(args: argparse.Namespace) -> int:
    admin = GatewayAdmin.of(args)
    if args.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        print_result("\n".join(_frame(_read(admin), is_live=False)))
        return 0
    return _live(admin, args.interval)


def _live(admin: GatewayAdmin, interval_s: float) -> int:
    state = _read(admin)  # an error is printed before the screen changes
    with _screen():
        while True:
            _draw(_frame(state, is_live=True))
            if _quits(interval_s):
                return 0
            try:
                state = _read(admin)
            except ConfigError as error:
                _draw([error.message, "", "Trying again. q quits."])
                if _quits(interval_s):
                    return 0
    return 0  # Ctrl-C


def _read(admin: GatewayAdmin) -> TopState:
    from stoker.up.top_view import read_state

    return read_state(admin.url, admin.get)


def _frame(state: TopState, *, is_live: bool) -> list[str]:
    from stoker.up.top_view import TopLook, top_lines

    size = shutil.get_terminal_size()
    has_bars = "utf" in (sys.stdout.encoding or "").lower()
    has_color = is_live and not os.environ.get("NO_COLOR")
    lines = top_lines(state, TopLook(size.columns, size.lines - 1 if is_live else None, has_color, has_bars))
    return lines if has_bars else [line.encode("ascii", "replace").decode() for line in lines]


def _draw(lines: list[str]) -> None:
    text = _HOME + "".join(f"{line}{_TO_LINE_END}\r\n" for line in lines) + _TO_SCREEN_END
    print(text, end="", flush=True)


def _quits(timeout_s: float) -> bool:
    """Wait for the next frame. Return True if a key to quit was pressed, or the terminal is gone."""
    end_s = time.monotonic() + timeout_s
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0]:
            keys = os.read(sys.stdin.fileno(), 64)
            if not keys or not _QUIT.isdisjoint(keys[:1]):
                return True
    return False


@contextmanager
def _screen() -> Iterator[None]:
    """Use the alternate screen, and read keys as they are pressed. Everything is restored at the end."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        print(_ENTER, end="", flush=True)
        yield
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        print(_LEAVE, end="", flush=True)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.2 <= value <= 60:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 0.2 to 60")
    return value
