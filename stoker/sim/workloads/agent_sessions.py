"""Recorded agent sessions, one a line: each request has its lengths, think time, and runs of block ids.

Block ids are local to a session. Sessions whose tools and system prompt have the same sizes share that prefix. A sub-agent's
requests stand where the session called it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError
from stoker.sim.workloads.trace_file import check_order, length_field, number_field, output_field, trace_rows
from stoker.sim.workloads.workload import SimSession, SimTurn

_BITS = 32


@dataclass(frozen=True, slots=True)
class AgentSessions:
    """Sessions that start at random times within `start_spread_s`.

    In a closed loop, a turn follows the answer of the turn before it after the recorded think time. With `fixed`, turns
    arrive at their recorded times, and the answers do not matter.
    """

    path: Path
    max_requests: int | None = None
    speedup: float = 1.0
    start_spread_s: float = 3600.0
    max_pause_s: float = 120.0
    fixed: bool = False
    seed: int = 0

    def sessions(self) -> Iterator[SimSession]:
        rows = list(trace_rows(self.path))
        rng = random.Random(self.seed)
        starts = sorted((rng.uniform(0, self.start_spread_s), at) for at in range(len(rows)))
        left = self.max_requests
        for start_s, at in starts:
            where, row = rows[at]
            start_s /= self.speedup
            try:
                turns = list(self._turns(row, where, start_s))
            except RecursionError:
                raise ConfigError(f"{where}: sub-agents are nested too deeply") from None
            if left is not None:
                turns = turns[:left]
                left -= len(turns)
            if turns:
                yield SimSession(start_s, iter(turns), str(row.get("id", at)))
            if left == 0:
                return

    def _turns(self, row: dict[str, Any], where: str, start_s: float) -> Iterator[SimTurn]:
        block_size = length_field(row, "block_size", where)
        clock_s, last_t = start_s, None
        last_of: dict[int, float] = {}  # the last time of each agent; those of a sub-agent may overlap the others
        for number, (request, agent) in enumerate(_requests(row, where)):
            place = f"{where}, request {number + 1}"
            pause_s = min(
                number_field(request, "think_time", place) if "think_time" in request else 0.0, self.max_pause_s
            )
            time = number_field(request, "t", place) if self.fixed or "t" in request else 0.0
            check_order(time, last_of.get(id(agent), time), place, "t")
            last_of[id(agent)] = time
            if self.fixed:
                clock_s += min(max(0.0, time - (time if last_t is None else last_t)), self.max_pause_s) / self.speedup
                last_t = time
            scope = str(row.get("id", where))
            segments = _segments(request, agent, scope, block_size, place, number)
            output_tokens = output_field(request, "out", place)
            yield SimTurn(
                segments,
                output_tokens,
                _token("output", scope, number),
                pause_s / self.speedup if number else 0.0,
                clock_s if self.fixed else None,
            )

    def describe(self) -> dict[str, object]:
        return {
            "workload": "agent sessions",
            "file": self.path.name,
            "arrivals": "fixed" if self.fixed else "closed loop",
            "speedup": self.speedup,
            "max_pause_s": self.max_pause_s,
            "start_spread_s": self.start_spread_s,
            "requests": self.max_requests,
            "seed": self.seed,
        }


def _requests(agent: dict[str, Any], where: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the requests of a session and of its sub-agents, each with its agent."""
    requests = agent.get("requests")
    if not isinstance(requests, list):
        raise ConfigError(f"{where}: the field 'requests' must be a list")
    for request in requests:
        if not isinstance(request, dict):
            raise ConfigError(f"{where}: a request is not an object")
        if "runs" in request:
            yield request, agent
        else:
            yield from _requests(request, where)


def _segments(
    request: dict[str, Any], agent: dict[str, Any], scope: str, block_size: int, where: str, number: int
) -> tuple[tuple[int, int], ...]:
    num_tokens = length_field(request, "in", where)
    runs = request["runs"]
    if not isinstance(runs, list) or not all(_is_run(one) for one in runs):
        raise ConfigError(f"{where}: runs must be pairs [first id, count] of whole numbers")
    tools, system = (
        number_field(agent, name, where) if name in agent else 0.0 for name in ("tool_tokens", "system_tokens")
    )
    num_shared = int(tools + system) // block_size
    segments: list[tuple[int, int]] = []
    place, left = 0, num_tokens
    for first, count in runs:
        for block in range(first, first + min(count, -(-left // block_size))):
            name = ("shared", f"{tools:g}/{system:g}", place) if place < num_shared else ("block", scope, block)
            size = min(block_size, left)
            segments.append((_token(*name), size))
            place += 1
            left -= size
    if left:
        segments.append((_token("tail", scope, number), left))
    return tuple(segments)


def _is_run(one: Any) -> bool:
    return isinstance(one, list) and len(one) == 2 and all(isinstance(part, int) and part >= 0 for part in one)


def _token(kind: str, scope: str, number: int) -> int:
    """Return a token id for a block. Equal blocks have equal ids, and different ones hardly ever do."""
    return int.from_bytes(blake2b(f"{kind}:{scope}:{number}".encode(), digest_size=_BITS // 8).digest(), "little")
