"""Uploads: the multipart form, the lines of a batch in pieces of any size, and the items of a Responses request."""

from __future__ import annotations

import contextlib
import json
import random

import msgspec

from stoker.base.errors import InvalidRequest
from stoker.gateway.api.client_body import fields
from stoker.gateway.objects.batch_file import BatchReader
from stoker.gateway.objects.multipart import read_form
from stoker.gateway.objects.response_events import EditedStream, ResponseEdits, error_of, events_beyond
from stoker.gateway.objects.response_input import own_items, stateless_body
from stoker.proto.openai.decode import decode
from stoker.proto.openai.responses import ResponsesRequest
from stoker.text.custom_input import CustomInput
from stoker.text.response_items import input_messages
from stoker.text.response_tools import responses_tools
from tests.fuzz.target import FuzzTarget, pieces

_TYPE = b"multipart/form-data; boundary=b"
_URL = "/v1/chat/completions"


def execute(data: bytes, rng: random.Random) -> None:
    with contextlib.suppress(InvalidRequest):
        form = read_form(_TYPE, data)
        assert sum(len(part.data) for part in form.values()) <= len(data)
    assert _requests([data]) == _requests(pieces(data, rng))
    with contextlib.suppress(InvalidRequest):
        body = decode(ResponsesRequest, data)
        responses_tools(body, 100)
        input_messages(body)
    with contextlib.suppress(InvalidRequest, msgspec.DecodeError):
        table = fields(data)
        assert fields(stateless_body(table, [], own_items(table), streams=True))["stream"] == msgspec.Raw(b"true")
    stream = EditedStream(ResponseEdits("resp_1", None, is_background=True))
    shown = stream.push(data)
    events_beyond(b"".join(shown), 3)
    for event in shown:
        error_of(event)
    text = data.decode("utf-8", "replace")
    whole, parts = CustomInput(), CustomInput()
    cut = rng.randint(0, len(text))
    assert whole.push(text) + whole.flush() == parts.push(text[:cut]) + parts.push(text[cut:]) + parts.flush()


def _requests(parts: list[bytes]) -> tuple[object, object]:
    """Return the requests and errors in a file. A line is far shorter than the limit, which depends on the pieces."""
    reader = BatchReader(_URL, 50, 1 << 20)
    found = [request for part in parts for request in reader.push(part)] + reader.finish()
    assert len(reader.errors) <= 101
    return found, reader.errors


def seeds() -> list[bytes]:
    line = {"custom_id": "a", "method": "POST", "url": _URL, "body": {"messages": []}}
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    form += b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\nabc\r\n--b--\r\n'
    response = {
        "input": [
            {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x", "namespace": "n"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "y"}]},
            {"type": "reasoning", "encrypted_content": "stoker-reasoning-1:eA==", "summary": []},
            {"type": "additional_tools", "tools": [{"type": "function", "name": "g"}]},
        ],
        "tools": [
            {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "p", "format": {"type": "text"}}]}
        ],
    }
    event = b'event: response.completed\ndata: {"type":"x","sequence_number":4,"response":{"id":"r"}}\n\n'
    call = json.dumps({"input": 'a\\"b\u00e9\U0001f600\n'}).encode()
    lines = json.dumps(line).encode() + b"\n" + json.dumps(line | {"custom_id": "b"}).encode()
    return [form, lines, json.dumps(response).encode(), event, call]


TARGET = FuzzTarget(
    execute,
    seeds,
    tokens=[
        b"--b", b"\r\n", b"\r\n\r\n", b"--b--", b'name="file"', b"\n", b'"custom_id":"c",', b'"\\ud83d', b'\\ude00"', b"\xff",
        b'"response":{', b"event: response.failed\n", b'"type":"namespace",', b'"tools":[', b'{"input": "', b"\\u12", b'"', b"}",
    ],
    base_bytes=8 << 20,
)  # fmt: skip
