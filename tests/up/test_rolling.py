"""A rolling upgrade restarts one worker after the other, and stops when something fails."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from stoker.base.canary import CanaryLimits, RequestGroup
from stoker.base.errors import ConfigError, StokerError
from stoker.proto.admin_api import CanaryStatus, ReservedLoad, WorkerStatus
from stoker.up.rolling import RollingUpgrade, UpgradeLimits, UpgradeStopped


@dataclass
class Fleet:
    """Workers that move their requests in a second, and need five to start."""

    names: tuple[str, ...] = ("a:1", "b:1", "c:1")
    running: dict[str, int] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    down_until: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    events: list[str] = field(default_factory=list)
    errors: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    registers: bool = False
    stuck: str = ""
    stuck_after: str = ""  # this worker cannot be drained after its upgrade
    broken: str = ""  # this worker does not get ready
    dies: str = ""  # this worker ends while it is watched
    bad: str = ""  # requests on this worker fail after its upgrade
    upgraded: set[str] = field(default_factory=set)
    slow: str = ""  # this worker is slow after its upgrade
    stopped_canary: str = ""  # the gateway stops it when this worker was upgraded
    requests: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # arrival and time to the first token

    def __post_init__(self) -> None:
        self.running = dict.fromkeys(self.names, 4)

    def worker(self, name: str) -> WorkerStatus | None:
        is_up = self.now >= self.down_until.get(name, 0.0)
        if name not in self.names or (self.registers and not is_up):
            return None
        return WorkerStatus(
            worker=name,
            url=f"http://{name}",
            role="unified",
            models=["m"],
            usable=is_up and name not in self.draining,
            draining=name in self.draining,
            reserved=ReservedLoad(requests=self.running[name]),
        )

    def drain(self, name: str) -> None:
        if name == self.stuck or (name == self.stuck_after and name in self.upgraded):
            raise ConfigError("no other worker serves m")
        self.events.append(f"drain {name}")
        self.draining.add(name)

    def undrain(self, name: str) -> None:
        self.events.append(f"undrain {name}")
        self.draining.discard(name)

    def num_errors(self) -> int:
        return self.errors

    def num_failures(self, name: str) -> int:
        return self.failures.get(name, 0)

    def newest_s(self) -> float:
        return self.now

    def groups(self, name: str, after_s: float) -> tuple[RequestGroup, RequestGroup]:
        times = [
            [ms for worker in names for arrived_s, ms in self.requests.get(worker, []) if arrived_s > after_s]
            for names in ([name], [other for other in self.names if other != name])
        ]
        canary, rest = (RequestGroup(len(one), 0, one, ()) for one in times)
        return canary, rest

    def canaries(self) -> list[CanaryStatus]:
        stopped = self.stopped_canary in self.upgraded
        return [CanaryStatus(name="m", model="m-next", stopped=stopped, reason="9 of 50 requests failed")]

    def restart(self, status: WorkerStatus) -> None:
        name = status.worker
        assert not self.running[name], "it was not empty"
        assert len(self.draining) == 1, "one worker at a time"
        self.events.append(f"restart {name}")
        self.upgraded.add(name)
        self.down_until[name] = float("inf") if name == self.broken else self.now + 5.0
        if self.registers:
            self.draining.discard(name)

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += max(seconds, 0.01)
        for name in self.names:
            if name not in self.draining and self.worker(name) is not None:
                ms = 900.0 if name == self.slow and name in self.upgraded else 100.0
                self.requests.setdefault(name, []).extend((self.now + i * 1e-6, ms + i) for i in range(10))
        if self.dies in self.upgraded and self.now > self.down_until[self.dies] + 3.0:
            self.down_until[self.dies] = float("inf")
        for name in self.draining:
            if self.running[name]:
                self.running[name] = 0
        if self.bad in self.upgraded and self.worker(self.bad):
            self.failures[self.bad] = self.failures.get(self.bad, 0) + 1

    def upgrade(self, **limits: object) -> RollingUpgrade:
        chosen = UpgradeLimits(**({"drain_s": 60.0, "ready_s": 60.0, "watch_s": 10.0} | limits))  # type: ignore[arg-type]
        return RollingUpgrade(self, self.restart, chosen, lambda: self.now, self.sleep, self.events.append)


@pytest.mark.parametrize("registers", [False, True])
def test_workers_are_restarted_one_after_the_other(registers: bool) -> None:
    fleet = Fleet(registers=registers)
    fleet.upgrade().run(fleet.names)
    restarts = [event for event in fleet.events if event.startswith("restart")]
    assert restarts == [f"restart {name}" for name in fleet.names]
    assert not fleet.draining
    assert all(status is not None and status.usable for status in map(fleet.worker, fleet.names))
    assert fleet.now > 30.0, "each was watched"


def test_a_worker_that_does_not_get_ready_stops_the_upgrade() -> None:
    fleet = Fleet(broken="b:1")
    with pytest.raises(UpgradeStopped, match="b:1 does not get ready after 60 s; look at its log"):
        fleet.upgrade().run(fleet.names)
    assert fleet.upgraded == {"a:1", "b:1"}


@pytest.mark.parametrize("registers", [False, True])
def test_a_worker_that_ends_while_it_is_watched_stops_the_upgrade(registers: bool) -> None:
    """Without traffic no request fails. The next worker must not be drained: it may be the last one."""
    fleet = Fleet(dies="b:1", registers=registers)
    with pytest.raises(UpgradeStopped, match="b:1 was ready after its upgrade, and is not any more"):
        fleet.upgrade().run(fleet.names)
    assert fleet.upgraded == {"a:1", "b:1"}
    assert "c:1" not in fleet.draining


def test_failing_requests_stop_the_upgrade_and_drain_the_worker() -> None:
    fleet = Fleet(bad="b:1")
    with pytest.raises(UpgradeStopped, match="requests failed after b:1 was upgraded"):
        fleet.upgrade().run(fleet.names)
    assert fleet.upgraded == {"a:1", "b:1"}
    assert fleet.draining == {"b:1"}


def test_a_slow_worker_stops_the_upgrade_and_is_drained() -> None:
    fleet = Fleet(slow="b:1")
    with pytest.raises(
        UpgradeStopped, match=r"b:1 is worse than the other workers after its upgrade.* 909\.0 ms, and 109"
    ):
        fleet.upgrade().run(fleet.names)
    assert fleet.upgraded == {"a:1", "b:1"}
    assert fleet.draining == {"b:1"}


def test_a_canary_that_the_gateway_has_stopped_stops_the_upgrade() -> None:
    fleet = Fleet(stopped_canary="a:1")
    with pytest.raises(UpgradeStopped, match="has stopped the canary m-next of m: 9 of 50 requests failed"):
        fleet.upgrade().run(fleet.names)
    assert fleet.upgraded == {"a:1"}
    with pytest.raises(UpgradeStopped, match="Repair it"):
        fleet.upgrade().run(["c:1"])
    assert fleet.upgraded == {"a:1"}, "it does not begin again"


def test_a_worker_with_few_requests_is_not_compared() -> None:
    fleet = Fleet(slow="b:1")
    fleet.upgrade(canary=CanaryLimits(min_requests=10_000)).run(fleet.names)
    assert "b:1: not compared with the other workers: fewer than 10000 requests" in fleet.events


def test_some_errors_may_be_allowed() -> None:
    fleet = Fleet()
    upgrade = fleet.upgrade(max_errors=2)
    fleet.errors = 0
    upgrade.run(fleet.names[:1])
    fleet.errors = 2
    upgrade.run(fleet.names[1:2])


def test_a_worker_whose_requests_cannot_move_stops_the_upgrade() -> None:
    fleet = Fleet(stuck="a:1")
    with pytest.raises(UpgradeStopped, match="cannot be drained: no other worker serves m"):
        fleet.upgrade().run(fleet.names)
    assert not fleet.upgraded


def test_a_restart_that_fails_leaves_the_worker_drained() -> None:
    fleet = Fleet()

    def restart(status: WorkerStatus) -> None:
        raise StokerError("the command ended with 1")

    upgrade = fleet.upgrade()
    upgrade.restart = restart
    with pytest.raises(UpgradeStopped, match="a:1 was not restarted and stays drained"):
        upgrade.run(fleet.names)
    assert fleet.draining == {"a:1"}


def test_an_unknown_worker_is_an_error() -> None:
    with pytest.raises(UpgradeStopped, match="z:9 is not a worker"):
        Fleet().upgrade().run(["z:9"])


def test_a_worker_that_cannot_be_drained_again_is_named_with_the_reason() -> None:
    fleet = Fleet(bad="b:1", stuck_after="b:1")
    with pytest.raises(
        UpgradeStopped, match=r"requests failed after b:1 .* It could not be drained and still serves \(no other"
    ):
        fleet.upgrade().run(fleet.names)
    assert fleet.upgraded == {"a:1", "b:1"}


def test_an_error_after_the_first_drain_is_not_one_before_anything_was_changed() -> None:
    fleet = Fleet()
    rolling = fleet.upgrade()
    assert not rolling.has_begun
    fleet.restart = None  # type: ignore[assignment, method-assign]
    rolling = fleet.upgrade()
    with pytest.raises(TypeError):
        rolling.run(fleet.names)
    assert rolling.has_begun
