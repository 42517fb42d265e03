"""kill -9 at every stage of a request: the client gets the one right answer or one clean error, and nothing stays reserved.

Real processes: two workers over a tiny model in float64, and the gateway before them; then a prefill worker and two decode
workers, where no KV stays kept either. The whole matrices are marked slow; a part of them that covers every row and column
runs always.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from real_fleet import LEASE_S, Exchange, Process, RealFleet, real_fleet
from worker.real import wait_for

SETTLES_S = 20.0  # until every counter is zero after an answer's end; one second on an idle machine

WORDS = "river stone lamp garden signal copper winter orbit pepper violin"
LONG_PROMPT = " ".join(f"{number} {WORDS}" for number in range(220))  # some seconds of prefill for the tiny model
MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 80}},
            "required": ["path"],
        },
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "stream": {"stream": True, "stream_options": {"include_usage": True}, "seed": 11, "temperature": 1.0},
    "whole": {"seed": 12, "temperature": 1.0},
    "three": {"stream": True, "stream_options": {"include_usage": True}, "n": 3, "seed": 13, "temperature": 1.0},
    "tool": {
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 14,
        "tools": [MOVE],
        "tool_choice": {"type": "function", "function": {"name": "move"}},
    },
}
COMPUTED = "stoker_computed_tokens_total"
STAGES = ("queued", "prefilling", "first_token", "mid_stream")
VICTIMS = ("worker", "engine")


@pytest.fixture(scope="module")
def fleet(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    # One row per worker, so a second request is queued.
    options = ("--max-rows", "3", "--engine-silent-s", "4.5")
    with real_fleet(tiny_folder, tmp_path_factory.mktemp("fleet"), worker_options=options) as fleet:
        yield fleet
    assert "Traceback" not in (fleet.gateway.log_path).read_text()


def body_of(kind: str, stage: str) -> dict[str, Any]:
    prompt = LONG_PROMPT if stage == "prefilling" else WORDS
    ending = {} if kind == "tool" else {"ignore_eos": True}
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 400} | ending | KINDS[kind]


def at_stage(fleet: RealFleet, exchange: Exchange, stage: str) -> Process:
    """Wait until the request has reached a worker, and return that worker."""
    worker = fleet.serving_worker()
    if exchange.body.get("stream"):
        wanted = {"first_token": 2, "mid_stream": 25}.get(stage, 0)
        wait_for(lambda: len(exchange.events) >= wanted or exchange.is_over)
    return worker


def ask(fleet: RealFleet, body: dict[str, Any], reach: Callable[[Exchange], Process]) -> tuple[Exchange, Process]:
    """Bring a request to its stage and return it with the worker to kill. Repeat if it ended too early."""
    for _ in range(5):
        exchange = fleet.ask(body)
        worker = reach(exchange)
        if not exchange.is_over or not body.get("stream"):
            return exchange, worker
    raise AssertionError("too fast to be struck")


def strike(victim: str, worker: Process) -> None:
    if victim == "worker":
        worker.kill()
    else:
        worker.kill_engine()


MATRIX = [
    pytest.param(victim, stage, kind, marks=() if k == s and v == s % 2 else pytest.mark.slow)
    for (v, victim), (s, stage), (k, kind) in itertools.product(*map(enumerate, (VICTIMS, STAGES, KINDS)))
]


@pytest.mark.parametrize(("victim", "stage", "kind"), MATRIX)
def test_a_dead_worker_changes_no_answer(fleet: RealFleet, victim: str, stage: str, kind: str) -> None:
    fleet.heal()
    body = body_of(kind, stage)
    undisturbed = fleet.direct(body)
    undisturbed.wait()
    crowd = []
    if stage == "queued":
        for number in range(6):  # all rows of both workers
            crowd.append(fleet.ask(body_of("stream", "mid_stream") | {"seed": 100 + number}))
        wait_for(lambda: all(len(one.events) > 1 for one in crowd))
    exchange, worker = ask(fleet, body, lambda exchange: at_stage(fleet, exchange, stage))
    strike(victim, worker)
    exchange.wait()
    assert exchange.said == undisturbed.said
    for one in crowd:
        one.wait()
        assert one.said[0][0]["finish"] == "length"
    nothing_left(fleet)


def test_a_stopped_engine_changes_no_answer(fleet: RealFleet) -> None:
    """It neither ends nor closes its connection: only the heartbeat notices it."""
    fleet.heal()
    body = body_of("stream", "mid_stream")
    undisturbed = fleet.direct(body)
    undisturbed.wait()
    exchange, worker = ask(fleet, body, lambda exchange: at_stage(fleet, exchange, "mid_stream"))
    with worker.stopped(engine=True):
        exchange.wait()
    assert exchange.said == undisturbed.said
    nothing_left(fleet)


def nothing_left(fleet: RealFleet) -> None:
    wait_for(lambda: not any(fleet.in_flight()["reserved"].values()), SETTLES_S)


def test_a_dead_gateway_leaves_nothing_running(fleet: RealFleet) -> None:
    fleet.heal()
    # Few enough that none waits for a row, and long enough that none ends before the last one begins.
    endless = {"max_tokens": 6000, "ignore_eos": True}
    exchanges = [fleet.ask(body_of(kind, "mid_stream") | endless) for kind in ("stream", "whole")]
    wait_for(lambda: all(len(one.events) > 1 for one in exchanges if one.body.get("stream")))
    before = sum(worker.metrics()[COMPUTED] for worker in fleet.workers)
    fleet.gateway.kill()
    for one in exchanges:  # the client does not wait
        one.wait()
        assert one.broken or not one.events or one.events[-1] != "[DONE]"
    wait_for(lambda: all(worker.is_idle for worker in fleet.workers))
    computed = sum(worker.metrics()[COMPUTED] for worker in fleet.workers) - before
    assert computed < 6000, "somebody went on to the end"
    fleet.gateway.start()
    fleet.heal()
    again = fleet.ask(body_of("stream", "first_token"))
    again.wait()
    assert again.said[0][0]["finish"] == "length"


def test_every_answer_has_one_row_in_the_ledger(fleet: RealFleet) -> None:
    fleet.heal()
    ids = [f"ledger-{number}" for number in range(8)]
    exchanges = [
        fleet.ask(body_of("stream" if number % 2 else "whole", "first_token"), X_Request_Id=request_id)
        for number, request_id in enumerate(ids)
    ]
    for one in exchanges:
        one.wait()
    nothing_left(fleet)

    def rows() -> list[Any]:
        with closing(sqlite3.connect(fleet.ledger_path)) as base:
            question = (
                "SELECT x_request_id, prompt_tokens, completion_tokens FROM usage WHERE x_request_id LIKE 'ledger-%'"
            )
            return base.execute(question).fetchall()

    wait_for(lambda: len(rows()) >= len(ids))
    booked = {request_id: (prompt, completion) for request_id, prompt, completion in rows()}
    assert booked == {request_id: one.said[1] for request_id, one in zip(ids, exchanges, strict=True)}


@pytest.mark.slow
def test_no_worker_left_is_a_clean_error(fleet: RealFleet) -> None:
    fleet.heal()
    exchange = fleet.ask(body_of("stream", "mid_stream") | {"max_tokens": 6000})
    wait_for(lambda: len(exchange.events) > 10)
    for worker in fleet.workers:
        worker.kill()
    exchange.wait()
    assert exchange.events[-1] != "[DONE]"
    error = json.loads(exchange.events[-1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    refused = fleet.ask(body_of("whole", "first_token"))
    refused.wait()
    assert refused.status == 503
    assert "retry-after" in refused.answer_headers
    assert set(refused.json["error"]) == {"message", "type", "param", "code"}
    nothing_left(fleet)
    fleet.heal()


# ---- prefill and decode workers

PAIR_STAGES = ("queued", "prefilling", "between_legs", "first_token", "mid_stream")
PAIR_VICTIMS = ("prefill worker", "prefill engine", "decode worker", "decode engine")
PAIR_MATRIX = [
    # Always run: every stage, each with another worker and kind.
    pytest.param(victim, stage, kind, marks=() if (v - s) % 4 == 0 and (k - s) % 4 == 1 else pytest.mark.slow)
    for (v, victim), (s, stage), (k, kind) in itertools.product(
        enumerate(PAIR_VICTIMS), enumerate(PAIR_STAGES), enumerate(KINDS)
    )
]


@pytest.fixture(scope="module")
def pair(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    roles, options = ("prefill", "decode", "decode"), ("--max-rows", "3")
    with real_fleet(tiny_folder, tmp_path_factory.mktemp("pair"), worker_options=options, roles=roles) as pair:
        yield pair
    assert "Traceback" not in (pair.gateway.log_path).read_text()


@pytest.mark.parametrize(("victim", "stage", "kind"), PAIR_MATRIX)
def test_a_dead_half_of_a_pair_changes_no_answer(pair: RealFleet, victim: str, stage: str, kind: str) -> None:
    pair.heal()
    role, _, part = victim.partition(" ")
    body = body_of(kind, stage)
    if stage == "prefilling":
        body["messages"] = [{"role": "user", "content": LONG_PROMPT[: len(LONG_PROMPT) // 2] + victim + kind}]
    undisturbed = pair.direct(body)
    undisturbed.wait()
    with ExitStack() as stopped:
        if stage == "queued":  # in a worker of this role
            for worker in pair.of_role(role):
                stopped.enter_context(worker.stopped(engine=True))
        if stage == "between_legs":
            for worker in pair.of_role("decode"):
                stopped.enter_context(worker.stopped())
        exchange, worker = ask(pair, body, lambda exchange: reached(pair, exchange, role, stage))
        strike(part, worker)
    exchange.wait()
    assert exchange.said == undisturbed.said
    pair.settle(LEASE_S + SETTLES_S)


def reached(pair: RealFleet, exchange: Exchange, role: str, stage: str) -> Process:
    """Wait until the request has arrived, and return the worker of this role that has it, had it, or will get it."""
    wait_for(lambda: any(pair.in_flight()["reserved"].values()))
    prefill, decode = pair.last_route()
    assert prefill is not None
    worker = prefill if role == "prefill" else decode
    if stage == "queued":
        wait_for(lambda: bool(worker.get("/health")["running_requests"]))
    elif stage == "prefilling":
        wait_for(lambda: exchange.is_over or bool(prefill.get("/health")["running_requests"]))
    elif stage == "between_legs":
        wait_for(lambda: prefill.metrics()["stoker_kv_leases"] > 0)
    elif exchange.body.get("stream"):
        wanted = {"first_token": 2, "mid_stream": 25}[stage]
        wait_for(lambda: len(exchange.events) >= wanted or exchange.is_over)
    else:
        wait_for(lambda: exchange.is_over or bool(decode.get("/health")["running_requests"]))
    return worker
