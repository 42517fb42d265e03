from __future__ import annotations

import pytest
from scripted_server import answer, delta, event, finish, text_event

from stoker.base.clock import VirtualClock
from stoker.loadgen.stream import AnswerReader, Record, SseParser, error_body
from stoker.loadgen.summary import peak_concurrency, quantile, spread_ms, summarize


def read(timeline: list[tuple[float, bytes]], started_s: float = 0.0, ended_s: float | None = None) -> Record:
    """Feeds bytes at their times on a virtual clock."""
    clock = VirtualClock(started_s)
    record = Record(started_s=clock.now())
    reader = AnswerReader(record)
    for at_s, data in timeline:
        clock.advance(at_s - clock.now())
        reader.feed(data, clock.now())
    reader.end(clock.now() if ended_s is None else ended_s)
    return record


def whole(*pieces: bytes) -> bytes:
    return b"".join(pieces)


STREAM = whole(*(piece for piece in answer("Grüße", ", ", "世界", "!").pieces if isinstance(piece, bytes)))


def test_events_are_the_same_wherever_packets_end():
    expected = SseParser().feed(STREAM)
    assert expected[-1] == b"[DONE]"
    for cut in range(len(STREAM)):
        parser = SseParser()
        assert parser.feed(STREAM[:cut]) + parser.feed(STREAM[cut:]) == expected
    parser = SseParser()
    assert [payload for place in range(len(STREAM)) for payload in parser.feed(STREAM[place : place + 1])] == expected


def test_events_with_crlf_comments_and_other_fields():
    stream = b": ping\r\n\r\nevent: x\r\nid: 3\r\ndata: one\r\n\r\ndata:two\n\n"
    assert SseParser().feed(stream) == [b"one", b"two"]


def test_a_text_cut_inside_a_character_comes_out_whole():
    cut = STREAM.index("世".encode()) + 1
    assert read([(1.0, STREAM[:cut]), (2.0, STREAM[cut:])]).text == "Grüße, 世界!"


def test_times_of_a_scripted_timeline_are_exact():
    record = read(
        [
            (10.25, delta(role="assistant", content="")),  # no token yet
            (10.5, delta(content="a")),
            (10.75, delta(content="b")),
            (11.25, delta(content="c")),
            (11.5, whole(*finish(prompt_tokens=20, completion_tokens=3, cached_tokens=8))),
        ],
        started_s=10.0,
    )
    assert record.error is None
    assert record.ttft_s == 0.5
    assert record.gaps_s == [0.25, 0.5]
    assert record.tpot_s == 0.375
    assert record.e2e_s == 1.5
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (20, 8, 3)
    assert (record.text, record.finish_reason, record.num_chunks) == ("abc", "stop", 3)


def test_usage_counts_the_tokens_where_a_chunk_carries_several():
    record = read(
        [(1.0, delta(content="a b")), (2.0, delta(content=" c d e")), (2.0, whole(*finish(9, completion_tokens=5)))]
    )
    assert record.completion_tokens == 5
    assert record.tpot_s == 0.25
    assert record.gaps_s == [1.0]  # how many of the five the second chunk held was not said


def test_a_gap_is_divided_if_the_server_counts_tokens_in_every_chunk():
    def counted(text: str, tokens: int) -> bytes:
        usage = {"prompt_tokens": 9, "completion_tokens": tokens}
        return event({"choices": [{"delta": {"content": text}}], "usage": usage})

    record = read([(1.0, counted("a", 1)), (2.0, counted(" b c d e", 5)), (2.5, whole(*finish(9, 5)))])
    assert record.gaps_s == [0.25] * 4
    assert record.tpot_s == 0.25


def test_reasoning_tool_calls_and_completions_are_tokens_too():
    call = {"index": 0, "function": {"name": "look", "arguments": "{"}}
    stream = [(1.0, delta(reasoning_content="hm")), (2.0, delta(tool_calls=[call])), (4.0, text_event("x"))]
    record = read([*stream, (4.0, whole(*finish(3, 3)))])
    assert record.ttft_s == 1.0
    assert record.gaps_s == [1.0, 2.0]
    assert record.text == "x"


def test_without_usage_chunks_are_counted():
    record = read([(1.0, delta(content="a")), (2.0, delta(content="b")), (2.0, b"data: [DONE]\n\n")])
    assert (record.error, record.has_usage, record.completion_tokens) == (None, False, 2)
    assert summarize([record]).without_usage == 1


def test_tokens_without_text_count_at_the_end_of_the_stream():
    record = read([(3.0, whole(*finish(5, completion_tokens=1)))])
    assert record.ttft_s == 3.0


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (delta(content="a"), "stream truncated"),
        (whole(delta(content="a"), event({"error": {"message": "gone", "code": "engine_died"}})), "stream engine_died"),
        (event({"error": "gone"}), "stream unknown"),
        (b"data: {nonsense\n\n", "stream bad_chunk"),
        (b"", "stream truncated"),
        (b"data: [DONE]\n\n", "stream empty"),
        (whole(event({"object": "error", "message": "gone"}), b"data: [DONE]\n\n"), "stream empty"),
        (whole(delta(content="a"), event({"choices": [{"delta": {}, "finish_reason": "abort"}]})), "stream abort"),
    ],
)
def test_a_broken_stream_is_an_error_of_its_kind(stream, kind):
    assert read([(1.0, stream)]).error == kind


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b'{"error": {"message": "slow down", "type": "rate", "code": "overloaded"}}', "overloaded", "slow down"),
        (
            b'{"error": {"message": "what", "type": "invalid_request_error", "code": null}}',
            "invalid_request_error",
            "what",
        ),
        (b'{"error": {"message": "what", "code": 400}}', "400", "what"),
        (b'{"error": "plain"}', "unknown", "plain"),
        (b"<html>502</html>", "unknown", "<html>502</html>"),
    ],
)
def test_error_bodies_of_all_shapes(body, kind, message):
    error = error_body(body)
    assert (error.kind(), error.message) == (kind, message)


def test_quantiles_lie_between_the_samples():
    ordered = [float(value) for value in range(1, 102)]
    assert [quantile(ordered, share) for share in (0.0, 0.5, 0.9, 0.95, 0.99, 1.0)] == [1, 51, 91, 96, 100, 101]
    assert quantile([2.0, 4.0], 0.25) == 2.5
    assert quantile([7.0], 0.99) == 7.0
    assert spread_ms([]) is None


def test_summary_of_three_requests_is_exact():
    def request(start_s: float, cached: int) -> Record:
        times = [(start_s + 1, delta(content="a")), (start_s + 2, delta(content="b"))]
        return read([*times, (start_s + 2, whole(*finish(100, 2, cached)))], started_s=start_s)

    records = [request(0.0, 0), request(1.0, 60), read([(4.0, delta(content="a"))], started_s=2.0)]
    result = summarize(records)
    assert (result.duration_s, result.requests, result.failed) == (4.0, 2, 1)
    assert result.errors == {"stream truncated": 1}
    assert result.peak_concurrency == 2
    assert (result.requests_per_s, result.output_tokens_per_s, result.input_tokens_per_s) == (0.5, 1.0, 50.0)
    assert (result.prompt_tokens, result.cached_tokens, result.hit_ratio) == (200, 60, 0.3)
    assert result.ttft_ms is not None
    assert (result.ttft_ms.p50, result.ttft_ms.p99, result.ttft_ms.count) == (1000.0, 1000.0, 2)
    assert result.e2e_ms is not None
    assert result.e2e_ms.mean == 2000.0


def test_a_reused_slot_is_one_running_request():
    records = [
        Record(started_s=0.0, ended_s=1.0),
        Record(started_s=1.0, ended_s=2.0),
        Record(started_s=1.5, ended_s=3.0),
    ]
    assert peak_concurrency(records) == 2
    assert peak_concurrency(records[:2]) == 1


def test_summary_of_no_request():
    result = summarize([])
    assert (result.requests, result.failed, result.ttft_ms, result.hit_ratio) == (0, 0, None, None)


def test_a_server_that_does_not_report_cached_tokens_has_no_hit_ratio():
    record = read([(1.0, delta(content="a")), (1.0, whole(*finish(10, 1, cached_tokens=None)))])
    assert (summarize([record]).cached_tokens, summarize([record]).hit_ratio) == (None, None)
