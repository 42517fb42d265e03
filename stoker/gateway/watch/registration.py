"""`/stoker/register`: Stoker workers register themselves, send heartbeats every few seconds, and sign off.

Requests are signed with the secret that workers and gateways share. Without a secret, registration is disabled. A worker is
identified by its address, so that a worker which is also in the configuration, or restarts, is listed only once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import msgspec

from stoker.base.errors import ConfigError, InvalidRequest
from stoker.base.fleet_key import FleetKey
from stoker.base.ids import WorkerId
from stoker.base.log import EventLog
from stoker.fleet.fleet import Fleet
from stoker.fleet.spec import WorkerSpec
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.api.reply import Reply, error_reply, json_reply, method_not_allowed
from stoker.gateway.worker_option import WorkerSettings, worker_id_of, worker_spec
from stoker.proto.internal_http import REGISTER_PATH
from stoker.proto.messages import WorkerRegistration
from stoker.proto.signed_http import AUTH_HEADER, CHALLENGE_HEADER, PROOF_HEADER, RequestVerifier

_AUTH = AUTH_HEADER.encode()

log = EventLog("registration")


class MembershipChanges(Protocol):
    """Adds workers to the gateway and removes them. `Membership` implements it."""

    def add(self, spec: WorkerSpec) -> None: ...

    def restarted(self, worker_id: WorkerId) -> None:
        """Note that a new process runs at the worker's address."""

    def remove(self, worker_id: WorkerId, *, moves: bool = False) -> None:
        """Remove a worker. `moves`: continue its running requests on other workers."""


class RegistrationEndpoint:
    """Handles POST (register, heartbeat) and DELETE (sign off)."""

    def __init__(self, key: FleetKey | None, fleet: Fleet, workers: MembershipChanges) -> None:
        self._verifier = None if key is None else RequestVerifier(key)
        self._fleet = fleet
        self._workers = workers
        self._processes: dict[WorkerId, WorkerId] = {}  # address -> the worker's own id, which is new after each start

    async def answer(self, request: EndpointRequest) -> Reply:
        verifier = self._verifier
        if verifier is None:
            message = "Workers cannot register here: start the gateway with --secret-file."
            return error_reply(403, message, code="registration_off")
        signed = verifier.check(request.header(_AUTH), request.method, REGISTER_PATH.encode())
        if signed is None or not signed.has_body(request.body):
            message = (
                f"The {AUTH_HEADER} header is missing, wrong or was used before: "
                "give worker and gateway the same --secret-file."
            )
            refusal = error_reply(401, message, code="invalid_secret")
            challenge = (CHALLENGE_HEADER.encode(), verifier.challenge.encode())
            return replace(refusal, headers=[*refusal.headers, challenge])
        reply = self._answer_signed(request)
        return replace(reply, headers=[*reply.headers, (PROOF_HEADER.encode(), signed.proof)])

    def _answer_signed(self, request: EndpointRequest) -> Reply:
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
            self._sign_off(worker_id, registration.moving)
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

    def _sign_off(self, worker_id: WorkerId, moves: bool) -> None:
        self._processes.pop(worker_id, None)
        known = self._fleet.member(worker_id)
        if known is not None and not known.spec.from_config:
            self._workers.remove(worker_id, moves=moves)
            log.event("worker_left", worker=worker_id)
