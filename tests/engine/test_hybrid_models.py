"""Models with windows, chunks, sinks, partly rotated heads and several KV groups give each request the tokens that it gets
when it runs alone, in float64: with other requests, preempted, with drafts, from the prefix cache, and handed over."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_handoff_engine import engine, hand_over, request
from test_handoff_engine import settings as handoff_settings
from test_schedules import VOCAB, random_request, run
from test_speculation import StartGrammars, requests, with_predictions
from test_speculation import settings as drafting
from tiny import make_tiny

from stoker.engine.llm import LLM, LLMOutput
from stoker.sched.request import GenerateRequest
from stoker.train.evaluate import EveryDraft

MODELS = ("gpt-oss", "llama4-scout", "minimax-m2")


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny(folder, request.param, torch.float64)
    return folder


def alone(folder: Path, wanted: list[GenerateRequest]) -> dict[str, LLMOutput]:
    with closing(LLM(folder, drafting("off", max_rows=1), grammars=StartGrammars())) as llm:
        return run(llm, [(0, one) for one in wanted], {})


@pytest.mark.parametrize(
    ("drafter", "num_blocks", "steps_ahead"), [("off", 18, 1), ("auto", 18, 2), ("oracle", 400, 0)]
)
def test_any_schedule_gives_the_same_tokens(folder: Path, drafter: str, num_blocks: int, steps_ahead: int) -> None:
    rng = random.Random(f"{drafter} {folder.name}")
    wanted = requests(rng, 9)
    expected = alone(folder, wanted)
    drafted = drafting(drafter, num_blocks, 16, steps_ahead)
    with closing(LLM(folder, drafted, grammars=StartGrammars(), wrap_drafting=EveryDraft)) as llm:
        for _ in range(2):  # the second time, prompts are in the prefix cache
            arrivals = [(rng.randint(0, 10), one) for one in with_predictions(wanted, expected)]
            found = run(llm, arrivals, {})
            for request_id, answer in expected.items():
                assert found[request_id].token_ids == answer.token_ids, request_id
        counters = llm.built.scheduler.counters
        assert num_blocks == 400 or counters.preemptions
        assert drafter == "off" or counters.accepted_draft_tokens
        assert llm.built.pool.num_free == llm.built.pool.num_blocks


def test_a_longer_prompt_reuses_the_blocks_of_a_shorter_one(folder: Path) -> None:
    rng = random.Random(folder.name)
    prompt = [rng.randrange(VOCAB) for _ in range(44)]
    first = replace(random_request(rng, 0, []), token_ids=prompt[:24], num_prompt=24, max_new_tokens=8, cache_salt="")
    second = replace(first, request_id=random_request(rng, 1, []).request_id, token_ids=prompt, num_prompt=44)
    expected = alone(folder, [second])
    with closing(LLM(folder, drafting("off", max_rows=1))) as llm:
        run(llm, [(0, first)], {})
        answer = run(llm, [(0, second)], {})[second.request_id]
    assert answer.token_ids == expected[second.request_id].token_ids
    assert answer.usage is not None
    assert answer.usage.cached_tokens >= 20


def test_handed_over_answers_are_those_of_one_engine(folder: Path) -> None:
    rng = random.Random(folder.name)
    asked = [[rng.randrange(1, VOCAB) for _ in range(length)] for length in (1, 8, 45, 61)]
    with engine(folder, handoff_settings()) as llm:
        expected = llm.run([request(i, prompt) for i, prompt in enumerate(asked)])
    with (
        engine(folder, handoff_settings(serves=True)) as prefill,
        engine(folder, handoff_settings()) as decode,
    ):
        found = hand_over(prefill, decode, asked)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
    assert found[3].usage is not None
    assert found[3].usage.pulled_tokens == 61
