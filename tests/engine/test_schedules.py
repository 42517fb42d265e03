"""With the real engine in float64, any schedule gives each request the tokens that it gets when it runs alone."""

from __future__ import annotations

import math
import random
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from known_answers import KnownAnswers
from tiny import SHAPE, make_tiny

from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.base.ids import RequestId
from stoker.engine.llm import LLM, LLMOutput
from stoker.sched.request import GenerateRequest, SamplingParams

VOCAB = SHAPE["vocab_size"]
BLOCK_TOKENS = 4
MAX_TOKENS = 60  # prompt and answer; the smallest cache holds one such sequence


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, "llama")
    return folder


def settings(num_blocks: int, step_tokens: int, max_rows: int, steps_ahead: int) -> EngineSettings:
    return EngineSettings(
        dtype="float64",
        device="cpu",
        num_threads=1,
        steps_ahead=steps_ahead,
        kv=KvSettings(block_tokens=BLOCK_TOKENS, num_blocks=num_blocks),
        sched=SchedSettings(step_tokens=step_tokens, max_rows=max_rows),
    )


def random_request(rng: random.Random, number: int, shared: list[int]) -> GenerateRequest:
    num_prompt = rng.randint(1, 40)
    head = shared[: rng.randint(0, num_prompt)] if rng.random() < 0.7 else []
    token_ids = head + [rng.randrange(VOCAB) for _ in range(num_prompt - len(head))]
    max_new = rng.randint(1, MAX_TOKENS - num_prompt)
    penalised = rng.random() < 0.4
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 1.0, 1.0, 0.7]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 0, 20]),
        min_p=rng.choice([0.0, 0.01]),
        frequency_penalty=rng.uniform(-1, 1) if penalised else 0.0,
        presence_penalty=rng.uniform(-1, 1) if penalised else 0.0,
        repetition_penalty=rng.uniform(0.8, 1.5) if penalised else 1.0,
        logit_bias={rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(rng.choice([0, 0, 3]))},
        seed=rng.randrange(1 << 62),
        num_logprobs=rng.choice([None, 0, 3]),
        stop_token_ids=tuple(rng.sample(range(VOCAB), 6)),
        min_tokens=rng.choice([0, 0, min(5, max_new)]),
    )
    return GenerateRequest(
        request_id=RequestId(f"r{number}"),
        token_ids=token_ids,
        num_prompt=num_prompt,
        sampling=sampling,
        max_new_tokens=max_new,
        cache_salt=rng.choice(["", "", "tenant"]),
        priority=rng.choice([0, 0, 0, 1, -1]),
    )


def run(llm: LLM, arrivals: list[tuple[int, GenerateRequest]], cancels: dict[str, int]) -> dict[str, LLMOutput]:
    """Add each request before its step, and cancel those in `cancels` at their step."""
    engine, pool = llm.built.engine, llm.built.pool
    waiting = sorted(arrivals, key=lambda arrival: arrival[0])
    answers: dict[str, LLMOutput] = {request.request_id: LLMOutput() for _, request in arrivals}
    step = 0
    while waiting or engine.has_work:
        while waiting and (waiting[0][0] <= step or not engine.has_work):
            engine.add(waiting.pop(0)[1])
        for request_id, at in cancels.items():
            if at == step:
                engine.cancel(RequestId(request_id))
        for chunk in engine.step():
            answer = answers[chunk.request_id]
            assert answer.finish is None, "a chunk after the last one"
            answer.token_ids += chunk.token_ids
            answer.logprobs += chunk.logprobs or []
            answer.finish = chunk.finish
            answer.usage = chunk.usage
        pool.check()
        step += 1
        assert step < 20_000, "the engine does not finish"
    assert pool.num_free == pool.num_blocks
    return answers


def assert_same(request: GenerateRequest, got: LLMOutput, lone: LLMOutput, cancelled: bool) -> None:
    assert got.finish is not None
    assert lone.finish is not None
    if cancelled and got.finish.reason == "cancelled":
        assert got.token_ids == lone.token_ids[: len(got.token_ids)]
        return
    assert got.token_ids == lone.token_ids
    assert got.finish == lone.finish
    assert len(got.logprobs) == (0 if request.sampling.num_logprobs is None else len(got.token_ids))
    for ours, theirs in zip(got.logprobs, lone.logprobs, strict=True):
        assert (ours.token_id, ours.top_ids) == (theirs.token_id, theirs.top_ids)
        assert math.isclose(ours.logprob, theirs.logprob, abs_tol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_the_tokens_of_running_alone(folder: Path, seed: int) -> None:
    """With drafts in two of three schedules."""
    print("seed", seed)
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    requests = [random_request(rng, number, shared) for number in range(10)]
    longest = max(requests, key=lambda request: request.num_prompt)
    other_seed = replace(longest.sampling, seed=longest.sampling.seed + 1)
    requests.append(replace(longest, request_id=RequestId("twin"), sampling=other_seed))
    lone = {}
    for request in requests:
        # A new engine with an empty cache, one request, no chunked prefill.
        with closing(LLM(folder, settings(100, 512, 1, 0))) as alone:
            lone[request.request_id] = run(alone, [(0, request)], {})[request.request_id]
    assert {len(answer.token_ids) > 0 for answer in lone.values()} == {True}
    known = {request_id: answer.token_ids for request_id, answer in lone.items()}
    preemptions = cached = accepted = 0
    for steps_ahead in (0, 1, 2):
        # One schedule that certainly preempts, and two random ones.
        schedules = [(MAX_TOKENS // BLOCK_TOKENS, 64, 16)]
        schedules += [
            (
                rng.choice([MAX_TOKENS // BLOCK_TOKENS, 20, 40, 400]),
                rng.choice([1, 3, 16, 64]),
                rng.choice([1, 2, 5, 16]),
            )
            for _ in range(2)
        ]
        for num_blocks, step_tokens, max_rows in schedules:
            arrivals = [(rng.choice([0, rng.randint(0, 20)]), request) for request in requests]
            cancels = {request.request_id: rng.randint(0, 80) for request in requests if rng.random() < 0.15}
            print(f"{num_blocks=} {step_tokens=} {max_rows=} {steps_ahead=}")
            limits = settings(num_blocks, step_tokens, max_rows, steps_ahead)
            drafts = KnownAnswers(known, VOCAB, rng) if rng.random() < 0.67 else None
            with closing(LLM(folder, limits, wrap_drafting=lambda built, drafts=drafts: drafts or built)) as llm:
                answers = run(llm, arrivals, cancels)
            for request in requests:
                is_cancelled = request.request_id in cancels
                assert_same(request, answers[request.request_id], lone[request.request_id], is_cancelled)
            preemptions += llm.built.scheduler.counters.preemptions
            cached += llm.built.scheduler.counters.cached_tokens
            accepted += llm.built.scheduler.counters.accepted_draft_tokens
    print(f"{preemptions=} {cached=} {accepted=}")
    assert accepted
    assert preemptions
    assert cached


def test_min_tokens_and_penalties_start_from_the_output_after_a_preemption(folder: Path) -> None:
    """Without penalties this greedy answer repeats itself, so a lost count would change it."""
    sampling = SamplingParams(
        temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.3, stop_token_ids=tuple(range(60)), min_tokens=30
    )
    prompts = [[number, 7, 11, 13, 17] for number in range(60, 64)]
    alone = [LLM(folder, settings(20, 64, 1, 0)).generate([prompt], sampling, 40)[0] for prompt in prompts]
    assert all(len(answer.token_ids) >= 30 for answer in alone)
    for steps_ahead in (0, 1, 2):
        llm = LLM(folder, settings(14, 64, 4, steps_ahead))
        together = llm.generate(prompts, sampling, 40)
        assert llm.built.scheduler.counters.preemptions
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
        assert llm.built.pool.num_free == llm.built.pool.num_blocks


def test_stop_tokens_outside_the_vocabulary_are_ignored(folder: Path) -> None:
    """Some configurations name tokens that were added to the tokenizer but not to the model."""
    sampling = SamplingParams(temperature=0.0, stop_token_ids=(VOCAB, VOCAB + 5), min_tokens=3)
    with closing(LLM(folder, settings(20, 64, 1, 0))) as llm:
        [answer] = llm.generate([[1, 2, 3]], sampling, 6)
    assert len(answer.token_ids) == 6


def test_a_prompt_beyond_the_context_fails_alone(folder: Path) -> None:
    context = SHAPE["max_position_embeddings"]
    with closing(LLM(folder, settings(400, 64, 2, 1))) as llm:
        long, short = llm.generate([[1] * context, [1, 2, 3]], SamplingParams(temperature=0.0), 6)
    assert long.finish is not None
    assert long.finish.error_code == "context_length_exceeded"
    assert len(short.token_ids) == 6


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_the_sum_of_step_times_is_at_most_the_elapsed_time(folder: Path, steps_ahead: int) -> None:
    """A step that is launched ahead waits for the one before, whose time must not count twice."""
    with closing(LLM(folder, settings(400, 16, 8, steps_ahead))) as llm:
        started_s = time.monotonic()
        llm.generate([[number] * 40 for number in range(8)], SamplingParams(temperature=0.0), 20)
        passed_s = time.monotonic() - started_s
        assert 0 < llm.built.engine.step_s <= passed_s
