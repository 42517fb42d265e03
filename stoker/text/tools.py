"""Check the tools of a chat request and its tool choice. `response_tools.py` does it for the Responses API."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stoker.base.errors import InvalidRequest
from stoker.proto.openai.chat import ChatRequest
from stoker.proto.openai.tools import Function, FunctionName, Tool, ToolChoice, ToolReference
from stoker.sched.request import TextGrammar
from stoker.text.custom_tools import custom_function, custom_grammar

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
    custom: frozenset[str] = frozenset()  # names of the custom tools of a chat request

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
        return _chat_plan(request.tools, request.tool_choice, request.parallel_tool_calls, max_tools)
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
    return _chat_plan(tools, None, None, max_tools)


def _chat_plan(
    tools: list[Tool] | None, choice: str | ToolChoice | None, parallel: bool | None, max_tools: int
) -> ToolPlan:
    functions: list[Function] = []
    inputs: dict[str, TextGrammar] = {}
    custom: set[str] = set()
    for i, tool in enumerate(tools or ()):
        if tool.type not in ("function", "custom"):
            raise _unsupported(tool.type, f"tools[{i}].type")
        if (tool.function if tool.type == "function" else tool.custom) is None:
            place = f"tools[{i}].{tool.type}"
            raise InvalidRequest(f"Missing required parameter: '{place}'.", param=place)
        if tool.type == "function" and tool.function is not None:
            functions.append(tool.function)
        elif tool.custom is not None:
            given = _flat_format(tool.custom.format)
            grammar = custom_grammar(given, f"tools[{i}].custom.format")
            if grammar is not None:
                inputs[tool.custom.name] = grammar
            custom.add(tool.custom.name)
            functions.append(custom_function(tool.custom.name, tool.custom.description, grammar))
    offered = [
        checked_function(function, f"tools[{i}].{'custom' if function.name in custom else 'function'}")
        for i, function in enumerate(functions)
    ]
    plan = plan_tools(offered, choice, parallel, max_tools, strict=strict_names(functions), inputs=inputs)
    return replace(plan, custom=frozenset(custom))


def _flat_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a custom tool's format as the Responses API has it: without an object around the grammar."""
    nested = form.get("grammar") if form is not None else None
    return form if form is None or not isinstance(nested, dict) else {"type": form.get("type")} | nested


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
            nested_name = choice.function or choice.custom
            name = nested_name.name if nested_name is not None else choice.name
            place = f"{param}.{choice.type}.name" if nested_name is not None else f"{param}.name"
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
    nested = reference.function or reference.custom
    return nested.name if nested is not None else reference.name


def _unsupported(kind: str, place: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid value for '{place}': '{kind}'. Only 'function' and 'custom' tools are supported.",
        param=place,
        code="unsupported_tool",
    )
