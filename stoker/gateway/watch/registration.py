"""`/stoker/register`: Stoker workers register themselves, send heartbeats every few seconds, and sign off.

Requests need the secret shared by workers and gateways; without a configured secret, registration is disabled. A worker is
identified by its address, so that a worker which is also in the configuration, or restarts, is listed only once.
"""

from __future__ import annotations

import hmac
from dataclasses import replace
from typing import Protocol

import msgspec

from stoker.base.errors import ConfigError, InvalidRequest
from stoker.base.ids import WorkerId
from stoker.base.log import EventLog
from stoker.fleet.fleet import Fleet
from stoker.fleet.spec import WorkerSpec
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.api.reply import Reply, error_reply, json_reply, method_not_allowed
from stoker.gateway.worker_option import WorkerSettings, worker_id_of, worker_spec
from stoker.proto.internal_http import REGISTER_PATH, SECRET_HEADER
from stoker.proto.messages import WorkerRegistration

_SECRET = SECRET_HEADER.encode()

log = EventLog("registration")


class MembershipChanges(Protocol):
    """Adds workers to the gateway and removes them. `Membership` implements it."""

    def add(self, spec: WorkerSpec) -> None: ...

    def restarted(self, worker_id: WorkerId) -> None:
        """Note that a new process runs at the worker's address."""

    def remove(self, worker_id: WorkerId) -> None: ...


class RegistrationEndpoint:
    """Handles POST (register, heartbeat) and DELETE (sign off)."""

    def __init__(self, secret: str | None, fleet: Fleet, workers: MembershipChanges) -> None:
        self._secret = None if secret is None else secret.encode()
        self._fleet = fleet
        self._workers = workers
        self._processes: dict[WorkerId, WorkerId] = {}  # address -> the worker's own id, which is new after each start

    async def answer(self, request: EndpointRequest) -> Reply:
        if self._secret is None:
            message = "Workers cannot register here: start the gateway with --secret-file."
            return error_reply(403, message, code="registration_off")
        sent = request.header(_SECRET)
        if sent is None or not hmac.compare_digest(sent, self._secret):
            message = f"The {SECRET_HEADER} header is missing or wrong: give worker and gateway the same --secret-file."
            return error_reply(401, message, code="invalid_secret")
        if request.method not in (b"POST", b"DELETE"):
            return method_not_allowed(REGISTER_PATH.encode(), request.method, [b"POST", b"DELETE"])
        try:
            registration = msgspec.json.decode(request.body, type=WorkerRegistration)
            worker_id = worker_id_of(registration.url)
            settings = WorkerSettings(
                registration.url, registration.role, events=registration.events, replay=registration.replay
            )
            spec = replace(worker_spec(settings), models=tuple(registration.models), from_config=False)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidRequest(f"The body is not a valid worker registration: {error}") from error
        except ConfigError as error:
            raise InvalidRequest(error.message) from error
        if request.method == b"DELETE":
            self._sign_off(worker_id)
        else:
            self._register(spec, registration)
        return json_reply({"worker": worker_id})

    def _register(self, spec: WorkerSpec, registration: WorkerRegistration) -> None:
        known = self._fleet.member(spec.worker_id)
        if known is None:
            log.event("worker_registered", worker=spec.worker_id, url=registration.url, models=registration.models)
        if known is None or not known.spec.from_config:  # the operator's configuration takes precedence
            self._workers.add(spec)
        if self._processes.get(spec.worker_id, registration.worker_id) != registration.worker_id:
            self._workers.restarted(spec.worker_id)
        self._processes[spec.worker_id] = registration.worker_id

    def _sign_off(self, worker_id: WorkerId) -> None:
        self._processes.pop(worker_id, None)
        known = self._fleet.member(worker_id)
        if known is not None and not known.spec.from_config:
            self._workers.remove(worker_id)
            log.event("worker_left", worker=worker_id)
