"""The tokens of a batch's line, read from the answer. The APIs name them differently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

_MOST = 1 << 40  # a worker that reports more is wrong; the sum of a batch must fit the store's numbers


@dataclass(frozen=True, slots=True)
class LineUsage:
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


class _LineAnswer(msgspec.Struct):
    usage: Any = None


def usage_of(answer: bytes) -> LineUsage:
    """Return the usage that an answer reports. What is missing or not a number counts as 0."""
    try:
        usage = msgspec.json.decode(answer, type=_LineAnswer).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        usage = None
    if not isinstance(usage, dict):
        return LineUsage()
    given = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    made = usage.get("completion_tokens_details") or usage.get("output_tokens_details")
    read = _count(usage, "cache_read_input_tokens")  # Anthropic's input_tokens do not include them
    output = _count(usage, "completion_tokens") or _count(usage, "output_tokens")
    prompt = _count(usage, "prompt_tokens") or _count(usage, "input_tokens") + read
    return LineUsage(
        input_tokens=prompt or max(_count(usage, "total_tokens") - output, 0),  # rerank has only a total
        cached_tokens=min(_count(given, "cached_tokens") or read, prompt),
        output_tokens=output,
        reasoning_tokens=min(_count(made, "reasoning_tokens"), output),
    )


def _count(table: Any, name: str) -> int:
    value = table.get(name) if isinstance(table, dict) else None
    return value if type(value) is int and 0 <= value <= _MOST else 0
