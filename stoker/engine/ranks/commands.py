"""What rank 0 sends to the other ranks, and the loop in which they execute it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from stoker.engine.runner import PendingStep, Runner
from stoker.kv.blocks.transfer import KvLoad
from stoker.parallel.collectives import ExchangeFailed
from stoker.parallel.frame_fields import FrameError
from stoker.parallel.kv_frame import KvUpdate
from stoker.parallel.plan_frame import Frame, RankCommand, decode, digest_of, encode
from stoker.parallel.rank_link import Kind
from stoker.sched.plan import StepPlan, StepResult


class Ranks(Protocol):
    """The other ranks, as rank 0 sees them."""

    def check(self) -> None:
        """Raise RankLost if a rank has ended, hangs or has diverged."""

    def send(self, frame: bytes) -> None:
        """Send a frame to all ranks. Raise RankLost if one of them cannot be reached."""

    def expect(self, kind: Kind, step: int, digest: int) -> None:
        """Set what all ranks should report for a step."""

    def explain(self, error: Exception) -> Exception:
        """Return why an exchange with the ranks failed. The error itself only says that a connection ended."""


class RankCommands:
    """Sends commands to all ranks, on the engine's thread, and sets what they should report."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.num_waited = 0
        """The number of the last step whose end rank 0 has waited for."""
        self._number = 0

    def send(self, command: RankCommand, plan: StepPlan | None = None, update: KvUpdate | None = None) -> int:
        """Send a command, and return its number."""
        self.ranks.check()
        self._number += 1
        frame = encode(Frame(command, self._number, plan, update))
        self.ranks.expect(Kind.RECEIVED, self._number, digest_of(frame))
        self.ranks.send(frame)
        return self._number


class RankedStep:
    """A step that all ranks execute."""

    def __init__(
        self, pending: PendingStep, number: int, commands: RankCommands, finish: Callable[[], None] | None
    ) -> None:
        """`finish` tells the ranks to sample, where they do not do that at once."""
        self._pending, self._number, self._commands, self._finish = pending, number, commands, finish
        self._ranks = commands.ranks

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
        self._commands.num_waited = self._number
        self._ranks.expect(Kind.SAMPLED, self._number, digest_of(self._pending.token_bytes))
        self._ranks.check()
        return result


class RankedRunner:
    """Rank 0's runner: every command goes to all ranks first."""

    def __init__(self, runner: Runner, commands: RankCommands, tells_when_to_sample: bool) -> None:
        """`tells_when_to_sample`: see RankPlace. The place of sampling in the order of the commands is then not fixed."""
        self._runner, self._commands, self._tells = runner, commands, tells_when_to_sample
        self._ranks = commands.ranks

    def launch(self, plan: StepPlan) -> RankedStep:
        """Start a plan on all ranks."""
        number = self._commands.send(RankCommand.STEP, plan)
        try:
            pending = self._runner.launch(plan)
        except ExchangeFailed as error:
            raise self._ranks.explain(error) from error
        return RankedStep(pending, number, self._commands, self._send_finish if self._tells else None)

    def warm_up(self) -> None:
        self._commands.send(RankCommand.WARM_UP)
        self._runner.warm_up()

    def capture_next(self) -> bool:
        self._commands.send(RankCommand.CAPTURE_NEXT)
        return self._runner.capture_next()

    def capture_all(self) -> None:
        self._commands.send(RankCommand.CAPTURE_ALL)
        self._runner.capture_all()

    def _send_finish(self) -> None:
        self._commands.send(RankCommand.FINISH)


class KvPart(Protocol):
    """What a rank does with KV (RankKvPart)."""

    def start_loads(self, loads: Iterable[KvLoad]) -> None: ...

    def apply(self, update: KvUpdate) -> None: ...

    def poll(self) -> None: ...

    def close(self) -> None: ...


class RankLoop:
    """Executes the commands of rank 0 on another rank."""

    def __init__(
        self,
        runner: Runner,
        kv: KvPart,
        report: Callable[[Kind, int, int], None],
        *,
        samples: bool,
        deferred: bool,
        steps_ahead: int,
    ) -> None:
        """`report` gets a kind of message, the step and a digest. `samples`: this rank is in the first stage. `deferred`: it
        samples when it is told to. `steps_ahead` are launched before the oldest one is waited for, as on rank 0."""
        self._runner, self._kv, self._report = runner, kv, report
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
            self._kv.start_loads(frame.plan.loads)
            if not self._is_told:
                self.finish(self._steps_ahead)
        elif frame.command is RankCommand.FINISH:
            if self._is_told:
                self._finish_oldest()
        elif frame.command is RankCommand.KV:
            assert frame.update is not None
            while not self._is_told and self._launched and self._launched[0][0] <= frame.update.after:
                self._finish_oldest()
            self._kv.apply(frame.update)
        elif frame.command is RankCommand.CLOSE_KV:
            self._kv.close()
        elif frame.command is RankCommand.WARM_UP:
            self._runner.warm_up()
        elif frame.command is RankCommand.CAPTURE_NEXT:
            self._runner.capture_next()
        else:
            self._runner.capture_all()

    def finish(self, max_launched: int = 0) -> None:
        """Wait for the oldest steps until at most `max_launched` are in flight. Call it also when no command comes."""
        self._kv.poll()
        while not self._is_told and len(self._launched) > max_launched:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        step, pending = self._launched.popleft()
        pending.wait()
        if self._samples:
            self._report(Kind.SAMPLED, step, digest_of(pending.token_bytes))
