"""AgentMix: synthetic agent sessions of different lengths, for the simulator's experiments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from stoker.sim.workloads.workload import SimSession, SimTurn

_FIRST_SYSTEM_ID = 1000
_FIRST_ID = 1 << 20
_MOST_TURNS = 64
Headers = Literal["none", "heavy", "all"]


@dataclass(frozen=True, slots=True)
class AgentMix:
    """Sessions that start at random times until `arrivals_s`.

    A prompt is one of `systems` system prompts and all turns before it. The number of turns has an exponential distribution.
    Sessions with at least `heavy_turns` turns are heavy. `headers` says which sessions send their key.
    """

    rate: float  # sessions per second
    arrivals_s: float = 60.0
    system_tokens: int = 12_000
    systems: int = 8
    mean_turns: float = 8.0
    turn_tokens: int = 1000  # new tokens of a turn, such as the output of a tool
    output_tokens: int = 150
    spread: float = 0.5  # lengths vary uniformly by this share
    think_s: float = 2.0  # until the next turn; varies uniformly by half
    heavy_turns: int = 12
    headers: Headers = "all"
    seed: int = 1

    def sessions(self) -> Iterator[SimSession]:
        rng = random.Random(self.seed)
        start_s, number = 0.0, 0
        while start_s < self.arrivals_s:
            turns = min(_MOST_TURNS, 1 + int(rng.expovariate(1 / self.mean_turns)))
            has_key = self.headers == "all" or (self.headers == "heavy" and turns >= self.heavy_turns)
            steps = self._turns(number, turns, rng.randrange(self.systems), rng.getrandbits(64))
            yield SimSession(start_s, steps, f"session-{number}" if has_key else None)
            start_s += rng.expovariate(self.rate)
            number += 1

    def _turns(self, number: int, turns: int, system: int, seed: int) -> Iterator[SimTurn]:
        rng = random.Random(seed)
        said: tuple[tuple[int, int], ...] = ((_FIRST_SYSTEM_ID + system, self.system_tokens),)
        for turn in range(turns):
            token = _FIRST_ID + 2 * (number * _MOST_TURNS + turn)
            said = (*said, (token, self._length(rng, self.turn_tokens)))
            output_tokens = self._length(rng, self.output_tokens)
            pause_s = rng.uniform(0.5, 1.5) * self.think_s if turn else 0.0
            yield SimTurn(said, output_tokens, token + 1, pause_s)
            said = (*said, (token + 1, output_tokens))

    def _length(self, rng: random.Random, mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - self.spread, 1 + self.spread)))

    def describe(self) -> dict[str, object]:
        return {"workload": "agent mix", **asdict(self)}
