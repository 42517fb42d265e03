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


class CustomCall(msgspec.Struct, kw_only=True):
    """A call of a custom tool, whose input is text."""

    name: str
    input: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET
    type: Literal["function", "custom"] = "function"


class CalledFunction(msgspec.Struct, kw_only=True):
    """A call in a message of a request. Clients of Ollama send its arguments as an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class PastToolCall(msgspec.Struct, kw_only=True):
    """A tool call in an assistant message of a request: of a function, or of a custom tool."""

    id: str
    function: CalledFunction | None = None
    custom: CustomCall | None = None
    type: str | None = None

    def __post_init__(self) -> None:
        if self.function is None and self.custom is None:
            raise ValueError("Object missing required field `function`")

    @property
    def called(self) -> CalledFunction:
        """Return the call as one of a function. The model knows a custom tool as a function of one text."""
        if self.function is not None:
            return self.function
        assert self.custom is not None
        return CalledFunction(name=self.custom.name, arguments={"input": self.custom.input})


class Function(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(msgspec.Struct, kw_only=True):
    """A tool whose input is text. `format` may hold a grammar of it."""

    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: str
    function: Function | None = None
    custom: CustomTool | None = None


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
    custom: FunctionName | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[ToolReference]


class ToolChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`{"type": "function", "function": {"name": ...}}`. In the Responses API, `name` stands beside `type`."""

    type: str
    function: FunctionName | None = None
    custom: FunctionName | None = None
    name: str | None = None
    namespace: str | None = None
    allowed_tools: AllowedTools | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolReference] | None = None
