"""A worker's coming and going: everybody who keeps something about it is told."""

from __future__ import annotations

import asyncio
import time

import pytest
from mocks import MockWorker, answers
from waiting import LONG_S, until

from stoker.base.errors import ConfigError
from stoker.fleet.fleet import Fleet
from stoker.fleet.ledger import Ledger
from stoker.fleet.spec import WorkerSpec
from stoker.gateway.conversation import KeyMakers
from stoker.gateway.upstream import Upstreams
from stoker.gateway.watch import Watchers
from stoker.gateway.worker_option import worker_id_of
from stoker.gateway.workers import Workers
from stoker.routing.router import PrefixIndexes

MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}


class World:
    def __init__(self, silent_s: float = 10.0) -> None:
        self.fleet, self.ledger, self.indexes = Fleet(), Ledger(), PrefixIndexes()
        self.makers = KeyMakers()
        self.watchers = Watchers(self.fleet, self.indexes, self.makers)
        self.workers = Workers(self.fleet, self.ledger, self.watchers, Upstreams(), time.monotonic, silent_s)

    async def close(self) -> None:
        await self.workers.close()
        self.makers.close()


def spec_of(url: str, *, from_config: bool = True, dialect: str = "openai") -> WorkerSpec:
    return WorkerSpec(worker_id=worker_id_of(url), url=url, dialect=dialect, from_config=from_config)


def test_a_worker_is_watched_from_when_it_comes_and_forgotten_when_it_leaves() -> None:
    async def main() -> None:
        world, mock = World(), MockWorker(answers(MODELS))
        await mock.start()
        spec = spec_of(mock.url)
        world.workers.add(spec)
        await world.workers.looked(LONG_S)
        assert set(world.fleet.models()) == {"m"}
        world.indexes["m"].routed(spec.worker_id, [1, 2, 3], 0.0)
        charge = world.ledger.charge(spec.worker_id, prefill_tokens=5, context_tokens=5, output_tokens=5, now=0.0)
        world.workers.remove(spec.worker_id)
        assert world.fleet.members() == []
        await until(lambda: not world.indexes["m"].match([1, 2, 3]))
        assert world.watchers.watcher(spec.worker_id) is None
        assert world.ledger.totals().requests == 1  # what runs there goes on
        charge.end(1.0)
        assert world.ledger.totals().requests == 0
        await world.close()
        await mock.stop()

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
        world, mock = World(silent_s=0.3), MockWorker(answers(MODELS))
        await mock.start()
        world.workers.add(spec_of(mock.url, from_config=False))
        world.workers.add(spec_of("http://127.0.0.1:1"))
        await until(lambda: len(world.fleet.members()) == 1)
        assert world.fleet.members()[0].spec.from_config
        await world.close()
        await mock.stop()

    asyncio.run(main())


def test_a_dialect_that_nobody_speaks_is_named() -> None:
    async def main() -> None:
        world = World()
        with pytest.raises(ConfigError, match="no dialect is called 'klingon'"):
            world.workers.add(spec_of("http://x", dialect="klingon"))
        assert world.fleet.members() == []
        await world.close()

    asyncio.run(main())
