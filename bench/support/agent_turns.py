"""The sessions of bench/support/agent_load.py as a workload of the simulator: the same turns, lengths and think times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.support.agent_load import AgentLoad, AgentProfile, agent_sessions
from stoker.loadgen.session import LoadSession, Messages
from stoker.sim.workloads.workload import SimSession, SimTurn

_TEMPLATE_TOKENS = 5  # of each message, in the template of Llama 3
_HEAD_ID, _FIRST_ID, _IDS = 1, 1000, 1000  # token ids: of the shared head, of the first session, and for each session


@dataclass(frozen=True, slots=True)
class AgentTurns:
    """A word of the text counts as one token. The head is the same in all sessions."""

    load: AgentLoad
    profile: AgentProfile
    seed: int = 0

    def sessions(self) -> Iterator[SimSession]:
        for number, session in enumerate(agent_sessions(self.load, self.profile, self.seed)):
            yield SimSession(session.start_s or 0.0, _turns(session, _FIRST_ID + number * _IDS), str(number))

    def describe(self) -> dict[str, object]:
        return {"workload": "agents", "load": self.load.describe(), "seed": self.seed}


def _turns(session: LoadSession, first_id: int) -> Iterator[SimTurn]:
    for number, turn in enumerate(session.turns):
        prompt = turn.prompt
        assert isinstance(prompt, Messages)
        sizes = [len(str(one["content"]).split()) + _TEMPLATE_TOKENS for one in prompt.conversation[: prompt.count]]
        segments = tuple((first_id + i if i else _HEAD_ID, size) for i, size in enumerate(sizes))
        yield SimTurn(segments, turn.max_tokens or 1, first_id + _IDS - 1 - number, turn.pause_s)
