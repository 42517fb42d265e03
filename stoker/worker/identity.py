"""The identity of a worker towards its gateways: its id, its role, and the secret of the fleet."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

from stoker.base.ids import WorkerId
from stoker.proto.messages import WorkerRole


def new_worker_id() -> WorkerId:
    """Return a new id. Each start has its own, so that a gateway drops what it knew of the process before."""
    return WorkerId(f"w-{secrets.token_hex(6)}")


@dataclass(frozen=True, slots=True)
class Identity:
    """KV events and load reports are published on `events_port`, if it is set. `replay_port` sends missed events again."""

    worker_id: WorkerId = field(default_factory=new_worker_id)
    role: WorkerRole = "unified"
    secret: str | None = None
    events_port: int | None = None
    replay_port: int | None = None

    def allows(self, given: str | None) -> bool:
        if self.secret is None:
            return True
        return given is not None and hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.secret.encode())
