"""Traces of real traffic. They hold lengths and block ids, no text.

The tokens of a block are generated from its id, so that the prompt repeats where ids repeat. For a small model a block
may stand for fewer tokens: all lengths shrink by the same factor, and the share that is reused stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError
from stoker.loadgen.prompts import read_lines
from stoker.loadgen.session import Blocks, LoadSession, TokenRange, Turn

MOONCAKE_BLOCK_TOKENS = 512
DEFAULT_STEP_S = 3.0  # between a Mooncake trace's batches


@dataclass(frozen=True, slots=True)
class Replay:
    """How a trace is turned into requests."""

    block_tokens: int | None = None  # tokens for one block of the trace; None: as in the trace
    speedup: float = 1.0
    max_pause_s: float = 120.0  # before the speed-up; longer pauses are cut
    token_range: TokenRange = field(default_factory=TokenRange)

    def __post_init__(self) -> None:
        if self.block_tokens is not None and self.block_tokens < 1:
            raise ConfigError(f"--block-tokens-scale {self.block_tokens}: must be above 0")
        if not self.speedup > 0:
            raise ConfigError(f"--speedup {self.speedup:g}: must be above 0")


def trace_sessions(path: Path, replay: Replay) -> list[LoadSession]:
    """Read Mooncake's format (one request per line) or agent sessions (one session per line). The first line decides which."""
    rows = list(read_lines(path))
    if not rows:
        raise ConfigError(f"{path} is empty")
    if "hash_ids" in rows[0]:
        return mooncake_sessions(rows, replay)
    if "requests" in rows[0]:
        return [agent_session(row, replay) for row in rows]
    raise ConfigError(f"{path}: its lines have neither hash_ids (Mooncake) nor requests (agent sessions)")


def spread(times_s: list[float]) -> list[float]:
    """Spread arrivals that were recorded in batches evenly over the time until the next batch."""
    batches = [(time_s, len(list(same))) for time_s, same in groupby(times_s)]
    spread_s: list[float] = []
    step_s = DEFAULT_STEP_S
    for index, (time_s, count) in enumerate(batches):
        if index + 1 < len(batches):
            step_s = batches[index + 1][0] - time_s
        spread_s += [time_s + step_s * number / count for number in range(count)]
    return spread_s


def mooncake_sessions(rows: list[dict[str, Any]], replay: Replay) -> list[LoadSession]:
    rows = sorted(rows, key=lambda row: float(row["timestamp"]))
    starts_s = spread([row["timestamp"] / 1000 for row in rows])
    sessions = []
    for index, (row, start_s) in enumerate(zip(rows, starts_s, strict=True)):
        name = f"mooncake-{index}"
        blocks = [f"mooncake-block-{block}" for block in row["hash_ids"]]
        lengths = (row["input_length"], row["output_length"])
        prompt, max_tokens = _scaled(blocks, name, *lengths, MOONCAKE_BLOCK_TOKENS, replay)
        turn = Turn(prompt, session=name, max_tokens=max_tokens)
        sessions.append(LoadSession([turn], start_s=start_s / replay.speedup))
    return sessions


@dataclass(frozen=True, slots=True)
class AgentBlocks:
    """Block names from runs of ids. Written out, the names of a few hundred sessions would take gigabytes."""

    scope: str  # the session within which ids are unique
    runs: Sequence[tuple[int, int]]  # first id, count
    prefix: str  # names the first `num_shared` blocks, in every scope
    num_shared: int

    def __iter__(self) -> Iterator[str]:
        place = 0
        for first, count in self.runs:
            for block in range(first, first + count):
                yield f"{self.prefix}-{place}" if place < self.num_shared else f"{self.scope}-{block}"
                place += 1


def agent_session(row: dict[str, Any], replay: Replay) -> LoadSession:
    """Make one session. Block ids are unique within it; sessions whose tools and system prompt have the same sizes share
    that prefix. A sub-agent's turns stand where the session called it: its parent waits for it.
    """
    return LoadSession(list(_agent_turns(row, row["id"], row["id"], "", row["block_size"], replay)))


def _agent_turns(
    agent: dict[str, Any], scope: str, session: str, parent: str, block_size: int, replay: Replay
) -> Iterator[Turn]:
    prefix = f"prefix-{agent['tool_tokens']}-{agent['system_tokens']}"
    num_shared = (agent["tool_tokens"] + agent["system_tokens"]) // block_size
    for index, request in enumerate(agent["requests"]):
        if "runs" not in request:
            name = f"{session}/{request.get('agent_id', index)}"
            yield from _agent_turns(request, scope, name, session, block_size, replay)
            continue
        blocks = AgentBlocks(scope, request["runs"], prefix, num_shared)
        tail = f"{session}-tail-{index}"
        prompt, max_tokens = _scaled(blocks, tail, request["in"], request["out"], block_size, replay)
        pause_s = min(float(request.get("think_time") or 0.0), replay.max_pause_s) / replay.speedup
        yield Turn(prompt, session, parent, max_tokens, pause_s)


def _scaled(
    blocks: Iterable[str], tail: str, input_tokens: int, output_tokens: int, block_size: int, replay: Replay
) -> tuple[Blocks, int]:
    block_tokens = replay.block_tokens or block_size
    num_tokens = max(1, round(input_tokens * block_tokens / block_size))
    max_tokens = max(1, round(output_tokens * block_tokens / block_size))
    return Blocks(blocks, tail, block_tokens, num_tokens, replay.token_range), max_tokens
