"""EngineWatchdog decides whether an engine process is alive, from the beats that it sends. It takes the time as an argument.

Two limits hold. An engine whose beats stop is stopped, or one of its threads never releases the GIL. An engine that beats,
but whose loop stays in the same round, hangs: a deadlock, or a step that never ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.proto.messages import Beat

CHECK_EVERY_S = 0.25
_LATE_S = 1.0  # a check this late means that the server process itself did not run


@dataclass(frozen=True, slots=True)
class WatchdogLimits:
    silent_s: float  # maximum time between two beats
    step_s: float  # maximum time of one round of the loop


class EngineWatchdog:
    """Watches one engine process, from the moment it is ready."""

    def __init__(self, limits: WatchdogLimits, now: float) -> None:
        self._limits = limits
        self._beat_s = now  # when the last beat arrived
        self._advanced_s = now  # when the loop was last seen idle or in a new round
        self._round = -1
        self._checked_s = now

    def beat(self, beat: Beat, now: float) -> None:
        self._beat_s = now
        if beat.round != self._round or not beat.busy:
            self._round, self._advanced_s = beat.round, now

    def verdict(self, now: float) -> str | None:
        """Return why the engine must be killed, or None. Call it every CHECK_EVERY_S.

        A late call means that this process was stopped, starved or suspended. It could not read the beats of that time, so
        the engine gets a fresh period.
        """
        late = now - self._checked_s > CHECK_EVERY_S + _LATE_S
        self._checked_s = now
        if late:
            self._beat_s = self._advanced_s = now
        if now - self._beat_s >= self._limits.silent_s:
            return (
                f"it sent no heartbeat for {now - self._beat_s:.1f} s (limit {self._limits.silent_s:g} s, "
                "--engine-silent-s): it is stopped, or one thread does not release the GIL"
            )
        if now - self._advanced_s >= self._limits.step_s:
            return (
                f"one step has taken {now - self._advanced_s:.0f} s (limit {self._limits.step_s:g} s, --step-timeout-s): "
                "it hangs, or the limit is too low for this model on this machine"
            )
        return None
