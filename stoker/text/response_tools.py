"""Check the tools of a Responses request, and flatten them to functions that every model knows.

- A function of a namespace is shown as `NAMESPACE__NAME`.
- A custom tool, whose input is text, is shown as a function with one text parameter.
- Hosted tools (web search, code interpreter, …) are left out: only OpenAI can run them.

The calls of an answer get their own names and types back (`CallableTool`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from stoker.base.errors import InvalidRequest
from stoker.proto.openai.decode import convert
from stoker.proto.openai.responses import ResponsesRequest
from stoker.proto.openai.tools import CLIENT_TOOLS, FlatTool, Function, ToolChoice, ToolReference
from stoker.text.tools import ToolPlan, checked_function, plan_tools

_SEPARATOR = "__"
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_TOOL_ITEMS = frozenset({"additional_tools", "tool_search_output"})  # items of `input` that add tools


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool under the name that its client knows."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None
    format: Mapping[str, Any] | None = None  # of a custom tool whose input must fit a grammar


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of a Responses request: the plan for the model, and each tool by the name that the model knows."""

    plan: ToolPlan
    by_name: Mapping[str, CallableTool]


def responses_tools(request: ResponsesRequest, max_tools: int) -> ResponseTools:
    """Return the tools of a Responses request, with those that items of its input add."""
    functions: list[dict[str, Any]] = []
    by_name: dict[str, CallableTool] = {}
    for tool, namespace, place in _given(request):
        name = _required(tool.name, f"{place}.name")
        flat = flat_name(name, namespace)
        if flat in by_name:
            raise InvalidRequest(
                f"Invalid '{place}.name': there are two tools that the model would know as {flat!r}; rename one.",
                param=f"{place}.name",
            )
        functions.append(checked_function(_function(tool, flat, place), place))
        kind: Literal["function", "custom"] = "custom" if tool.type == "custom" else "function"
        by_name[flat] = CallableTool(kind, name, namespace, tool.format or None)
    choice = _flat_choice(request.tool_choice, by_name)
    return ResponseTools(plan_tools(functions, choice, request.parallel_tool_calls, max_tools), by_name)


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model knows a tool."""
    return name if not namespace else f"{namespace}{_SEPARATOR}{name}"


def custom_arguments(text: str) -> str:
    """Return the input of a custom tool call as the arguments of the function that the model knows."""
    return msgspec.json.encode({"input": text}).decode().replace('{"input":', '{"input": ', 1)


def _given(request: ResponsesRequest) -> Iterator[tuple[FlatTool, str | None, str]]:
    """Yield the tools that the client runs, each with its namespace and its place in the body."""
    yield from _flattened(request.tools or [], "tools")
    if isinstance(request.input, list):
        for i, item in enumerate(request.input):
            if item.type in _TOOL_ITEMS:
                place = f"input[{i}].tools"
                tools = [convert(FlatTool, tool, f"{place}[{j}]") for j, tool in enumerate(item.tools or ())]
                yield from _flattened(tools, place)


def _flattened(tools: list[FlatTool], at: str) -> Iterator[tuple[FlatTool, str | None, str]]:
    for i, tool in enumerate(tools):
        if tool.type not in CLIENT_TOOLS:
            continue
        if tool.type != "namespace":
            yield tool, None, f"{at}[{i}]"
            continue
        name = _required(tool.name, f"{at}[{i}].name")
        for j, inner in enumerate(tool.tools or ()):
            if inner.type in ("function", "custom"):
                yield inner, name, f"{at}[{i}].tools[{j}]"


def _function(tool: FlatTool, name: str, place: str) -> Function:
    if tool.type != "custom":
        return Function(name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    described = [tool.description] if tool.description else []
    if tool.format is not UNSET and tool.format is not None and (form := _grammar(tool.format, place)):
        described.append(form)
    return Function(name=name, description="\n".join(described) or None, parameters=_INPUT)


def _grammar(form: Mapping[str, Any], place: str) -> str | None:
    """Return what the model is told about the grammar of a custom tool's input."""
    if form.get("type") == "text":
        return None
    syntax, definition = form.get("syntax"), form.get("definition")
    if form.get("type") != "grammar" or syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise InvalidRequest(
            f"Invalid '{place}.format': expected {{'type': 'text'}}, or {{'type': 'grammar'}} with 'syntax' (lark or"
            " regex) and 'definition'.",
            param=f"{place}.format",
            code="invalid_value",
        )
    return f"The input must match this grammar ({syntax}):\n{definition}"


def _flat_choice(choice: str | ToolChoice | None, by_name: Mapping[str, CallableTool]) -> str | ToolChoice | None:
    """Return the tool choice with the names that the model knows."""
    if not isinstance(choice, ToolChoice):
        return choice
    tools = choice.tools and [
        msgspec.structs.replace(one, name=_known(one, by_name)) if one.function is None else one for one in choice.tools
    ]
    name = _known(choice, by_name) if choice.type in CLIENT_TOOLS and choice.function is None else choice.name
    return msgspec.structs.replace(choice, name=name, tools=tools)


def _known(choice: ToolChoice | ToolReference, by_name: Mapping[str, CallableTool]) -> str | None:
    """Return the flat name of a chosen tool. Its namespace may be left out where only one tool has the name."""
    if choice.name is None or choice.namespace or choice.name in by_name:
        return choice.name and flat_name(choice.name, choice.namespace)
    found = [flat for flat, tool in by_name.items() if tool.name == choice.name]
    return found[0] if len(found) == 1 else choice.name


def _required(value: str | None, place: str) -> str:
    if value is None:
        raise InvalidRequest(f"Missing required parameter: '{place}'.", param=place, code="missing_required_parameter")
    return value
