"""Changes the duty of workers while they serve: drains them, moves their requests, and gives them other roles.

The gateway follows at once. A Stoker worker with a secret is told too: it reports its new duty, so that other gateways follow. No
request fails: running ones continue where they are, or move to other workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stoker.base.errors import InvalidRequest, Overloaded
from stoker.base.ids import WorkerId
from stoker.base.log import EventLog
from stoker.fleet.fleet import Fleet, Member
from stoker.fleet.spec import Role
from stoker.gateway.path.moves import Moves
from stoker.proto.moves import DutyRequest

log = EventLog("duties")


class Duties:
    """Drains workers and changes their roles. The admin API and the autoscaler use it."""

    def __init__(self, fleet: Fleet, moves: Moves, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._moves = moves
        self._clock = clock
        # What a change checks must still hold when it takes effect, after the worker was told.
        self._changing = asyncio.Lock()

    async def drain(self, member: Member, *, move: bool) -> None:
        """Send no new requests to a worker. `move`: continue its running requests on other workers."""
        async with self._changing:
            if move:
                self._check_targets(member)
            self._fleet.drain(member.worker_id, self._clock(), True)
        running = self._moves.num_running(member.worker_id)
        log.event("worker_drained", worker=member.worker_id, move=move, running=running)
        if move:
            self._moves.begin(member)
            await self._tell(member, DutyRequest(draining=True, moving=True))

    async def undrain(self, member: Member) -> None:
        """Send requests to a worker again."""
        self._fleet.drain(member.worker_id, self._clock(), False)
        log.event("worker_undrained", worker=member.worker_id)
        await self._tell(member, DutyRequest(draining=False))

    async def set_role(self, member: Member, role: Role, *, move: bool = False) -> None:
        """Give a worker another role. `move`: continue the requests that it runs now on other workers."""
        async with self._changing:
            await self._set_role(member, role, move=move)

    async def _set_role(self, member: Member, role: Role, *, move: bool) -> None:
        self._check_role(member, role)
        if move:
            self._check_targets(member)
        refusal = await self._tell(member, DutyRequest(role=role.value))
        if refusal is not None and not member.spec.from_config:  # its next heartbeat would bring the old role back
            raise Overloaded(
                f"Worker {member.worker_id} did not take the role {role.value}: {refusal}. Try again, or restart it with --role.",
                code="role_refused",
            )
        before = member.spec.role
        self._fleet.set_role(member.worker_id, role, self._clock())
        log.event("role_changed", worker=member.worker_id, before=before.value, role=role.value, move=move)
        if move:
            self._moves.begin(member)

    def saw_role(self, worker_id: WorkerId, role: Role) -> None:
        """Follow a worker that another gateway gave a role."""
        member = self._fleet.member(worker_id)
        if member is not None and member.spec.role is not role:
            log.event("role_followed", worker=worker_id, before=member.spec.role.value, role=role.value)
            self._fleet.set_role(worker_id, role, self._clock())

    def saw_moving(self, worker_id: WorkerId) -> None:
        """Move the requests of a worker that drains and wants to lose them."""
        member = self._fleet.member(worker_id)
        if member is not None:
            self._moves.begin(member)

    def _check_targets(self, member: Member) -> None:
        if stuck := self._moves.stuck_models(member.worker_id):
            raise Overloaded(
                f"Worker {member.worker_id} runs requests of {', '.join(sorted(stuck))}, and no other usable Stoker worker "
                "that decodes serves it: add one, or try again without moving and wait for the requests.",
                code="no_move_target",
            )

    def _check_role(self, member: Member, role: Role) -> None:
        if member.spec.dialect not in self._moves.dialects:
            raise InvalidRequest(
                f"Worker {member.worker_id} is a {member.spec.dialect} server, whose role is fixed: only Stoker workers can "
                "change theirs.",
                param="worker",
            )
        if role is not Role.PREFILL:
            return
        for model in sorted(member.models):
            others = [other for other in self._fleet.pool(model, self._clock()).members if other is not member]
            if not any(other.spec.role is not Role.PREFILL for other in others):
                raise Overloaded(
                    f"Worker {member.worker_id} is the last usable one that decodes {model}: give another worker the role "
                    "decode or unified first.",
                    code="last_decode_worker",
                )

    async def _tell(self, member: Member, duty: DutyRequest) -> str | None:
        """Tell a Stoker worker its duty. Return why it does not accept it: then only this gateway follows."""
        if member.spec.dialect not in self._moves.dialects:
            return None
        refusal = await self._moves.change_duty(member, duty)
        if refusal is not None:
            log.warning("duty_refused", worker=member.worker_id, reason=refusal, hint="other gateways do not follow")
        return refusal
