"""Who a worker is to the gateways in front of it: its id, its role, and the secret that both know."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

from stoker.base.ids import WorkerId
from stoker.proto.messages import WorkerRole

SECRET_HEADER = "x-stoker-secret"


def new_worker_id() -> WorkerId:
    """An id for each start: what a gateway knew of the process before is no longer so."""
    return WorkerId(f"w-{secrets.token_hex(6)}")


@dataclass(frozen=True, slots=True)
class Identity:
    """`events_port` and `replay_port`: where KV events and load reports are published, if they are."""

    worker_id: WorkerId = field(default_factory=new_worker_id)
    role: WorkerRole = "unified"
    secret: str | None = None
    events_port: int | None = None
    replay_port: int | None = None

    def allows(self, given: str | None) -> bool:
        if self.secret is None:
            return True
        return given is not None and hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.secret.encode())
