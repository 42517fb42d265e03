"""Hand-off and tiers with the real engine: the tokens are those of a single engine, and no cached token is computed."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kv.mooncake_worker import calls_take
from tiny import make_tiny

from stoker.base.config import EngineSettings, HandoffSettings, KvSettings, SchedSettings, StoreSettings
from stoker.base.ids import RequestId
from stoker.engine.llm import LLM, LLMOutput
from stoker.engine.runner import PendingStep, Runner
from stoker.kv.blocks.transfer import KvTicket
from stoker.kv.mooncake.master import INSTALL_HINT, MooncakeMaster, is_installed
from stoker.kv.peer.lease_book import LeaseBook
from stoker.kv.store.tiers.host.host_memory import remove_host_store
from stoker.sched.plan import StepPlan
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.step_rates import StepRates

BLOCK = 8
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path, "llama", torch.float64)
    return path


def settings(
    store: StoreSettings | None = None, serves: bool = False, num_blocks: int = 64, **handoff: object
) -> EngineSettings:
    return EngineSettings(
        device="cpu",
        dtype="float64",
        num_threads=1,
        kv=KvSettings(BLOCK, num_blocks),
        sched=SchedSettings(step_tokens=32, max_rows=8),
        store=store or StoreSettings(),
        handoff=HandoffSettings(serves=serves, **{"transports": ("local", "tcp"), **handoff}),  # type: ignore[arg-type]
    )


@contextmanager
def engine(folder: Path, chosen: EngineSettings) -> Iterator[LLM]:
    llm = LLM(folder, chosen)
    try:
        yield llm
    finally:
        llm.close()


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    print("seed", seed)
    rng = random.Random(seed)
    return [[rng.randrange(1, 199) for _ in range(length)] for length in lengths]


def request(number: int, prompt: list[int], **fields: object) -> GenerateRequest:
    plain = GenerateRequest(
        RequestId(f"r{number}"), list(prompt), len(prompt), SamplingParams(temperature=0.0), NEW_TOKENS
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


def hand_over(prefill: LLM, decode: LLM, asked: list[list[int]]) -> list[LLMOutput]:
    firsts = prefill.run([request(i, prompt, lease_id=f"l{i}") for i, prompt in enumerate(asked)])
    seconds = decode.run(
        [
            request(i, prompt, token_ids=prompt + first.token_ids, ticket=first.ticket)
            for i, (prompt, first) in enumerate(zip(asked, firsts, strict=True))
        ]
    )
    for first, second in zip(firsts, seconds, strict=True):
        assert first.finish is not None
        assert first.finish.reason == "handoff"
        second.token_ids = first.token_ids + second.token_ids
    return seconds


def settle(llm: LLM) -> None:
    """Step until every lease has ended and every block is free."""
    scheduler = llm.built.scheduler
    for _ in range(10_000):
        llm.built.engine.step()
        if not scheduler.num_held and llm.built.pool.num_free == llm.built.pool.num_blocks:
            return
        time.sleep(0.005)
    raise AssertionError(f"{scheduler.num_held} leases held, {llm.built.pool.num_free} blocks free")


def wait_until_written(llm: LLM, asked: list[list[int]]) -> None:
    """Wait until the first tier has all full blocks of these prompts and their answers. The prompts share no block."""
    num_blocks = sum((len(prompt) + NEW_TOKENS - 1) // BLOCK for prompt in asked)
    counters, until_s = llm.built.store.tiers[0].counters, time.monotonic() + 60
    while counters.written_bytes < num_blocks * llm.built.layout.block_bytes:
        assert time.monotonic() < until_s, f"{counters.written_bytes} bytes of {num_blocks} blocks were written"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long enough for KV, also on a slow machine."""
    for name in ("_TIER_GRACE_S", "_PEER_GRACE_S"):
        monkeypatch.setattr(f"stoker.kv.store.loader.{name}", 60.0)


LENGTHS = [1, 2, 7, 8, 9, 16, 17, 40, 64, 100]


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_prefill_and_decode_give_the_unified_answer_and_decode_computes_no_prompt(folder: Path, transport: str) -> None:
    asked = prompts(1, LENGTHS)
    with (
        engine(folder, settings()) as unified,
        engine(folder, settings(serves=True, transports=(transport,))) as prefill,
        engine(folder, settings(transports=(transport,))) as decode,
    ):
        expected = unified.generate(asked, SamplingParams(temperature=0.0), NEW_TOKENS)
        answers = hand_over(prefill, decode, asked)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        counters = decode.built.scheduler.counters
        assert counters.pulled_tokens == sum(LENGTHS)
        assert counters.computed_tokens == len(LENGTHS) * (NEW_TOKENS - 1)
        settle(prefill)
        settle(decode)


def test_a_lost_prefill_worker_costs_time_not_the_answer(folder: Path) -> None:
    asked = prompts(2, [5, 16, 50])
    with engine(folder, settings()) as unified, engine(folder, settings()) as decode:
        expected = unified.generate(asked, SamplingParams(temperature=0.0), NEW_TOKENS)
        gone = KvTicket("gone", "127.0.0.1:9", "l", 5, 30.0)
        requests = [request(i, prompt, ticket=replace(gone, num_tokens=len(prompt))) for i, prompt in enumerate(asked)]
        assert [answer.token_ids for answer in decode.run(requests)] == [answer.token_ids for answer in expected]
        assert decode.built.scheduler.counters.failed_loads == 3
        settle(decode)


def test_the_prefill_measurement_fits_into_a_short_context(folder: Path) -> None:
    with engine(folder, replace(settings(serves=True), max_model_tokens=20)) as short:
        [done] = short.run([request(0, *prompts(3, [8]))])
    assert len(done.token_ids) == NEW_TOKENS


@pytest.mark.parametrize("how", ["preempted", "cancelled"])
def test_overwritten_blocks_are_never_taken_for_the_kv_of_a_lease(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A peer reads while a step runs, and asks afterwards whether the lease still held the blocks."""
    book = LeaseBook()
    monkeypatch.setattr("stoker.engine.build.LeaseBook", lambda: book)
    first, second = prompts(4, [72, 60])
    with engine(folder, settings(serves=True, num_blocks=11, lease_s=1.0)) as llm:
        running = llm.built.engine
        running.add(request(0, first, lease_id="l", priority=1))
        running.step()
        view = book.view("l", 0, None, 10)
        assert len(view.blocks) == 4
        was_held = []

        def launch(runner: Runner, plan: StepPlan) -> PendingStep:
            if set(view.blocks) & set(plan.fresh_blocks[0]):
                was_held.append(book.holds("l", view.generation))
            return real_launch(runner, plan)

        real_launch = Runner.launch
        monkeypatch.setattr(Runner, "launch", launch)
        if how == "cancelled":
            running.cancel(RequestId("r0"))
        running.add(request(1, second))
        while running.has_work:
            running.step()
        assert was_held
        assert was_held[0] is False
        settle(llm)


def test_a_lease_is_closed_if_the_answer_ends_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = LeaseBook()
    monkeypatch.setattr("stoker.engine.build.LeaseBook", lambda: book)
    any_token = SamplingParams(temperature=0.0, stop_token_ids=tuple(range(199)))
    with engine(folder, settings(serves=True)) as llm:
        for number, prompt in enumerate(prompts(5, [40, 9])):
            [ended] = llm.run([request(number, prompt, lease_id=f"l{number}", sampling=any_token)])
            assert ended.finish is not None
            assert ended.finish.reason == "stop"
            settle(llm)
        assert len(book) == 0


def test_blocks_that_decode_has_are_not_pulled_again(folder: Path) -> None:
    first, second = prompts(3, [40, 3])
    with (
        engine(folder, settings(serves=True)) as prefill,
        engine(folder, settings()) as decode,
    ):
        turn = hand_over(prefill, decode, [first])[0].token_ids
        settle(prefill)
        pulled = decode.built.scheduler.counters.pulled_tokens
        hand_over(prefill, decode, [first + turn + second])
        known = (len(first) + len(turn) - 1) // BLOCK * BLOCK
        assert decode.built.scheduler.counters.pulled_tokens - pulled == len(first + turn + second) - known


@contextmanager
def a_store(tier: str, folder: Path) -> Iterator[StoreSettings]:
    match tier:
        case "host":
            name = f"test-{os.getpid()}-{folder.name}"
            try:
                yield StoreSettings(name=name, host_gib=0.05)
            finally:
                remove_host_store(name)
        case "disk":
            yield StoreSettings(disk_dir=str(folder))
        case "mooncake":
            if not is_installed():
                pytest.skip(INSTALL_HINT)
            with calls_take(60.0), MooncakeMaster(folder / "master.log") as master:
                yield StoreSettings(mooncake_master=master.address, mooncake_segment_gib=0.05)


@pytest.mark.parametrize("tier", ["host", "disk", "mooncake"])
def test_a_prefix_computed_by_one_worker_is_found_by_another_through_the_store(
    folder: Path, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A model this small computes a block faster than a file is opened.
    monkeypatch.setattr(StepRates, "prefill_tokens_per_s", 100.0)
    asked = prompts(4, [100])
    with (
        a_store(tier, tmp_path) as store,
        engine(folder, settings()) as unified,
        engine(folder, settings(store)) as first,
    ):
        expected = unified.generate(asked, SamplingParams(temperature=0.0), NEW_TOKENS)
        first.generate(asked, SamplingParams(temperature=0.0), NEW_TOKENS)
        settle(first)
        wait_until_written(first, asked)
        with engine(folder, settings(store)) as second:
            answer = second.generate(asked, SamplingParams(temperature=0.0), NEW_TOKENS)[0]
            assert answer.token_ids == expected[0].token_ids
            assert answer.usage is not None
            assert answer.usage.cached_tokens == 96
            assert second.built.scheduler.counters.computed_tokens == 4 + NEW_TOKENS - 1
            settle(second)
            other = second.generate(asked, SamplingParams(temperature=0.0), NEW_TOKENS, cache_salt="another tenant")[0]
            assert other.usage is not None
            assert other.usage.cached_tokens == 0
            assert other.token_ids == expected[0].token_ids
