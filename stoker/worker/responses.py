"""`/v1/responses`, without state: all of the conversation is in the request, and nothing is kept of the answer."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from stoker.base.errors import InvalidRequest
from stoker.proto.openai import (
    InputItem,
    ReasoningConfig,
    ResponseFormat,
    ResponsesRequest,
    TextConfig,
    decode,
)
from stoker.proto.sse import encode_event
from stoker.worker.context import CONTEXT, WorkerContext, read_body
from stoker.worker.errors import Problem
from stoker.worker.generate import Choice, pieces
from stoker.worker.messages import text_of
from stoker.worker.prompt import (
    Asked,
    Conversation,
    Prompt,
    chat_parser,
    forced_constraint,
    make_choices,
    needs_special_tokens,
    new_id,
    num_chars,
    render,
    template_kwargs,
    usage_report,
)
from stoker.worker.record import RECORD
from stoker.worker.responses_writer import ResponseEvent, ResponseObject, ResponseWriter
from stoker.worker.sampling import check_token_ids, resolve_constraint
from stoker.worker.stream import open_stream
from stoker.worker.tools import ToolPlan, responses_tools

_ROLES = ("user", "assistant", "system", "developer")


@dataclass(frozen=True, slots=True)
class ResponseAnswer:
    choice: Choice
    response: ResponseObject


async def responses(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    body = decode(ResponsesRequest, await read_body(request, context.config))
    answer = await prepare_response(context, body)
    writer = ResponseWriter(answer.response, context.text.tokenizer.token_bytes)
    if body.stream:
        return await _stream(request, answer.choice, writer)
    async with aclosing(pieces(context.service, [answer.choice], request[RECORD])) as source:
        async for piece in source:
            writer.push(piece)
            if piece.finish is not None:
                writer.finish(piece.finish, usage_report([answer.choice]))
    return web.Response(body=msgspec.json.encode(writer.response), content_type="application/json")


async def _stream(request: web.Request, choice: Choice, writer: ResponseWriter) -> web.StreamResponse:
    def failed(problem: Problem) -> bytes:
        return _encode(writer.fail(problem.body.message))

    context = request.app[CONTEXT]
    async with aclosing(pieces(context.service, [choice], request[RECORD])) as source:
        stream = open_stream(request, context.config.client_stall_s, failed)
        async for piece in source:
            events = [] if stream.started else writer.start()
            events += writer.push(piece)
            if piece.finish is not None:
                events += writer.finish(piece.finish, usage_report([choice]))
            if events:
                await stream.send(_encode(events))
    return await stream.end()


def _encode(events: list[ResponseEvent]) -> bytes:
    return b"".join(encode_event(msgspec.json.encode(event), event.type) for event in events)


async def prepare_response(context: WorkerContext, body: ResponsesRequest) -> ResponseAnswer:
    model = context.served_model(body.model)
    _refuse_unsupported(body)
    tools = responses_tools(body, context.config.max_tools)
    constraint = resolve_constraint(body, body.text.format if body.text else None, "text.format")
    constraint = forced_constraint(context.text, constraint, tools)
    prompt = await _prompt(context, body, tools, constrained=constraint is not None)
    with_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
    answer_id = new_id("resp_")
    choices = make_choices(
        context,
        body,
        Asked(
            prompt_param="input" if body.prompt_token_ids is None else "prompt_token_ids",
            max_tokens=body.max_output_tokens,
            max_tokens_param="max_output_tokens",
            num_logprobs=(body.top_logprobs or 0) if with_logprobs else None,
            constraint=constraint,
        ),
        prompt,
        lambda: chat_parser(context.text, prompt, tools, constraint is not None, split=True),
        answer_id,
        keep_special_tokens=needs_special_tokens(context.text, tools),
    )
    return ResponseAnswer(choices[0], _response_object(body, answer_id, model))


def _refuse_unsupported(body: ResponsesRequest) -> None:
    stateless = "this server is stateless: send the whole conversation in 'input'"
    for name, why in (
        ("previous_response_id", stateless),
        ("conversation", stateless),
        ("prompt", "stored prompts are not available"),
        ("image", "this model gives text alone"),
    ):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"Unsupported parameter: '{name}': {why}.", param=name, code="unsupported_parameter")
    if body.background:
        raise InvalidRequest(f"Unsupported value: 'background': {stateless}.", param="background")


async def _prompt(context: WorkerContext, body: ResponsesRequest, tools: ToolPlan, constrained: bool) -> Prompt:
    if body.prompt_token_ids is not None:
        return Prompt(check_token_ids(body.prompt_token_ids, "prompt_token_ids", context.limits))
    effort = body.reasoning.effort if body.reasoning else None
    conversation = Conversation(
        messages=_messages(body),
        tools=tools,
        template_kwargs=template_kwargs(body.chat_template_kwargs, effort, constrained),
        param="input",
    )
    return await context.off_loop(num_chars(conversation), lambda: render(context.text, conversation, context.limits))


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if body.input is None:
        raise InvalidRequest("Missing required parameter: 'input'.", param="input", code="missing_required_parameter")
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise InvalidRequest("Invalid 'input': empty array. Expected at least one item.", param="input")
    call_ids: set[str] = set()
    for i, item in enumerate(body.input):
        _add_item(item, f"input[{i}]", messages, call_ids)
    return messages


def _add_item(item: InputItem, place: str, messages: list[dict[str, Any]], call_ids: set[str]) -> None:
    match item.type or "message":
        case "message":
            role = _required(item.role, f"{place}.role")
            if role not in _ROLES:
                raise InvalidRequest(f"Invalid value for '{place}.role': '{role}'.", param=f"{place}.role")
            content = text_of(_required(item.content, f"{place}.content"), f"{place}.content")
            messages.append({"role": role, "content": content})
        case "function_call":
            call_id = _required(item.call_id, f"{place}.call_id")
            function = {"name": _required(item.name, f"{place}.name"), "arguments": item.arguments or ""}
            # Calls of one turn are items of their own here, and one message to a template.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
            call_ids.add(call_id)
        case "function_call_output":
            call_id = _required(item.call_id, f"{place}.call_id")
            if call_id not in call_ids:
                raise InvalidRequest(
                    f"No tool call found for '{place}.call_id': '{call_id}'.", param=f"{place}.call_id"
                )
            output = text_of(_required(item.output, f"{place}.output"), f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        case "reasoning":
            return  # what was thought in earlier turns is not shown again
        case other:
            raise InvalidRequest(f"Invalid value for '{place}.type': '{other}'.", param=f"{place}.type")


def _required(value: Any, place: str) -> Any:
    if value is None:
        raise InvalidRequest(f"Missing required parameter: '{place}'.", param=place, code="missing_required_parameter")
    return value


def _response_object(body: ResponsesRequest, answer_id: str, model: str) -> ResponseObject:
    return ResponseObject(
        id=answer_id,
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=body.reasoning or ReasoningConfig(),
        temperature=1.0 if body.temperature is None else body.temperature,
        text=TextConfig(format=(body.text and body.text.format) or ResponseFormat(type="text")),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )
