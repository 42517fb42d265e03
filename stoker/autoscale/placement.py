"""The contract with what places workers on machines, such as `stoker up`."""

from __future__ import annotations

from typing import Protocol

from stoker.base.ids import WorkerId
from stoker.fleet.spec import Role


class WorkerPlacement(Protocol):
    """Starts and stops workers. Both calls only ask: the fleet shows when it has happened."""

    def start(self, role: Role) -> None:
        """Ask for another worker with this role. It joins the fleet when it is ready, if there is room for it."""

    def stop(self, worker_id: WorkerId) -> None:
        """Ask to stop a worker that is drained. Its requests may still be on their way to other workers."""
