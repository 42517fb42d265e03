"""Synthetic sessions with stated parameters: arrivals, lengths, turns, a shared system prompt, and think time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice

from stoker.base.errors import ConfigError
from stoker.sim.workloads.workload import SimSession, SimTurn

_SYSTEM_IDS = 1000  # token ids of shared system prompts start here; those of sessions are above
_FIRST_ID = 1 << 20
_MAX_ID = 1 << 32


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Sessions that start at random times. Lengths vary uniformly by `spread` around their mean.

    Each turn adds `input_tokens` to the conversation, after the system prompt and all turns before it. With `fixed`, a turn
    starts `think_s` after the start of the turn before it, answered or not.
    """

    requests: int = 1000
    rate: float = 1.0  # sessions per second
    input_tokens: int = 512
    output_tokens: int = 128
    spread: float = 0.0
    turns: int = 1
    system_tokens: int = 0
    systems: int = 1  # different system prompts
    think_s: float = 0.0
    fixed: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "input_tokens", "output_tokens", "turns", "systems"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        for name in ("system_tokens", "think_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")
        if not 0 < self.rate < float("inf"):
            raise ConfigError(f"--rate {self.rate}: must be above 0")
        if not 0 <= self.spread <= 1:
            raise ConfigError(f"--spread {self.spread}: must be from 0 to 1")

    def sessions(self) -> Iterator[SimSession]:
        rng = random.Random(self.seed)
        left, start_s = self.requests, 0.0
        for number in count():
            if left <= 0:
                return
            turns = min(self.turns, left)
            left -= turns
            yield SimSession(start_s, self._turns(number, turns, start_s, rng.getrandbits(64)), f"session-{number}")
            start_s += rng.expovariate(self.rate)

    def _turns(self, number: int, turns: int, start_s: float, seed: int) -> Iterator[SimTurn]:
        rng = random.Random(seed)
        first_id = (_FIRST_ID + number * 2 * self.turns) % (_MAX_ID - 2 * self.turns)
        system = ((_SYSTEM_IDS + number % self.systems, self.system_tokens),) if self.system_tokens else ()
        said = system
        for turn, token in islice(zip(count(), count(first_id, 2), strict=False), turns):
            said = (*said, (token, self._length(rng, self.input_tokens)))
            output_tokens = self._length(rng, self.output_tokens)
            at_s = start_s + turn * self.think_s if self.fixed else None
            pause_s = rng.uniform(0.5, 1.5) * self.think_s if turn else 0.0
            yield SimTurn(said, output_tokens, token + 1, pause_s, at_s)
            said = (*said, (token + 1, output_tokens))

    def _length(self, rng: random.Random, mean: int) -> int:
        if not self.spread:
            return mean
        return max(1, round(mean * rng.uniform(1 - self.spread, 1 + self.spread)))

    def describe(self) -> dict[str, object]:
        return {"workload": "synthetic", **asdict(self)}
