"""Tools, tool calls and `tool_choice`, in requests and answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

# The types of tools in the Responses API that the client runs. OpenAI runs the others: web search, code interpreter, ….
CLIENT_TOOLS = frozenset({"function", "custom", "namespace"})

ToolMode = Literal["none", "auto", "required"]


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class CalledFunction(msgspec.Struct, kw_only=True):
    """A call in a message of a request. Clients of Ollama send its arguments as an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class PastToolCall(msgspec.Struct, kw_only=True):
    """A tool call in an assistant message of a request."""

    id: str
    function: CalledFunction
    type: str | None = None


class Function(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: str
    function: Function | None = None


class FlatTool(msgspec.Struct, kw_only=True):
    """A tool in the Responses API. A namespace holds further tools."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | UnsetType | None = UNSET  # of a custom tool: its input is text, or fits a grammar
    tools: list[FlatTool] | UnsetType | None = UNSET


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


class ToolReference(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    namespace: str | None = None
    function: FunctionName | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[ToolReference]


class ToolChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`{"type": "function", "function": {"name": ...}}`. In the Responses API, `name` stands beside `type`."""

    type: str
    function: FunctionName | None = None
    name: str | None = None
    namespace: str | None = None
    allowed_tools: AllowedTools | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolReference] | None = None
