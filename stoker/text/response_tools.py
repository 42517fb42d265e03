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

from stoker.base.errors import InvalidRequest
from stoker.proto.openai.decode import convert
from stoker.proto.openai.responses import ResponsesRequest
from stoker.proto.openai.tools import CLIENT_TOOLS, FlatTool, Function, ToolChoice, ToolReference
from stoker.sched.request import TextGrammar
from stoker.text.custom_tools import custom_function, custom_grammar
from stoker.text.tools import ToolPlan, checked_function, plan_tools, strict_names

_SEPARATOR = "__"
_TOOL_ITEMS = frozenset({"additional_tools", "tool_search_output"})  # items of `input` that add tools


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool under the name that its client knows."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of a Responses request: the plan for the model, and each tool by the name that the model knows."""

    plan: ToolPlan
    by_name: Mapping[str, CallableTool]


def responses_tools(request: ResponsesRequest, max_tools: int) -> ResponseTools:
    """Return the tools of a Responses request, with those that items of its input add."""
    functions: list[dict[str, Any]] = []
    by_name: dict[str, CallableTool] = {}
    all_functions: list[Function] = []
    inputs: dict[str, TextGrammar] = {}
    for tool, namespace, place in _given(request):
        name = _required(tool.name, f"{place}.name")
        flat = flat_name(name, namespace)
        if flat in by_name:
            raise InvalidRequest(
                f"Invalid '{place}.name': there are two tools that the model would know as {flat!r}; rename one.",
                param=f"{place}.name",
            )
        kind: Literal["function", "custom"] = "custom" if tool.type == "custom" else "function"
        grammar = custom_grammar(tool.format or None, f"{place}.format") if kind == "custom" else None
        function = _function(tool, flat, grammar)
        functions.append(checked_function(function, place))
        all_functions.append(function)
        if grammar is not None:
            inputs[flat] = grammar
        by_name[flat] = CallableTool(kind, name, namespace)
    choice, parallel = _flat_choice(request.tool_choice, by_name), request.parallel_tool_calls
    plan = plan_tools(functions, choice, parallel, max_tools, strict=strict_names(all_functions), inputs=inputs)
    return ResponseTools(plan, by_name)


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model knows a tool."""
    return name if not namespace else f"{namespace}{_SEPARATOR}{name}"


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


def _function(tool: FlatTool, name: str, grammar: TextGrammar | None) -> Function:
    if tool.type == "custom":
        return custom_function(name, tool.description, grammar)
    return Function(name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict)


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
