"""A tier that is slow, silent or wrong costs time, never an answer; and a load is not worth more time than computing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from test_handoff_engine import NEW_TOKENS, engine, prompts, settings, settle, wait_until_written
from tiny import make_tiny

from stoker.base.config import StoreSettings
from stoker.base.ids import BlockKey
from stoker.engine.llm import LLM
from stoker.kv.blocks.transfer import BlockName, TierUnavailable
from stoker.kv.store.tiers.tier import HostBytes, Tier, TierStats
from stoker.sched.request import SamplingParams
from stoker.sched.step_rates import StepRates

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path, "llama", torch.float64)
    return path


@dataclass(eq=False)
class Troubled:
    """A real tier with something in front of its reads."""

    tier: Tier
    before_read: Callable[[], None]
    medium: str = "DISK"
    shared_location: str | None = None
    num_reads: int = field(default=0)

    def find(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self.tier.find(keys)

    def read(self, keys: Sequence[BlockKey], into: Sequence[HostBytes]) -> list[bool]:
        self.num_reads += 1
        self.before_read()
        return self.tier.read(keys, into)

    def write(self, names: Sequence[BlockName], data: Sequence[HostBytes], checksums: Sequence[int]) -> list[bool]:
        return self.tier.write(names, data, checksums)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        self.tier.drop(keys)

    def catch_up(self) -> None:
        self.tier.catch_up()

    def names(self) -> Iterator[BlockName]:
        return self.tier.names()

    def stats(self) -> TierStats:
        return self.tier.stats()

    def close(self) -> None:
        self.tier.close()


@contextmanager
def filled(
    folder: Path, store: Path, asked: list[list[int]], before_read: Callable[[], None]
) -> Iterator[tuple[LLM, Troubled, list[list[int]]]]:
    """A second engine on a disk tier that a first one has filled, with trouble before each read; and the right answers."""
    chosen = settings(StoreSettings(disk_dir=str(store)))
    with engine(folder, chosen) as first:
        expected = []
        for count, prompt in enumerate(asked, 1):  # one at a time: a slow machine must not exceed the bound on offers
            expected.append(first.generate([prompt], GREEDY, NEW_TOKENS)[0].token_ids)
            settle(first)
            wait_until_written(first, asked[:count])
    with engine(folder, chosen) as second:
        measured = second.built.store.tiers[0]
        measured.backend = troubled = Troubled(measured.backend, before_read)
        yield second, troubled, expected


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read is waited for, also on a machine that stalls."""
    monkeypatch.setattr("stoker.kv.store.loader._TIER_GRACE_S", 60.0)


@pytest.fixture(autouse=True)
def a_slow_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a model this small a block is computed as soon as a file is opened.
    monkeypatch.setattr(StepRates, "prefill_tokens_per_s", 200.0)


def test_a_read_that_hangs_is_left_behind(folder: Path, tmp_path: Path) -> None:
    asked = prompts(21, [100])
    let_go, is_late = threading.Event(), threading.Event()

    def hang() -> None:
        if not let_go.wait(60):
            is_late.set()

    with filled(folder, tmp_path, asked, hang) as (llm, tier, expected):
        answer = llm.generate(asked, GREEDY, NEW_TOKENS)[0]
        assert tier.num_reads == 1
        assert not is_late.is_set(), "it was waited for"
        let_go.set()
        assert answer.token_ids == expected[0]
        assert llm.built.scheduler.counters.failed_loads == 1
        settle(llm)


def test_a_tier_that_became_slow_is_not_asked_again(folder: Path, tmp_path: Path) -> None:
    asked = prompts(22, [100, 90])
    with filled(folder, tmp_path, asked, lambda: time.sleep(3.0)) as (llm, tier, expected):
        assert llm.generate(asked[:1], GREEDY, NEW_TOKENS)[0].token_ids == expected[0]
        num_reads = tier.num_reads
        assert llm.generate(asked[1:], GREEDY, NEW_TOKENS)[0].token_ids == expected[1]
        assert tier.num_reads == num_reads
        settle(llm)


@pytest.mark.usefixtures("patient")
def test_a_store_that_cannot_be_reached_has_nothing(folder: Path, tmp_path: Path) -> None:
    def lost() -> None:
        raise TierUnavailable("nobody answers")

    asked = prompts(23, [64, 100])
    with filled(folder, tmp_path, asked, lost) as (llm, _tier, expected):
        assert [done.token_ids for done in llm.generate(asked, GREEDY, NEW_TOKENS)] == expected
        assert llm.built.store.tiers[0].counters.errors > 0
        settle(llm)


@pytest.mark.usefixtures("patient")
def test_wrong_bytes_on_the_disk_are_computed_not_served(folder: Path, tmp_path: Path) -> None:
    asked = prompts(24, [100])
    with filled(folder, tmp_path, asked, lambda: None) as (llm, _tier, expected):
        files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 12_000]
        assert len(files) >= 12
        for path in files:
            data = bytearray(path.read_bytes())
            data[-100] ^= 4
            path.write_bytes(data)
        answer = llm.generate(asked, GREEDY, NEW_TOKENS)[0]
        assert answer.token_ids == expected[0]
        assert answer.usage is not None
        assert answer.usage.cached_tokens == 0
        assert llm.built.store.tiers[0].backend.stats().corrupt > 0
        settle(llm)


def test_loading_that_takes_longer_than_computing_is_not_tried(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(25, [100])
    with filled(folder, tmp_path, asked, lambda: None) as (llm, tier, expected):
        monkeypatch.setattr(StepRates, "prefill_tokens_per_s", 1e9)
        assert llm.generate(asked, GREEDY, NEW_TOKENS)[0].token_ids == expected[0]
        assert tier.num_reads == 0
        assert llm.built.store.crossover_tokens(llm.built.store.tiers[0]) is None


def test_what_the_disk_held_before_is_told_behind_the_engines_back(folder: Path, tmp_path: Path) -> None:
    asked = prompts(26, [100])
    with filled(folder, tmp_path, asked, lambda: None) as (llm, tier, _expected):
        store = llm.built.store
        store.announce_held_blocks()
        told: set[BlockKey] = set()
        until = time.monotonic() + 60
        while len(told) < 12:
            assert time.monotonic() < until, f"{len(told)} blocks told"
            told |= {name.key for event in store.take_events() for name in event.stored}
            time.sleep(0.01)
        assert told == {name.key for name in tier.names()}
