"""SessionBook: the latest sessions with their turns, for the dashboard. Bounded, least recently used first. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from stoker.gateway.admission.prices import in_currency
from stoker.gateway.insight.request_digest import RequestDigest

_MAX_SESSIONS = 512
_MAX_TURNS = 24


class SessionTurn(NamedTuple):
    """One request of a session."""

    time_s: float
    request_id: str
    worker: str
    status: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    misses: str
    cost: int


class _Session:
    __slots__ = ("cached_tokens", "completion_tokens", "cost", "model", "parent", "prompt_tokens", "requests", "turns")

    def __init__(self) -> None:
        self.parent: str | None = None
        self.model = ""
        self.requests = self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.cost = 0
        self.turns: deque[SessionTurn] = deque(maxlen=_MAX_TURNS)


class SessionBook:
    """The sessions by their keys, which begin with the tenant."""

    def __init__(self, max_sessions: int = _MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def add(self, ended: RequestDigest) -> None:
        row = ended.row
        if row.session is None:
            return
        session = self._sessions.get(row.session)
        if session is None:
            session = self._sessions[row.session] = _Session()
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        else:
            self._sessions.move_to_end(row.session)
        session.parent = ended.parent or session.parent
        session.model = row.model
        session.requests += 1
        session.prompt_tokens += row.prompt_tokens
        session.cached_tokens += row.cached_tokens
        session.completion_tokens += row.completion_tokens
        session.cost += ended.cost
        session.turns.append(
            SessionTurn(
                row.time_s,
                row.request_id,
                row.worker,
                row.status,
                row.prompt_tokens,
                row.cached_tokens,
                row.completion_tokens,
                row.ttft_ms,
                row.misses,
                ended.cost,
            )
        )

    def report(self, count: int) -> list[dict[str, object]]:
        """Return the latest sessions, the latest first."""
        latest = list(self._sessions.items())[-count:] if count > 0 else []
        return [_as_dict(key, session) for key, session in reversed(latest)]


def _as_dict(key: str, session: _Session) -> dict[str, object]:
    return {
        "session": key,
        "parent": session.parent,
        "model": session.model,
        "requests": session.requests,
        "prompt_tokens": session.prompt_tokens,
        "cached_tokens": session.cached_tokens,
        "completion_tokens": session.completion_tokens,
        "cost": in_currency(session.cost),
        "turns": [{**turn._asdict(), "cost": in_currency(turn.cost)} for turn in session.turns],
    }
