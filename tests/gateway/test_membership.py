"""A worker's coming and going: everybody who keeps something about it is told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from mocks import JSON, MockWorker, answers
from waiting import LONG_S, turns, until

from stoker.base.errors import ConfigError
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.spec import WorkerSpec
from stoker.gateway import membership as workers
from stoker.gateway.http import Request
from stoker.gateway.membership import Workers
from stoker.gateway.path.upstream import Lifeline, Upstreams
from stoker.gateway.prefix.conversation import KeyMakers
from stoker.gateway.watch.watchers import Watchers
from stoker.gateway.worker_option import worker_id_of
from stoker.routing.router import PrefixIndexes
from stoker.worker import register

MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}


class World:
    def __init__(self, silent_s: float = 10.0) -> None:
        self.fleet, self.ledger, self.indexes = Fleet(), LoadBook(), PrefixIndexes()
        self.makers = KeyMakers()
        self.watchers = Watchers(self.fleet, self.indexes, self.makers)
        self.upstreams = Upstreams()
        self.stood_still_s = 0.0
        self.workers = Workers(self.fleet, self.ledger, self.watchers, self.upstreams, self.now, silent_s)

    def now(self) -> float:
        return time.monotonic() + self.stood_still_s

    async def close(self) -> None:
        await self.workers.close()
        self.makers.close()


@asynccontextmanager
async def world_and_worker(silent_s: float = 10.0) -> AsyncIterator[tuple[World, MockWorker]]:
    world, mock = World(silent_s), MockWorker(answers(MODELS))
    await mock.start()
    yield world, mock
    await world.close()
    await mock.stop()


def spec_of(url: str, *, from_config: bool = True, dialect: str = "openai") -> WorkerSpec:
    return WorkerSpec(worker_id=worker_id_of(url), url=url, dialect=dialect, from_config=from_config)


def test_a_worker_is_watched_from_when_it_comes_and_forgotten_when_it_leaves() -> None:
    async def main() -> None:
        async with world_and_worker() as (world, mock):
            spec = spec_of(mock.url)
            world.workers.add(spec)
            await world.workers.looked(LONG_S)
            assert set(world.fleet.models()) == {"m"}
            world.indexes["m"].routed(spec.worker_id, [1, 2, 3], 0.0)
            reservation = world.ledger.reserve(
                spec.worker_id, prefill_tokens=5, context_tokens=5, output_tokens=5, now=0.0
            )
            world.workers.remove(spec.worker_id)
            assert world.fleet.members() == []
            await until(lambda: not world.indexes["m"].match([1, 2, 3]))
            assert world.watchers.watcher(spec.worker_id) is None
            assert world.ledger.totals().requests == 1  # what runs there goes on
            reservation.end(1.0)
            assert world.ledger.totals().requests == 0

    asyncio.run(main())


def test_of_one_that_left_with_a_request_running_nothing_stays_behind() -> None:
    """As every worker does that is drained: with the connections goes what was learnt of its answers' heads."""
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def script(worker: MockWorker, request: Request) -> None:
        if request.method == b"POST":
            has_begun.set()
            await may_end.wait()
        request.respond(200, JSON, json.dumps(MODELS).encode())

    async def main() -> None:
        async with world_and_worker() as (world, mock):
            mock.script = script
            spec = spec_of(mock.url)
            world.workers.add(spec)
            member = world.fleet.member(spec.worker_id)
            assert member is not None
            reservation = world.ledger.reserve(
                spec.worker_id, prefill_tokens=5, context_tokens=5, output_tokens=5, now=0.0
            )
            pool = world.upstreams.of(member).pool
            asking = asyncio.create_task(pool.send(b"POST", b"/", (), b"{}", connect_s=LONG_S, head_s=LONG_S))
            await has_begun.wait()
            world.workers.remove(spec.worker_id)
            may_end.set()
            assert (await asking).status == 200
            reservation.end(1.0)
            assert not world.upstreams._known
            await until(lambda: pool.num_open == 0)

    asyncio.run(main())


def test_the_start_does_not_wait_for_a_worker_that_is_away() -> None:
    async def main() -> None:
        world = World()
        world.workers.add(spec_of("http://127.0.0.1:1"))
        began = time.monotonic()
        await world.workers.looked(2 * LONG_S)
        assert time.monotonic() - began < LONG_S
        await world.close()

    asyncio.run(main())


def test_one_that_registered_itself_and_falls_silent_is_forgotten() -> None:
    async def main() -> None:
        async with world_and_worker(0.3) as (world, mock):
            world.workers.add(spec_of(mock.url, from_config=False))
            world.workers.add(spec_of("http://127.0.0.1:1"))
            await until(lambda: len(world.fleet.members()) == 1)
            assert world.fleet.members()[0].spec.from_config

    asyncio.run(main())


def test_two_heartbeats_that_got_lost_are_no_silence() -> None:
    """What runs on a silent worker is cut. The next heartbeat comes after a lost one's time-out, and may take its time, too."""
    assert 3 * (register._HEARTBEAT_S + register._ANSWER_S) < workers._SILENT_S


def test_nobody_is_forgotten_because_the_gateway_itself_stood_still() -> None:
    """What the workers said meanwhile is not read yet, or they could not say it."""

    async def main() -> None:
        async with world_and_worker(0.3) as (world, mock):
            world.workers.add(spec_of(mock.url, from_config=False))
            await turns()
            world.stood_still_s = 60.0
            began = time.monotonic()
            await until(lambda: not world.fleet.members())
            assert time.monotonic() - began >= 0.3, "from then on it had its time"

    asyncio.run(main())


def test_what_runs_on_one_that_fell_silent_is_not_waited_for() -> None:
    """A worker that hangs, or whose machine is gone, closes no connection; once it is forgotten nobody else finds out."""

    async def main() -> None:
        async with world_and_worker(0.3) as (world, mock):
            spec = spec_of(mock.url, from_config=False)
            world.workers.add(spec)
            [member] = world.fleet.members()
            waiting = asyncio.create_task(asyncio.sleep(2 * LONG_S))
            lifeline = Lifeline(waiting)
            world.upstreams.of(member).lifelines.add(lifeline)
            world.ledger.reserve(spec.worker_id, prefill_tokens=5, context_tokens=5, output_tokens=5, now=0.0)
            await until(lambda: not world.fleet.members())
            assert lifeline.lost_worker == spec.worker_id
            await asyncio.wait([waiting])

    asyncio.run(main())


def test_one_that_comes_back_as_it_leaves_is_watched() -> None:
    async def main() -> None:
        async with world_and_worker() as (world, mock):
            spec = spec_of(mock.url)
            world.workers.add(spec)
            await world.workers.looked(LONG_S)
            world.workers.remove(spec.worker_id)
            world.workers.add(spec)
            world.indexes["m"].routed(spec.worker_id, [1, 2, 3], 0.0)
            await world.workers.looked(LONG_S)
            await turns()
            assert world.watchers.watcher(spec.worker_id) is not None
            assert set(world.fleet.models()) == {"m"}
            assert world.indexes["m"].match([1, 2, 3]), "what came after it had left is not forgotten with it"

    asyncio.run(main())


def test_an_address_that_cannot_be_asked_makes_no_worker_and_takes_none_away() -> None:
    async def main() -> None:
        world = World()
        with pytest.raises(ConfigError, match="odd characters"):
            world.workers.add(spec_of("http://w\xf6rker:8000"))
        assert world.fleet.members() == []
        spec = spec_of("http://127.0.0.1:1")
        world.workers.add(spec)
        watcher = world.watchers.watcher(spec.worker_id)
        with pytest.raises(ConfigError, match="odd characters"):
            world.workers.add(spec_of("http://@127.0.0.1:1"))
        assert world.watchers.watcher(spec.worker_id) is watcher
        assert [member.spec.url for member in world.fleet.members()] == ["http://127.0.0.1:1"]
        await world.close()

    asyncio.run(main())


def test_a_dialect_that_nobody_speaks_is_named() -> None:
    async def main() -> None:
        world = World()
        with pytest.raises(ConfigError, match="unknown dialect 'klingon'"):
            world.workers.add(spec_of("http://x", dialect="klingon"))
        assert world.fleet.members() == []
        await world.close()

    asyncio.run(main())
