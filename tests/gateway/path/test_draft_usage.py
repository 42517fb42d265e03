"""Counts of drafts in a worker's usage: clients see them, and rejected drafts are not billed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_stoker import FakeStoker
from mocks import answers, event, usage
from world import World

from stoker.gateway.path.rewrite import ForeignAnswer, UsageCounts

DETAILS = {"reasoning_tokens": 1, "accepted_prediction_tokens": 5, "rejected_prediction_tokens": 40}
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [],
    "seed": 42,
    "max_tokens": 8,
    "prediction": {"type": "content", "content": "the old text"},
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def shown_usage(body: bytes, stream: bool) -> dict[str, Any]:
    data = [line[6:] for line in body.split(b"\n\n") if b'"usage"' in line][-1] if stream else body
    found: dict[str, Any] = json.loads(data)["usage"]
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_rejected_drafts_are_shown_and_not_billed(stream: bool) -> None:
    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", FakeStoker(completion_details=DETAILS), dialect="stoker")
            got = await world.ask(BODY | (STREAM if stream else {}))
            row = await world.settled()
            assert worker.jsons[0]["prediction"] == BODY["prediction"]
            assert shown_usage(got.body, stream)["completion_tokens_details"] == DETAILS
            assert row.completion_tokens == 8
            assert row.error is None

    asyncio.run(main())


def test_the_counts_survive_a_resumed_stream() -> None:
    """The usage is rewritten then, because the first worker's cached tokens count."""

    async def main() -> None:
        async with World() as world:
            await world.add("a", FakeStoker(dies=[3], completion_details=DETAILS), dialect="stoker")
            await world.add("b", FakeStoker(cached_tokens=9, completion_details=DETAILS), dialect="stoker")
            got = await world.ask(BODY | STREAM)
            row = await world.settled()
            told = shown_usage(got.body, stream=True)
            assert (row.resumed, row.completion_tokens) == (1, 8)
            assert told["prompt_tokens_details"] == {"cached_tokens": 3}
            assert told["completion_tokens_details"] == DETAILS

    asyncio.run(main())


def test_a_rewritten_foreign_usage_keeps_the_counts() -> None:
    """A pair's cached tokens are rewritten. Nothing else in the usage changes."""
    reported = usage(10, 9, 6) | {"completion_tokens_details": DETAILS}
    answer = ForeignAnswer(is_pair=True)
    answer.prefill_cached_tokens = 4
    told = json.loads(answer.whole(json.dumps({"id": "c", "usage": reported}).encode()))
    assert told["usage"] == usage(10, 4, 6) | {"completion_tokens_details": DETAILS}
    assert answer.usage == UsageCounts(10, 4, 6)
    streamed = ForeignAnswer(is_pair=True)
    streamed.prefill_cached_tokens = 4
    [data] = streamed.push(event({"id": "c", "choices": [], "usage": reported})).splitlines()[:1]
    assert json.loads(data[6:])["usage"] == usage(10, 4, 6) | {"completion_tokens_details": DETAILS}


def test_counts_that_cannot_be_true_change_no_bill() -> None:
    """A worker may report any number of rejected drafts: only completion_tokens are billed."""

    async def main() -> None:
        async with World() as world:
            wrong = usage(10, 0, 2) | {"completion_tokens_details": {"rejected_prediction_tokens": 1 << 40}}
            reply = {"id": "c", "choices": [{"index": 0, "message": {"content": "ab"}}], "usage": wrong}
            await world.add("a", answers(reply))
            await world.ask(BODY)
            row = await world.settled()
            assert (row.prompt_tokens, row.completion_tokens) == (10, 2)

    asyncio.run(main())
