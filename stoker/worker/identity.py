"""The identity of a worker towards its gateways: its id, its role, and the secret of the fleet."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from stoker.base.ids import WorkerId
from stoker.proto.messages import WorkerRole


def new_worker_id() -> WorkerId:
    """Return a new id. Each start gets another one, so that a gateway drops what it knew about the previous process."""
    return WorkerId(f"w-{secrets.token_hex(6)}")


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker's id, role, secret and ports. `api_key` opens the generating endpoints to senders without the secret.

    KV events and load reports are published on `events_port`, if it is set. Missed events can be requested on `replay_port`.
    """

    worker_id: WorkerId = field(default_factory=new_worker_id)
    role: WorkerRole = "unified"
    role_assigned: bool = False  # it got this role while it ran
    secret: str | None = None
    api_key: str | None = None
    events_port: int | None = None
    replay_port: int | None = None
