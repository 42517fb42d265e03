"""The scripted model keeps to its script however it is scheduled, and through a real worker with 100,000 tokens of context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway.real_fleet import RealFleet, real_fleet

from scripted.script_folder import call, python_path, write_script

ANSWERS = [call("read", path="a.txt"), "Now I know it.", "Goodbye."]


@pytest.fixture(scope="module")
def fleet(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    work = tmp_path_factory.mktemp("scripted")
    folder = write_script(work / "model", smollm2, ANSWERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path())
        with real_fleet(folder, work, 2, worker_options=["--dtype", "float32", "--kv-blocks", "20000"]) as fleet:
            yield fleet


def test_a_conversation_follows_the_script(fleet: RealFleet) -> None:
    messages = [{"role": "user", "content": "Read it."}]
    for expected in [*ANSWERS[1:], ANSWERS[-1]]:
        messages += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "And now? " * 20}]
        exchange = fleet.ask({"messages": messages, "stream": True, "stream_options": {"include_usage": True}})
        exchange.wait()
        [choice] = exchange.said[0].values()
        assert choice["content"] == expected


def test_a_call_is_parsed(fleet: RealFleet) -> None:
    tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
    exchange = fleet.ask({"messages": [{"role": "user", "content": "Read it."}], "tools": [tool]})
    exchange.wait()
    [choice] = exchange.said[0].values()
    assert (choice["name"], choice["arguments"], choice["finish"]) == ("read", '{"path": "a.txt"}', "tool_calls")


@pytest.mark.slow
def test_a_prompt_of_a_hundred_thousand_tokens_is_cached(fleet: RealFleet) -> None:
    """Slow: a minute for the masks of 100,000 tokens, which the engine builds and this model does not need."""
    text = "The quick brown fox jumps over the lazy dog. " * 10_000
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "?"},
    ]
    for cached in (0.0, 0.99):
        exchange = fleet.ask({"messages": messages})
        exchange.wait(180)
        usage = exchange.usage
        assert usage["prompt_tokens"] > 100_000
        assert usage["prompt_tokens_details"]["cached_tokens"] >= cached * usage["prompt_tokens"]
        assert exchange.json["choices"][0]["message"]["content"] == ANSWERS[1]
