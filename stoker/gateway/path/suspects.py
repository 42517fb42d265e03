"""Requests that may crash workers: remembers the bodies that were running when workers crashed, and limits their retries.

The gateway cannot see why a worker crashed. All requests that ran there are equally suspicious, and almost all are innocent.
So a body is refused only after it crashed a worker on which no other suspect was running. It passes these stages:

1. A request fails for good after its workers crashed. Its body is remembered for `suspect_s`, with the number of crashes.
2. A body with two crashes or more is a *suspect*. If the client sends it again, it runs, but on one worker only.
3. If a suspect's worker crashes too, and other suspects were running there, each of them must run *alone* from then on:
   while one of them is being tried, the others are refused with a `Retry-After` header.
4. If no other suspect was running there, the body is *refused* for the rest of the time.

A body that completes at any stage is forgotten. So an innocent request gets an error at worst, and succeeds when its client
sends it again. A body that crashes every worker costs two workers, then one, and at most one more, and none after that.

The body is compared as bytes, separately for each tenant. A client that changes the body each time is a new suspect each
time. Nothing here does I/O, and the time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from hashlib import blake2b

from stoker.base.errors import InvalidRequest, Overloaded
from stoker.base.ids import WorkerId
from stoker.gateway.path.call import Call

ENOUGH_CRASHES = 2  # a request that crashed this many workers is tried on no other one

_MAX_BODIES = 256  # remembered for each tenant
_TRIAL_S = 10.0  # a body that must run alone blocks the others for up to this time
_SAME_CRASH_S = 5.0  # requests that lose one worker within this time were running there together


class CrashingRequest(InvalidRequest):
    """The body crashed several workers, the last one alone, so it is refused."""

    code = "request_crashes_workers"


class SuspectWaits(Overloaded):
    """The body may crash workers, so it must run alone, and another one is being tried."""

    code = "suspect_request_waits"


@dataclass(slots=True, eq=False)
class _Body:
    length: int
    forget_at: float
    num_crashes: int = 0
    runs_alone: bool = False
    is_refused: bool = False


@dataclass(slots=True, eq=False)
class SuspectTrial:
    """A running request whose body has been on crashed workers before."""

    call: Call
    body: _Body
    digest: bytes
    began_s: float

    @property
    def num_crashes(self) -> int:
        return self.body.num_crashes


class SuspectRequests:
    """The bodies that were running on workers that crashed. See the module docstring."""

    def __init__(self, suspect_s: float) -> None:
        self._suspect_s = suspect_s
        self.tenants: dict[str, OrderedDict[bytes, _Body]] = {}
        self._trials: set[SuspectTrial] = set()
        self._crashes: deque[tuple[WorkerId, bytes, float]] = deque(maxlen=64)  # of suspects: worker, body, time

    def begin(self, call: Call, now: float) -> SuspectTrial | None:
        """Return the trial that this request is, or None for a request without a record; the caller must end a trial.

        Raises CrashingRequest, or SuspectWaits with the time after which a retry makes sense.
        """
        bodies = self.tenants.get(call.tenant)
        if bodies is None:
            return None
        self._forget_old(call.tenant, bodies, now)
        length = len(call.envelope.raw)
        if not any(body.length == length for body in bodies.values()):
            return None  # hashing a body takes longer than everything else here
        digest = _digest(call)
        body = bodies.get(digest)
        if body is None:
            return None
        if body.is_refused:
            raise CrashingRequest(
                f"This request was running on {body.num_crashes} workers when they crashed, on the last one as the only "
                f"suspect. The same body is refused for another {body.forget_at - now:.0f} s. Change the request, or report "
                f"it to the operator."
            )
        if body.runs_alone:
            self._check_turn(now)
        trial = SuspectTrial(call, body, digest, now)
        self._trials.add(trial)
        return trial

    def end(self, trial: SuspectTrial) -> None:
        self._trials.discard(trial)

    def completed(self, trial: SuspectTrial) -> None:
        """Forget a body that has completed: it was not the cause of the crashes."""
        bodies = self.tenants.get(trial.call.tenant)
        if bodies is not None and bodies.pop(trial.digest, None) is not None and not bodies:
            del self.tenants[trial.call.tenant]

    def crashed(
        self, call: Call, num_crashes: int, worker_id: WorkerId, trial: SuspectTrial | None, now: float
    ) -> bool:
        """Remember a request that has failed after `num_crashes` workers crashed, the last one now.

        Returns True if its body will be refused from now on.
        """
        if not self._suspect_s:
            return False
        digest = _digest(call) if trial is None else trial.digest
        body = self._remember(call, digest, now)
        if trial is not None and trial.num_crashes >= ENOUGH_CRASHES:
            body.is_refused = not self._has_company(worker_id, digest, now)
            body.runs_alone = True
        body.num_crashes += num_crashes
        self._crashes.append((worker_id, digest, now))
        return body.is_refused

    # ---- internals

    def _remember(self, call: Call, digest: bytes, now: float) -> _Body:
        bodies = self.tenants.setdefault(call.tenant, OrderedDict())
        body = bodies.get(digest)
        if body is None:
            body = bodies[digest] = _Body(len(call.envelope.raw), 0.0)
        bodies.move_to_end(digest)
        body.forget_at = now + self._suspect_s
        if len(bodies) > _MAX_BODIES:
            bodies.popitem(last=False)
        return body

    def _forget_old(self, tenant: str, bodies: OrderedDict[bytes, _Body], now: float) -> None:
        while bodies and (oldest := next(iter(bodies.values()))).forget_at <= now:
            bodies.popitem(last=False)
            del oldest
        if not bodies:
            del self.tenants[tenant]

    def _check_turn(self, now: float) -> None:
        ends_at = [trial.began_s + _TRIAL_S for trial in self._trials if trial.body.runs_alone]
        wait_s = max(ends_at, default=now) - now
        if wait_s > 0:
            raise SuspectWaits(
                "Workers crashed several times while this request was running, so it must run without other such requests, "
                f"and one of them is being tried. Retry in {wait_s:.0f} s.",
                retry_after_s=wait_s,
            )

    def _has_company(self, worker_id: WorkerId, digest: bytes, now: float) -> bool:
        """Return True if another suspect is running on the worker, or was when it crashed."""
        if any(
            trial.call.worker_id == worker_id and trial.digest != digest and trial.num_crashes >= ENOUGH_CRASHES
            for trial in self._trials
        ):
            return True
        return any(
            worker == worker_id and other != digest and now - at < _SAME_CRASH_S for worker, other, at in self._crashes
        )


def _digest(call: Call) -> bytes:
    return blake2b(call.envelope.raw, digest_size=16, person=call.envelope.kind.value.encode()).digest()
