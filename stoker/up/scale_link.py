"""ScaleLink: asks the fleet's own gateway what its autoscaler wants, and carries it out in the fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
import msgspec

from stoker.proto.admin_api import (
    ADMIN_FLEET_PATH,
    ADMIN_SCALE_PATH,
    ScaleWishes,
    WorkerStatus,
    decode_scale_wishes,
    decode_worker_list,
)
from stoker.up.scale_follower import BringWorker, ReleaseWorker, ScaleFollower, SeenWorker, Tell, WorkerSlot

_POLL_S = 1.0
_ANSWER_S = 5.0


class ScaledFleet(Protocol):
    """The fleet whose workers start and end."""

    def slots(self) -> Sequence[WorkerSlot]: ...

    def bring(self, name: str) -> None:
        """Start a worker that is unused."""

    def release(self, name: str) -> None:
        """Drain and end a worker."""


@dataclass(slots=True, eq=False)
class ScaleLink:
    """Follows the autoscaler of one gateway until it is cancelled."""

    gateway_url: Callable[[], str]  # it may move; empty until it is known
    admin_token: str
    fleet: ScaledFleet
    tell: Callable[[str], None]
    dry_run: bool = False
    follower: ScaleFollower = field(default_factory=ScaleFollower)
    _trouble: str = ""

    async def run(self) -> None:
        headers = {"Authorization": f"Bearer {self.admin_token}"}
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            while True:
                await asyncio.sleep(_POLL_S)
                if not (url := self.gateway_url()):
                    continue
                try:
                    # Of several processes of a gateway, only the first one runs the autoscaler.
                    wishes = decode_scale_wishes(await _get(session, f"{url}{ADMIN_SCALE_PATH}?process=0"))
                    workers = decode_worker_list(await _get(session, f"{url}{ADMIN_FLEET_PATH}?process=0")).workers
                except (TimeoutError, aiohttp.ClientConnectionError):
                    continue  # it restarts; the supervisor looks after it
                except (aiohttp.ClientError, msgspec.MsgspecError) as error:
                    self._complain(f"the autoscaler's wishes cannot be read: {error}")
                    continue
                self._trouble = ""
                self._carry_out(wishes, workers)

    def _complain(self, trouble: str) -> None:
        if trouble != self._trouble:
            self.tell(trouble)
        self._trouble = trouble

    def _carry_out(self, wishes: ScaleWishes, workers: Sequence[WorkerStatus]) -> None:
        seen = {one.worker: SeenWorker(_num_requests(one), one.draining) for one in workers}
        prefix = "dry run, nothing is changed: " if self.dry_run else ""
        for step in self.follower.follow(wishes, self.fleet.slots(), seen, time.monotonic()):
            match step:
                case Tell(text=text):
                    self.tell(prefix + text)
                case BringWorker(name=name) if not self.dry_run:
                    self.fleet.bring(name)
                case ReleaseWorker(name=name) if not self.dry_run:
                    self.fleet.release(name)


def _num_requests(worker: WorkerStatus) -> int:
    """Return how many requests a worker has: those of this gateway, or those that it reports itself, if they are more."""
    reported = worker.report
    own = 0 if reported is None else reported.running_sequences + reported.waiting_sequences
    return max(worker.reserved.requests, own)


async def _get(session: aiohttp.ClientSession, url: str) -> bytes:
    async with session.get(url, ssl=False) as answer:
        answer.raise_for_status()
        return await answer.read()
