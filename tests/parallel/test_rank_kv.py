"""KV of engines with several ranks: tiers, hand-off between any two layouts, and blocks that one rank has lost."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stoker.base.config import EngineSettings, HandoffSettings, KvSettings, RankSettings, SchedSettings, StoreSettings
from stoker.base.ids import BlockKey, RequestId
from stoker.engine.llm import LLM, LLMOutput
from stoker.engine.ranks.rank_host import NoRanks, RankHost
from stoker.engine.ranks.rank_processes import RankProcesses
from stoker.kv.blocks.keys import block_keys, root_key
from stoker.kv.mooncake.master import INSTALL_HINT, MooncakeMaster, is_installed
from stoker.kv.store.tiers.host.host_memory import remove_host_store
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.step_rates import StepRates
from tests.kv.mooncake_worker import calls_take
from tests.parallel.rank_cases import CHANGES, LAYOUTS
from tests.parallel.virtual_ranks import VirtualRanks
from tests.tiny import make_tiny

BLOCK, NEW_TOKENS = 8, 12
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model, one with latent attention, and one with two KV sets."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("llama", "kimi-k2", "gpt-oss")}
    make_tiny(folders["llama"], "llama", torch.float64, **CHANGES)
    make_tiny(folders["kimi-k2"], "kimi-k2", torch.float64, **{**CHANGES, "num_key_value_heads": 8})
    make_tiny(folders["gpt-oss"], "gpt-oss", torch.float64, **CHANGES)
    return folders


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long enough for KV, also on a slow machine. A model this small computes a block faster than a file is opened."""
    for name in ("_TIER_GRACE_S", "_PEER_GRACE_S"):
        monkeypatch.setattr(f"stoker.kv.store.loader.{name}", 60.0)
    monkeypatch.setattr(StepRates, "prefill_tokens_per_s", 1.0)
    monkeypatch.setattr("stoker.kv.store.kv_store._UNKNOWN_COMPUTE_S", 60.0)


def settings(
    layout: str = "", store: StoreSettings | None = None, *, serves: bool = False, num_blocks: int = 256
) -> EngineSettings:
    return EngineSettings(
        device="cpu",
        dtype="float64",
        num_threads=1,
        kv=KvSettings(BLOCK, num_blocks),
        sched=SchedSettings(step_tokens=32, max_rows=8),
        store=store or StoreSettings(),
        handoff=HandoffSettings(serves=serves, transports=("local", "tcp"), secret="a secret of the fleet"),
        ranks=LAYOUTS[layout] if layout else RankSettings(),
    )


@contextmanager
def engine(folder: Path, chosen: EngineSettings, ranks: RankHost | None = None) -> Iterator[LLM]:
    alone = chosen.ranks == RankSettings()
    with closing(LLM(folder, chosen, ranks=ranks or (NoRanks() if alone else VirtualRanks()))) as llm:
        yield llm


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 199) for _ in range(length)] for length in lengths]


def request(number: int, prompt: list[int], **fields: object) -> GenerateRequest:
    plain = GenerateRequest(RequestId(f"r{number}"), list(prompt), len(prompt), GREEDY, NEW_TOKENS)
    return replace(plain, **fields)  # type: ignore[arg-type]


def tokens(outputs: list[LLMOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def settle(llm: LLM) -> None:
    """Step until every lease has ended, every block is free, and the tiers of all virtual ranks have written theirs."""
    built, until_s = llm.built, time.monotonic() + 60
    parts = built.ranks.kv_parts if isinstance(built.ranks, VirtualRanks) else {}
    while built.scheduler.num_held or any(pool.num_free < pool.num_blocks for pool in (built.pool, *built.local_pools)):
        assert time.monotonic() < until_s, f"{built.scheduler.num_held} leases held, {built.pool.num_free} blocks free"
        built.engine.step()
        time.sleep(0.002)
    for store in [built.store, *(part.store for part in parts.values())]:
        for buffers in (one.write_behind._buffers for one in store.sets if one.tiers):
            while len(buffers._free) + buffers._left < store.max_offers:  # the others wait for a tier
                assert time.monotonic() < until_s, "blocks wait for a tier"
                time.sleep(0.002)


@contextmanager
def a_store(tier: str, folder: Path) -> Iterator[StoreSettings]:
    if tier == "host":
        name = f"test-{os.getpid()}-{folder.name}"
        try:
            yield StoreSettings(name=name, host_gib=0.05)
        finally:
            remove_host_store(name)
    elif tier == "disk":
        yield StoreSettings(disk_dir=str(folder))
    else:
        if not is_installed():
            pytest.skip(INSTALL_HINT)
        with calls_take(60.0), MooncakeMaster(folder / "master.log") as master:
            yield StoreSettings(mooncake_master=master.address, mooncake_segment_gib=0.05)


TIER_CASES = [
    ("llama", "host", "tp2"),
    ("llama", "disk", "tp2 pp2"),
    pytest.param("llama", "mooncake", "pp2", marks=pytest.mark.slow),  # Mooncake takes seconds to start
    ("kimi-k2", "disk", "tp2"),
    ("kimi-k2", "disk", "tp2 cp2"),
    ("gpt-oss", "disk", "ep2"),
]


@pytest.mark.parametrize(("name", "tier", "layout"), TIER_CASES)
def test_a_new_engine_loads_what_another_one_stored(
    models: dict[str, Path], tmp_path: Path, name: str, tier: str, layout: str
) -> None:
    """The first one is closed before the second one starts, as in a restart."""
    asked = prompts(4, [100, 41])
    with engine(models[name], settings()) as unified:
        wanted = tokens(unified.generate(asked, GREEDY, NEW_TOKENS))
    with a_store(tier, tmp_path) as store, ExitStack() as open_engines:
        first = open_engines.enter_context(engine(models[name], settings(layout, store)))
        assert tokens(first.generate(asked, GREEDY, NEW_TOKENS)) == wanted
        settle(first)
        if tier != "mooncake":  # its blocks are in the memory of the workers
            open_engines.close()
        second = open_engines.enter_context(engine(models[name], settings(layout, store)))
        assert tokens(second.generate(asked, GREEDY, NEW_TOKENS)) == wanted
        counters = second.built.scheduler.counters
        assert counters.loaded_tokens == 96 + 40
        assert counters.computed_tokens == 4 + 1 + 2 * (NEW_TOKENS - 1)
        settle(second)
        other = second.generate(asked[:1], GREEDY, NEW_TOKENS, cache_salt="another tenant")[0]
        assert other.usage is not None
        assert other.usage.cached_tokens == 0


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_block_that_one_rank_has_lost_is_computed(models: dict[str, Path], tmp_path: Path, layout: str) -> None:
    asked = prompts(5, [100])
    with a_store("host", tmp_path) as store:
        with engine(models["llama"], settings(layout, store)) as first:
            wanted = tokens(first.generate(asked, GREEDY, NEW_TOKENS))
            settle(first)
        ranks = VirtualRanks()
        with engine(models["llama"], settings(layout, store), ranks) as second:
            keys = block_keys(asked[0], root_key(second.built.fingerprint), BLOCK)
            ranks.kv_parts[1].store.tiers[0].backend.drop([keys[5]])
            assert tokens(second.generate(asked, GREEDY, NEW_TOKENS)) == wanted
            counters = second.built.scheduler.counters
            assert (counters.loaded_tokens, counters.failed_loads) == (5 * BLOCK, 1)
            settle(second)
        with engine(models["llama"], settings(layout, store)) as third:  # the block was written again
            assert tokens(third.generate(asked, GREEDY, NEW_TOKENS)) == wanted
            assert third.built.scheduler.counters.failed_loads == 0


def test_ranks_and_layouts_never_mix_their_blocks(models: dict[str, Path], tmp_path: Path) -> None:
    """The same keys, in one store, by engines that are split in different ways. Each of them finds only its own blocks."""
    asked = prompts(6, [50])
    layouts = ["", "tp2", "pp2"]
    with a_store("host", tmp_path) as shared:
        both = replace(shared, disk_dir=str(tmp_path / "disk"))
        found = []
        for layout in [*layouts, *layouts]:
            with engine(models["llama"], settings(layout, both)) as llm:
                found.append((tokens(llm.generate(asked, GREEDY, NEW_TOKENS)), llm.built.fingerprint))
                settle(llm)
                counters = llm.built.scheduler.counters
                assert counters.loaded_tokens == (48 if len(found) > len(layouts) else 0), layout
                assert not any(tier.backend.stats().corrupt for tier in llm.built.store.tiers)
        assert all(one == found[0] for one in found)


def test_only_the_first_rank_reports_events_once_per_block(models: dict[str, Path], tmp_path: Path) -> None:
    ranks, asked = VirtualRanks(), prompts(7, [64, 33])
    store = StoreSettings(host_gib=0.05)
    with engine(models["llama"], settings("tp2 pp2", store), ranks) as llm:
        llm.generate(asked, GREEDY, NEW_TOKENS)
        settle(llm)
        wanted = sum((len(prompt) + NEW_TOKENS - 1) // BLOCK for prompt in asked)
        stored: list[BlockKey] = []
        until_s = time.monotonic() + 60
        while len(stored) < wanted:
            assert time.monotonic() < until_s
            stored += [name.key for event in llm.built.store.take_events() for name in event.stored]
        assert len(set(stored)) == len(stored) == wanted
        assert not any(kv.store.take_events() for kv in ranks.kv_parts.values())


def hand_over(prefill: LLM, decode: LLM, asked: list[list[int]]) -> list[list[int]]:
    firsts = prefill.run([request(i, prompt, lease_id=f"l{i}") for i, prompt in enumerate(asked)])
    pairs = enumerate(zip(asked, firsts, strict=True))
    seconds = decode.run([request(i, p, token_ids=p + first.token_ids, ticket=first.ticket) for i, (p, first) in pairs])
    assert all(first.finish is not None and first.finish.reason == "handoff" for first in firsts)
    return [first.token_ids + second.token_ids for first, second in zip(firsts, seconds, strict=True)]


HANDOFFS = [
    ("llama", "tp2", ""),
    ("llama", "", "tp2"),
    ("llama", "pp2", "tp2"),
    ("llama", "tp2", "pp2"),
    ("llama", "tp4", "tp2 pp2"),
    ("kimi-k2", "pp2", "tp2"),
    ("gpt-oss", "pp2", "ep2"),
    ("kimi-k2", "tp2 cp2", ""),
    ("kimi-k2", "", "tp2 cp2"),
    ("kimi-k2", "tp2 cp2", "tp2 cp2"),
    ("kimi-k2", "pp2", "tp2 cp2"),
    pytest.param("kimi-k2", "tp4 cp2", "tp2 pp2 cp2", marks=pytest.mark.slow),
    pytest.param("kimi-k2", "tp2 cp2", "tp4 ep2 cp4", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "src", "dst"), HANDOFFS)
def test_a_hand_off_between_two_layouts_gives_the_answer_of_one_engine(
    models: dict[str, Path], name: str, src: str, dst: str
) -> None:
    lengths = [1, 2, 7, 8, 9, 17, 40, 100]
    asked = prompts(1, lengths)
    with (
        engine(models[name], settings()) as unified,
        engine(models[name], settings(src, serves=True)) as prefill,
        engine(models[name], settings(dst)) as decode,
    ):
        wanted = tokens(unified.generate(asked, GREEDY, NEW_TOKENS))
        assert hand_over(prefill, decode, asked) == wanted
        counters = decode.built.scheduler.counters
        assert counters.pulled_tokens == sum(lengths)
        assert counters.computed_tokens == len(lengths) * (NEW_TOKENS - 1), "only the tokens of the answers"
        settle(prefill)
        settle(decode)


def test_a_rank_that_does_not_serve_its_blocks_costs_time_and_no_answer(models: dict[str, Path]) -> None:
    asked, ranks = prompts(2, [5, 16, 50]), VirtualRanks()
    with (
        engine(models["llama"], settings()) as unified,
        engine(models["llama"], settings("tp2", serves=True), ranks) as prefill,
        engine(models["llama"], settings("pp2")) as decode,
    ):
        wanted = tokens(unified.generate(asked, GREEDY, NEW_TOKENS))
        server = ranks.kv_parts[1].server
        assert server is not None
        server.close()
        assert hand_over(prefill, decode, asked) == wanted
        assert decode.built.scheduler.counters.failed_loads == len(asked)
        settle(prefill)
        settle(decode)


def test_a_preempted_lease_is_withdrawn_and_moved_on_all_ranks(models: dict[str, Path]) -> None:
    first, second = prompts(4, [72, 60])
    ranks = VirtualRanks()
    with (
        engine(models["llama"], settings()) as unified,
        engine(models["llama"], settings("tp2", serves=True, num_blocks=11), ranks) as prefill,
        engine(models["llama"], settings("pp2")) as decode,
    ):
        wanted = tokens(unified.generate([first], GREEDY, NEW_TOKENS))
        running, book = prefill.built.engine, ranks.kv_parts[1].leases
        running.add(request(0, first, lease_id="l", priority=1))
        running.step()
        before = book.view("l", 0, None, 10, wait_s=60.0)
        assert len(before.blocks) == 4
        running.add(request(1, second))
        found: list[LLMOutput] = []
        while running.has_work:
            for chunk in running.step():
                if chunk.request_id == "r0":
                    found.append(LLMOutput(chunk.token_ids, ticket=chunk.ticket))
        assert prefill.built.scheduler.counters.preemptions
        assert not book.holds("l", before.generation)
        [done] = found
        [rest] = decode.run([request(0, first, token_ids=first + done.token_ids, ticket=done.ticket)])
        assert [done.token_ids + rest.token_ids] == wanted
        assert decode.built.scheduler.counters.pulled_tokens == len(first)
        settle(prefill)


def test_processes_load_store_and_hand_over(models: dict[str, Path], tmp_path: Path) -> None:
    """Ranks as processes load what threads have stored, and hand it to an engine with two stages."""
    asked, store = prompts(8, [100, 30]), StoreSettings(disk_dir=str(tmp_path))
    with engine(models["llama"], settings("tp2", store)) as first:
        wanted = tokens(first.generate(asked, GREEDY, NEW_TOKENS))
        settle(first)
    chosen = settings("tp2", store, serves=True)
    with engine(models["llama"], chosen, RankProcesses()) as second, engine(models["llama"], settings("pp2")) as decode:
        assert hand_over(second, decode, asked) == wanted
        assert second.built.scheduler.counters.loaded_tokens == 96 + 24
        assert decode.built.scheduler.counters.pulled_tokens == 130
        settle(second)
        settle(decode)
