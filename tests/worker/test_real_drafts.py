"""Drafts of a real engine on the way to the client: the same answers, the usage and the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real import COMPLETIONS, RealServer, serving_together

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
    # Exact numerics on both sides: a token then does not depend on the number of drafts.
    starts = [(logs / name, ("--drafter", name, "--numerics", "exact")) for name in ("auto", "off")]
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
    drafted, plain = (server.send("/v1/chat/completions", body | {"model": server.model}).json for server in servers)
    calls = [answer["choices"][0]["message"]["tool_calls"][0]["function"] for answer in (drafted, plain)]
    assert calls[0] == calls[1]
    assert usage_without_drafts(drafted["usage"]) == plain["usage"]
    metrics = servers[0].metrics()
    assert metrics['stoker_accepted_draft_tokens_total{source="grammar"}'] > 0
    assert metrics['stoker_draft_accepted_length{source="grammar"}'] > 1
    assert metrics['stoker_output_accepted_draft_tokens_total{kind="tool_call"}'] > 0


def test_a_worker_without_drafter_has_no_counts(servers: list[RealServer]) -> None:
    answer = servers[1].send(COMPLETIONS, {"model": servers[1].model, "prompt": "Hello", "max_tokens": 8})
    assert answer.json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert not any("draft" in name and value for name, value in servers[1].metrics().items())
