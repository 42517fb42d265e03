"""OpenAI chat messages, made into what chat templates expect.

It checks and reshapes; it refuses to know any template's text beyond the few habits named in `Habits`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stoker.base.errors import InvalidRequest

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})

# In what shape a template takes a call's arguments: an object to serialize, the client's JSON text (which it prints as
# it is, so that a resent call has the very tokens that were sampled), or the text because it joins strings.
ArgumentsShape = Literal["object", "text"]


@dataclass(frozen=True, slots=True)
class Habits:
    """How one template wants its messages."""

    arguments: ArgumentsShape
    tests_for_none: bool  # it tells a call from an answer by `content is none`
    knows_developer: bool

    @classmethod
    def of(cls, source: str) -> Habits:
        takes_text = re.search(r"arguments\S*\s+is\s+(not\s+)?string|\+\s*tool\w*\[?\S*arguments\S*\s*\+", source)
        return cls(
            arguments="text" if takes_text else "object",
            tests_for_none=bool(re.search(r"content\S*\s+is\s+(not\s+)?none", source)),
            knows_developer="developer" in source,
        )


def uses_tools(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether the conversation so far has calls or results in it."""
    return any(
        isinstance(message, dict) and (message.get("role") == "tool" or message.get("tool_calls"))
        for message in messages
    )


def prepare(messages: Sequence[dict[str, Any]], habits: Habits) -> list[dict[str, Any]]:
    """Copies of the messages with their content as text and their calls in the shape that the template wants."""
    return [_prepare(message, f"messages[{place}]", habits) for place, message in enumerate(messages)]


def _prepare(message: Any, where: str, habits: Habits) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} is a {type(message).__name__}, not an object", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role is missing", param=f"{where}.role")
    prepared = {name: value for name, value in message.items() if value is not None}
    if role == "developer" and not habits.knows_developer:
        prepared["role"] = "system"
    content = _flatten(message.get("content"), f"{where}.content")
    calls = message.get("tool_calls")
    if calls:
        prepared["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{place}]", habits) for place, call in enumerate(_list(calls, where))
        ]
    else:
        prepared.pop("tool_calls", None)
    prepared["content"] = None if calls and not content and habits.tests_for_none else content
    return prepared


def _flatten(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} is neither a text nor a list of parts", param=where)
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"{where}[{place}] is a part of type {kind!r}; this model takes text only", param=where
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Any, where: str, habits: Habits) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function.name is missing", param=f"{where}.function")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if habits.arguments == "object" and isinstance(arguments, str):
        arguments = _parse(arguments)
    elif habits.arguments == "text" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _parse(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments  # what a model really wrote: the template prints it as a string
    if "\\ud" in arguments.lower():
        # A model may write half a surrogate pair, which no prompt can hold: its conversation must go on all the same.
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value if isinstance(value, dict) else arguments


def _list(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls is not a list", param=f"{where}.tool_calls")
    return calls
