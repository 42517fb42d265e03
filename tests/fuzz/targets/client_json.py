"""Client bodies: the gateway's envelope, session keys and edits, and the worker's decoding, for the generating endpoints."""

from __future__ import annotations

import contextlib
import json
import random

import msgspec

from stoker.base.errors import InvalidRequest
from stoker.base.log import EventLog
from stoker.gateway.api.client_body import EndpointKind, edit, parse
from stoker.gateway.prefix.session import session_of
from stoker.proto.anthropic.messages import MessagesRequest
from stoker.proto.anthropic.to_chat import to_chat
from stoker.proto.openai.chat import ChatRequest
from stoker.proto.openai.completions import CompletionRequest
from stoker.proto.openai.not_honoured import not_honoured
from stoker.proto.openai.responses import ResponsesRequest
from stoker.proto.openai.unknown_fields import UnknownFields
from stoker.text.openai_messages import template_messages
from stoker.text.tools import chat_tools
from stoker.worker.constraint import resolve_constraint
from tests.fuzz.target import FuzzTarget

_PUT = {"cache_salt": b'"tenant:t"', "seed": b"7", "priority": b"0"}


def execute(data: bytes, rng: random.Random) -> None:
    unknown = UnknownFields(EventLog("fuzz"))
    for struct in (ChatRequest, CompletionRequest, ResponsesRequest):
        try:
            request = unknown.decode(struct, data)
            resolve_constraint(request, getattr(request, "response_format", None))
            if prediction := getattr(request, "prediction", None):
                _ = prediction.text
            not_honoured(request)
        except InvalidRequest:
            continue
    with contextlib.suppress(InvalidRequest):
        chat = to_chat(unknown.decode(MessagesRequest, data))
        chat_tools(chat, 1024)
        template_messages(chat.messages)
    assert len(unknown.counts) <= 65
    for kind in EndpointKind:
        envelope = parse(kind, data)
        session_of({b"x-session-id": data[:64]} if rng.random() < 0.2 else {}, envelope, "tenant")
        assert envelope.num_prompts <= len(data) + 1
        _ = envelope.num_choices, envelope.max_new_tokens, envelope.wants_usage
        edited = edit(envelope, _PUT, drop=rng.choice(((), ("user",))))
        again = msgspec.json.decode(edited, type=dict[str, msgspec.Raw])
        assert {name: bytes(again[name]) for name in _PUT} == _PUT
        # A worker that keeps the first of two fields must see the gateway's value, too.
        assert edited.count(b'"cache_salt":"tenant:t"') >= 1
        parse(kind, edited)


def seeds() -> list[bytes]:
    chat = {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 2, "user": "u",
        "stream_options": {"include_usage": True}, "max_tokens": 5, "prompt_cache_key": "k",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]},
    }  # fmt: skip
    completion = {"model": "m", "prompt": ["a", "b"], "cache_salt": "mine", "seed": 3, "guided_choice": ["a"]}
    responses = {"model": "m", "input": [{"role": "user", "content": "hi"}], "instructions": "be", "session_id": 5}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r"}], "is_error": False}
    message = {
        "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "thinking": {"type": "enabled"},
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
        "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "f"}, "metadata": {"user_id": "u"},
    }  # fmt: skip
    return [json.dumps(body).encode() for body in (chat, completion, responses, message, {})]


TARGET = FuzzTarget(
    execute,
    seeds,
    errors=(InvalidRequest,),
    tokens=[
        b'"cache_salt":"x",', b'"seed":1,', b'"user":', b'"session_id":[', b'"n":', b'"\\ud800"', b'"\\u0000"', b"\xff",
        b'"prompt":[[1,2],[3]],', b'"kv_transfer_params":{},', b'"priority":', b'"response_format":{"type":"regex","regex":"a"},',
        b'"cache\\u005fsalt":"evil",', b",", b"{", b"}", b"[", b"]", b'"guided_json":"{}",',
    ],
    base_bytes=8 << 20,
)  # fmt: skip
