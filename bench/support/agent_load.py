"""Sessions of coding agents, generated from a seed: growing prompts with a shared head, tool results and think time.

A session is a chat. Its first message is the head that all sessions share (system prompt and tools), then come a task, and
in turn an answer and a tool result. Each turn resends everything before it. The answers in the prompts are generated, not
the server's, so that every server gets exactly the same prompts; the lengths of the server's answers are fixed. Tool
results are sent as user messages, because many chat templates have no place for tools.

Text is made of common words, about one token each. The server's usage tells the exact number of tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.loadgen.session import LoadSession

Range = tuple[float, float]
_TURN_TOKENS = 16  # of the chat template, for each message; rounded up


@dataclass(frozen=True, slots=True)
class AgentProfile:
    """What agents send. Ranges are sampled log-uniformly: most tool results are short, and few are long."""

    head_tokens: int = 4000
    task_tokens: Range = (50, 400)
    tool_tokens: Range = (50, 6000)
    answer_tokens: Range = (40, 300)
    think_s: Range = (0.5, 8.0)  # from an answer to the next turn: the tool runs
    turns: tuple[int, int] = (4, 8)
    context_tokens: int = 32768  # a session ends before a prompt and its answer would not fit
    ramp_s: float = 5.0  # sessions start within this time


# For a small model on a CPU: the same proportions with prompts of some hundred tokens.
SMALL = AgentProfile(
    head_tokens=250, task_tokens=(8, 30), tool_tokens=(8, 375), answer_tokens=(4, 20), think_s=(0.1, 0.6),
    context_tokens=2048, ramp_s=0.5,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """A number of agents that work at the same time."""

    name: str
    sessions: int

    def describe(self) -> str:
        return f"{self.name}, {self.sessions} sessions"


LOADS = {load.name: load for load in (AgentLoad("light", 24), AgentLoad("full", 96), AgentLoad("overload", 192))}
SMALL_LOADS = {load.name: load for load in (AgentLoad("light", 2), AgentLoad("full", 8), AgentLoad("overload", 24))}


def agent_sessions(load: AgentLoad, profile: AgentProfile, seed: int) -> list[LoadSession]:
    """Return the load's sessions in the order of their start. Equal arguments give equal sessions, on any machine."""
    head = _text(random.Random(f"agents-{seed}-head"), profile.head_tokens)
    made = [_session(f"agents-{seed}-{load.name}-{number}", head, profile) for number in range(load.sessions)]
    return sorted(made, key=lambda session: session.start_s or 0.0)


def _session(name: str, head: str, profile: AgentProfile) -> LoadSession:
    from stoker.loadgen.session import LoadSession, Messages, Turn

    rng = random.Random(name)
    start_s = rng.uniform(0.0, profile.ramp_s)
    conversation: list[dict[str, Any]] = [{"role": "system", "content": head}]
    turns: list[Turn] = []
    num_tokens = profile.head_tokens + _TURN_TOKENS
    for num_new, num_out, think_s in _steps(rng, profile):
        num_tokens += num_new + _TURN_TOKENS
        if num_tokens + num_out > profile.context_tokens:
            break
        conversation.append({"role": "user", "content": _text(rng, num_new)})
        turns.append(Turn(Messages(conversation, len(conversation)), name, "", num_out, think_s))
        conversation.append({"role": "assistant", "content": _text(rng, num_out)})
        num_tokens += num_out + _TURN_TOKENS
    return LoadSession(turns, start_s)


def _steps(rng: random.Random, profile: AgentProfile) -> Iterator[tuple[int, int, float]]:
    """Yield the tokens of the new message, those of the answer, and the think time of each turn."""
    yield _length(rng, profile.task_tokens), _length(rng, profile.answer_tokens), 0.0
    for _ in range(rng.randint(*profile.turns) - 1):
        think_s = _log_uniform(rng, profile.think_s)
        yield _length(rng, profile.tool_tokens), _length(rng, profile.answer_tokens), think_s


def _log_uniform(rng: random.Random, bounds: Range) -> float:
    low, high = bounds
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _length(rng: random.Random, bounds: Range) -> int:
    return min(round(_log_uniform(rng, bounds)), int(bounds[1]))


def _text(rng: random.Random, num_words: int) -> str:
    from stoker.loadgen.prompts import WORDS

    return " ".join(rng.choices(WORDS, k=num_words))


def scaled(load: AgentLoad, share: float) -> AgentLoad:
    """Return the load with this share of its sessions, at least one."""
    return replace(load, sessions=max(1, round(load.sessions * share)))


def paced(profile: AgentProfile, scale: float) -> AgentProfile:
    """Return the profile with think times and the ramp multiplied by `scale`."""
    low, high = profile.think_s
    return replace(profile, think_s=(low * scale, high * scale), ramp_s=profile.ramp_s * scale)
