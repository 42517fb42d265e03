"""`/v1/messages` through a real gateway and workers: answers survive kill -9 exactly, usage is billed, prefixes are found."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from real_fleet import Exchange, Process, RealFleet, real_fleet
from worker.real import wait_for

PATH = "/v1/messages"
WORDS = "river stone lamp garden signal copper winter orbit pepper violin"
MOVE = {
    "name": "move",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 80}},
        "required": ["path"],
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "text": {"stream": True, "ignore_eos": True, "seed": 11},
    "tool": {"stream": True, "tools": [MOVE], "tool_choice": {"type": "tool", "name": "move"}, "seed": 14},
    "whole": {"ignore_eos": True, "seed": 12},
}


@pytest.fixture(scope="module")
def fleet(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    options = ("--max-rows", "3", "--engine-silent-s", "4.5")
    with real_fleet(tiny_folder, tmp_path_factory.mktemp("fleet"), worker_options=options) as fleet:
        yield fleet
    assert "Traceback" not in fleet.gateway.log_path.read_text()


def ask(process: Process, body: dict[str, Any], path: str = PATH, **headers: str) -> Exchange:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    full = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": WORDS}]} | body
    return Exchange(process.port, full, named, path)


def said(exchange: Exchange) -> Any:
    """Return the events of a stream, or a whole message, without what differs between two requests."""
    exchange.check()
    found = [json.loads(one) for one in exchange.events] if exchange.body.get("stream") else [exchange.json]
    for one in found:
        for part in (one, one.get("message", {}), one.get("content_block", {}), *one.get("content", ())):
            part.pop("id", None)
            usage = part.get("usage", {})
            usage["input_tokens"] = usage.pop("input_tokens", 0) + usage.pop("cache_read_input_tokens", 0)
    return found


def has_events(exchange: Exchange, num: int) -> bool:
    return len(exchange.events) >= num or exchange.is_over


@pytest.mark.parametrize(
    ("victim", "kind"),
    [
        ("worker", "text"),
        ("worker", "tool"),
        pytest.param("worker", "whole", marks=pytest.mark.slow),
        pytest.param("engine", "tool", marks=pytest.mark.slow),
    ],
)
def test_a_dead_worker_changes_no_event(fleet: RealFleet, kind: str, victim: str) -> None:
    fleet.heal()
    body = KINDS[kind]
    undisturbed = ask(fleet.workers[0], body)
    undisturbed.wait()
    for _ in range(5):
        exchange = ask(fleet.gateway, body)
        worker = fleet.serving_worker()
        if body.get("stream"):
            wait_for(partial(has_events, exchange, 25))
        if not exchange.is_over:
            break
    else:
        raise AssertionError("too fast to be struck")
    worker.kill() if victim == "worker" else worker.kill_engine()
    exchange.wait()
    assert said(exchange) == said(undisturbed)
    if body.get("stream"):
        assert json.loads(exchange.events[-1]) == {"type": "message_stop"}
    wait_for(lambda: not any(fleet.in_flight()["reserved"].values()), 20)


def test_a_session_stays_on_its_worker_and_its_usage_is_billed(fleet: RealFleet) -> None:
    fleet.heal()
    messages: list[dict[str, Any]] = []
    usages, workers = [], []
    common = " ".join([WORDS] * 60)  # long enough that no busy machine makes computing it again seem cheaper
    for turn in range(4):
        line = f"x-anthropic-billing-header: cc_version=2.1; cch={turn};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": common}]
        messages.append({"role": "user", "content": f"Turn {turn}: {WORDS}"})
        body = {"messages": messages, "system": system, "max_tokens": 8, "ignore_eos": True, "stream": bool(turn % 2)}
        body |= {"metadata": {"user_id": "user_1_session_2"}}
        exchange = ask(fleet.gateway, body, X_Request_Id=f"messages-{turn}")
        exchange.wait()
        exchange.check()
        if turn % 2:
            events = [json.loads(one) for one in exchange.events]
            start, usage = events[0]["message"]["usage"], events[-2]["usage"]
            assert usage | {"output_tokens": 0} == start | {"output_tokens": 0}
            text = "".join(one["delta"]["text"] for one in events if one.get("delta", {}).get("type") == "text_delta")
        else:
            usage, text = exchange.json["usage"], exchange.json["content"][0]["text"]
        usages.append(usage)
        workers.append(fleet.last_route()[1])
        messages.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        fleet.settle(60)
    assert len({id(worker) for worker in workers}) == 1
    for before, usage in pairwise(usages):
        sent = before["input_tokens"] + before["cache_read_input_tokens"]
        assert usage["cache_read_input_tokens"] >= sent // 16 * 16, "the billing line must not break the prefix"

    def rows() -> dict[str, tuple[int, ...]]:
        with closing(sqlite3.connect(fleet.ledger_path)) as base:
            found = base.execute(
                "SELECT x_request_id, prompt_tokens, cached_tokens, completion_tokens FROM usage"
                " WHERE endpoint = 'messages' AND x_request_id LIKE 'messages-%'"
            )
            return {name: tuple(counts) for name, *counts in found}

    wait_for(lambda: len(rows()) == 4)
    assert rows() == {
        f"messages-{i}": (
            usage["input_tokens"] + usage["cache_read_input_tokens"],
            usage["cache_read_input_tokens"],
            usage["output_tokens"],
        )
        for i, usage in enumerate(usages)
    }


def test_counting_and_errors_at_the_gateway(fleet: RealFleet) -> None:
    fleet.heal()
    counted = ask(fleet.gateway, {"max_tokens": 1}, f"{PATH}/count_tokens")
    used = ask(fleet.gateway, {"max_tokens": 1})
    for one in (counted, used):
        one.wait()
    usage = used.json["usage"]
    assert counted.json == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    response = ask(fleet.gateway, {"input": WORDS, "messages": None}, "/v1/responses/input_tokens")
    response.wait()
    assert response.json["input_tokens"] > 10
    for body, param in (({"messages": []}, "messages"), ({"tools": [{"name": "a b"}]}, "tools[0].name")):
        wrong = ask(fleet.gateway, body)
        wrong.wait()
        assert (wrong.status, wrong.json["type"], wrong.json["error"]["param"]) == (400, "error", param)
        assert wrong.json["request_id"] == wrong.answer_headers["x-request-id"]


@pytest.fixture(scope="module")
def pair(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    with real_fleet(tiny_folder, tmp_path_factory.mktemp("pair"), roles=("prefill", "decode")) as pair:
        yield pair
    assert "Traceback" not in pair.gateway.log_path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_hand_off_changes_no_event(pair: RealFleet, kind: str) -> None:
    body = KINDS[kind] | {"max_tokens": 40 if kind != "tool" else 300}
    assert pair.reference is not None
    undisturbed = ask(pair.reference, body)
    exchange = ask(pair.gateway, body)
    for one in (undisturbed, exchange):
        one.wait()
    assert said(exchange) == said(undisturbed)
    assert pair.last_route()[0] is not None
