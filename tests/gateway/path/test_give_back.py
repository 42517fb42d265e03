"""A prefill worker's lease is released if no decode worker will pull its KV, whatever went wrong in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_stoker import FakeStoker
from mocks import JSON, MockWorker
from test_early_pull import BODY, KEEPS, info
from waiting import LONG_S, until
from world import PATIENT, World

from stoker.fleet.spec import Role
from stoker.gateway.http import HttpRequest
from stoker.gateway.path.handoff_hints import HandoffHints
from stoker.gateway.path.proxy_settings import ProxySettings


@dataclass
class Keeper:
    """A prefill worker that records released leases separately. `hangs`: it sends its ticket and does not end the response."""

    hangs: bool = False
    leases: list[str] = field(default_factory=list)
    given_back: list[Any] = field(default_factory=list)

    async def __call__(self, worker: MockWorker, request: HttpRequest) -> None:
        body = json.loads(request.body)
        if request.path == b"/stoker/release":
            self.given_back.append(body)
            request.respond(202, [], b"")
            return
        self.leases.append(body["kv_transfer_params"]["transfer_id"])
        if self.hangs:
            finish = request.finish
            request.finish = lambda: None  # type: ignore[method-assign]
            await FakeStoker()(worker, request)
            await asyncio.sleep(2 * LONG_S)
            finish()
        else:
            await FakeStoker()(worker, request)

    @property
    def expected(self) -> list[Any]:
        return [{"transfer_id": lease, "num_choices": 1} for lease in self.leases]


Script = Callable[[MockWorker, HttpRequest], Any]


async def run(keeper: Keeper, decode: Script, ask: Callable[[World], Any], retries: int = 0) -> None:
    infos = {"p": info("p", **KEEPS), "d": info("d")}
    settings = ProxySettings(connect_s=PATIENT.connect_s, retries=retries)
    hints = HandoffHints(infos.get)
    async with World(prompt_tokens=500, proxy=settings, resume_grace_s=0.0, hints=hints) as world:
        await world.add("p", keeper, role=Role.PREFILL, dialect="stoker")
        await world.add("d", decode, role=Role.DECODE, dialect="stoker")
        await ask(world)
        await world.settled()
        await until(lambda: keeper.given_back == keeper.expected)


async def asks(world: World) -> None:
    await world.ask(BODY)


def leaves_after(condition: Callable[[], bool]) -> Callable[[World], Any]:
    async def ask(world: World) -> None:
        answer = await world.send(BODY)
        await until(condition)
        answer.abort()

    return ask


async def dies(worker: MockWorker, request: HttpRequest) -> None:
    request.abort()


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_decode_refuses(status: int) -> None:
    async def refuses(worker: MockWorker, request: HttpRequest) -> None:
        request.respond(status, JSON, b'{"error": {"message": "no"}}')

    keeper = Keeper()
    asyncio.run(run(keeper, refuses, asks))
    assert keeper.leases


def test_decode_is_lost_before_it_answers() -> None:
    keeper = Keeper()
    asyncio.run(run(keeper, dies, asks))
    assert keeper.leases


def test_the_client_disconnects_before_decode_has_answered() -> None:
    asked: list[bytes] = []

    async def hangs(worker: MockWorker, request: HttpRequest) -> None:
        asked.append(request.body)
        await asyncio.sleep(2 * LONG_S)

    keeper = Keeper()
    asyncio.run(run(keeper, hangs, leaves_after(lambda: bool(asked))))
    assert keeper.leases


def test_the_client_disconnects_before_prefill_has_ended() -> None:
    """The lease may exist already, with its ticket on the way."""
    keeper = Keeper(hangs=True)
    asyncio.run(run(keeper, FakeStoker(), leaves_after(lambda: bool(keeper.leases))))
    assert keeper.leases


def test_after_decode_has_answered_the_gateway_releases_nothing() -> None:
    async def main() -> None:
        keeper = Keeper()
        infos = {"p": info("p", **KEEPS), "d": info("d")}
        async with World(prompt_tokens=500, hints=HandoffHints(infos.get)) as world:
            await world.add("p", keeper, role=Role.PREFILL, dialect="stoker")
            await world.add("d", FakeStoker(), role=Role.DECODE, dialect="stoker")
            for body in (BODY, BODY | {"stream": False}, BODY | {"max_tokens": 1}):
                assert (await world.ask(body)).status == 200
        assert len(keeper.leases) == 3
        assert keeper.given_back == []

    asyncio.run(main())
