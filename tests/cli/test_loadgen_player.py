from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_server import CUT, Piece, Reply, ScriptedServer, Seen, answer, delta, failure, finish

from stoker.base.clock import Clock, RealClock, VirtualClock
from stoker.base.errors import StokerError
from stoker.loadgen.client import Client, Target
from stoker.loadgen.load import LoadPlan
from stoker.loadgen.player import play
from stoker.loadgen.session import Blocks, FollowUp, LoadSession, Messages, TokenRange, Turn
from stoker.loadgen.stream import Record
from stoker.loadgen.summary import summarize


def chat(text: str, session: str = "s", **fields: Any) -> Turn:
    return Turn(Messages([{"role": "user", "content": text}], 1), session, **fields)


def run(target: Target, sessions: Sequence[LoadSession], load: LoadPlan, clock: Clock | None = None) -> list[Record]:
    clock = clock or RealClock()

    async def measure() -> list[Record]:
        records: list[Record] = []
        async with Client(target, clock) as client:
            await play(
                sessions,
                client,
                load,
                {"model": "m", "max_tokens": 5},
                lambda turn, record: records.append(record),
                clock,
            )
        return records

    return asyncio.run(measure())


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The player's own clock, which its waits move: no machine is so slow that a start would be late on it."""
    clock = VirtualClock()

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0)  # what was started before has its turn
        clock.advance(seconds)

    instead = SimpleNamespace(sleep=sleep, TaskGroup=asyncio.TaskGroup, Semaphore=asyncio.Semaphore)
    monkeypatch.setattr("stoker.loadgen.player.asyncio", instead)
    return clock


def test_a_request_asks_for_a_stream_with_usage(server: ScriptedServer):
    [record] = run(Target(server.url, {"x-key": "k"}), [LoadSession([chat("hi", max_tokens=3)])], LoadPlan(slots=1))
    [seen] = server.seen
    assert seen.path == "/v1/chat/completions"
    assert seen.body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
    }
    assert seen.headers["x-key"] == "k"
    assert "x-session-affinity" not in seen.headers
    assert (record.text, record.completion_tokens, record.cached_tokens, record.error) == ("Hello there.", 3, 4, None)
    assert 0 < (record.ttft_s or 0) <= record.e2e_s


def test_token_ids_go_to_completions(server: ScriptedServer):
    turn = Turn(Blocks(["a"], "t", 4, 6, TokenRange()), "s")
    run(Target(server.url + "/v1/"), [LoadSession([turn])], LoadPlan(slots=1))
    [seen] = server.seen
    assert seen.path == "/v1/completions"
    assert seen.body["prompt"] == turn.prompt.fields(())["prompt"]
    assert len(seen.body["prompt"]) == 6


def test_a_closed_loop_fills_its_slots_and_no_more(server: ScriptedServer):
    server.script = lambda seen: answer("a", "b", pause=0.02)
    records = run(Target(server.url), [LoadSession([chat(str(n))]) for n in range(12)], LoadPlan(slots=3))
    result = summarize(records)
    assert (result.requests, result.peak_concurrency) == (12, 3)


def test_an_open_loop_does_not_wait_for_answers(server: ScriptedServer, pace: VirtualClock):
    server.script = lambda seen: answer("a", pause=lambda: len(server.seen) == 8)
    sessions = [LoadSession([chat(str(n))]) for n in range(8)]
    records = run(Target(server.url), sessions, LoadPlan(rate=100, arrival="constant"), pace)
    assert sorted(record.started_s for record in records) == pytest.approx([0.01 * n for n in range(8)])
    assert [record.error for record in records] == [None] * 8


def test_a_trace_is_played_at_its_times(server: ScriptedServer, pace: VirtualClock):
    sessions = [LoadSession([chat(str(n))], start_s=0.1 * n) for n in range(3)]
    records = run(Target(server.url), sessions, LoadPlan(), pace)
    assert sorted(record.started_s for record in records) == pytest.approx([0.0, 0.1, 0.2])
    records = run(Target(server.url), sessions, LoadPlan(slots=3, keep_trace_times=False), pace)
    assert len({record.started_s for record in records}) == 1


def test_turns_follow_one_another_with_the_servers_own_answers_and_pauses(server: ScriptedServer):
    turns = [Turn(FollowUp(["a"]), "s"), Turn(FollowUp(["a", "b"]), "s", pause_s=0.1)]
    first, second = run(Target(server.url), [LoadSession(turns)], LoadPlan(slots=4))
    assert second.started_s - first.ended_s >= 0.1
    assert [message["content"] for message in server.seen[1].body["messages"]] == ["a", "Hello there.", "b"]


def test_sessions_and_their_parents_are_named_if_requested(server: ScriptedServer):
    turns = [chat("a", "main"), chat("b", "main/sub", parent="main")]
    run(Target(server.url, session_header=True), [LoadSession(turns)], LoadPlan(slots=1))
    main, sub = (seen.headers for seen in server.seen)
    assert main["x-session-affinity"] == "main"
    assert "x-parent-session-id" not in main
    assert (sub["x-session-affinity"], sub["x-parent-session-id"]) == ("main/sub", "main")


def test_errors_are_counted_by_kind_and_never_raised(server: ScriptedServer):
    replies = {
        "fine": answer("a"),
        "busy": failure(429, "rate_limited"),
        "wrong": failure(400, "bad_field"),
        "cut": Reply([delta(content="a"), 0.05, CUT]),
        "short": Reply([delta(content="a")]),
        "plain": Reply(status=502, body="bad gateway"),
    }

    def script(seen: Seen) -> Reply:
        return replies[seen.body["messages"][0]["content"]]

    server.script = script
    names = [*replies, "busy", "fine"]
    result = summarize(run(Target(server.url), [LoadSession([chat(name)]) for name in names], LoadPlan(slots=8)))
    assert result.requests == 2
    assert result.failed == 6
    assert result.errors == {
        "400 bad_field": 1,
        "429 rate_limited": 2,
        "502 unknown": 1,
        "disconnected": 1,
        "stream truncated": 1,
    }


def test_an_answer_that_does_not_end_in_time_is_an_error(server: ScriptedServer):
    server.script = lambda seen: Reply([delta(content="a"), 600.0])
    [record] = run(Target(server.url, timeout_s=0.3), [LoadSession([chat("slow")])], LoadPlan(slots=1))
    assert record.error == "timeout"


def test_a_server_that_is_not_there(server: ScriptedServer, unused_url: str):
    [record] = run(Target(unused_url), [LoadSession([chat("a")])], LoadPlan(slots=1))
    assert record.error == "connect"

    async def first_model(url: str) -> str:
        async with Client(Target(url)) as client:
            return await client.first_model()

    assert asyncio.run(first_model(server.url)) == "scripted"
    with pytest.raises(StokerError, match="no server answers at"):
        asyncio.run(first_model(unused_url))
    server.models = ()
    with pytest.raises(StokerError, match="lists no model"):
        asyncio.run(first_model(server.url))


def test_chunks_are_read_wherever_the_network_cuts_them(server: ScriptedServer):
    stream = b"".join([delta(content="grün"), delta(content="世界"), *finish(5, 2)])
    pieces: list[Piece] = []
    for place in range(0, len(stream), 7):
        pieces += [stream[place : place + 7], 0.0005]
    server.script = lambda seen: Reply(pieces)
    [record] = run(Target(server.url), [LoadSession([chat("a")])], LoadPlan(slots=1))
    assert (record.error, record.text, record.num_chunks) == (None, "grün世界", 2)
