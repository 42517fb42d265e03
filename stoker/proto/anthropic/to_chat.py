"""Translates a Messages request to a chat request, so that templates, tools and prefix keys know one format.

Errors name the fields of the Messages request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker.base.errors import InvalidRequest
from stoker.proto.anthropic.messages import ContentSource, InputMessage, MessageBlock, MessagesRequest, is_hosted
from stoker.proto.openai.chat import ChatRequest, Message
from stoker.proto.openai.fields import GenerationFields, JsonSchema, ResponseFormat
from stoker.proto.openai.tools import CalledFunction, Function, FunctionName, PastToolCall, Tool, ToolChoice, ToolMode

_SHARED = tuple(name for name in GenerationFields.__struct_fields__ if name != "metadata")
_EFFORTS = {"xhigh": "high", "max": "high"}  # templates know low, medium and high
_THINKING = ("enable_thinking", "thinking")
# What Anthropic's servers did for an earlier answer. A model here cannot see it.
_HOSTED_BLOCKS = ("server_tool_use", "redacted_thinking", "mcp_tool_use", "mcp_tool_result", "container_upload")


@dataclass(slots=True)
class _ChatTurn:
    """A chat message in the making. Its texts are joined once, at the end."""

    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[PastToolCall] = field(default_factory=list)
    tool_call_id: str | None = None

    def message(self) -> Message:
        return Message(
            role=self.role,
            content="\n".join(self.texts),
            reasoning_content="\n".join(self.reasoning) or None,
            tool_calls=self.calls or None,
            tool_call_id=self.tool_call_id,
        )


def to_chat(body: MessagesRequest) -> ChatRequest:
    """Return the chat request that asks for the same answer."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SHARED}
    if body.stop_sequences is not None:
        fields["stop"] = body.stop_sequences
    messages = _messages(body)
    choice, parallel = _choice(body)
    config = body.output_config
    form = body.output_format or (config.format if config is not None else None)
    effort = config.effort if config is not None else None
    kwargs = body.chat_template_kwargs or {}
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    is_shown = any(kwargs.get(name) for name in _THINKING) or (thinks and not _is_omitted(body))
    return ChatRequest(
        **fields,
        messages=messages,
        max_tokens=body.max_tokens,
        tools=_tools(body) or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=None
        if form is None
        else ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema)),
        reasoning_effort=None if effort is None else _EFFORTS.get(effort, effort),
        enable_thinking=thinks,
        include_reasoning=is_shown,
        chat_template_kwargs=body.chat_template_kwargs,
        # An answer that the client has begun is continued.
        continue_final_message=True if _ends_with_answer(messages) else None,
    )


def _is_omitted(body: MessagesRequest) -> bool:
    return body.thinking is not None and body.thinking.display == "omitted"


def _ends_with_answer(messages: list[Message] | None) -> bool:
    last = messages[-1] if messages else None
    return last is not None and last.role == "assistant" and not last.tool_calls and bool(last.content)


def _messages(body: MessagesRequest) -> list[Message] | None:
    if body.messages is None and body.prompt_token_ids is not None:
        return None
    if body.messages is None:
        raise InvalidRequest("messages: Field required", param="messages", code="missing_required_parameter")
    if not body.messages:
        raise InvalidRequest("messages: at least one message is required", param="messages")
    chat: list[_ChatTurn] = []
    if body.system:
        text = body.system if isinstance(body.system, str) else _text(body.system, "system")
        if text:
            chat.append(_ChatTurn("system", [text]))
    call_ids: set[str] = set()
    for i, message in enumerate(body.messages):
        place = f"messages[{i}].content"
        if message.role == "assistant":
            _add_answer(message, place, chat, call_ids)
        else:
            _add_question(message, place, chat, call_ids)
    return [turn.message() for turn in chat]


def _add_question(message: InputMessage, place: str, chat: list[_ChatTurn], call_ids: set[str]) -> None:
    """Add a user or system message: each tool result is a message of its own, in order."""
    if isinstance(message.content, str):
        _add_texts(message.role, [message.content], chat)
        return
    texts: list[str] = []
    for j, block in enumerate(message.content):
        if block.type == "tool_result":
            if texts:
                _add_texts(message.role, texts, chat)
                texts = []
            chat.append(_tool_result(block, f"{place}[{j}]", call_ids))
        else:
            texts += _texts(block, f"{place}[{j}]")
    if texts or not message.content:
        _add_texts(message.role, texts, chat)


def _add_texts(role: str, texts: list[str], chat: list[_ChatTurn]) -> None:
    """Add texts to the last turn if it has the same role, which is not the system's: some templates refuse two such turns."""
    if role == "system" or not chat or chat[-1].role != role:
        chat.append(_ChatTurn(role))
    chat[-1].texts += texts


def _tool_result(block: MessageBlock, place: str, call_ids: set[str]) -> _ChatTurn:
    if block.tool_use_id is None:
        raise _missing(f"{place}.tool_use_id")
    if block.tool_use_id not in call_ids:
        raise InvalidRequest(
            f"{place}.tool_use_id: '{block.tool_use_id}' is not the id of a `tool_use` block in an earlier message",
            param=f"{place}.tool_use_id",
        )
    content = block.content
    if isinstance(content, dict):
        raise InvalidRequest(f"{place}.content: expected a string or a list of blocks", param=f"{place}.content")
    if isinstance(content, list):
        # An agent cannot take a result back, so what a text model cannot read must not end the conversation.
        content = "\n".join(
            text
            for j, part in enumerate(content)
            for text in (_texts(part, f"{place}.content[{j}]") if _is_text(part) else [_omitted(part)])
        )
    if not content and block.is_error:
        content = "Error"
    return _ChatTurn("tool", [content or ""], tool_call_id=block.tool_use_id)


def _add_answer(message: InputMessage, place: str, chat: list[_ChatTurn], call_ids: set[str]) -> None:
    if not chat or chat[-1].role != "assistant":
        chat.append(_ChatTurn("assistant"))
    turn = chat[-1]
    blocks = [MessageBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    for j, block in enumerate(blocks):
        if block.type == "tool_use":
            turn.calls.append(_past_call(block, f"{place}[{j}]"))
            call_ids.add(turn.calls[-1].id)
        elif block.type == "thinking":
            turn.reasoning.append(block.thinking or "")
        elif block.type not in _HOSTED_BLOCKS and not block.type.endswith("_tool_result"):
            turn.texts += _texts(block, f"{place}[{j}]")


def _past_call(block: MessageBlock, place: str) -> PastToolCall:
    if block.id is None:
        raise _missing(f"{place}.id")
    if block.name is None:
        raise _missing(f"{place}.name")
    return PastToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=block.input or {}))


def _text(blocks: list[MessageBlock], place: str) -> str:
    return "\n".join(text for j, block in enumerate(blocks) for text in _texts(block, f"{place}[{j}]"))


def _is_text(block: MessageBlock) -> bool:
    source = block.source
    is_document = block.type == "document" and isinstance(source, ContentSource) and source.type in ("text", "content")
    return block.type in ("text", "search_result") or is_document


def _texts(block: MessageBlock, place: str) -> list[str]:
    """Return the text of a block, with the title of a document in front."""
    if block.type == "text":
        if block.text is None:
            raise _missing(f"{place}.text")
        return [block.text]
    if not _is_text(block):
        raise InvalidRequest(
            f"{place}.type: '{block.type}' blocks are not supported; this model accepts only text",
            param=f"{place}.type",
            code="unsupported_content",
        )
    title = [block.title] if block.title else []
    held = block.content if block.type == "search_result" else None
    if isinstance(block.source, ContentSource) and block.type == "document":
        held = block.source.data if block.source.type == "text" else block.source.content
    if isinstance(held, list):
        return [*title, *(text for j, one in enumerate(held) for text in _texts(one, f"{place}.content[{j}]"))]
    return [*title, held] if isinstance(held, str) else title


def _omitted(block: MessageBlock) -> str:
    return f"[{block.type[:32]} left out: this model reads only text]"


def _tools(body: MessagesRequest) -> list[Tool]:
    tools = []
    for i, tool in enumerate(body.tools or ()):
        if is_hosted(tool):
            continue
        if tool.name is None:
            raise _missing(f"tools[{i}].name")
        function = Function(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        tools.append(Tool(type="function", function=function))
    return tools


def _choice(body: MessagesRequest) -> tuple[ToolMode | ToolChoice | None, bool | None]:
    choice = body.tool_choice
    if choice is None:
        return None, None
    parallel = False if choice.disable_parallel_tool_use else None
    match choice.type:
        case "any":
            return "required", parallel
        case "tool":
            if choice.name is None:
                raise _missing("tool_choice.name")
            return ToolChoice(type="function", function=FunctionName(name=choice.name)), parallel
        case "none":
            return "none", parallel
        case "auto":
            return "auto", parallel


def _missing(place: str) -> InvalidRequest:
    return InvalidRequest(f"{place}: Field required", param=place, code="missing_required_parameter")
