"""The bill does not depend on good will: clients that leave early, workers that report nonsense, refusals of stream_options."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from mocks import DONE, SSE, MockWorker, answers, chunk, event, in_turn, streams, usage, usage_chunk
from waiting import LONG_S, until
from world import World

from stoker.fleet.spec import Role
from stoker.gateway.api.client_body import EndpointKind
from stoker.gateway.http import HttpRequest
from stoker.gateway.path.rewrite import ForeignAnswer, TextCounter
from stoker.gateway.records.running_usage import RunningUsage

STREAM = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
ROLE = event({"id": "c1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})


def with_usage(text: str, prompt: int, completion: int) -> bytes:
    """One chunk with running usage, as vLLM writes it."""
    counts = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return event({"id": "c1", "choices": [{"index": 0, "delta": {"content": text}}], "usage": counts})


def endless(*pieces: bytes) -> Any:
    """Send the pieces and never end the stream."""

    async def script(worker: MockWorker, request: HttpRequest) -> None:
        request.start(200, SSE)
        for piece in pieces:
            request.write(piece)
            await asyncio.sleep(0)
        await asyncio.sleep(2 * LONG_S)

    return script


async def leave_after(world: World, last: bytes, body: dict[str, Any], path: str = "/v1/chat/completions") -> bytes:
    """Read a stream until `last` has arrived, then disconnect. Return what was read."""
    answer = await world.send(body, path)
    seen = bytearray()

    def sink(data: bytes) -> None:
        seen.extend(data)

    reading = asyncio.create_task(answer.relay(sink))
    await until(lambda: last in seen)
    reading.cancel()
    answer.abort()
    return bytes(seen)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "vllm_mooncake"])
def test_a_client_that_leaves_early_is_billed_by_the_running_usage_that_it_does_not_see(dialect: str) -> None:
    async def main() -> None:
        async with World() as world:
            pieces = [with_usage("", 12, 0), with_usage("a", 12, 1), with_usage("bcd", 12, 4)]
            worker = await world.add("a", endless(*pieces), dialect=dialect)
            seen = await leave_after(world, b'"bcd"', STREAM)
            row = await world.settled()
            assert worker.jsons[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
            assert b"usage" not in seen
            assert [json.loads(line[6:])["choices"][0]["delta"] for line in seen.split(b"\n\n") if line] == [
                {"content": ""},
                {"content": "a"},
                {"content": "bcd"},
            ]
            assert (row.status, row.prompt_tokens, row.completion_tokens) == (499, 12, 4)

    asyncio.run(main())


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "openai"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_client_that_leaves_early_is_billed_by_pieces_if_the_worker_counts_none(
    dialect: str, separators: tuple[str, str]
) -> None:
    def piece(delta: dict[str, Any]) -> bytes:
        data = {"id": "c1", "choices": [{"index": 0, "delta": delta}]}
        return event(json.dumps(data, separators=separators).encode())

    async def main() -> None:
        async with World(prompt_tokens=33) as world:
            arguments = {"tool_calls": [{"index": 0, "function": {"arguments": '{"content":"x"}'}}]}
            deltas: list[dict[str, Any]] = [
                {"role": "assistant", "content": ""},
                *({"content": text} for text in ("a", '"content":"', "c")),
                {"reasoning_content": "hm"},
                arguments,
                {"content": "end"},
            ]
            await world.add("a", endless(*map(piece, deltas), b": ping\n\n"), dialect=dialect)
            await leave_after(world, b"end", STREAM)
            row = await world.settled()
            assert (row.status, row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (499, 33, 0, 6)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body", "piece"),
    [
        ("/v1/completions", {"prompt": "hi"}, event({"choices": [{"index": 0, "text": "word"}]})),
        ("/v1/responses", {"input": "hi"}, b'event: response.output_text.delta\ndata: {"delta":"word"}\n\n'),
    ],
)
def test_the_other_endpoints_count_pieces_too(path: str, body: dict[str, Any], piece: bytes) -> None:
    async def main() -> None:
        async with World(prompt_tokens=33) as world:
            await world.add("a", endless(piece, piece, piece.replace(b"word", b"end")))
            await leave_after(world, b"end", {"model": "m", "stream": True, **body}, path)
            row = await world.settled()
            assert (row.prompt_tokens, row.completion_tokens) == (33, 3)

    asyncio.run(main())


def test_a_client_that_asked_for_running_usage_gets_it() -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("a", streams(with_usage("a", 12, 1), usage_chunk(12, 0, 1), DONE), dialect="vllm")
            options = {"include_usage": True, "continuous_usage_stats": True}
            got = await world.ask(STREAM | {"stream_options": options})
            assert got.body.count(b'"usage"') == 2
            hidden = await world.ask(STREAM | {"stream_options": {"include_usage": True}})
            assert hidden.body.count(b'"usage"') == 1
            plain = await world.ask(STREAM)
            assert plain.body == chunk("a").replace(b'"object":"chat.completion.chunk",', b"") + DONE

    asyncio.run(main())


def test_running_usage_is_hidden_however_it_is_written() -> None:
    """Chunks that the quick way does not understand are parsed: several in one read, other orders, nested objects."""
    first = event({"usage": {"completion_tokens": 1, "prompt_tokens": 9}, "choices": [{"delta": {"content": "a"}}]})
    details = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
    second = event({"choices": [{"delta": {"content": "b"}}], "usage": details})
    for pushes in ([first, second], [first + second], [first + second[:20], second[20:]]):
        running = RunningUsage()
        answer = ForeignAnswer(running, hide_usage=True, hide_running=True)
        shown = b"".join(answer.push(data) for data in pushes)
        assert b"usage" not in shown
        assert shown.count(b'"content"') == 2
        assert (running.prompt_tokens, running.cached_tokens, running.completion_tokens) == (9, 8, 2)


@pytest.mark.parametrize(
    ("reported", "limits", "billed"),
    [
        ((-5, 0, 2), {}, (33, 0, 2)),
        ((10, -7, 2), {}, (10, 0, 2)),
        ((10, 11, 2), {}, (10, 10, 2)),
        ((10, 4, -9), {}, (10, 4, 1)),
        ((10, 4, 0), {}, (10, 4, 1)),
        ((10, 4, 10**15), {"max_tokens": 7}, (10, 4, 7)),
        ((10, 4, 10**25), {"max_tokens": 10**30}, (10, 4, 1 << 24)),
        ((10, 4, 15), {"max_tokens": 7, "n": 2}, (10, 4, 14)),
        ((10, 4, 14), {"max_tokens": 7, "n": 2}, (10, 4, 14)),
        ((10**12, 0, 2), {}, (4096 + 95, 0, 2)),
    ],
)
@pytest.mark.parametrize("is_streamed", [True, False])
def test_impossible_counts_of_a_worker_are_bounded(
    reported: tuple[int, int, int], limits: dict[str, int], billed: tuple[int, int, int], is_streamed: bool
) -> None:
    async def main() -> None:
        async with World(prompt_tokens=33) as world:
            text = {"id": "c", "choices": [{"message": {"content": "abcd"}}], "usage": usage(*reported)}
            script = streams(chunk("a"), chunk("b"), usage_chunk(*reported), DONE) if is_streamed else answers(text)
            await world.add("a", script)
            body = json.dumps(STREAM | {"stream": is_streamed} | limits).encode()
            await world.ask(body.ljust(95))
            row = await world.settled()
            counts = (row.prompt_tokens, row.cached_tokens, row.completion_tokens)
            # An answer that is not streamed has no pieces that the gateway could count.
            assert counts == billed if is_streamed else counts == (*billed[:2], max(0, min(billed[2], reported[2])))
            # More cached tokens than prompt tokens are always corrected, and not an error.
            is_wrong = (min(reported[1], reported[0]) if reported[0] > 0 else 0, reported[::2]) != (
                counts[1],
                counts[::2],
            )
            assert world.metrics.wrong_usage["a"] == is_wrong

    asyncio.run(main())


@pytest.mark.parametrize("number", ['"12"', "1.5", "1e400", "null", "{}", "9" * 5000, "[1]"])
def test_counts_that_are_no_integers_are_replaced_by_the_gateways_own(number: str) -> None:
    async def main() -> None:
        async with World(prompt_tokens=33) as world:
            last = b'data: {"choices":[],"usage":{"prompt_tokens":%b,"completion_tokens":%b}}\n\n'
            await world.add("a", streams(chunk("a"), chunk("b"), last % (number.encode(), number.encode()), DONE))
            got = await world.ask(STREAM)
            assert got.status == 200
            row = await world.settled()
            assert row.prompt_tokens == 33
            assert 1 <= row.completion_tokens <= 2

    asyncio.run(main())


def test_without_a_limit_hidden_tokens_are_allowed_up_to_the_setting() -> None:
    async def main() -> None:
        async with World() as world:
            pieces = [chunk("a"), DONE]
            await world.add("a", streams(chunk("a"), usage_chunk(10, 0, 10**9), DONE))
            await world.ask(STREAM)
            row = await world.settled()
            assert row.completion_tokens == sum(map(len, pieces)) + 1000  # World's hidden_tokens

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "limits"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 50, "max_completion_tokens": 1, "max_output_tokens": 1}),
        ("/v1/chat/completions", {"max_tokens": 50, "max_completion_tokens": 1}),  # the worker takes the other one
        ("/v1/chat/completions", {"max_completion_tokens": 1}),  # the worker does not know this field
    ],
)
def test_a_limit_that_the_worker_ignores_does_not_lower_the_bill(path: str, limits: dict[str, Any]) -> None:
    async def main() -> None:
        async with World() as world:
            piece = chunk("a") if "chat" in path else event({"choices": [{"index": 0, "text": "a"}]})
            await world.add("a", streams(*[piece] * 40, usage_chunk(10, 4, 40), DONE))
            await world.ask({"model": "m", "stream": True, **limits}, path)
            row = await world.settled()
            assert row.completion_tokens == 40

    asyncio.run(main())


def test_a_stoker_worker_is_bounded_too() -> None:
    async def main() -> None:
        async with World() as world:
            notes = b":u 999999999999 3 1 1\n:t 0 " + b" ".join([b"5"] * 500) + b"\n"
            await world.add("a", streams(notes + chunk("a"), b":e\n" + DONE), dialect="stoker")
            await world.ask(STREAM | {"max_tokens": 4})
            row = await world.settled()
            assert (row.completion_tokens, row.cached_tokens) == (4, 3)
            assert row.prompt_tokens < 10_000
            assert world.metrics.wrong_usage["a"] == 1

    asyncio.run(main())


def test_a_refusal_that_a_client_provokes_switches_usage_off_for_no_other_tenant() -> None:
    """The worker's error text quotes the client, or the worker understands the body differently than the gateway."""
    poison = {"error": {"message": "bad value in stream_options"}}

    async def main() -> None:
        async with World() as world:
            normal = streams(chunk("a"), usage_chunk(10, 4, 2), DONE)
            scripts = [
                answers(poison, 400),
                answers(poison, 400),  # also without the option
                answers(poison, 400),
                answers({"choices": [], "usage": usage(1, 0, 1)}),  # does not stream, so the option may have been unfit
                normal,
            ]
            worker = await world.add("a", in_turn(*scripts))
            assert (await world.ask(STREAM)).status == 400
            assert (await world.ask(STREAM)).status == 200
            world.rows.rows.clear()
            await world.ask(STREAM)
            row = await world.settled()
            assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (10, 4, 2)
            assert [b"include_usage" in body for body in worker.bodies] == [True, False, True, False, True]

    asyncio.run(main())


def test_a_worker_that_refuses_the_option_is_asked_again_after_a_minute_and_billed_meanwhile() -> None:
    refusal = {"error": {"message": "unknown field: stream_options"}}

    async def main() -> None:
        async with World(prompt_tokens=33) as world:
            plain = streams(chunk("a"), chunk("b"), DONE)
            worker = await world.add("a", in_turn(answers(refusal, 400), plain, plain, answers(refusal, 400), plain))
            for _ in range(3):
                await world.ask(STREAM)
                world.clock.advance(31.0)
            assert [b"stream_options" in body for body in worker.bodies] == [True, False, False, True, False]
            await until(lambda: len(world.rows.rows) == 3)
            assert {(row.prompt_tokens, row.completion_tokens) for row in world.rows.rows} == {(33, 2)}

    asyncio.run(main())


def test_the_running_counts_can_be_read_while_the_answer_streams() -> None:
    async def main() -> None:
        async with World(prompt_tokens=33) as world:
            running: list[RunningUsage] = []
            opened = world.rows.open
            world.rows.open = lambda head: running.append(opened(head)) or running[-1]  # type: ignore[method-assign]
            await world.add("a", endless(ROLE, chunk("a"), chunk("b")))
            await leave_after(world, b'"b"', STREAM)
            assert (running[0].prompt_tokens, running[0].completion_tokens) == (33, 2)
            await world.settled()

    asyncio.run(main())


def test_pieces_are_counted_one_by_one_or_many_at_once() -> None:
    """Also where the text moves, is empty, or several events come in one read."""
    moved = event({"id": "longer", "choices": [{"index": 0, "delta": {"content": "x"}}]})
    events = [ROLE, chunk("a"), chunk("b"), chunk(""), chunk("c"), b": ping\n\n", moved, chunk("d"), DONE]
    for size in (1, 2, 3, len(events)):
        answer = ForeignAnswer(prompt_tokens=5)
        for start in range(0, len(events), size):
            answer.push(b"".join(events[start : start + size]))
        assert answer.num_pieces == 5


def test_text_in_an_answer_is_never_taken_for_a_piece() -> None:
    counter = TextCounter(EndpointKind.CHAT, ROLE)
    assert counter.count(chunk('","content":"x","arguments":"y')) == 1
    assert counter.count(ROLE + b": content\n\n" + DONE) == 0


def test_a_prefill_worker_reporting_nonsense_does_not_reach_the_bill() -> None:
    async def main() -> None:
        async with World() as world:
            prefill = {"kv_transfer_params": {"x": 1}, "usage": usage(10, 10**18, 1)}
            await world.add("p", answers(prefill), role=Role.PREFILL, dialect="vllm")
            decode = streams(chunk("a"), usage_chunk(10, 10, 1), DONE)
            await world.add("d", decode, role=Role.DECODE, dialect="vllm")
            await world.ask(STREAM)
            row = await world.settled()
            assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (10, 10, 1)

    asyncio.run(main())
