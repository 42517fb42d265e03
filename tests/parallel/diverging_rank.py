"""A rank that goes wrong: `diverging_rank.py HOW`, then the arguments of a rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stoker.engine import part, sampler
from stoker.engine.ranks import commands, connections, rank_process


def wrong_tokens() -> None:
    real, calls = sampler.choose_tokens, [0]

    def choose(*args: Any) -> Any:
        calls[0] += 1
        found = real(*args)
        return (found + 1) % 100 if calls[0] == 8 else found

    sampler.choose_tokens = choose


def wrong_plan() -> None:
    real, calls = commands.RankLoop.execute, [0]

    def execute(self: commands.RankLoop, data: bytes) -> None:
        calls[0] += 1
        real(self, data[:-1] + bytes([data[-1] ^ 1]) if calls[0] == 8 else data)

    commands.RankLoop.execute = execute  # type: ignore[method-assign]


def wrong_settings() -> None:
    real = connections.rank_facts
    connections.rank_facts = lambda source, settings: real(source, replace(settings, max_model_tokens=77))


def no_memory() -> None:
    def refuse(*args: Any) -> int:
        raise MemoryError("no room for this rank")

    part.blocks_per_set = refuse


def no_weights() -> None:
    """A drive that does not answer."""
    part._load_model = lambda *args: time.sleep(3600)  # type: ignore[assignment, func-returns-value]


HOW: dict[str, Callable[[], None]] = {
    "tokens": wrong_tokens,
    "plan": wrong_plan,
    "settings": wrong_settings,
    "memory": no_memory,
    "drive": no_weights,
}

if __name__ == "__main__":
    HOW[sys.argv.pop(1)]()
    rank_process.main()
