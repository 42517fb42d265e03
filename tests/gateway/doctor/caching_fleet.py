"""Workers with a prefix cache behind the real router, index and cache doctor. A token is one character of the prompt."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.base.clock import VirtualClock
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.lost_blocks import LostBlocks
from stoker.fleet.spec import WorkerSpec
from stoker.gateway.api.client_body import EndpointKind, RequestEnvelope, parse
from stoker.gateway.doctor.cache_doctor import CacheDoctor
from stoker.gateway.doctor.miss_parts import MissPart
from stoker.gateway.prefix.prefix_keys import root_key, token_keys
from stoker.kv.blocks.keys import salt_hash
from stoker.routing.query import Route, RouteQuery
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import RouterSettings

BLOCK = 16
MODEL = "m"
Messages = list[dict[str, Any]]


@dataclass
class CachingWorker:
    """Holds blocks on its device up to `capacity`, least recently used first, and in a host tier without a limit."""

    worker_id: WorkerId
    capacity: int = 10_000
    device: dict[int, None] = field(default_factory=dict)
    host: set[int] = field(default_factory=set)

    def num_cached(self, keys: Sequence[int]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.device), len(keys))


@dataclass
class RunningRequest:
    envelope: RequestEnvelope
    query: RouteQuery
    route: Route
    num_cached: int  # tokens
    prompt: list[int]


class CachingFleet:
    def __init__(self, num_workers: int = 2, policy: str = "cost", capacity: int = 10_000) -> None:
        self.clock = VirtualClock(start_s=1000.0)
        losses = LostBlocks(self.clock.now)
        self.indexes = PrefixIndexes(losses=losses)
        self.fleet = Fleet()
        self.doctor = CacheDoctor(losses)
        self.router = Router(self.fleet, LoadBook(), self.indexes, settings=RouterSettings(policy=policy))
        self.workers: dict[str, CachingWorker] = {}
        for number in range(num_workers):
            worker_id = WorkerId(f"w{number}")
            self.workers[worker_id] = CachingWorker(worker_id, capacity)
            spec = WorkerSpec(worker_id=worker_id, url=f"http://{worker_id}", models=(MODEL,))
            self.fleet.add(spec, self.clock.now())
            self.indexes[MODEL].stored(worker_id, [])  # it has KV events

    @property
    def index(self) -> Any:
        return self.indexes[MODEL]

    def begin(
        self,
        messages: Messages,
        *,
        tools: Sequence[str] = (),
        salt: str | None = None,
        session: str | None = None,
        thinks: bool = True,
        excluded: frozenset[WorkerId] = frozenset(),
    ) -> RunningRequest:
        body = {"messages": messages, "tools": [{"function": {"name": tool}} for tool in tools]}
        envelope = parse(EndpointKind.CHAT, json.dumps(body).encode())
        envelope.salt = salt
        prompt = [ord(one) for one in _rendered(messages, tools, thinks)]
        keys = token_keys(array("I", prompt), root_key(salt_hash(salt) if salt else None), BLOCK)
        query = RouteQuery(
            model=MODEL, keys=keys, block_tokens=BLOCK, num_tokens=len(prompt), session=session, excluded=excluded
        )
        route = self.router.route(query, self.clock.now())
        worker = self.workers[route.decode.worker.worker_id]
        blocks = min(worker.num_cached(keys), (len(prompt) - 1) // BLOCK)
        return RunningRequest(envelope, query, route, blocks * BLOCK, prompt)

    def end(self, running: RunningRequest, answer: str = "", *, stores: bool = True) -> tuple[MissPart, ...]:
        """The worker ends the request and stores its blocks. Return why it was computed."""
        num_tokens, now = len(running.prompt), self.clock.now()
        running.route.end(now)
        if stores:
            self._store(running, answer)
        query, route = running.query, running.route
        examined = self.doctor.examine("tenant", running.envelope, query, route, num_tokens, len(answer))
        parts = examined.parts(num_tokens, running.num_cached)
        assert sum(part.tokens for part in parts) == num_tokens - running.num_cached
        assert all(part.tokens > 0 for part in parts)
        return parts

    def ask(self, messages: Messages, answer: str = "", **more: Any) -> tuple[MissPart, ...]:
        return self.end(self.begin(messages, **more), answer)

    def _store(self, running: RunningRequest, answer: str) -> None:
        worker = self.workers[running.route.decode.worker.worker_id]
        salt = running.envelope.salt
        tokens = array("I", [*running.prompt, *map(ord, answer)])
        keys = token_keys(tokens, root_key(salt_hash(salt) if salt else None), BLOCK)
        for key in keys:
            worker.device.pop(key, None)
            worker.device[key] = None
        self.index.stored(worker.worker_id, keys)
        excess = list(worker.device)[: max(0, len(worker.device) - worker.capacity)]
        self.evict(worker, excess)

    def evict(self, worker: CachingWorker, keys: Sequence[int]) -> None:
        for key in keys:
            worker.device.pop(key, None)
        if keys:
            self.index.removed(worker.worker_id, keys)


def _rendered(messages: Messages, tools: Sequence[str], thinks: bool) -> str:
    """A chat template: options, tools, messages, and the start of an answer."""
    turns = "".join(f"<{one['role'][0]}>{one['content']}" for one in messages)
    return f"{'' if thinks else '<no thinking>'}{''.join(f'<tool {tool}>' for tool in tools)}{turns}<a>"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}
