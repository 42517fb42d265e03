"""Check the input of a Responses request and convert its items to messages for `ChatTemplate`."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import InvalidRequest
from stoker.proto.openai.responses import InputItem, ResponsesRequest
from stoker.text.custom_tools import custom_arguments
from stoker.text.openai_messages import text_of
from stoker.text.reasoning_items import decode_reasoning
from stoker.text.response_tools import flat_name

_ROLES = ("user", "assistant", "system", "developer")
# Items of tools that OpenAI runs, and of its own bookkeeping. A text model has no use for them.
_IGNORED = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "computer_call",
        "computer_call_output",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "tool_search_call",
        "tool_search_output",
        "additional_tools",
        "compaction",
        "compaction_trigger",
        "configuration_update",
        "program",
        "program_output",
    }
)


def input_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the input of a Responses request as messages."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if body.input is None:
        raise InvalidRequest("Missing required parameter: 'input'.", param="input", code="missing_required_parameter")
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise InvalidRequest("Invalid 'input': empty array. Expected at least one item.", param="input")
    items = _Items(messages)
    for i, item in enumerate(body.input):
        items.add(item, f"input[{i}]")
    return messages


class _Items:
    """Joins items to messages: the reasoning, the text and the calls of one turn are one message of the assistant."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._call_ids: set[str] = set()
        self._reasoning = ""  # of the turn that the next item continues

    def add(self, item: InputItem, place: str) -> None:
        match item.type or "message":
            case "message":
                self._message(item, place)
            case "function_call":
                self._call(item, place, "" if item.arguments is None else item.arguments)
            case "custom_tool_call":
                text = _required(item.input, f"{place}.input")
                if not isinstance(text, str):
                    raise InvalidRequest(
                        f"Invalid value for '{place}.input': expected a string.", param=f"{place}.input"
                    )
                self._call(item, place, custom_arguments(text))
            case "function_call_output" | "custom_tool_call_output":
                self._output(item, place)
            case "reasoning":
                self._reasoning += _reasoning_of(item, place)
            case other if other not in _IGNORED:
                raise _unknown_item(other, place)

    def _message(self, item: InputItem, place: str) -> None:
        role = _required(item.role, f"{place}.role")
        if role not in _ROLES:
            raise InvalidRequest(
                f"Invalid value for '{place}.role': '{role}'. Supported values are: "
                + ", ".join(f"'{name}'" for name in _ROLES)
                + ".",
                param=f"{place}.role",
            )
        content = text_of(_required(item.content, f"{place}.content"), f"{place}.content")
        self._append({"role": role, "content": content})

    def _call(self, item: InputItem, place: str, arguments: str | dict[str, Any]) -> None:
        call_id = _required(item.call_id, f"{place}.call_id")
        name = flat_name(_required(item.name, f"{place}.name"), item.namespace)
        # The calls of one turn are separate items here, but one message for a template.
        if self._reasoning or not self._messages or self._messages[-1]["role"] != "assistant":
            self._append({"role": "assistant", "content": None})
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._messages[-1].setdefault("tool_calls", []).append(call)
        self._call_ids.add(call_id)

    def _output(self, item: InputItem, place: str) -> None:
        call_id = _required(item.call_id, f"{place}.call_id")
        if call_id not in self._call_ids:
            raise InvalidRequest(
                f"Invalid value for '{place}.call_id': '{call_id}' is not the call_id of an earlier function_call item.",
                param=f"{place}.call_id",
            )
        output = _required(item.output, f"{place}.output")
        if isinstance(output, dict):
            raise InvalidRequest(
                f"Invalid value for '{place}.output': expected a string or an array.", param=f"{place}.output"
            )
        self._append({"role": "tool", "tool_call_id": call_id, "content": text_of(output, f"{place}.output")})

    def _append(self, message: dict[str, Any]) -> None:
        reasoning, self._reasoning = self._reasoning, ""
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"] = reasoning
        self._messages.append(message)


def _reasoning_of(item: InputItem, place: str) -> str:
    """Return the text of a reasoning item: its content, else what its `encrypted_content` holds, else its summary."""
    if isinstance(item.content, str):
        return item.content
    content = "".join(part.text or "" for part in item.content or ())
    return content or decode_reasoning(item.encrypted_content) or "\n".join(p.text or "" for p in item.summary or ())


def _unknown_item(kind: str, place: str) -> InvalidRequest:
    if kind == "item_reference":
        return InvalidRequest(
            f"Invalid value for '{place}.type': items cannot be named by their id; send the item itself, or continue a"
            " stored response with 'previous_response_id'.",
            param=f"{place}.type",
            code="unsupported_content",
        )
    return InvalidRequest(
        f"Invalid value for '{place}.type': '{kind}'. Supported values are: 'message', 'function_call', "
        "'function_call_output', 'custom_tool_call', 'custom_tool_call_output' and 'reasoning'.",
        param=f"{place}.type",
    )


def _required(value: Any, place: str) -> Any:
    if value is None:
        raise InvalidRequest(f"Missing required parameter: '{place}'.", param=place, code="missing_required_parameter")
    return value
