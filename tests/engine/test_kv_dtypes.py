"""A KV cache in fewer bits: the answers are the same whatever the schedule, the worker or the tier, and workers of
different types never share a block."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from stoker.base.config import EngineSettings, HandoffSettings, KvSettings, SchedSettings, StoreSettings
from stoker.base.errors import ConfigError
from stoker.base.ids import RequestId
from stoker.engine.llm import LLM, LLMOutput
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.step_rates import StepRates

BLOCK, NEW_TOKENS = 8, 12
GREEDY = SamplingParams(temperature=0.0)
NARROW = ["int8", "fp8_e4m3", "bfloat16"]
LENGTHS = [1, 7, 8, 9, 40, 100]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path, "llama", torch.float64)
    return path


@contextmanager
def engine(
    folder: Path,
    kv_dtype: str,
    *,
    num_blocks: int = 80,
    step_tokens: int = 32,
    store: StoreSettings | None = None,
    **handoff: object,
) -> Iterator[LLM]:
    llm = LLM(
        folder,
        EngineSettings(
            device="cpu",
            dtype="float64",
            num_threads=1,
            kv=KvSettings(BLOCK, num_blocks, dtype=kv_dtype),
            sched=SchedSettings(step_tokens=step_tokens, max_rows=4),
            store=store or StoreSettings(),
            handoff=HandoffSettings(**{"transports": ("local", "tcp"), **handoff}),  # type: ignore[arg-type]
        ),
    )
    try:
        yield llm
    finally:
        llm.close()


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(1, 199) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def answers(folder: Path, asked: list[list[int]]) -> dict[str, list[list[int]]]:
    """Return the answers of a single worker for each type, computed one request at a time."""
    found = {}
    for kv_dtype in ("auto", *NARROW):
        with engine(folder, kv_dtype) as llm:
            found[kv_dtype] = [llm.generate([prompt], GREEDY, NEW_TOKENS)[0].token_ids for prompt in asked]
    return found


def tokens(outputs: Sequence[LLMOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def hand_over(prefill: LLM, decode: LLM, asked: list[list[int]]) -> list[list[int]]:
    def request(number: int, prompt: list[int], **fields: object) -> GenerateRequest:
        given = {"token_ids": prompt, **fields}
        return GenerateRequest(
            RequestId(f"r{number}"), num_prompt=len(prompt), sampling=GREEDY, max_new_tokens=NEW_TOKENS, **given
        )  # type: ignore[arg-type]

    firsts = prefill.run([request(i, prompt, lease_id=f"l{i}") for i, prompt in enumerate(asked)])
    pairs = list(zip(asked, firsts, strict=True))
    seconds = decode.run(
        [request(i, p, token_ids=p + first.token_ids, ticket=first.ticket) for i, (p, first) in enumerate(pairs)]
    )
    return [first.token_ids + second.token_ids for first, second in zip(firsts, seconds, strict=True)]


@pytest.mark.parametrize("kv_dtype", NARROW)
@pytest.mark.parametrize(("num_blocks", "step_tokens"), [(80, 5), (80, 512), (18, 24)])
def test_the_schedule_does_not_change_the_answers(
    folder: Path,
    asked: list[list[int]],
    answers: dict[str, list[list[int]]],
    kv_dtype: str,
    num_blocks: int,
    step_tokens: int,
) -> None:
    """Prompts in small and large chunks, from the prefix cache, and with preemption."""
    with engine(folder, kv_dtype, num_blocks=num_blocks, step_tokens=step_tokens) as llm:
        assert tokens(llm.generate(asked, GREEDY, NEW_TOKENS)) == answers[kv_dtype]
        again = llm.generate(asked, GREEDY, NEW_TOKENS)
        assert tokens(again) == answers[kv_dtype]
        assert any(output.usage is not None and output.usage.cached_tokens for output in again)


@pytest.mark.parametrize(("kv_dtype", "transport"), [("int8", "local"), ("int8", "tcp"), ("fp8_e4m3", "tcp")])
def test_prefill_and_decode_give_the_unified_answer(
    folder: Path, asked: list[list[int]], answers: dict[str, list[list[int]]], kv_dtype: str, transport: str
) -> None:
    with (
        engine(folder, kv_dtype, serves=True, transports=(transport,)) as prefill,
        engine(folder, kv_dtype, transports=(transport,)) as decode,
    ):
        assert hand_over(prefill, decode, asked) == answers[kv_dtype]
        assert decode.built.scheduler.counters.pulled_tokens == sum(LENGTHS)


@pytest.mark.parametrize(("ours", "theirs"), [("auto", "int8"), ("int8", "fp8_e4m3")])
def test_workers_of_different_types_refuse_each_others_kv(
    folder: Path, asked: list[list[int]], answers: dict[str, list[list[int]]], ours: str, theirs: str
) -> None:
    with engine(folder, theirs, serves=True) as prefill, engine(folder, ours) as decode:
        assert prefill.built.fingerprint != decode.built.fingerprint
        firsts = hand_over(prefill, decode, asked)
        assert decode.built.scheduler.counters.pulled_tokens == 0
        # The first token is the prefill worker's. The others are what decode makes of it, without the foreign KV.
        whole = [prompt + answer[:1] for prompt, answer in zip(asked, firsts, strict=True)]
        alone = decode.generate(whole, GREEDY, NEW_TOKENS - 1)
        assert [answer[1:] for answer in firsts] == tokens(alone)


def test_blocks_in_a_tier_are_found_by_workers_of_the_same_type_only(
    folder: Path,
    asked: list[list[int]],
    answers: dict[str, list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A model this small computes a block faster than a file is opened.
    monkeypatch.setattr(StepRates, "prefill_tokens_per_s", 100.0)
    monkeypatch.setattr("stoker.kv.store.loader._TIER_GRACE_S", 60.0)
    store = StoreSettings(disk_dir=str(tmp_path))
    longest = asked[-1:]
    with engine(folder, "int8", store=store) as first:
        first.generate(longest, GREEDY, NEW_TOKENS)
    cached = {}
    for kv_dtype in ("int8", "fp8_e4m3"):
        with engine(folder, kv_dtype, store=store) as second:
            answer = second.generate(longest, GREEDY, NEW_TOKENS)[0]
            assert answer.token_ids == answers[kv_dtype][-1]
            assert answer.usage is not None
            cached[kv_dtype] = answer.usage.cached_tokens
    assert cached == {"int8": LENGTHS[-1] // BLOCK * BLOCK, "fp8_e4m3": 0}


def test_the_same_memory_holds_more_tokens(folder: Path) -> None:
    blocks = {}
    for kv_dtype in ("float32", "bfloat16", "int8"):
        settings = EngineSettings(device="cpu", dtype="float32", kv=KvSettings(BLOCK, memory_gib=0.01, dtype=kv_dtype))
        llm = LLM(folder, settings)
        width = llm.built.layout.groups[0].width
        blocks[kv_dtype] = llm.built.pool.num_blocks
        llm.close()
    assert blocks["bfloat16"] // 2 == blocks["float32"]
    assert blocks["int8"] == pytest.approx(blocks["float32"] * 4 * width / (width + 2), abs=4)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "float32"), ("bfloat16", "float16")])
def test_a_type_that_saves_nothing_is_refused(folder: Path, dtype: str, kv_dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"kv.dtype={kv_dtype} takes . bytes per value.*leave out --kv-dtype"):
        LLM(folder, EngineSettings(device="cpu", dtype=dtype, kv=KvSettings(dtype=kv_dtype)))


def test_an_unknown_type_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="fp8_e4m3"):
        KvSettings(dtype="fp4")
