"""The decisions of the autoscaler. Each has the reason and the numbers that it follows from."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.base.ids import WorkerId
from stoker.fleet.spec import Role


@dataclass(frozen=True, slots=True)
class Keep:
    """Change nothing."""

    def describe(self) -> str:
        return "wait"


@dataclass(frozen=True, slots=True)
class Flip:
    """Give a worker another role."""

    worker_id: WorkerId
    role: Role

    def describe(self) -> str:
        return f"flip {self.worker_id} to {self.role.value}"


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker with this role."""

    role: Role

    def describe(self) -> str:
        return f"start a {self.role.value} worker"


@dataclass(frozen=True, slots=True)
class Stop:
    """Drain a worker, move its requests and stop it."""

    worker_id: WorkerId

    def describe(self) -> str:
        return f"stop {self.worker_id}"


Action = Keep | Flip | Start | Stop
KEEP = Keep()


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and why. `numbers` are logged with it."""

    action: Action
    reason: str
    numbers: dict[str, float] = field(default_factory=dict)
