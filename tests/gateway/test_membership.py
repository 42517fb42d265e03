"""Workers join and leave: every part that holds state about them is updated."""

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
from stoker.gateway.http import HttpRequest
from stoker.gateway.membership import Membership
from stoker.gateway.path.moves import Moves
from stoker.gateway.path.upstream import CancelOnLoss, Upstreams
from stoker.gateway.prefix.conversation_keys import PrefixKeyMakers
from stoker.gateway.watch.watchers import Watchers
from stoker.gateway.worker_option import worker_id_of
from stoker.routing.router import PrefixIndexes
from stoker.worker import register

MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}


class World:
    def __init__(self, silent_s: float = 10.0) -> None:
        self.fleet, self.ledger, self.indexes = Fleet(), LoadBook(), PrefixIndexes()
        self.makers = PrefixKeyMakers()
        self.watchers = Watchers(self.fleet, self.indexes, self.makers)
        self.upstreams = Upstreams()
        self.stood_still_s = 0.0
        moves = Moves(self.fleet, self.upstreams, self.now)
        self.workers = Membership(self.fleet, self.ledger, self.watchers, self.upstreams, moves, self.now, silent_s)

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


def watch_tasks(spec: WorkerSpec) -> set[asyncio.Task[object]]:
    """The running tasks that watch this worker."""
    return {task for task in asyncio.all_tasks() if task.get_name() == f"watch-{spec.worker_id}"}


def test_a_worker_is_watched_from_when_it_joins_and_forgotten_when_it_leaves() -> None:
    async def main() -> None:
        async with world_and_worker() as (world, mock):
            spec = spec_of(mock.url)
            world.workers.add(spec)
            await world.workers.wait_first_polls(LONG_S)
            assert set(world.fleet.models()) == {"m"}
            world.indexes["m"].routed(spec.worker_id, [1, 2, 3], 0.0)
            reservation = world.ledger.reserve(
                spec.worker_id, prefill_tokens=5, context_tokens=5, output_tokens=5, now=0.0
            )
            world.workers.remove(spec.worker_id)
            assert world.fleet.members() == []
            await until(lambda: not world.indexes["m"].match([1, 2, 3]))
            await until(lambda: not watch_tasks(spec))
            assert world.ledger.totals().requests == 1  # running requests continue
            reservation.end(1.0)
            assert world.ledger.totals().requests == 0

    asyncio.run(main())


def test_a_worker_removed_with_a_running_request_leaves_no_state() -> None:
    """The cached response heads are dropped with the connections, as for every removed worker."""
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def script(worker: MockWorker, request: HttpRequest) -> None:
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
        await world.workers.wait_first_polls(2 * LONG_S)
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
    """Requests on a silent worker are cut. The expiry must be longer than one lost heartbeat plus one slow one."""
    assert 3 * (register._HEARTBEAT_S + register._ANSWER_S) < workers._SILENT_S


def test_no_worker_expires_because_the_gateway_was_stopped() -> None:
    """Heartbeats sent meanwhile are not read yet, or could not be sent."""

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
    """A hanging worker, or one whose machine vanished, closes no connection, and after its removal no watcher notices."""

    async def main() -> None:
        async with world_and_worker(0.3) as (world, mock):
            spec = spec_of(mock.url, from_config=False)
            world.workers.add(spec)
            [member] = world.fleet.members()
            waiting = asyncio.create_task(asyncio.sleep(2 * LONG_S))
            loss_guard = CancelOnLoss(waiting)
            world.upstreams.of(member).loss_guards.add(loss_guard)
            world.ledger.reserve(spec.worker_id, prefill_tokens=5, context_tokens=5, output_tokens=5, now=0.0)
            await until(lambda: not world.fleet.members())
            assert loss_guard.lost_worker == spec.worker_id
            await asyncio.wait([waiting])

    asyncio.run(main())


def test_a_worker_added_again_right_after_its_removal_is_watched() -> None:
    async def main() -> None:
        async with world_and_worker() as (world, mock):
            spec = spec_of(mock.url)
            world.workers.add(spec)
            await world.workers.wait_first_polls(LONG_S)
            world.workers.remove(spec.worker_id)
            world.workers.add(spec)
            world.indexes["m"].routed(spec.worker_id, [1, 2, 3], 0.0)
            await world.workers.wait_first_polls(LONG_S)
            await turns()
            assert len(watch_tasks(spec)) == 1
            assert set(world.fleet.models()) == {"m"}
            assert world.indexes["m"].match([1, 2, 3]), "what came after it had left is not forgotten with it"

    asyncio.run(main())


def test_an_invalid_address_adds_no_worker_and_removes_none() -> None:
    async def main() -> None:
        world = World()
        with pytest.raises(ConfigError, match="printable ASCII"):
            world.workers.add(spec_of("http://w\xf6rker:8000"))
        assert world.fleet.members() == []
        spec = spec_of("http://127.0.0.1:1")
        world.workers.add(spec)
        watching = watch_tasks(spec)
        with pytest.raises(ConfigError, match="printable ASCII"):
            world.workers.add(spec_of("http://@127.0.0.1:1"))
        assert len(watching) == 1
        assert watch_tasks(spec) == watching
        assert [member.spec.url for member in world.fleet.members()] == ["http://127.0.0.1:1"]
        await world.close()

    asyncio.run(main())


def test_an_unknown_dialect_is_named_in_the_error() -> None:
    async def main() -> None:
        world = World()
        with pytest.raises(ConfigError, match="unknown dialect 'klingon'"):
            world.workers.add(spec_of("http://x", dialect="klingon"))
        assert world.fleet.members() == []
        await world.close()

    asyncio.run(main())
