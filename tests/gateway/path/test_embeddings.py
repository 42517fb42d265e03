"""Embeddings and rerank requests go to foreign workers, and are limited and billed as other requests."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from mocks import MockWorker, answers, drops
from world import NOTHING, World

from stoker.gateway.admission.budgets import UNITS
from stoker.gateway.admission.limit_leases import LimitLeases
from stoker.gateway.http import HttpRequest
from stoker.gateway.key_settings import KeySettings
from stoker.gateway.store.limit_tables import add_spent
from stoker.gateway.store.sqlite import SqliteStore
from stoker.gateway.store.store_threads import StoreThreads


def in_event_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))  # type: ignore[arg-type]

    return run


EMBEDDING = {"object": "list", "data": [{"embedding": [0.5]}], "model": "m", "usage": {"prompt_tokens": 7}}
RANKED = {"results": [{"index": 1, "relevance_score": 0.9}], "usage": {"total_tokens": 21}}


@pytest.mark.parametrize(
    ("path", "body", "answer", "endpoint", "tokens"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}, EMBEDDING, "embeddings", 7),
        ("/v1/rerank", {"query": "q", "documents": ["a", "b"]}, RANKED, "rerank", 21),
        ("/v2/rerank", {"query": "q", "documents": ["a", "b"]}, RANKED, "rerank", 21),
        ("/v1/score", {"text_1": "q", "text_2": ["a", "b"]}, {"data": []}, "rerank", 11),
    ],
)
@in_event_loop
async def test_a_request_is_forwarded_and_billed(
    path: str, body: dict[str, Any], answer: dict[str, Any], endpoint: str, tokens: int
) -> None:
    async with World() as world:
        worker = await world.add("w", answers(answer), dialect="vllm")
        got = await world.ask({"model": "m", **body}, path, [(b"x-request-id", b"mine")])
        assert (got.status, got.json, got.headers["x-request-id"]) == (200, answer, "mine")
        assert (worker.paths, worker.jsons) == ([path], [{**body, "model": "m"}])
        [row] = world.rows.rows
        assert (row.endpoint, row.status, row.worker, row.x_request_id) == (endpoint, 200, "w", "mine")
        assert (row.prompt_tokens, row.completion_tokens) == (tokens, 0)
        assert world.admission.num_in_flight == 0
        assert world.ledger.totals() == NOTHING


@in_event_loop
async def test_aliases_apply_and_fields_that_an_engine_should_not_see_are_dropped() -> None:
    async with World() as world:
        worker = await world.add("w", answers(EMBEDDING), dialect="vllm")
        body = {
            "model": "text-embedding-3-small",
            "input": "a",
            "kv_transfer_params": {},
            "messages": [],
            "priority": -9,
        }
        assert (await world.ask(body, "/v1/embeddings")).status == 200
        assert worker.jsons == [{"input": "a", "model": "m"}]


@pytest.mark.parametrize(
    "item", [{"image_url": "http://10.0.0.1/"}, {"image": "x"}, {"type": "input", "audio_url": {}}]
)
@in_event_loop
async def test_an_engine_is_not_pointed_to_a_url(item: dict[str, Any]) -> None:
    async with World() as world:
        worker = await world.add("w", answers(EMBEDDING), dialect="vllm")
        got = await world.ask({"model": "m", "query": "q", "documents": [item]}, "/v1/rerank")
        assert (got.status, got.json["error"]["code"]) == (400, "unsupported_content")
        assert worker.bodies == []
        assert world.admission.num_in_flight == 0


@in_event_loop
async def test_an_escaped_key_is_a_key_and_a_text_is_not() -> None:
    async with World() as world:
        worker = await world.add("w", answers(EMBEDDING), dialect="vllm")
        body = b'{"model": "m", "query": "q", "documents": [{"im\\u0061ge": "http://10.0.0.1/"}]}'
        assert (await world.ask(body, "/v1/rerank")).status == 400
        assert (await world.ask({"model": "m", "input": ["image", "audio"]}, "/v1/embeddings")).status == 200
        assert [sent["input"] for sent in worker.jsons] == [["image", "audio"]]


@in_event_loop
async def test_limits_that_gateways_share_are_leased_first(tmp_path: Path) -> None:
    key = KeySettings(name="k", sha256=hashlib.sha256(b"sk-k").hexdigest(), budget=1.0)
    async with World(keys=[key]) as world:
        await world.add("w", answers(EMBEDDING), dialect="vllm")
        threads = StoreThreads(SqliteStore(tmp_path / "s.db"))
        leases = world.admission._leases = LimitLeases(threads, "g", world.admission.clock)
        await threads.write(lambda changes: add_spent(changes, {"key/k/money": UNITS}, 0.0))  # by another gateway
        headers = [(b"authorization", b"Bearer sk-k")]
        got = await world.ask({"model": "m", "input": "a"}, "/v1/embeddings", headers)
        assert (got.status, got.json["error"]["code"]) == (429, "insufficient_quota")
        await leases.close()
        threads.close()


@in_event_loop
async def test_models_without_a_foreign_worker_are_refused() -> None:
    async with World() as world:
        await world.add("w", answers(EMBEDDING), dialect="stoker")
        got = await world.ask({"model": "m", "input": "a"}, "/v1/embeddings")
        assert (got.status, got.json["error"]["code"]) == (404, "unknown_url")
        got = await world.ask({"model": "other", "input": "a"}, "/v1/embeddings")
        assert (got.status, got.json["error"]["code"]) == (404, "model_not_found")
        assert (await world.ask(b"{", "/v1/embeddings")).status == 400
        assert (await world.get("/v1/embeddings")).status == 405
        assert world.admission.num_in_flight == 0


@in_event_loop
async def test_a_lost_worker_is_replaced_and_an_error_is_recorded() -> None:
    async with World() as world:
        await world.add("w1", drops(), dialect="vllm")
        await world.add("w2", drops(), dialect="vllm")
        await world.add("w3", answers(EMBEDDING), dialect="vllm")
        got = await world.ask({"model": "m", "input": "a"}, "/v1/embeddings")
        assert got.status == 502  # two workers were lost: it may be the cause
        [row] = world.rows.rows
        assert (row.status, row.prompt_tokens) == (502, 0)
        assert world.ledger.totals() == NOTHING


@in_event_loop
async def test_an_engines_refusal_is_passed_on_and_not_billed() -> None:
    async with World() as world:
        error = {"error": {"message": "input is too long", "type": "BadRequestError"}}
        await world.add("w", answers(error, 400), dialect="vllm")
        got = await world.ask({"model": "m", "input": "a"}, "/v1/embeddings")
        assert (got.status, got.json) == (400, error)
        assert world.rows.rows[0].prompt_tokens == 0


@in_event_loop
async def test_the_limits_of_a_key_hold() -> None:
    key = KeySettings(name="k", sha256=hashlib.sha256(b"sk-k").hexdigest(), requests_per_minute=1)
    async with World(keys=[key]) as world:
        await world.add("w", answers(EMBEDDING), dialect="vllm")
        body = {"model": "m", "input": "a"}
        assert (await world.ask(body, "/v1/embeddings")).status == 401
        headers = [(b"authorization", b"Bearer sk-k")]
        assert (await world.ask(body, "/v1/embeddings", headers)).status == 200
        assert (await world.ask(body, "/v1/embeddings", headers)).status == 429


@in_event_loop
async def test_a_worker_cannot_bill_more_than_the_request_can_have() -> None:
    async def greedy(worker: MockWorker, request: HttpRequest) -> None:
        answer = {**EMBEDDING, "usage": {"prompt_tokens": 10**12}}
        request.respond(200, [(b"content-type", b"application/json")], json.dumps(answer).encode())

    async with World() as world:
        await world.add("w", greedy, dialect="vllm")
        await world.ask({"model": "m", "input": "a"}, "/v1/embeddings")
        assert world.rows.rows[0].prompt_tokens < 5000


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model":"m","input":[%b{"image":1}]}' % (b"{}," * 100_001), "100000 values"),
        (
            b'{"model":"m","input":"x",%b}' % b",".join(b'"%d":1' % number for number in range(60_000)),
            "50000 are allowed",
        ),
    ],
    ids=["values", "fields"],
)
@in_event_loop
async def test_a_body_of_very_many_parts_is_refused(body: bytes, says: str) -> None:
    async with World() as world:
        worker = await world.add("w", answers(EMBEDDING), dialect="vllm")
        got = await world.ask(body, "/v1/embeddings")
        assert (got.status, worker.bodies) == (400, [])
        assert says in got.json["error"]["message"]
        tokens = {"model": "m", "input": list(range(100_100))}
        assert (await world.ask(tokens, "/v1/embeddings")).status == 200
