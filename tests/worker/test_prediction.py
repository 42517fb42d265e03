"""The request field `prediction` on its way to the engine, and what is reported about drafts."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import MAX_MODEL_TOKENS
from http_server import Server

from stoker.proto.messages import DraftReport, PoolReport
from stoker.sched.draft_tape import MAX_DRAFTS
from stoker.sched.request import GrammarSpec
from stoker.worker.draft_metrics import output_kind

PREDICTION = {"type": "content", "content": "def f():\n    return 1\n"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def details(usage: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = usage["completion_tokens_details"]
    return found


def metric(server: Server, name: str) -> float:
    lines = server.send("/metrics").body.decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)


@pytest.mark.parametrize(
    "content",
    [
        "def f():\n    return 1\n",
        [{"type": "text", "text": "def f():\n"}, {"type": "text", "text": "    return 1\n"}],
    ],
)
def test_a_prediction_reaches_the_engine_as_tokens(server: Server, content: Any) -> None:
    assert server.chat(prediction={"type": "content", "content": content}, n=2).status == 200
    expected = tuple(server.text.tokenizer.encode("def f():\n    return 1\n"))
    assert [request.prediction for request in server.service.requests] == [expected] * 2


def test_completions_take_a_prediction_too(server: Server) -> None:
    body = {"model": "tiny", "prompt": "Hello", "prediction": PREDICTION}
    answer = server.send("/v1/completions", body)
    assert answer.status == 200
    assert server.service.requests[-1].prediction
    assert "accepted_prediction_tokens" in details(answer.json["usage"])


def test_a_request_without_prediction_has_none(server: Server) -> None:
    server.say(draft_tokens=3, accepted_draft_tokens=2)
    usage = server.chat(prediction=None).json["usage"]
    assert server.service.requests[-1].prediction == ()
    assert details(usage).keys() == {"reasoning_tokens"}


def test_a_prediction_of_a_megabyte_is_cut(server: Server) -> None:
    huge = {"type": "content", "content": "x" * (1 << 20)}
    assert server.chat(prediction=huge, max_tokens=10).status == 200
    assert len(server.service.requests[-1].prediction) == 10 + 1024
    assert server.chat(prediction=huge).status == 200
    assert len(server.service.requests[-1].prediction) == MAX_MODEL_TOKENS + 1024


@pytest.mark.parametrize("content", ["", [], [{"type": "text"}]])
def test_an_empty_prediction_is_none(server: Server, content: Any) -> None:
    assert server.chat(prediction={"type": "content", "content": content}).status == 200
    assert server.service.requests[-1].prediction == ()


@pytest.mark.parametrize(
    "wrong", [{"type": "content"}, {"type": "content", "content": 1}, {"type": "x", "content": ""}]
)
def test_a_prediction_of_another_form_is_a_400_that_names_it(server: Server, wrong: Any) -> None:
    answer = server.chat(prediction=wrong)
    assert answer.status == 400
    assert "prediction" in answer.error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, "world"])
def test_accepted_and_rejected_drafts_are_in_the_usage(server: Server, stream: bool, stop: str | None) -> None:
    """Also if a stop string ends the answer before the engine's last chunk."""
    server.say("Hello, world and more", draft_tokens=3, accepted_draft_tokens=2, chunk_tokens=4)
    fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = server.chat(prediction=PREDICTION, stop=stop, **fields)
    usage = answer.chunks[-1]["usage"] if stream else answer.json["usage"]
    num_chunks = 3 if stop else 6  # the stop token is one of the tokens
    assert details(usage)["accepted_prediction_tokens"] == 2 * num_chunks
    assert details(usage)["rejected_prediction_tokens"] == num_chunks
    plain = server.chat(stop=stop).json["usage"]
    assert usage["completion_tokens"] == plain["completion_tokens"], "rejected drafts are no completion tokens"
    assert usage["total_tokens"] == plain["total_tokens"]


@pytest.mark.parametrize(
    ("fields", "text", "kind"),
    [
        ({}, "Hello", "prose"),
        ({"response_format": {"type": "json_object"}}, "{}", "json"),
        ({"response_format": {"type": "regex", "regex": "a+"}}, "aaa", "grammar"),
        ({"tools": TOOLS}, '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', "tool_call"),
    ],
)
def test_drafts_are_counted_by_kind_of_output(server: Server, fields: dict[str, Any], text: str, kind: str) -> None:
    server.say(text, draft_tokens=3, accepted_draft_tokens=1, chunk_tokens=1000)
    num_tokens = server.chat(**fields).json["usage"]["completion_tokens"]
    assert metric(server, f'stoker_output_tokens_total{{kind="{kind}"}}') == num_tokens
    assert metric(server, f'stoker_output_draft_tokens_total{{kind="{kind}"}}') == 3
    assert metric(server, f'stoker_output_accepted_draft_tokens_total{{kind="{kind}"}}') == 1


def test_a_forced_call_that_was_cut_off_is_a_tool_call() -> None:
    assert output_kind(False, GrammarSpec("structural_tag", "{}")) == "tool_call"
    assert output_kind(False, GrammarSpec("json_schema", "{}")) == "json"


WINDOW_POOL = PoolReport(name="window128", num_blocks=40, free_blocks=30, cached_blocks=20)


def test_the_engines_counts_are_metrics(server: Server) -> None:
    padding = [0] * (MAX_DRAFTS - 2)
    reports = [
        DraftReport(source="cache", spans=4, drafted_at=[4, 3, *padding], accepted_at=[3, 1, *padding]),
        DraftReport(source="ngram", spans=2, drafted_at=[2, 0, *padding], accepted_at=[0, 0, *padding]),
    ]
    assert server.service.stats is not None
    server.service.stats = type(server.service.stats)(
        **{name: getattr(server.service.stats, name) for name in server.service.stats.__struct_fields__}
        | {"drafts": reports, "draft_step_s": 2.0, "undrafted_s": 5.0, "local_pools": [WINDOW_POOL]}
    )
    assert metric(server, 'stoker_kv_local_blocks{reach="window128"}') == 40
    assert metric(server, 'stoker_kv_local_blocks_free{reach="window128"}') == 30
    assert metric(server, "stoker_draft_speedup") == 2.5
    assert metric(server, "stoker_draft_undrafted_seconds_total") == 5
    assert metric(server, 'stoker_draft_spans_total{source="cache"}') == 4
    assert metric(server, 'stoker_draft_tokens_total{source="cache"}') == 7
    assert metric(server, 'stoker_accepted_draft_tokens_total{source="cache"}') == 4
    assert metric(server, 'stoker_draft_accepted_length{source="cache"}') == 2
    assert metric(server, 'stoker_draft_accepted_length{source="ngram"}') == 1
    assert metric(server, 'stoker_draft_position_tokens_total{position="1"}') == 6
    assert metric(server, 'stoker_accepted_draft_position_tokens_total{position="2"}') == 1
    assert metric(server, 'stoker_draft_position_tokens_total{position="3"}') == 0
