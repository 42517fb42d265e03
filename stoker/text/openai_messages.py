"""Check the messages of a chat request and convert them to dicts for `ChatTemplate`."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import InvalidRequest
from stoker.proto.openai.chat import Message
from stoker.proto.openai.fields import ContentPart
from stoker.proto.openai.tools import CalledFunction, PastToolCall

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")


def template_messages(messages: list[Message] | None) -> list[dict[str, Any]]:
    """Return the messages of a chat request."""
    if messages is None:
        raise InvalidRequest(
            "Missing required parameter: 'messages'.", param="messages", code="missing_required_parameter"
        )
    if not messages:
        raise InvalidRequest("Invalid 'messages': empty array. Expected at least one message.", param="messages")
    call_ids: set[str] = set()
    return [_template_message(message, f"messages[{i}]", call_ids) for i, message in enumerate(messages)]


def text_of(content: str | list[ContentPart], place: str) -> str:
    """Return the text parts, joined by line breaks as in other servers of open models."""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type in _TEXT_PARTS and part.text is not None:
            texts.append(part.text)
        elif part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
        elif part.type in (*_TEXT_PARTS, "refusal"):
            field = f"{place}[{i}].{'refusal' if part.type == 'refusal' else 'text'}"
            raise InvalidRequest(f"Missing required parameter: '{field}'.", param=field)
        else:
            field = f"{place}[{i}].type"
            raise InvalidRequest(
                f"Invalid value for '{field}': '{part.type}'. This model accepts only text.",
                param=field,
                code="unsupported_content",
            )
    return "\n".join(texts)


def _template_message(message: Message, place: str, call_ids: set[str]) -> dict[str, Any]:
    if message.role not in _ROLES:
        raise InvalidRequest(
            f"Invalid value for '{place}.role': '{message.role}'. Supported values are: "
            + ", ".join(f"'{role}'" for role in _ROLES)
            + ".",
            param=f"{place}.role",
            code="invalid_value",
        )
    result: dict[str, Any] = {"role": message.role}
    if message.name is not None:
        result["name"] = message.name
    if message.role == "assistant":
        _add_assistant(message, place, call_ids, result)
        return result
    if message.content is None:
        raise InvalidRequest(
            f"Invalid value for '{place}.content': expected a string, got null.", param=f"{place}.content"
        )
    result["content"] = text_of(message.content, f"{place}.content")
    if message.role == "tool":
        result["tool_call_id"] = _answered_call(message.tool_call_id, f"{place}.tool_call_id", call_ids)
    elif message.role == "function":
        result["role"] = "tool"
        if message.name is None:
            raise InvalidRequest(f"Missing required parameter: '{place}.name'.", param=f"{place}.name")
    return result


def _add_assistant(message: Message, place: str, call_ids: set[str], result: dict[str, Any]) -> None:
    content = message.content if message.content is not None else message.refusal
    reasoning = message.reasoning_content
    if reasoning is None and isinstance(message.reasoning, str):
        reasoning = message.reasoning
    if content is None and not message.tool_calls and message.function_call is None and reasoning is None:
        raise InvalidRequest(
            f"Invalid value for '{place}.content': expected a string, got null, in a message without tool calls.",
            param=f"{place}.content",
        )
    result["content"] = "" if content is None else text_of(content, f"{place}.content")
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        call_ids.update(call.id for call in message.tool_calls)
        result["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    elif message.function_call is not None:
        function = _template_function(message.function_call)
        result["tool_calls"] = [{"id": f"call_{place}", "type": "function", "function": function}]


def _template_call(call: PastToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": _template_function(call.called)}


def _template_function(function: CalledFunction) -> dict[str, Any]:
    return {"name": function.name, "arguments": "" if function.arguments is None else function.arguments}


def _answered_call(call_id: str | None, place: str, call_ids: set[str]) -> str:
    if call_id is None:
        raise InvalidRequest(f"Missing required parameter: '{place}'.", param=place, code="missing_required_parameter")
    if call_id not in call_ids:
        raise InvalidRequest(
            f"Invalid value for '{place}': '{call_id}' is not the id of a tool call in an earlier assistant message.",
            param=place,
        )
    return call_id
