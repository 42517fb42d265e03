"""Models whose layers have a window or chunks, with the real engine: such layers keep only what they can still see, and the
tokens are those of transformers, which keeps everything."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kv.mooncake_worker import PATIENCE_S, calls_take, within
from tiny import make_tiny

from stoker.base.config import EngineSettings, HandoffSettings, KvSettings, SchedSettings, StoreSettings
from stoker.base.errors import ConfigError
from stoker.base.ids import BlockId, BlockKey, RequestId
from stoker.engine.llm import LLM, LLMOutput
from stoker.engine.runner import PendingStep, Runner
from stoker.kv.blocks.keys import block_keys, root_key
from stoker.kv.mooncake.master import INSTALL_HINT, MooncakeMaster, is_installed
from stoker.kv.store.tiers.tier import HostBytes
from stoker.sched.plan import StepPlan
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.step_rates import StepRates
from stoker.train.evaluate import EveryDraft

BLOCK = 4
NEW_TOKENS = 10
LENGTHS = (3, 13, 26, 58, 97)


@dataclass(frozen=True)
class TinyModel:
    """A tiny model and the answers of transformers."""

    folder: Path
    prompts: list[list[int]]
    answers: list[list[int]]


CHANGES: dict[str, dict[str, Any]] = {
    "gpt-oss": {},
    "llama4-scout": {},
    "all-window": {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2},
}


@pytest.fixture(scope="module", params=CHANGES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    name = "gpt-oss" if request.param == "all-window" else request.param
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_tiny(folder, name, torch.float64, **CHANGES[request.param]).float()  # experts need float32
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 199) for _ in range(length)] for length in LENGTHS]
    return TinyModel(folder, prompts, [greedy(reference, prompt) for prompt in prompts])


@torch.no_grad()
def greedy(reference: Any, prompt: list[int]) -> list[int]:
    known = list(prompt)
    for _ in range(NEW_TOKENS):
        known.append(int(reference(torch.tensor([known]), use_cache=False).logits[0, -1].argmax()))
    return known[len(prompt) :]


def settings(num_blocks: int = 128, **changes: Any) -> EngineSettings:
    plain = EngineSettings(
        device="cpu",
        dtype="float64",
        num_threads=1,
        kv=KvSettings(BLOCK, num_blocks),
        sched=SchedSettings(step_tokens=24, max_rows=4),
        drafter="off",
        steps_ahead=1,
    )
    return replace(plain, **changes)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long enough for KV, also on a slow machine."""
    for name in ("_TIER_GRACE_S", "_PEER_GRACE_S"):
        monkeypatch.setattr(f"stoker.kv.store.loader.{name}", 60.0)


@contextmanager
def engine(folder: Path, chosen: EngineSettings) -> Iterator[LLM]:
    llm = LLM(folder, chosen, wrap_drafting=EveryDraft)
    try:
        yield llm
        for pool in (llm.built.pool, *llm.built.local_pools):
            pool.check()
    finally:
        llm.close()


def ask(llm: LLM, prompts: list[list[int]], **fields: Any) -> list[LLMOutput]:
    return llm.run(
        [
            GenerateRequest(
                RequestId(f"r{i}"), list(prompt), len(prompt), SamplingParams(temperature=0.0), NEW_TOKENS, **fields
            )
            for i, prompt in enumerate(prompts)
        ]
    )


def tokens(outputs: list[LLMOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_released_blocks_are_never_read(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each step, NaN is written into all blocks that no sequence holds. Salts differ, so that none is found again."""
    real, num_poisoned = Runner.launch, 0
    with engine(model.folder, settings()) as llm:
        pools = [llm.built.pool, *llm.built.local_pools]

        def launch(runner: Runner, plan: StepPlan) -> PendingStep:
            nonlocal num_poisoned
            for pool, memory in zip(pools, runner._kv.sets, strict=True):
                free = [i for i in range(pool.num_blocks) if pool.num_free_after([BlockId(i)]) < pool.num_free]
                memory.blocks[free] = float("nan")
                num_poisoned += len(free) if pool.reach.is_bounded else 0
            return real(runner, plan)

        monkeypatch.setattr(Runner, "launch", launch)
        for i in range(3):
            assert tokens(ask(llm, model.prompts, cache_salt=str(i))) == model.answers
    assert num_poisoned


def test_a_prefix_hit_needs_only_what_the_next_token_sees(model: TinyModel) -> None:
    with engine(model.folder, settings()) as llm:
        counters = llm.built.scheduler.counters
        for prompt, answer in zip(model.prompts, model.answers, strict=True):
            assert tokens(ask(llm, [prompt])) == [answer]
            computed = counters.computed_tokens
            (again,) = ask(llm, [prompt])
            assert again.token_ids == answer
            assert again.usage is not None
            assert again.usage.cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
            assert counters.computed_tokens - computed <= BLOCK + NEW_TOKENS
            # The next turn of a conversation continues at the end of the answer.
            (longer,) = ask(llm, [prompt + answer + prompt[:3]])
            assert longer.usage is not None
            assert longer.usage.cached_tokens == (len(prompt) + NEW_TOKENS - 1) // BLOCK * BLOCK


def test_a_small_pool_preempts_and_gives_the_same_tokens(model: TinyModel) -> None:
    with engine(model.folder, settings(num_blocks=30)) as llm:
        for _ in range(2):
            assert tokens(ask(llm, model.prompts)) == model.answers
        assert llm.built.scheduler.counters.preemptions or llm.built.pool.reach.is_bounded
        assert all(pool.num_free == pool.num_blocks for pool in (llm.built.pool, *llm.built.local_pools))


def test_drafts_change_no_token(model: TinyModel) -> None:
    repeating = [prompt[:9] * 8 for prompt in model.prompts]
    with engine(model.folder, settings(num_blocks=200)) as llm:
        expected = tokens(ask(llm, repeating))
    with engine(model.folder, settings(num_blocks=200, drafter="cache,ngram", numerics="exact")) as llm:
        for _ in range(2):
            assert tokens(ask(llm, repeating)) == expected
        assert llm.built.scheduler.counters.draft_tokens


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_a_hand_over_pulls_all_tokens(model: TinyModel, transport: str) -> None:
    serves = settings(handoff=HandoffSettings(serves=True, transports=(transport,)))
    pulls = settings(handoff=HandoffSettings(transports=(transport,)))
    with engine(model.folder, serves) as prefill, engine(model.folder, pulls) as decode:
        requests = [
            GenerateRequest(RequestId(f"r{i}"), prompt, len(prompt), SamplingParams(temperature=0.0), NEW_TOKENS)
            for i, prompt in enumerate(model.prompts)
        ]
        firsts = prefill.run([replace(request, lease_id=f"lease {i}") for i, request in enumerate(requests)])
        assert all(first.ticket is not None for first in firsts)
        rest = decode.run(
            [
                replace(request, token_ids=request.token_ids + first.token_ids, ticket=first.ticket)
                for request, first in zip(requests, firsts, strict=True)
            ]
        )
        found = [first.token_ids + more.token_ids for first, more in zip(firsts, rest, strict=True)]
        assert found == model.answers
        counters = decode.built.scheduler.counters
        assert (counters.pulled_tokens, counters.failed_loads) == (sum(LENGTHS), 0)
        assert counters.computed_tokens == len(LENGTHS) * (NEW_TOKENS - 1)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_tier_brings_back_what_the_next_token_sees(
    model: TinyModel, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A model this small computes a block faster than a file is opened.
    monkeypatch.setattr(StepRates, "prefill_tokens_per_s", 100.0)
    store = StoreSettings(host_gib=0.01) if tier == "host" else StoreSettings(disk_dir=str(tmp_path))
    with engine(model.folder, settings(store=store)) as llm:
        assert tokens(ask(llm, model.prompts)) == model.answers
        if tier == "host":  # the blocks of the device are evicted by others
            for i in range(8):
                ask(llm, model.prompts, cache_salt=str(i))
            assert check_loads(llm, model)
    if tier == "disk":
        with engine(model.folder, settings(store=store)) as again:
            assert check_loads(again, model)


def test_a_load_that_fails_in_part_brings_a_shorter_prefix(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiers have the windows before the end of an earlier prompt too. A block after it cannot be read."""
    monkeypatch.setattr(StepRates, "prefill_tokens_per_s", 100.0)
    stored, longer = settings(store=StoreSettings(disk_dir=str(tmp_path))), model.prompts[3] + model.prompts[4][:40]
    with engine(model.folder, stored) as llm:
        ask(llm, [model.prompts[3]])
        expected = tokens(ask(llm, [longer]))
        lost = block_keys(longer, root_key(llm.built.fingerprint, ""), BLOCK)[20]
    with engine(model.folder, stored) as other:
        backend = other.built.store.tiers[0].backend
        read = backend.read

        def read_others(keys: Sequence[BlockKey], into: Sequence[HostBytes]) -> list[bool]:
            return [key != lost and is_right for key, is_right in zip(keys, read(keys, into), strict=True)]

        monkeypatch.setattr(backend, "read", read_others)
        found = ask(other, [longer])
        assert tokens(found) == expected
        counters = other.built.scheduler.counters
        if other.built.layout.sets[0].reach.is_bounded:  # no set with all blocks: the window alone decides
            return
        assert counters.failed_loads == 1
        # After 76 tokens a chunk of 19 begins, and needs nothing before it.
        is_chunked = other.built.layout.sets[1].reach.kind == "chunk"
        assert counters.loaded_tokens == (76 if is_chunked else (len(model.prompts[3]) - 1) // BLOCK * BLOCK)
        assert counters.computed_tokens == len(longer) - counters.loaded_tokens + NEW_TOKENS - 1


def test_an_answer_is_resumed_on_another_worker(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies at any token. Another one continues from the tokens that the client has, with and without its blocks."""
    monkeypatch.setattr(StepRates, "prefill_tokens_per_s", 100.0)
    prompts = model.prompts[1:]
    whole = [
        GenerateRequest(
            RequestId(f"r{i}"), prompt, len(prompt), SamplingParams(temperature=i % 2, seed=5), 3 * NEW_TOKENS
        )
        for i, prompt in enumerate(prompts)
    ]
    stored = settings(store=StoreSettings(disk_dir=str(tmp_path)))
    with engine(model.folder, stored) as llm:
        answers = tokens(llm.run(whole))
    for chosen in (stored, settings()):
        with engine(model.folder, chosen) as other:
            for cut in (2 * NEW_TOKENS + 3, 1):  # the blocks of the first one help the second one
                rest = [
                    replace(
                        request, request_id=RequestId(f"{request.request_id} {cut}"), token_ids=prompt + answer[:cut]
                    )
                    for request, prompt, answer in zip(whole, prompts, answers, strict=True)
                ]
                found = other.run(rest)
                assert tokens(found) == [answer[cut:] for answer in answers]
                assert [one.usage.prompt_tokens for one in found if one.usage] == [len(prompt) for prompt in prompts]
            counters = other.built.scheduler.counters
            assert bool(counters.loaded_tokens) == (chosen is stored)
            assert not counters.failed_loads


@pytest.mark.skipif(not is_installed(), reason=f"Mooncake is not installed: {INSTALL_HINT}")
@pytest.mark.parametrize("model", ["gpt-oss"], indirect=True)
def test_a_worker_finds_the_blocks_of_all_sets_in_mooncake(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers on one Mooncake store. Each KV set has a tier of its own in it, with the same keys."""
    monkeypatch.setattr(StepRates, "prefill_tokens_per_s", 100.0)
    with (
        calls_take(PATIENCE_S),
        MooncakeMaster(tmp_path / "master.log", lease_ms=200, client_ttl_s=10) as master,
    ):
        store = StoreSettings(mooncake_master=master.address, mooncake_segment_gib=1 / 16)
        with engine(model.folder, settings(store=store)) as one, engine(model.folder, settings(store=store)) as other:
            num_stored = 0
            for prompt, answer in zip(model.prompts, model.answers, strict=True):
                assert tokens(ask(one, [prompt])) == [answer]
                num_blocks = (len(prompt) - 1) // BLOCK
                assert within(PATIENCE_S, lambda: other.built.store.num_worth_loading(prompt, "") == num_blocks)  # noqa: B023
                num_stored += num_blocks
            assert check_loads(other, model) == BLOCK * num_stored


def check_loads(llm: LLM, model: TinyModel) -> int:
    """Ask again, and return how many tokens were loaded."""
    counters = llm.built.scheduler.counters
    before = counters.loaded_tokens
    assert tokens(ask(llm, model.prompts)) == model.answers
    assert not counters.failed_loads
    return counters.loaded_tokens - before


def test_the_planned_memory_is_the_used_memory(model: TinyModel) -> None:
    with engine(model.folder, settings(kv=KvSettings(BLOCK, memory_gib=0.01))) as llm:
        pools = [llm.built.pool, *llm.built.local_pools]
        sizes = [one.layout.block_bytes for one in llm.built.layout.sets]
        used = sum(pool.num_blocks * size for pool, size in zip(pools, sizes, strict=True))
        assert 0 <= 0.01 * 2**30 - used < sum(sizes)
        if not llm.built.local_pools:
            return
    with pytest.raises(ConfigError, match=r"kv.memory_gib"):
        LLM(model.folder, settings(kv=KvSettings(BLOCK, memory_gib=4 * sum(sizes) / 2**30)))
