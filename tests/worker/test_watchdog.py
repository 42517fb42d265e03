"""The engine watchdog in virtual time: stopped and hanging engines are noticed, slow ones and slow servers are not."""

from __future__ import annotations

import pytest

from stoker.proto.messages import Beat
from stoker.worker.watchdog import CHECK_EVERY_S, EngineWatchdog, WatchdogLimits

BEAT_EVERY_S = 0.5


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.watchdog = EngineWatchdog(WatchdogLimits(silent_s=4.5, step_s=120.0), self.now)
        self.round = 0

    def run(
        self, seconds: float, *, beats: bool = True, advances: bool = True, busy: bool = True
    ) -> tuple[float, str] | None:
        """Return when and why the watchdog gave up the engine, as seconds after the start of this phase."""
        started, next_beat = self.now, self.now
        while self.now < started + seconds:
            if beats and self.now >= next_beat:
                next_beat += BEAT_EVERY_S
                self.round += advances
                self.watchdog.beat(Beat(round=self.round, busy=busy), self.now)
            if (reason := self.watchdog.verdict(self.now)) is not None:
                return self.now - started, reason
            self.now += CHECK_EVERY_S
        return None


@pytest.fixture
def world() -> World:
    return World()


def test_a_stopped_engine_is_noticed_within_five_seconds(world: World) -> None:
    assert world.run(60) is None
    noticed = world.run(10, beats=False)
    assert noticed is not None
    assert 4.0 <= noticed[0] < 5.0
    assert "no heartbeat for 4." in noticed[1]


def test_a_loop_that_stays_in_one_step_is_noticed_after_the_longer_limit(world: World) -> None:
    assert world.run(10) is None
    noticed = world.run(300, advances=False)
    assert noticed is not None
    assert 119 < noticed[0] < 122
    assert "--step-timeout-s" in noticed[1]


def test_a_long_step_and_a_long_idle_time_are_left_alone(world: World) -> None:
    assert world.run(110, advances=False) is None
    assert world.run(1) is None
    assert world.run(110, advances=False) is None
    assert world.run(100_000 * CHECK_EVERY_S, advances=False, busy=False) is None


@pytest.mark.parametrize("late_s", [2.0, 10.0, 1000.0])
def test_a_server_that_did_not_run_itself_gives_the_engine_a_fresh_period(world: World, late_s: float) -> None:
    assert world.run(115, advances=False) is None
    for _ in range(10):  # starved again and again: no verdict is possible, and none is made
        world.now += late_s
        assert world.watchdog.verdict(world.now) is None
    assert world.run(115, advances=False) is None
    noticed = world.run(10, beats=False)
    assert noticed is not None
    assert 4.0 <= noticed[0] < 5.0
