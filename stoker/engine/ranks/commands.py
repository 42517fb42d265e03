"""What rank 0 sends to the other ranks, and the loop in which they execute it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from stoker.engine.runner import PendingStep, Runner
from stoker.parallel.collectives import ExchangeFailed
from stoker.parallel.plan_frame import Frame, FrameError, RankCommand, decode, digest_of, encode
from stoker.parallel.rank_link import Kind
from stoker.sched.plan import StepPlan, StepResult


class Ranks(Protocol):
    """The other ranks, as rank 0 sees them."""

    def check(self) -> None:
        """Raise RankLost if a rank has ended, hangs or has diverged."""

    def send(self, frame: bytes) -> None:
        """Send a frame to all ranks."""

    def expect(self, kind: Kind, step: int, digest: int) -> None:
        """Set what all ranks should report for a step."""

    def explain(self, error: Exception) -> Exception:
        """Return why an exchange with the ranks failed. The error itself only says that a connection ended."""


class RankedStep:
    """A step that all ranks execute."""

    def __init__(self, pending: PendingStep, number: int, ranks: Ranks, finish: Callable[[], None] | None) -> None:
        """`finish` tells the ranks to sample, where they do not do that at once."""
        self._pending, self._number, self._ranks, self._finish = pending, number, ranks, finish

    @property
    def plan(self) -> StepPlan:
        return self._pending.plan

    def wait(self) -> StepResult:
        """Return the result, after waiting for the step. Steps are waited for in the order of their launch."""
        if self._finish is not None:
            self._finish()
            self._finish = None
        try:
            result = self._pending.wait()
        except ExchangeFailed as error:
            raise self._ranks.explain(error) from error
        self._ranks.expect(Kind.SAMPLED, self._number, digest_of(self._pending.token_bytes))
        self._ranks.check()
        return result


class RankedRunner:
    """Rank 0's runner: every command goes to all ranks first."""

    def __init__(self, runner: Runner, ranks: Ranks, is_deferred: bool) -> None:
        """`is_deferred`: sampling waits for later stages, so that its place in the order of the commands is not fixed."""
        self._runner, self._ranks, self._is_deferred = runner, ranks, is_deferred
        self._number = 0

    def launch(self, plan: StepPlan) -> RankedStep:
        """Start a plan on all ranks."""
        number = self._send(RankCommand.STEP, plan)
        try:
            pending = self._runner.launch(plan)
        except ExchangeFailed as error:
            raise self._ranks.explain(error) from error
        return RankedStep(pending, number, self._ranks, self._send_finish if self._is_deferred else None)

    def warm_up(self) -> None:
        self._send(RankCommand.WARM_UP)
        self._runner.warm_up()

    def capture_next(self) -> bool:
        self._send(RankCommand.CAPTURE_NEXT)
        return self._runner.capture_next()

    def capture_all(self) -> None:
        self._send(RankCommand.CAPTURE_ALL)
        self._runner.capture_all()

    def _send_finish(self) -> None:
        self._send(RankCommand.FINISH)

    def _send(self, command: RankCommand, plan: StepPlan | None = None) -> int:
        self._ranks.check()
        self._number += 1
        frame = encode(Frame(command, self._number, plan))
        self._ranks.expect(Kind.RECEIVED, self._number, digest_of(frame))
        self._ranks.send(frame)
        return self._number


class RankLoop:
    """Executes the commands of rank 0 on another rank."""

    def __init__(
        self,
        runner: Runner,
        report: Callable[[Kind, int, int], None],
        *,
        samples: bool,
        deferred: bool,
        steps_ahead: int,
    ) -> None:
        """`report` gets a kind of message, the step and a digest. `samples`: this rank is in the first stage. `deferred`: it
        samples when it is told to. `steps_ahead` are launched before the oldest one is waited for, as on rank 0."""
        self._runner, self._report = runner, report
        self._samples, self._is_told = samples, samples and deferred
        self._steps_ahead = steps_ahead
        self._number = 0
        self._launched: deque[tuple[int, PendingStep]] = deque()

    def execute(self, data: bytes) -> None:
        """Execute one frame. It is reported first: executing a wrong one may hang."""
        self._number += 1
        self._report(Kind.RECEIVED, self._number, digest_of(data))
        frame = decode(data)
        if frame.step != self._number:
            raise FrameError(f"command {frame.step} came instead of {self._number}")
        if frame.command is RankCommand.STEP:
            assert frame.plan is not None
            self._launched.append((frame.step, self._runner.launch(frame.plan)))
            if not self._is_told:
                self.finish(self._steps_ahead)
        elif frame.command is RankCommand.FINISH:
            if self._is_told:
                self._finish_oldest()
        elif frame.command is RankCommand.WARM_UP:
            self._runner.warm_up()
        elif frame.command is RankCommand.CAPTURE_NEXT:
            self._runner.capture_next()
        else:
            self._runner.capture_all()

    def finish(self, max_launched: int = 0) -> None:
        """Wait for the oldest steps until at most `max_launched` are in flight. Call it also when no command comes."""
        while not self._is_told and len(self._launched) > max_launched:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        step, pending = self._launched.popleft()
        pending.wait()
        if self._samples:
            self._report(Kind.SAMPLED, step, digest_of(pending.token_bytes))
