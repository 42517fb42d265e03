"""Convert OpenAI chat messages to the form that a chat template expects (`TemplateTraits`)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stoker.base.errors import InvalidRequest

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})

# How a template takes the arguments of a tool call. "object": it serializes them. "text": it prints the client's JSON text as it
# is, so that a call that is sent back has exactly the tokens that were sampled, or it concatenates strings. Compact text gets white
# space first.
ArgumentsShape = Literal["object", "text"]


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template expects of its messages, found in its source."""

    arguments: ArgumentsShape
    tests_for_none: bool  # it recognizes a tool call by `content is none`
    knows_developer: bool
    knows_thinking: bool  # it calls the reasoning of an answer `thinking`

    @classmethod
    def of(cls, source: str) -> TemplateTraits:
        takes_text = re.search(r"arguments\S*\s+is\s+(not\s+)?string|\+\s*tool\w*\[?\S*arguments\S*\s*\+", source)
        return cls(
            arguments="text" if takes_text else "object",
            tests_for_none=bool(re.search(r"content\S*\s+is\s+(not\s+)?none", source)),
            knows_developer="developer" in source,
            knows_thinking="message.thinking" in source,
        )


def uses_tools(messages: Sequence[dict[str, Any]]) -> bool:
    """Return True if the conversation contains tool calls or tool results."""
    return any(
        isinstance(message, dict) and (message.get("role") == "tool" or message.get("tool_calls"))
        for message in messages
    )


def with_early_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with one system message at most, at the start. Later ones become messages of the user.

    They keep their place, so that the tokens before them stay the same.
    """
    start = next((i for i, message in enumerate(messages) if not _is_system(message)), len(messages))
    leading, rest = list(messages[:start]), messages[start:]
    if len(leading) > 1 and all(isinstance(message.get("content"), str) for message in leading):
        leading = [leading[0] | {"content": "\n".join(message["content"] for message in leading)}]
    return [*leading, *(message | {"role": "user"} if _is_system(message) else message for message in rest)]


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ("system", "developer")


def prepare(messages: Sequence[dict[str, Any]], traits: TemplateTraits) -> list[dict[str, Any]]:
    """Return copies of the messages, with their content as text and their calls in the form that the template expects."""
    return [_prepare(message, f"messages[{place}]", traits) for place, message in enumerate(messages)]


def _prepare(message: Any, where: str, traits: TemplateTraits) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} is a {type(message).__name__}, not an object", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role is missing", param=f"{where}.role")
    prepared = {name: value for name, value in message.items() if value is not None}
    if role == "developer" and not traits.knows_developer:
        prepared["role"] = "system"
    content = _flatten(message.get("content"), f"{where}.content")
    calls = message.get("tool_calls")
    if calls:
        prepared["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{place}]", traits) for place, call in enumerate(_list(calls, where))
        ]
    else:
        prepared.pop("tool_calls", None)
    if traits.knows_thinking and "reasoning_content" in prepared and not (calls and content):
        prepared.setdefault("thinking", prepared["reasoning_content"])
    prepared["content"] = None if calls and not content and traits.tests_for_none else content
    return prepared


def _flatten(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} is neither a string nor a list of parts", param=where)
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"{where}[{place}] is a part of type {kind!r}; this model accepts only text", param=where
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Any, where: str, traits: TemplateTraits) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function.name is missing", param=f"{where}.function")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if traits.arguments == "object" and isinstance(arguments, str):
        arguments = _parse(arguments)
    elif traits.arguments == "text":
        arguments = _spaced(arguments) if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _spaced(arguments: str) -> str:
    """Return compact JSON with the white space that models write. Other text is returned unchanged.

    JavaScript clients parse the arguments of a call and send them back without white space. Their tokens would differ from those
    that were sampled, so a prefix cache would lose everything after the first difference.
    """
    colon = arguments.find('":')
    if colon < 0 or arguments[colon + 2 : colon + 3].isspace():  # much faster than parsing
        return arguments
    try:
        value = json.loads(arguments)
        is_compact = json.dumps(value, ensure_ascii=False, separators=(",", ":")) == arguments
    except (ValueError, RecursionError):
        return arguments
    return json.dumps(value, ensure_ascii=False) if is_compact else arguments


def _parse(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments  # the model wrote invalid JSON: the template prints it as a string
    if "\\ud" in arguments.lower():
        # A model may write half a surrogate pair, which cannot be encoded. The conversation must continue nevertheless.
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value if isinstance(value, dict) else arguments


def _list(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls is not a list", param=f"{where}.tool_calls")
    return calls
