"""Faults in the hand-off between prefill, decode and their shared store: the right answer, and every lease released."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from real_fleet import CHAT, Exchange, Process, RealFleet, real_fleet
from worker.real import COMPLETIONS, wait_for

from stoker.kv.store.tiers.host.host_memory import remove_host_store

BLOCK = 16
PULLED, LOADED = "stoker_kv_pulled_tokens_total", "stoker_kv_loaded_tokens_total"
VICTIMS = ("decode worker", "decode engine", "prefill worker", "prefill engine")
ALWAYS = (("decode worker", 0.03), ("prefill worker", 0.0))
WORDS = "river stone lamp garden signal copper winter orbit pepper violin "


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def fleet(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    roles = ("prefill", "decode", "decode")
    with real_fleet(tiny_folder, tmp_path_factory.mktemp("faults"), roles=roles) as fleet:
        # A restarted worker keeps its KV address. No lease expires during a test, so unused leases must be released.
        fleet.of_role("prefill")[0].arguments += ["--kv-port", str(free_port()), "--kv-lease-s", "600"]
        fleet.of_role("prefill")[0].stop()
        fleet.heal()
        yield fleet
    assert "Traceback" not in fleet.gateway.log_path.read_text()


def body(name: str, **more: Any) -> dict[str, Any]:
    content = f"{name} {WORDS * 12}"
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 40, "seed": 5, "ignore_eos": True}
    return asked | {"stream": True, "stream_options": {"include_usage": True}} | more


def handed_over(fleet: RealFleet, asked: dict[str, Any]) -> tuple[Exchange, Process, Process]:
    """Prefill has ended. Decode's engines are stopped: the request has arrived, and no KV is pulled."""
    exchange = fleet.ask(asked)
    wait_for(lambda: any(fleet.in_flight()["reserved"].values()))
    prefill, decode = fleet.last_route()
    assert prefill is not None
    wait_for(lambda: prefill.metrics()["stoker_kv_leases"] > 0)
    wait_for(lambda: bool(decode.get("/health")["running_requests"]))
    return exchange, prefill, decode


def check(fleet: RealFleet, exchange: Exchange, asked: dict[str, Any]) -> None:
    undisturbed = fleet.direct(asked)
    for one in (exchange, undisturbed):
        one.wait()
    assert exchange.said == undisturbed.said
    fleet.settle(60)


def test_a_ticket_of_an_earlier_life_at_the_same_address_opens_nothing(fleet: RealFleet) -> None:
    fleet.heal()
    asked = body("stale")
    first, second = fleet.of_role("decode")
    with first.stopped(engine=True), second.stopped(engine=True):
        exchange, prefill, decode = handed_over(fleet, asked)
        pulled = decode.metrics()[PULLED]
        prefill.kill()
        prefill.start()
        wait_for(lambda: prefill.is_ready)
        # The same blocks hold another request's KV now.
        asked_other = {"model": "tiny"} | body("other")
        other = Exchange(prefill.port, asked_other, prefill.signed(CHAT, json.dumps(asked_other).encode()))
        other.wait()
        assert other.status == 200, other.answer
    check(fleet, exchange, asked)
    assert decode.metrics()[PULLED] == pulled


@pytest.mark.parametrize(
    ("victim", "after_s"),
    [
        pytest.param(victim, after_s, marks=() if (victim, after_s) in ALWAYS else pytest.mark.slow)
        for victim, after_s in itertools.product(VICTIMS, (0.0, 0.03))
    ],
)
def test_a_pull_that_hangs_and_loses_one_of_its_ends(fleet: RealFleet, victim: str, after_s: float) -> None:
    """The prefill engine is stopped when decode pulls its KV."""
    fleet.heal()
    asked = body(f"{victim} {after_s}")
    role, _, part = victim.partition(" ")
    first, second = fleet.of_role("decode")
    (prefill,) = fleet.of_role("prefill")
    with first.stopped(engine=True), second.stopped(engine=True):
        exchange, _, decode = handed_over(fleet, asked)
        hanging = prefill.stopped(engine=True)
        hanging.__enter__()
    try:
        time.sleep(after_s)
        struck = decode if role == "decode" else prefill
        struck.kill() if part == "worker" else struck.kill_engine()
    finally:
        hanging.__exit__(None, None, None)
    check(fleet, exchange, asked)


def test_a_client_that_disconnects_between_the_legs_leaves_no_lease(fleet: RealFleet) -> None:
    fleet.heal()
    first, second = fleet.of_role("decode")
    with first.stopped(engine=True), second.stopped(engine=True):
        exchange, prefill, _ = handed_over(fleet, body("left"))
        exchange.leave()
        wait_for(lambda: prefill.metrics()["stoker_kv_leases"] == 0, 60)
    fleet.settle(60)


@pytest.fixture
def stored(tiny_folder: Path, tmp_path: Path) -> Iterator[tuple[RealFleet, Path]]:
    """A pair with shared RAM and disk tiers."""
    name, disk = f"test-{uuid.uuid4().hex[:12]}", tmp_path / "disk"
    options = ("--kv-host-gib", "0.02", "--kv-store", name, "--kv-disk", str(disk), "--kv-disk-gib", "0.1")
    try:
        with real_fleet(tiny_folder, tmp_path, roles=("prefill", "decode"), worker_options=options) as fleet:
            yield fleet, disk
    finally:
        remove_host_store(name)


def blocks_known(fleet: RealFleet) -> tuple[float, float]:
    """Wait until the blocks are in the shared RAM tier and the gateway knows it."""
    in_memory = fleet.of_role("decode")[0].metrics()['stoker_kv_tier_blocks{tier="host"}']
    return in_memory, fleet.gateway.metrics()['stoker_gateway_index_blocks{model="tiny"}']


def take_turn(fleet: RealFleet, prompt: list[int]) -> dict[str, Any]:
    """Ask the gateway and one worker alone, compare the answers, and return that of the gateway when the fleet is idle."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 3 * BLOCK, "temperature": 0}
    asked |= {"ignore_eos": True, "return_token_ids": True}
    assert fleet.reference is not None
    through, alone = (Exchange(port, asked, path=COMPLETIONS) for port in (fleet.gateway.port, fleet.reference.port))
    for one in (through, alone):
        one.wait()
        assert one.status == 200, (one.status, one.answer[:500], one.broken)
    assert through.json["choices"] == alone.json["choices"]
    fleet.settle(60)
    answer: dict[str, Any] = through.json
    return answer


def next_prompt(prompt: list[int], answer: dict[str, Any], number: int) -> list[int]:
    return [*prompt, *answer["choices"][0]["token_ids"], *range(1000 * number, 1000 * number + 5)]


def test_prefill_finds_what_decode_computed(stored: tuple[RealFleet, Path]) -> None:
    fleet, _ = stored
    (prefill,) = fleet.of_role("prefill")
    rng = random.Random(1)
    found = []
    for number in range(4):  # on a busy machine, a load may be late, or seem slower than to compute some blocks again
        prompt = [rng.randrange(100, 20_000) for _ in range(20 * BLOCK)]
        blocks, known = min(blocks_known(fleet)), len(prompt) + 3 * BLOCK
        first = take_turn(fleet, prompt)
        # Computed blocks are written behind, then published.
        wait_for(lambda wanted=blocks + known // BLOCK - 2: min(blocks_known(fleet)) >= wanted)  # type: ignore[misc]
        second = take_turn(fleet, next_prompt(prompt, first, number))
        (reason,) = (one for one in fleet.last_reasons() if one["part"] == "prefill")
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        found.append((cached, reason["cached_tokens"]))
        # Events may lag behind the last steps.
        if cached >= known - 2 * BLOCK and reason["cached_tokens"] > len(prompt) // 2:
            assert prefill.metrics()[LOADED] > 0
            return
    raise AssertionError(f"cached tokens of the prefill worker, and what the gateway knew of: {found}")


def test_a_store_that_is_gone_costs_time_alone(stored: tuple[RealFleet, Path]) -> None:
    fleet, disk = stored
    rng = random.Random(2)
    prompt = [rng.randrange(100, 20_000) for _ in range(20 * BLOCK)]
    for turn in range(4):
        if turn == 2:
            while disk.exists():  # a worker may still write there
                shutil.rmtree(disk, ignore_errors=True)
        prompt = next_prompt(prompt, take_turn(fleet, prompt), turn)


@pytest.mark.slow
def test_decode_reads_ahead_into_its_own_memory_while_prefill_computes(tiny_folder: Path, tmp_path: Path) -> None:
    roles, options = ("prefill", "decode"), ("--kv-host-gib", "0.05", "--step-tokens", "128", "--kv-transports", "tcp")
    with real_fleet(tiny_folder, tmp_path, roles=roles, worker_options=options) as fleet:
        (decode,) = fleet.of_role("decode")
        asked = body("long") | {"messages": [{"role": "user", "content": WORDS * 400}]}
        exchange = fleet.ask(asked)
        check(fleet, exchange, asked)
        assert decode.metrics()[LOADED] > 0, "it came from its own memory, not from prefill's"
