"""Measuring a running worker over HTTP, for `stoker calibrate --url`."""

from __future__ import annotations

import asyncio

import pytest
from scripted_server import Reply, ScriptedServer, Seen, failure, finish, running, text_event

from stoker.loadgen.client import Target
from stoker.loadgen.worker_probe import ProbeFailed, probe_worker


def words(seen: Seen, cached_tokens: int = 0) -> Reply:
    pieces: list[bytes | float] = []
    for _ in range(seen.body["max_tokens"]):
        pieces += [0.001, text_event("w")]
    return Reply([*pieces, *finish(len(seen.body["prompt"]), seen.body["max_tokens"], cached_tokens)])


def test_prompts_and_batches_are_measured() -> None:
    with running(ScriptedServer(words)) as server:
        targets = [Target(server.url)] * 2
        found = asyncio.run(probe_worker(targets, "m", 1000, [32], [(2, 16)], repeats=1))
    assert [(one.rows, one.prompt_tokens) for one in found.steps] == [(1, 0), (0, 32), (2, 0)]
    assert all(one.seconds >= 0.0005 for one in found.steps if one.rows)
    assert [tokens for tokens, _ in found.handoff_gaps_s] == [32]
    prompts = [tuple(seen.body["prompt"]) for seen in server.seen if len(seen.body["prompt"]) > 1]
    assert len(set(prompts)) == len(prompts), "a prompt that was sent before is cached"


def test_prompts_with_a_cached_head_are_measured() -> None:
    seen_prompts: list[list[int]] = []

    def cached_words(seen: Seen) -> Reply:
        prompt = seen.body["prompt"]
        cached = max((len(one) for one in seen_prompts if prompt[: len(one)] == one), default=0)
        seen_prompts.append(prompt)
        return words(seen, cached)

    with running(ScriptedServer(cached_words)) as server:
        found = asyncio.run(probe_worker([Target(server.url)], "m", 1000, [], [], repeats=2, follow_ups=[(48, 16)]))
    assert [(one.rows, one.context, one.prompt_tokens) for one in found.steps] == [(1, 5, 0), (0, 48, 16)]


def test_steps_with_rows_and_a_prompt_are_the_longest_gaps_of_the_rows() -> None:
    """The prompt of 50 tokens arrives while the others are answered."""
    with running(ScriptedServer(words)) as server:
        found = asyncio.run(probe_worker([Target(server.url)], "m", 1000, [], [], repeats=1, mixed=[(2, 50)]))
        order = [(len(seen.body["prompt"]), seen.body["max_tokens"]) for seen in server.seen[-3:]]
    assert order == [(16, 40), (16, 40), (50, 1)]
    step = found.steps[-1]
    assert (step.rows, step.prompt_tokens) == (2, 50)
    assert step.seconds >= found.steps[0].seconds  # the longest gap, not the typical one


def test_jitter_is_relative_to_the_typical_gap() -> None:
    with running(ScriptedServer(words)) as server:
        found = asyncio.run(probe_worker([Target(server.url)], "m", 1000, [], [(2, 16)], repeats=2))
    assert len(found.jitter) == 20
    assert found.jitter == sorted(found.jitter)
    assert found.jitter[0] <= 1.0 <= found.jitter[-1]


def test_a_server_without_cached_tokens_has_no_such_steps() -> None:
    with running(ScriptedServer(words)) as server:
        found = asyncio.run(probe_worker([Target(server.url)], "m", 1000, [], [], repeats=1, follow_ups=[(48, 16)]))
    assert [one.rows for one in found.steps] == [1]


def test_a_server_that_fails_is_an_error() -> None:
    with (
        running(ScriptedServer(lambda seen: failure(503, "busy"))) as server,
        pytest.raises(ProbeFailed, match="503 busy"),
    ):
        asyncio.run(probe_worker([Target(server.url)], "m", 1000, [32], [], repeats=1))
