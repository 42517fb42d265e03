"""/stoker/register: disabled without the secret; a worker is listed once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from stoker.base.errors import InvalidRequest
from stoker.base.fleet_key import FleetKey
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.spec import Role, WorkerSpec
from stoker.gateway.api.reply import Reply
from stoker.gateway.watch.registration import RegistrationEndpoint
from stoker.proto.signed_http import RequestSigner

SECRET = "s3cret"
PATH = b"/stoker/register"


class Asked:
    """A registration, signed with a secret for a gateway's challenge."""

    path, query = PATH, b""

    def __init__(self, method: str, body: bytes, secret: str | None, challenge: bytes | None) -> None:
        self.method, self.body, self.sent = method.encode(), body, None
        if secret is not None and challenge is not None:
            signer = RequestSigner(FleetKey(secret))
            signer.learn(challenge)
            self.sent = signer.sign(self.method, PATH, body)

    def header(self, name: bytes) -> bytes | None:
        return self.sent if name == b"x-stoker-auth" else None


class World:
    def __init__(self, secret: str | None = SECRET) -> None:
        self.now = 0.0
        self.fleet = Fleet()
        self.restarts: list[str] = []
        self.moved: list[str] = []
        self.registration = RegistrationEndpoint(None if secret is None else FleetKey(secret), self.fleet, self)

    def add(self, spec: WorkerSpec) -> None:
        self.fleet.add(spec, self.now)

    def restarted(self, worker_id: WorkerId) -> None:
        self.restarts.append(worker_id)

    def remove(self, worker_id: WorkerId, *, moves: bool = False) -> None:
        self.fleet.remove(worker_id, self.now)
        self.moved += [worker_id] if moves else []

    def say(self, method: str = "POST", secret: str | None = SECRET, **changes: Any) -> int:
        word = {
            "worker_id": "w-1", "role": "unified", "models": ["m"], "fingerprint": "f", "block_tokens": 16, "num_blocks": 9,
            "max_model_tokens": 100, "events": "tcp://h:5557", "replay": None, "tokenizer": "t", "url": "http://h:1",
        } | changes  # fmt: skip
        return self.ask(Asked(method, msgspec.json.encode(word), secret, self.challenge())).status

    def ask(self, asked: Asked) -> Reply:
        return asyncio.run(self.registration.answer(asked))

    def challenge(self) -> bytes | None:
        return dict(self.ask(Asked("POST", b"", None, None)).headers).get(b"x-stoker-challenge")


def test_a_worker_registers_sends_heartbeats_and_signs_off() -> None:
    world = World()
    assert world.say() == 200
    member = world.fleet.member(WorkerId("h:1"))
    assert member is not None
    assert (member.models, member.spec.events_url, member.spec.from_config) == (frozenset({"m"}), "tcp://h:5557", False)
    world.now = 8.0
    assert world.say(worker_id="w-2") == 200  # the next heartbeat, of a new process
    assert world.fleet.members() == [member]
    assert world.restarts == ["h:1"]
    assert world.fleet.expire(15.0, 10.0) == []
    assert world.fleet.expire(19.0, 10.0) == ["h:1"]
    assert world.say() == 200
    assert world.say("DELETE") == 200
    assert world.fleet.members() == []
    assert world.moved == []
    assert world.say() == world.say("DELETE", moving=True) == 200
    assert world.moved == ["h:1"]


@pytest.mark.parametrize("secret", [None, "", "wrong", "S3CRET"])
def test_registration_needs_the_secret(secret: str | None) -> None:
    world = World()
    assert world.say(secret=secret) == 401
    assert world.fleet.members() == []


def test_without_a_secret_registration_is_disabled() -> None:
    world = World(secret=None)
    assert world.say(secret="") == 403
    assert world.say(secret=None) == 403


def test_what_the_operator_wrote_counts_more() -> None:
    world = World()
    world.add(WorkerSpec(worker_id=WorkerId("h:1"), url="http://h:1", role=Role.DECODE, weight=3.0))
    assert world.say() == 200
    (member,) = world.fleet.members()
    assert (member.spec.role, member.spec.weight) == (Role.DECODE, 3.0)
    assert world.say("DELETE") == 200
    assert world.fleet.members() == [member]


@pytest.mark.parametrize(
    "changes",
    [
        {"url": "nowhere"},
        {"role": "boss"},
        {"url": "http://h:99999"},
        {"events": "http://h"},
        {"block_tokens": 0},
        {"block_tokens": -16},
        {"block_tokens": 1 << 60},
        {"num_blocks": -1},
        {"max_model_tokens": 0},
    ],
)
def test_nonsense_is_refused(changes: dict[str, object]) -> None:
    world = World()
    with pytest.raises(InvalidRequest):
        world.say(**changes)
    assert world.say("PUT") == 405
    assert world.fleet.members() == []


def test_a_captured_registration_can_neither_be_replayed_nor_changed() -> None:
    world = World()
    asked = Asked("POST", b"{}", SECRET, world.challenge())
    assert asyncio.run(_answered(world, asked)) == (400, 401)
    word = msgspec.json.encode({"worker_id": "w-1", "url": "http://h:1"})
    tampered = Asked("POST", b"{}", SECRET, world.challenge())
    tampered.body = word
    assert world.ask(tampered).status == 401


async def _answered(world: World, asked: Asked) -> tuple[int, int]:
    """Return the statuses of a message and of its replay. The first is read, and is no registration."""
    statuses = []
    for _ in range(2):
        try:
            statuses.append((await world.registration.answer(asked)).status)
        except InvalidRequest:
            statuses.append(400)
    return statuses[0], statuses[1]
