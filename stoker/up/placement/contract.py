"""The contract of a placement: it starts a part somewhere, stops it, watches it, and says where it is.

The supervisor decides when a part is started or stopped. A placement decides where, if the part has a request: it finds a machine
for the request, sends the files there and replaces the names in the command. It is never on the path of a request: the gateway
reaches a worker directly at its address.
"""

from __future__ import annotations

from typing import Protocol

from stoker.up.part import FleetPart
from stoker.up.part_log import PartLog
from stoker.up.rotating_file import RotatingFile
from stoker.up.supervisor import StopMode


class PlacedPart(Protocol):
    """A part that was started."""

    @property
    def log(self) -> PartLog: ...

    @property
    def part(self) -> FleetPart:
        """The part, with its address. The address is empty until it is known where the part runs."""

    @property
    def where(self) -> str:
        """The process of the part, for the terminal."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The addresses of its machines; empty on this machine, or until they are known."""

    @property
    def pid(self) -> int | None:
        """The process, if it runs on this machine."""

    async def wait(self) -> int:
        """Wait until the part has exited, and its last lines are in the log. Return its exit code, also if its machine is lost."""

    def write(self, file: str, text: str) -> None:
        """Replace the content of one of the files in `lists` of the part's request. Returns at once."""

    def stop(self, how: StopMode) -> None:
        """Stop the part. Returns at once."""


class Placement(Protocol):
    """Runs the parts of one fleet, on this machine or elsewhere."""

    def reach(self, host: str) -> str:
        """Return where parts reach a server of this machine that listens on `host`. Raises ConfigError if they cannot."""

    async def start(self, part: FleetPart, file: RotatingFile) -> PlacedPart:
        """Start a part, whose log goes to `file`. Raises OSError if it cannot be started."""

    def close(self) -> None:
        """Give up the connection to the machines. All parts have been stopped."""
