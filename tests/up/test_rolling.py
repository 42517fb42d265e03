"""A rolling upgrade restarts one worker after the other, and stops when something fails."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from stoker.base.errors import ConfigError, StokerError
from stoker.proto.admin_api import ReservedLoad, WorkerStatus
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
    broken: str = ""  # this worker does not get ready
    bad: str = ""  # requests on this worker fail after its upgrade
    upgraded: set[str] = field(default_factory=set)

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
        if name == self.stuck:
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
        for name in self.draining:
            if self.running[name]:
                self.running[name] = 0
        if self.bad in self.upgraded and self.worker(self.bad):
            self.failures[self.bad] = self.failures.get(self.bad, 0) + 1

    def upgrade(self, **limits: float) -> RollingUpgrade:
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


def test_failing_requests_stop_the_upgrade_and_drain_the_worker() -> None:
    fleet = Fleet(bad="b:1")
    with pytest.raises(UpgradeStopped, match="requests failed after b:1 was upgraded"):
        fleet.upgrade().run(fleet.names)
    assert fleet.upgraded == {"a:1", "b:1"}
    assert fleet.draining == {"b:1"}


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
