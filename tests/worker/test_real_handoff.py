"""Prefill in one process and decode in another give the answer of one process, whatever happens to the KV."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from real import CHAT, COMPLETIONS, RESPONSES, RealServer, serving_together, wait_for
from resume_notes import Seen, blocks_of, shown
from test_real_resume import CASES, FAST, comparable, stream

BLOCK = 16
LEASE_S = 6
KEEP = {"do_remote_decode": True}
VLLM_KEEP = KEEP | {"do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
SECRET = "correct-horse-battery-staple"
CREATED = 1763186401  # of all answers, because their ids depend on it


@dataclass
class Fleet:
    unified: RealServer
    prefill: RealServer
    decode: RealServer


@pytest.fixture(scope="module")
def fleet(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("log")
    secret = logs / "secret"
    secret.write_text(f"{SECRET}\n")
    options = (*FAST, "--secret-file", str(secret), "--kv-transports", "local,tcp")
    with serving_together(
        tiny_folder,
        (logs / "u", options),
        (logs / "p", (*options, "--role", "prefill", "--kv-lease-s", str(LEASE_S))),
        (logs / "d", (*options, "--role", "decode")),
    ) as servers:
        for server in servers:
            server.secret = SECRET
        yield Fleet(*servers)
    assert not any("Traceback" in path.read_text() for path in logs.iterdir())


@dataclass
class Handed:
    events: list[bytes]  # of both workers
    transfer: Any  # None: the first token ended the answer
    pulled_tokens: int = 0


def begins(num_choices: int) -> dict[str, Any]:
    return {"resume": {"created": CREATED, "choices": [{} for _ in range(num_choices)]}}


def requests(worker: RealServer) -> list[dict[str, Any]]:
    """Return them from its log. The last line may not be written yet."""
    lines = [line for line in worker.log.splitlines(keepends=True) if line.startswith("{") and line.endswith("\n")]
    return [line for line in map(json.loads, lines) if line["event"] == "request"]


def hand_over(fleet: Fleet, path: str, body: dict[str, Any], change: dict[str, Any] | None = None) -> Handed:
    """Hand off as our gateway does. `change` alters the ticket on its way."""
    num_choices = body.get("n", 1)
    first = blocks_of(stream(fleet.prefill, path, body | begins(num_choices) | {"kv_transfer_params": KEEP}))
    if not first[-1].lines[-1:] or not first[-1].lines[-1].startswith(b":k "):
        return Handed(shown(first), None)
    transfer = json.loads(first[-1].lines[-1].removeprefix(b":k ")) | (change or {})
    events = {"events": len(shown(first))} if path == RESPONSES else {}
    resume = Seen().read(first[:-1]).resume(num_choices, **events)
    before = len(requests(fleet.decode))
    rest = blocks_of(stream(fleet.decode, path, body | {"resume": resume, "kv_transfer_params": transfer}))
    wait_for(lambda: len(requests(fleet.decode)) > before)
    return Handed(shown(first) + shown(rest), transfer, requests(fleet.decode)[-1].get("pulled_tokens", 0))


def alone(fleet: Fleet, path: str, body: dict[str, Any]) -> list[bytes]:
    return shown(blocks_of(stream(fleet.unified, path, body | begins(body.get("n", 1)))))


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + num_tokens)
    return [rng.randrange(100, 20_000) for _ in range(num_tokens)]


# tests/gateway/test_real_pd.py always runs all of them through a gateway.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if i % 4 else name for i, name in enumerate(CASES)]
)
def test_prefill_and_decode_workers_give_the_answer_of_one_worker(fleet: Fleet, name: str) -> None:
    path, body = CASES[name]
    handed = hand_over(fleet, path, body)
    assert handed.transfer is not None
    assert comparable(handed.events) == comparable(alone(fleet, path, body))


@pytest.mark.parametrize("num_tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 50 * BLOCK + 7])
@pytest.mark.parametrize("dialect", ["stoker", "vllm"])
def test_only_what_cannot_be_pulled_is_computed(fleet: Fleet, num_tokens: int, dialect: str) -> None:
    # More than one try: a pull times out after a second, and on a stalled machine everything is computed, correctly.
    for attempt in range(3):
        if not pull_was_late(fleet, num_tokens, dialect, seed=10 * attempt + len(dialect)):
            return
    pytest.fail("three pulls brought too little")


def pull_was_late(fleet: Fleet, num_tokens: int, dialect: str, seed: int) -> bool:
    fields = {"prompt": prompt(num_tokens, seed), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    expected = fleet.unified.complete(**fields).text
    wait_for(lambda: fleet.decode.is_idle)
    before = fleet.decode.metrics()
    if dialect == "stoker":
        handed = hand_over(fleet, COMPLETIONS, fields)
        text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in handed.events if b"[DONE]" not in event)
    else:
        kept = fleet.prefill.complete(**fields | {"max_tokens": 1, "kv_transfer_params": VLLM_KEEP}).json
        assert kept["choices"][0]["finish_reason"] == "length"
        text = fleet.decode.complete(**fields, kv_transfer_params=kept["kv_transfer_params"]).text
    assert text == expected
    num_new = 5 if dialect == "stoker" else 6  # one forward pass each; the first computes the last known token
    computed = "stoker_computed_tokens_total"
    wait_for(lambda: fleet.decode.metrics()[computed] >= before[computed] + num_new and fleet.decode.is_idle)
    after = fleet.decode.metrics()
    if after["stoker_kv_failed_loads_total"] > before["stoker_kv_failed_loads_total"]:
        return True
    assert after[computed] - before[computed] == num_new
    num_pulled = after["stoker_kv_pulled_tokens_total"] - before["stoker_kv_pulled_tokens_total"]
    assert num_pulled == (num_tokens if dialect == "stoker" else num_tokens - 1)
    return False


def test_the_next_turn_finds_the_pulled_blocks(fleet: Fleet) -> None:
    fields = {"prompt": prompt(5 * BLOCK), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    hand_over(fleet, COMPLETIONS, fields)
    again = hand_over(fleet, COMPLETIONS, fields | {"max_tokens": 5})
    assert comparable(again.events) == comparable(alone(fleet, COMPLETIONS, fields | {"max_tokens": 5}))
    assert again.pulled_tokens < BLOCK, "blocks that decode has are not moved"


@pytest.mark.parametrize(
    "change",
    [
        {"remote_engine_id": "e-of-another-life"},
        {"remote_port": 1},
        {"remote_request_id": "nobody-0"},
        {"transfer_mode": "pull"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_invalid_ticket_costs_only_time(fleet: Fleet, change: dict[str, Any]) -> None:
    body = {"prompt": prompt(3 * BLOCK + 1, len(str(change))), "max_tokens": 6, "temperature": 0}
    handed = hand_over(fleet, COMPLETIONS, body, change)
    assert comparable(handed.events) == comparable(alone(fleet, COMPLETIONS, body))
    assert handed.pulled_tokens == 0


def test_an_unused_lease_ends(fleet: Fleet) -> None:
    answer = fleet.prefill.complete(prompt(3 * BLOCK, 7), max_tokens=1, kv_transfer_params=VLLM_KEEP).json
    wait_for(lambda: fleet.prefill.metrics()["stoker_kv_leases"] >= 1)
    wait_for(lambda: fleet.prefill.metrics()["stoker_kv_leases"] == 0)
    text = fleet.decode.complete(
        prompt(3 * BLOCK, 7), max_tokens=4, temperature=0, kv_transfer_params=answer["kv_transfer_params"]
    ).text
    assert text == fleet.unified.complete(prompt(3 * BLOCK, 7), max_tokens=4, temperature=0).text


def test_every_lease_is_returned(fleet: Fleet) -> None:
    for seed in range(4):
        hand_over(fleet, COMPLETIONS, {"prompt": prompt(40, seed), "max_tokens": 3, "n": 2, "ignore_eos": True})
    wait_for(lambda: fleet.prefill.metrics()["stoker_kv_leases"] == 0, LEASE_S - 0.5)  # before the lease expires
    wait_for(lambda: fleet.prefill.is_idle and fleet.decode.is_idle)
    info = [worker.metrics() for worker in (fleet.prefill, fleet.decode)]
    assert all(values["stoker_kv_blocks_free"] == values["stoker_kv_blocks"] for values in info)


def test_a_prefetch_changes_no_answer(fleet: Fleet) -> None:
    body = {"messages": [{"role": "user", "content": "Once upon a time " * 20}], "max_tokens": 4, "temperature": 0}
    kept = fleet.prefill.send(CHAT, body | {"max_tokens": 1, "kv_transfer_params": VLLM_KEEP}).json
    pull = {"kv_transfer_params": kept["kv_transfer_params"]}
    hint = json.dumps({"request": body} | pull).encode()
    assert fleet.decode.send("/stoker/prefetch", hint).status == 202
    answered = fleet.decode.send(CHAT, body | pull).json
    assert answered["choices"] == fleet.unified.send(CHAT, body).json["choices"]


def test_the_secret_is_not_on_a_command_line(fleet: Fleet) -> None:
    """Every user of the machine can read command lines."""
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert any(b"--secret-file" in line for line in lines), "the workers were there to be seen"
    assert not any(SECRET.encode() in line for line in lines)


def test_every_worker_answers_requests_without_a_handoff(fleet: Fleet) -> None:
    fields = {"prompt": prompt(33, 9), "max_tokens": 8, "temperature": 0}
    texts = {worker.complete(**fields).text for worker in (fleet.unified, fleet.prefill, fleet.decode)}
    assert len(texts) == 1
    assert [worker.send("/load").json["role"] for worker in (fleet.unified, fleet.prefill, fleet.decode)] == [
        "unified",
        "prefill",
        "decode",
    ]
    # Every worker keeps KV for others, so that its requests can move.
    assert fleet.decode.complete("x", max_tokens=1, kv_transfer_params=VLLM_KEEP).status == 200
