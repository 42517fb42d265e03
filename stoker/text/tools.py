"""Check the tools of a chat request and its tool choice. `response_tools.py` does it for the Responses API."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stoker.base.errors import InvalidRequest
from stoker.proto.openai.chat import ChatRequest
from stoker.proto.openai.tools import Function, FunctionName, Tool, ToolChoice, ToolReference
from stoker.sched.request import TextGrammar

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")

ToolMode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The tools of a request. The prompt shows all `offered` tools, so that `tool_choice` does not change the cached prefix.
    Only `allowed` tools may be called."""

    mode: ToolMode = "none"
    offered: list[dict[str, Any]] = field(default_factory=list)
    allowed: list[dict[str, Any]] = field(default_factory=list)
    parallel: bool = True
    strict: frozenset[str] = frozenset()  # names of the tools whose calls must fit their schema, also if none is forced
    inputs: Mapping[str, TextGrammar] = field(default_factory=dict)  # the grammars of custom tools, by name

    @property
    def holds_calls(self) -> bool:
        """True if the model may call tools or not, and some calls must fit their schema."""
        return self.mode == "auto" and any(tool["function"]["name"] in self.strict for tool in self.allowed)

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The allowed tools, each custom tool with the grammar of its input, for the grammar of the answer."""
        return [self._with_input(tool) for tool in self.allowed]

    @property
    def held(self) -> list[dict[str, Any]]:
        """The callable tools. Those that are not strict take any object."""
        return [tool if tool["function"]["name"] in self.strict else _loose(tool) for tool in self.callable]

    def _with_input(self, tool: dict[str, Any]) -> dict[str, Any]:
        found = self.inputs.get(tool["function"]["name"])
        return tool if found is None else tool | {"input_grammar": found}

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """The tools that the template shows. None for tool_choice "none", so that the model does not call one."""
        return self.offered if self.mode != "none" and self.offered else None


def chat_tools(request: ChatRequest, max_tools: int) -> ToolPlan:
    """Return the tools of a chat request, or its `functions`, the older form of the same."""
    if request.functions is None and request.function_call is None:
        given = [tool.function for tool in request.tools or () if tool.function is not None]
        return plan_tools(
            _chat_functions(request.tools),
            request.tool_choice,
            request.parallel_tool_calls,
            max_tools,
            strict=strict_names(given),
        )
    if request.tools:
        raise InvalidRequest("Give either 'tools' or 'functions', which is their older form.", param="functions")
    older = request.functions or []
    functions = [checked_function(one, f"functions[{i}]") for i, one in enumerate(older)]
    choice = _older_choice(request.function_call)
    return plan_tools(functions, choice, False, max_tools, "function_call", strict=strict_names(older))


def _older_choice(choice: str | FunctionName | None) -> str | ToolChoice | None:
    return ToolChoice(type="function", function=choice) if isinstance(choice, FunctionName) else choice


def offered_tools(tools: list[Tool] | None, max_tools: int) -> ToolPlan:
    """Return the plan for tools with tool_choice "auto"."""
    return plan_tools(_chat_functions(tools), None, None, max_tools)


def _chat_functions(tools: list[Tool] | None) -> list[dict[str, Any]]:
    functions = []
    for i, tool in enumerate(tools or ()):
        if tool.type != "function":
            raise _unsupported(tool.type, f"tools[{i}].type")
        if tool.function is None:
            raise InvalidRequest(f"Missing required parameter: 'tools[{i}].function'.", param=f"tools[{i}].function")
        functions.append(checked_function(tool.function, f"tools[{i}].function"))
    return functions


def strict_names(functions: Iterable[Function]) -> frozenset[str]:
    return frozenset(function.name for function in functions if function.strict)


def _loose(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool["function"]["name"]}}


def checked_function(function: Function, place: str) -> dict[str, Any]:
    if not _NAME.fullmatch(function.name):
        raise InvalidRequest(
            f"Invalid '{place}.name': {function.name[:80]!r}. Expected 1 to 128 letters, digits, '_', '-' or '.'.",
            param=f"{place}.name",
            code="invalid_value",
        )
    parameters = function.parameters
    if parameters is not None and parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"Invalid schema for function '{function.name}': schema must be a JSON Schema of 'type: \"object\"', "
            f"got 'type: {parameters['type']!r}'.",
            param=f"{place}.parameters",
            code="invalid_function_parameters",
        )
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    shown["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": shown}


def plan_tools(
    offered: list[dict[str, Any]],
    choice: str | ToolChoice | None,
    parallel: bool | None,
    max_tools: int,
    param: str = "tool_choice",
    *,
    strict: frozenset[str] = frozenset(),
    inputs: Mapping[str, TextGrammar] | None = None,
) -> ToolPlan:
    """Return the plan for the offered tools. `strict` and `inputs` are fields of it."""
    if len(offered) > max_tools:
        raise InvalidRequest(
            f"Invalid 'tools': got {len(offered)} tools, at most {max_tools} are allowed.", param="tools"
        )
    parallel = parallel is not False
    mode: ToolMode
    match choice:
        case None | "auto":
            mode, allowed = ("auto" if offered else "none"), offered
        case "none":
            mode, allowed = "none", []
        case "required":
            mode, allowed = "required", offered
        case ToolChoice(type="function" | "custom"):
            name = choice.function.name if choice.function is not None else choice.name
            place = f"{param}.function.name" if choice.function is not None else f"{param}.name"
            mode, allowed, parallel = "named", [_named(offered, name, place, param)], False
        case ToolChoice(type="allowed_tools"):
            nested = choice.allowed_tools
            references = nested.tools if nested is not None else choice.tools or []
            mode = (nested.mode if nested is not None else choice.mode) or "auto"
            allowed = [_named(offered, _name_of(tool), "tool_choice.tools") for tool in references]
        case ToolChoice():
            raise _unsupported(choice.type, "tool_choice.type")
        case _:
            raise InvalidRequest(f"Invalid value for 'tool_choice': '{choice}'.", param="tool_choice")
    if mode in ("required", "named") and not allowed:
        raise InvalidRequest(f"'{param}' is only allowed when 'tools' are specified.", param=param)
    return ToolPlan(mode, offered, allowed, parallel, strict, inputs or {})


def _named(offered: list[dict[str, Any]], name: str | None, place: str, param: str = "tool_choice") -> dict[str, Any]:
    if name is None:
        raise InvalidRequest(f"Missing required parameter: '{place}'.", param=place)
    for tool in offered:
        if tool["function"]["name"] == name:
            return tool
    raise InvalidRequest(f"Tool choice '{name}' not found in 'tools' parameter.", param=param)


def _name_of(reference: ToolReference) -> str | None:
    return reference.function.name if reference.function is not None else reference.name


def _unsupported(kind: str, place: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid value for '{place}': '{kind}'. Only 'function' tools are supported.",
        param=place,
        code="unsupported_tool",
    )
