"""The contract of a workload: sessions of turns, in the order of their start. A turn is one request.

A prompt is a list of segments: (token id, count). Equal segments at the same place are equal text, so that prefixes repeat
where a workload says so. A turn's answer consists of its `output_id`; a later turn that contains the answer has it as a
segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Segments = tuple[tuple[int, int], ...]


class SimTurn(NamedTuple):
    """One request of a session."""

    segments: Segments
    output_tokens: int
    output_id: int
    pause_s: float = 0.0  # think time: after the previous turn's answer
    at_s: float | None = None  # a fixed arrival; None: after the previous turn and the pause

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.segments)

    def token_ids(self) -> list[int]:
        tokens: list[int] = []
        for token, count in self.segments:
            tokens += [token] * count
        return tokens


@dataclass(frozen=True, slots=True)
class SimSession:
    """Turns that one client sends one after another, from `start_s` on."""

    start_s: float
    turns: Iterator[SimTurn]
    name: str | None = None  # the session key that the client sends; None: none
    tenant: str = ""


class Workload(Protocol):
    """A source of requests. The same object always gives the same sessions."""

    def sessions(self) -> Iterator[SimSession]:
        """Yield the sessions by ascending start. Raise ConfigError, which names the line, if the input is wrong."""

    def describe(self) -> dict[str, object]:
        """Return the parameters, for the report."""
