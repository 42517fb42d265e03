"""Runs tool parsers and reasoning parsers over text in chunks, and joins what they stream."""

from __future__ import annotations

import random
from typing import Any

from stoker.text.parsers.contract import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["query"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
SEARCH = '{"query": "say \\"}{\\" ü", "days": 3}'
CALLS = [("search", SEARCH), ("now", "{}")]  # name and arguments


def parse_calls(name: str, chunks: list[str]) -> list[Delta]:
    parser = TOOL_PARSERS.get(name)(TOOLS)
    deltas = [delta for chunk in chunks for delta in parser.push(chunk)]
    return deltas + parser.flush()


def joined(deltas: list[Delta]) -> list[tuple[str, ...]]:
    """Return ("text", text) and ("call", name, arguments) in order, with the deltas joined. Call ids are left out."""
    whole: list[tuple[str, ...]] = []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            if not whole or whole[-1][0] != "text":
                whole.append(("text", ""))
            whole[-1] = ("text", whole[-1][1] + delta.text)
        elif isinstance(delta, ToolCallStart):
            assert delta.index == sum(kind == "call" for kind, *_ in whole)
            whole.append(("call", delta.name, ""))
        else:
            kind, called, arguments = whole[-1]
            whole[-1] = (kind, called, arguments + delta.text)
    return whole


def parse_reasoning(name: str, chunks: list[str], starts_inside: bool) -> tuple[str, str]:
    """Return the reasoning and the text."""
    parser = REASONING_PARSERS.get(name)(starts_inside)
    deltas = [delta for chunk in chunks for delta in parser.push(chunk)] + parser.flush()
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    return reasoning, "".join(delta.text for delta in deltas if not isinstance(delta, ReasoningDelta))


def random_chunks(text: str, seed: int) -> list[str]:
    dice = random.Random(seed)
    chunks, at = [], 0
    while at < len(text):
        size = dice.choice([1, 1, 2, 3, 7, 40])
        chunks.append(text[at : at + size])
        at += size
    return chunks
