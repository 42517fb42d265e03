"""PartAddresses: where the parts of a fleet are reached, and which other parts depend on that.

The address of a part on another machine is known only when it runs there, and changes when that machine is lost. Another part
depends on it in one of two ways. If its command has the address, it must be restarted when the address changes. If a file that it
follows has the address, the file is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from stoker.up.part import FleetPart


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file of a running part that gets another content."""

    part: str
    file: str
    text: str


@dataclass(frozen=True, slots=True)
class Move:
    """What follows from the new address of a part."""

    changes: Sequence[FileChange] = ()
    outdated: Sequence[str] = ()  # the parts that were started with another address


@dataclass(slots=True, eq=False)
class PartAddresses:
    """The last known address of each part. It does no I/O."""

    parts: Iterable[FleetPart]
    _parts: dict[str, FleetPart] = field(init=False)
    _known: dict[str, str] = field(init=False)
    # the addresses in the command of each part
    _used: dict[str, dict[str, str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._parts = {part.name: part for part in self.parts}
        self._known = {part.name: part.address for part in self._parts.values() if part.address}

    def of(self, name: str) -> str:
        """Return the last known address of a part, or an empty text if it never ran."""
        return self._known.get(name, "")

    def resolved(self, name: str) -> FleetPart:
        """Return a part that is about to start, with the addresses of the parts that it depends on."""
        part = self._parts[name]
        values = self._used[name] = {word: self.of(other) for word, other in part.addresses.items()}
        command = tuple(values.get(argument, argument) for argument in part.command)
        request = part.request
        if request is not None:
            lists = {file: self._list(others) for file, others in request.lists.items()}
            request = replace(request, texts={**request.texts, **lists})
        return replace(part, command=command, request=request)

    def learn(self, name: str, address: str) -> Move:
        """Note the address of a part that is ready."""
        if self.of(name) == address:
            return Move()
        self._known[name] = address
        changes = [
            FileChange(part.name, file, self._list(others))
            for part in self._parts.values()
            if part.request is not None
            for file, others in part.request.lists.items()
            if name in others
        ]
        outdated = [
            other
            for other, used in self._used.items()
            if any(needed == name and used[word] != address for word, needed in self._parts[other].addresses.items())
        ]
        return Move(changes, outdated)

    def _list(self, names: Iterable[str]) -> str:
        return "".join(f"{address}\n" for address in map(self.of, names) if address)
