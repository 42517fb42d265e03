"""Progress of a run with an estimate of the time left, from the first streamed token on."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from stoker.base.clock import Clock
from stoker.loadgen.load import LoadPlan
from stoker.loadgen.session import LoadSession, Turn
from stoker.loadgen.stream import Delta, Record

_REFRESHES_PER_S = 2  # rendering takes CPU time from the server under test


class RunEstimate:
    """Estimates the time left of a run.

    Output tokens measure the progress, not finished requests: the first requests all finish late, but their tokens
    arrive early. An open-loop run or a trace cannot end before its last request is sent; that bounds the estimate from
    below, and is known before the first token.
    """

    def __init__(self, sessions: Sequence[LoadSession], load: LoadPlan, default_max_tokens: int) -> None:
        self._default_max_tokens = default_max_tokens
        self._expected_tokens = sum(self._expected(turn) for session in sessions for turn in session.turns)
        starts_s = [start if start is not None else session.start_s or 0.0
                    for session, start in zip(sessions, load.starts(), strict=False)]  # fmt: skip
        pauses_s = [sum(turn.pause_s for turn in session.turns) for session in sessions]
        self._shortest_s = max((start + pause for start, pause in zip(starts_s, pauses_s, strict=True)), default=0.0)
        self._ended_tokens = 0  # what the finished requests were expected to generate
        self._streamed_chunks = 0  # of the requests that still run

    def received(self, _: Delta) -> None:
        self._streamed_chunks += 1

    def ended(self, turn: Turn, record: Record) -> None:
        self._streamed_chunks -= record.num_chunks
        self._ended_tokens += self._expected(turn)

    def remaining_s(self, elapsed_s: float) -> float | None:
        """Return the seconds left, or None while nothing is known."""
        done = min(self._ended_tokens + self._streamed_chunks, self._expected_tokens)
        shortest_s = max(0.0, self._shortest_s - elapsed_s)
        if done <= 0:
            return shortest_s or None
        return max(shortest_s, elapsed_s * (self._expected_tokens - done) / done)

    def _expected(self, turn: Turn) -> int:
        return turn.max_tokens or self._default_max_tokens


def describe_duration(seconds: float) -> str:
    """Return a duration as text, such as `1 min 05 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class _TimeLeftColumn(ProgressColumn):
    def __init__(self, estimate: RunEstimate, clock: Clock) -> None:
        super().__init__()
        self._estimate, self._clock, self._begin_s = estimate, clock, clock.now()

    def render(self, task: Task) -> Text:
        left_s = self._estimate.remaining_s(self._clock.now() - self._begin_s)
        return Text("estimating the time left" if left_s is None else f"about {describe_duration(left_s)} left")


def progress_bar(console: Console, estimate: RunEstimate, clock: Clock) -> Progress:
    """Return a bar of finished requests, which disappears at the end. It is hidden if `console` is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        *columns,
        _TimeLeftColumn(estimate, clock),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        refresh_per_second=_REFRESHES_PER_S,
    )
