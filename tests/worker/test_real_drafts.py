"""Drafts of a real engine on the way to the client: the same answers, the usage and the metrics."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real import CHAT, COMPLETIONS, RESPONSES, RealServer, serving_together
from resume_notes import Block, Seen, blocks_of, cuts, shown

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def servers(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealServer]]:
    """Two workers with the same model: one drafts, the other does not."""
    logs = tmp_path_factory.mktemp("logs")
    # In float64 the batch and the number of drafts do not change a sampled token.
    options = ("--threads", "1", "--dtype", "float64", "--served-name", "tiny")
    starts = [(logs / name, (*options, "--drafter", name)) for name in ("auto", "off")]
    with serving_together(tiny_folder, *starts) as begun:
        yield begun


def usage_without_drafts(usage: dict[str, Any]) -> dict[str, Any]:
    kept = dict(usage)
    kept["completion_tokens_details"] = {
        name: count for name, count in usage["completion_tokens_details"].items() if "prediction" not in name
    }
    return kept


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("stop", [None, "a"])
def test_a_prediction_changes_nothing_but_its_counts(
    servers: list[RealServer], temperature: float, stop: str | None
) -> None:
    fields = {
        "max_tokens": 48,
        "temperature": temperature,
        "seed": 11,
        "stop": stop,
        "cache_salt": f"{temperature}{stop}",
    }
    plain = servers[1].complete("The weather in Paris is", **fields).json
    text = plain["choices"][0]["text"]
    prediction = {"type": "content", "content": text}
    for _ in range(2):
        drafted = servers[0].complete("The weather in Paris is", prediction=prediction, **fields).json
        assert drafted["choices"] == plain["choices"]
        counts = drafted["usage"]["completion_tokens_details"]
        assert counts["accepted_prediction_tokens"] <= drafted["usage"]["completion_tokens"]
        assert counts["rejected_prediction_tokens"] >= 0
        plain = servers[1].complete("The weather in Paris is", **fields).json  # the second time, the prompt is cached
    if plain["usage"]["completion_tokens"] > 16:
        assert counts["accepted_prediction_tokens"] > 0


def test_a_forced_call_is_drafted_by_its_grammar(servers: list[RealServer]) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the weather?"}],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 200,
        "temperature": 0,
    }
    drafted, plain = (server.send(CHAT, body | {"model": server.model}).json for server in servers)
    calls = [answer["choices"][0]["message"]["tool_calls"][0]["function"] for answer in (drafted, plain)]
    assert calls[0] == calls[1]
    assert usage_without_drafts(drafted["usage"]) == plain["usage"]
    metrics = servers[0].metrics()
    assert metrics['stoker_accepted_draft_tokens_total{source="grammar"}'] > 0
    assert metrics['stoker_draft_accepted_length{source="grammar"}'] > 1
    assert metrics["stoker_draft_speedup"] > 0
    assert metrics['stoker_output_accepted_draft_tokens_total{kind="tool_call"}'] > 0


def test_a_worker_without_drafter_has_no_counts(servers: list[RealServer]) -> None:
    answer = servers[1].send(COMPLETIONS, {"model": servers[1].model, "prompt": "Hello", "max_tokens": 8})
    assert answer.json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert not any("draft" in name and value for name, value in servers[1].metrics().items())


# ---- resumed streams


STREAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "Tell me"}], "logprobs": True, "top_logprobs": 2}),
    "forced": (
        CHAT,
        {"messages": [{"role": "user", "content": "Tell me"}], "tools": [TOOL], "tool_choice": "required"},
    ),
    "completions": (COMPLETIONS, {"prompt": "Once upon a time", "echo": True}),
    "responses": (RESPONSES, {"input": "Tell me"}),
}


def stream(worker: RealServer, path: str, body: dict[str, Any]) -> list[Block]:
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 40}
    data = json.dumps({"model": "tiny", "stream": True, "seed": 11, "temperature": 0.5} | limit | body).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": "r-1", "x-stoker-stream": "1"}
    with urllib.request.urlopen(urllib.request.Request(worker.url + path, data, headers), timeout=120) as answer:
        return blocks_of(answer.read())


def joined(blocks: list[Block], path: str) -> tuple[str, list[str]]:
    """What a client collects: all text and arguments in order, and the tokens of the logprobs."""
    text, tokens = "", []
    for block in blocks:
        if not block.event or block.data is None:
            continue
        if path == RESPONSES:
            text += block.data.get("delta", "")
        for choice in block.data.get("choices", ()):
            delta = choice.get("delta", {})
            text += (delta.get("content") or "") + (choice.get("text") or "")
            text += "".join(call["function"].get("arguments", "") for call in delta.get("tool_calls", ()))
            tokens += [entry["token"] for entry in (choice.get("logprobs") or {}).get("content", ())]
    return text, tokens


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("drafts_first", [True, False])
def test_a_stream_with_drafts_continues_on_a_worker_without_and_the_reverse(
    servers: list[RealServer], name: str, drafts_first: bool
) -> None:
    path, body = STREAMED[name]
    first, second = servers if drafts_first else reversed(servers)
    stream(first, path, body)
    blocks = stream(first, path, body)  # what it wrote before is drafted now
    if drafts_first:
        assert any(len(line.split()) > 3 for block in blocks for line in block.lines if line.startswith(b":t"))
    whole = joined(blocks, path)
    places = cuts(blocks)
    for count in sorted({places[0], places[len(places) // 2], places[-1]}):
        num_events = {"events": len(shown(blocks[:count]))} if path == RESPONSES else {}
        resume = Seen().read(blocks[:count]).resume(1, **num_events)
        rest = stream(second, path, body | {"resume": resume})
        assert joined(blocks[:count] + rest, path) == whole
