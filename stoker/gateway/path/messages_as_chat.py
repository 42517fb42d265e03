"""Runs a Messages request on a worker that knows only chat: translates its body. `translated_answer.py` translates the answer."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

import msgspec

from stoker.base.volatile_lines import without_volatile
from stoker.gateway.api.client_body import EndpointKind, RequestEnvelope, check_num_values, parse
from stoker.gateway.path.call import Call
from stoker.gateway.path.legs import Legs
from stoker.proto.anthropic.messages import MessagesRequest
from stoker.proto.anthropic.to_chat import to_chat
from stoker.proto.openai.chat import ChatRequest, Message
from stoker.proto.openai.decode import decode

# The fields of the translated request, besides the messages and the switch for thinking.
_PASSED = (
    "model",
    "stream",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "seed",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "chat_template_kwargs",
    "cache_salt",
    "priority",
    "timeout_s",
)


_OBJECTS = frozenset({"tools", "tool_choice", "response_format"})  # made here, with null where nothing was given


class _Runs(Protocol):
    def run(self, call: Call, legs: Legs) -> Awaitable[None]: ...


async def run_as_chat(dialect: _Runs, call: Call, legs: Legs, volatile_lines: Sequence[str]) -> None:
    """Run a Messages request in a dialect that has no such endpoint. Afterwards, the call is as it was."""
    envelope = call.envelope
    call.envelope, call.shows_thinking = _chat_envelope(envelope, volatile_lines)
    try:
        await dialect.run(call, legs)
    finally:
        call.envelope, call.shows_thinking = envelope, None


def _chat_envelope(envelope: RequestEnvelope, volatile_lines: Sequence[str]) -> tuple[RequestEnvelope, bool]:
    """Return the request as chat, and whether the client wants to see the model's thinking."""
    check_num_values(envelope.raw, "messages")
    given = decode(MessagesRequest, envelope.raw)
    chat = to_chat(given)
    body: dict[str, Any] = {
        name: value for name in _PASSED if (value := msgspec.to_builtins(getattr(chat, name))) is not None
    }
    body |= {name: _without_nulls(body[name]) for name in _OBJECTS & body.keys()}
    messages = chat.messages or []
    if messages and messages[0].role == "system" and isinstance(messages[0].content, str):
        messages[0].content = without_volatile(messages[0].content, volatile_lines)
    body["messages"] = [_message(message) for message in messages if message.content != "" or message.role != "system"]
    if given.thinking is not None:
        body["chat_template_kwargs"] = _switch(chat) | (chat.chat_template_kwargs or {})
    if chat.continue_final_message:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if chat.stream:
        body["stream_options"] = {"include_usage": True}
    translated = parse(EndpointKind.CHAT, msgspec.json.encode(body))
    translated.salt = envelope.salt
    return translated, not chat.hides_reasoning


def _switch(chat: ChatRequest) -> dict[str, Any]:
    return {"enable_thinking": chat.enable_thinking, "thinking": chat.enable_thinking}


def _message(message: Message) -> dict[str, Any]:
    found = {"role": message.role, "content": message.content}
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.called.name, "arguments": _text(call)}}
            for call in message.tool_calls
        ]
        return found | {"content": message.content or None, "tool_calls": calls}
    return found


def _text(call: Any) -> str:
    """Return the arguments of a past call as text, as OpenAI's API has them."""
    arguments = call.called.arguments
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _without_nulls(value: Any) -> Any:
    """Leave out null fields of objects: some servers refuse them. Schemas of tools keep theirs."""
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {
            name: one if name in ("parameters", "schema") else _without_nulls(one)
            for name, one in value.items()
            if one is not None
        }
    return value
