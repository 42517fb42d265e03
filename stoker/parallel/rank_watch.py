"""RankWatch: decides whether the other ranks are alive and agree with rank 0. Pure: the time is an argument.

A rank sends a beat every half second, and digests of the plans that it received and of the tokens that it sampled. A rank
whose beats stop is stopped, dead or out of memory. A rank whose start does not go on waits for a drive that does not answer. A
rank whose digests differ has diverged: it would soon wait for a collective that the others never call.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from stoker.base.errors import StokerError
from stoker.parallel.rank_link import WAITS_FOR_RANKS, Kind, LinkMessage

CHECK_EVERY_S = 0.25
_LATE_S = 1.0  # a check this late means that this process itself did not run
_MAX_STEPS = 1024  # steps whose digests are remembered


class RankLost(StokerError):
    """A rank has ended, hangs or has diverged. The message names it."""

    code = "rank_lost"


@dataclass(slots=True)
class _RankState:
    beat_s: float
    progress_s: float  # when its start went on, or waited for other ranks
    progress: int = WAITS_FOR_RANKS
    where: str = ""  # empty: this machine
    is_ready: bool = False
    has_said_hello: bool = False
    failure: str | None = None


@dataclass(slots=True)
class _StepDigests:
    """Digests of one step, by the kind of message: rank 0's, and those of ranks that arrived before it."""

    own: dict[Kind, int] = field(default_factory=dict)
    early: dict[Kind, dict[int, int]] = field(default_factory=dict)


class RankWatch:
    """Watches the ranks 1 to `num_ranks` - 1."""

    def __init__(self, num_ranks: int, silent_s: float, start_silent_s: float, now: float) -> None:
        """`silent_s` is the longest time between two beats, `start_silent_s` that before a rank is ready. It is the longest time
        without progress of its start too."""
        self._ranks = {rank: _RankState(now, now) for rank in range(1, num_ranks)}
        self._silent_s, self._start_silent_s = silent_s, start_silent_s
        self._steps: OrderedDict[int, _StepDigests] = OrderedDict()
        self._checked_s = now
        self.verdict: str | None = None
        """Why the engine must end; None: all is well."""

    @property
    def all_connected(self) -> bool:
        return all(state.has_said_hello for state in self._ranks.values())

    @property
    def all_ready(self) -> bool:
        return all(state.is_ready for state in self._ranks.values())

    @property
    def missing(self) -> list[int]:
        """The ranks that have not connected."""
        return [rank for rank, state in self._ranks.items() if not state.has_said_hello]

    def arrived(self, rank: int, where: str, now: float) -> None:
        """A rank of another machine has connected. Errors name where it runs."""
        state = self._ranks[rank]
        state.beat_s = state.progress_s = now
        state.where, state.has_said_hello = where, True

    def fail(self, reason: str) -> None:
        """Another part of rank 0 has found that the ranks cannot work together."""
        self._judge(reason)

    def received(self, rank: int, message: LinkMessage, now: float) -> None:
        """Take in a message of a rank."""
        state = self._ranks[rank]
        state.beat_s = now
        if message.kind is not Kind.BEAT or message.step == WAITS_FOR_RANKS or message.step != state.progress:
            state.progress_s = now
        if message.kind is Kind.BEAT:
            state.progress = message.step
        elif message.kind is Kind.HELLO:
            state.has_said_hello = True
        elif message.kind is Kind.READY:
            state.is_ready = True
        elif message.kind is Kind.FAILED:
            state.failure = message.text
            self._judge(f"{self._name(rank)} failed: {message.text}")
        elif message.kind in (Kind.RECEIVED, Kind.SAMPLED):
            self._compare(rank, message.kind, message.step, message.digest)

    def ended(self, rank: int, exit_code: int | None) -> None:
        """A rank's process or connection has ended."""
        if self._ranks[rank].failure is None:
            how = "its connection ended" if exit_code is None else f"its process ended with exit code {exit_code}"
            self._judge(f"{self._name(rank)} is lost: {how}")

    def expect(self, kind: Kind, step: int, digest: int) -> None:
        """Set what every rank should report for a step."""
        digests = self._digests(step)
        digests.own[kind] = digest
        for rank, found in digests.early.pop(kind, {}).items():
            self._compare(rank, kind, step, found)

    def check(self, now: float) -> str | None:
        """Return why the engine must end, or None. Call it every CHECK_EVERY_S.

        A late call means that this process was stopped or starved. It could not read the beats of that time, so the ranks get
        a fresh period.
        """
        late = now - self._checked_s > CHECK_EVERY_S + _LATE_S
        self._checked_s = now
        for rank, state in self._ranks.items():
            if late:
                state.beat_s = state.progress_s = now
            limit_s = self._silent_s if state.is_ready else self._start_silent_s
            if now - state.beat_s >= limit_s:
                self._judge(
                    f"{self._name(rank)} is lost: it sent no heartbeat for {now - state.beat_s:.1f} s (limit {limit_s:g} s)"
                )
            elif not state.is_ready and now - state.progress_s >= limit_s:
                self._judge(
                    f"{self._name(rank)} is lost: its start made no progress for {now - state.progress_s:.1f} s "
                    f"(limit {limit_s:g} s)"
                )
        return self.verdict

    def _compare(self, rank: int, kind: Kind, step: int, digest: int) -> None:
        digests = self._digests(step)
        if kind not in digests.own:
            digests.early.setdefault(kind, {})[rank] = digest
        elif digests.own[kind] != digest:
            what = "received another plan" if kind is Kind.RECEIVED else "sampled other tokens"
            self._judge(
                f"{self._name(rank)} has diverged: in step {step} it {what} than rank 0 (digest {digest:016x}, rank 0 has "
                f"{digests.own[kind]:016x})"
            )

    def _digests(self, step: int) -> _StepDigests:
        found = self._steps.get(step)
        if found is None:
            found = self._steps[step] = _StepDigests()
            while len(self._steps) > _MAX_STEPS:
                self._steps.popitem(last=False)
        return found

    def _name(self, rank: int) -> str:
        where = self._ranks[rank].where
        return f"rank {rank} ({where})" if where else f"rank {rank}"

    def _judge(self, verdict: str) -> None:
        self.verdict = self.verdict or verdict  # the first reason counts; the others follow from it
