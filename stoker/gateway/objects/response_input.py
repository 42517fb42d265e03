"""The input of a response: the items of its turn, the whole conversation for a worker, and the items as a list for clients."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from stoker.base.errors import InvalidRequest
from stoker.gateway.api.client_body import fields
from stoker.gateway.objects.response_table import StoredResponse

_ITEMS: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
# Fields that only the gateway acts upon. Workers are stateless.
_STATE_FIELDS = ("store", "background", "previous_response_id")
_CONTINUED = frozenset({"completed", "incomplete"})
_ID_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
}


class PreviousNotFound(InvalidRequest):
    """A response that `previous_response_id` names, or one before it, is not stored."""

    code = "previous_response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Previous response with id '{response_id[:80]}' not found.", param="previous_response_id")


def own_items(body: dict[str, Raw]) -> bytes:
    """Return the items of a request's `input` as a JSON array. A text is one message of the user."""
    given = body.get("input", Raw(b"[]"))
    try:
        if bytes(memoryview(given)[:1]) == b'"':
            text = msgspec.json.decode(given, type=str)
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
            return msgspec.json.encode([item])
        return msgspec.json.encode(_ITEMS.decode(given))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest(
            "Invalid value for 'input': expected a string or an array of items.", param="input", code="invalid_value"
        ) from None


def stateless_body(body: dict[str, Raw], turns: Sequence[StoredResponse], items: bytes, *, streams: bool) -> bytes:
    """Return the request for a worker: with the whole conversation, and without the fields of stored responses."""
    table = {name: value for name, value in body.items() if name not in _STATE_FIELDS}
    if turns:
        joined: list[Raw] = []
        for turn in turns:
            joined += _ITEMS.decode(turn.input)
            joined += _ITEMS.decode(fields(turn.response).get("output", Raw(b"[]")))
        table["input"] = Raw(msgspec.json.encode(joined + _ITEMS.decode(items)))
    if streams:
        table["stream"] = Raw(b"true")
    return msgspec.json.encode(table)


def check_turns(turns: Sequence[StoredResponse], response_id: str, max_turns: int) -> None:
    """Raise InvalidRequest if the conversation that ends with `response_id` cannot be continued."""
    if not turns:
        raise PreviousNotFound(response_id)
    if len(turns) > max_turns:
        raise InvalidRequest(
            f"This conversation has more than {max_turns} turns, the limit of this gateway; send it as 'input'.",
            param="previous_response_id",
        )
    if turns[0].previous_id is not None:
        raise PreviousNotFound(turns[0].previous_id)
    if turns[-1].status not in _CONTINUED:
        raise InvalidRequest(
            f"Response '{response_id}' has the status '{turns[-1].status}'; only a completed one can be continued.",
            param="previous_response_id",
        )


def listed_items(row: StoredResponse) -> list[dict[str, Any]]:
    """Return the input items of a response for a client, each with an id."""
    listed = []
    for i, item in enumerate(msgspec.json.decode(row.input)):
        if not isinstance(item, dict):
            continue
        kind = item.get("type") or "message"
        shown = {**item, "type": kind}
        if not isinstance(shown.get("id"), str):
            digest = hashlib.sha256(f"{row.id}\n{i}".encode()).hexdigest()
            shown["id"] = _ID_PREFIXES.get(kind, "item_") + digest[:32]
        if kind == "message" and isinstance(shown.get("content"), str):
            part = "output_text" if shown.get("role") == "assistant" else "input_text"
            text = {"type": part, "text": shown["content"]}
            shown["content"] = [text | ({"annotations": []} if part == "output_text" else {})]
        if kind in ("message", "function_call", "function_call_output"):
            shown.setdefault("status", "completed")
        listed.append(shown)
    return listed
