"""`/stoker/register`: our workers say that they are here, every few seconds, and that they leave.

Behind the secret that workers and gateways share; without one nobody can register. A worker is known by its address, so that
one that is in the configuration too, or comes back as a new process, is not there twice.
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
from stoker.gateway.api.reply import Reply, error_reply, json_reply
from stoker.gateway.worker_option import WorkerSettings, worker_id_of, worker_spec
from stoker.proto.internal_http import REGISTER_PATH, SECRET_HEADER
from stoker.proto.messages import WorkerRegistration

_SECRET = SECRET_HEADER.encode()

log = EventLog("registration")


class Request(Protocol):
    @property
    def method(self) -> bytes: ...

    @property
    def body(self) -> bytes: ...

    def header(self, name: bytes) -> bytes | None: ...


class Workers(Protocol):
    def add(self, spec: WorkerSpec) -> None: ...

    def restarted(self, worker_id: WorkerId) -> None: ...

    def remove(self, worker_id: WorkerId) -> None: ...


class Registration:
    def __init__(self, secret: str | None, fleet: Fleet, workers: Workers) -> None:
        self._secret = None if secret is None else secret.encode()
        self._fleet = fleet
        self._workers = workers
        self._processes: dict[WorkerId, WorkerId] = {}  # a worker has a new name for itself after each start

    async def answer(self, request: Request) -> Reply:
        if self._secret is None:
            message = "Workers cannot register here: the gateway has no --secret-file."
            return error_reply(403, message, code="registration_off")
        shown = request.header(_SECRET)
        if shown is None or not hmac.compare_digest(shown, self._secret):
            return error_reply(401, "The secret is not ours.", code="invalid_secret")
        if request.method not in (b"POST", b"DELETE"):
            reply = error_reply(405, f"{REGISTER_PATH} takes POST and DELETE.", code="method_not_allowed")
            reply.headers.append((b"allow", b"POST, DELETE"))
            return reply
        try:
            word = msgspec.json.decode(request.body, type=WorkerRegistration)
            worker_id = worker_id_of(word.url)
            settings = WorkerSettings(word.url, word.role, events=word.events, replay=word.replay)
            spec = replace(worker_spec(settings), models=tuple(word.models), from_config=False)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidRequest(f"That is not a worker's registration: {error}") from error
        except ConfigError as error:
            raise InvalidRequest(error.message) from error
        if request.method == b"DELETE":
            self._leave(worker_id)
        else:
            self._come(spec, word)
        return json_reply({"worker": worker_id})

    def _come(self, spec: WorkerSpec, word: WorkerRegistration) -> None:
        known = self._fleet.member(spec.worker_id)
        if known is None:
            log.event("worker_registered", worker=spec.worker_id, url=word.url, models=word.models)
        if known is None or not known.spec.from_config:  # what the operator wrote counts more than what it says itself
            self._workers.add(spec)
        if self._processes.get(spec.worker_id, word.worker_id) != word.worker_id:
            self._workers.restarted(spec.worker_id)
        self._processes[spec.worker_id] = word.worker_id

    def _leave(self, worker_id: WorkerId) -> None:
        self._processes.pop(worker_id, None)
        known = self._fleet.member(worker_id)
        if known is not None and not known.spec.from_config:
            self._workers.remove(worker_id)
            log.event("worker_left", worker=worker_id)
