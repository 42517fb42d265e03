"""`/v1/messages`: its request. Fields that are not declared are accepted, as in the other APIs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from stoker.proto.openai.chat import ThinkingOption
from stoker.proto.openai.field_types import Ignored, NotHonoured, TokenLimit
from stoker.proto.openai.fields import GenerationFields


class ContentSource(msgspec.Struct, kw_only=True):
    """The source of an image or a document. Only text in the request itself can be read."""

    type: str
    data: str | None = None
    media_type: str | None = None
    content: str | list[MessageBlock] | None = None


class MessageBlock(msgspec.Struct, kw_only=True):
    """A content block of any kind. Only the fields of its `type` are set."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None  # this and the next two: of `tool_use`
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # this and the next two: of `tool_result`
    content: str | list[MessageBlock] | dict[str, Any] | None = None
    is_error: bool | None = None
    source: ContentSource | str | None = None  # this and the next: of `document`; a text in `search_result`
    title: str | None = None
    cache_control: Ignored = None  # prefixes are always cached
    citations: Ignored = None


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[MessageBlock]


class MessageTool(msgspec.Struct, kw_only=True):
    """A tool. One with another `type` than "custom" is run or defined by Anthropic's own servers, and left out here."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Ignored = None


class MessageToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class MessageMetadata(msgspec.Struct, kw_only=True):
    user_id: str | None = None


class MessagesRequest(GenerationFields, kw_only=True):
    """The fields of GenerationFields that Anthropic's API does not have are extensions here too."""

    messages: list[InputMessage] | None = None
    system: str | list[MessageBlock] | None = None
    max_tokens: TokenLimit | None = None
    stop_sequences: list[str] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingOption | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    metadata: MessageMetadata | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Ignored = None
    inference_geo: Ignored = None
    container: NotHonoured = None
    context_management: NotHonoured = None
    mcp_servers: NotHonoured = None
    speed: NotHonoured = None

    @property
    def hosted_tools(self) -> list[str]:
        """Return the types of the tools that only Anthropic's own servers have."""
        return [tool.type for tool in self.tools or () if is_hosted(tool) and tool.type is not None]


def is_hosted(tool: MessageTool) -> bool:
    return tool.type is not None and tool.type != "custom"
