"""The input of a response: the items of its turn, the whole conversation for a worker, and the items as a list for clients."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from stoker.base.errors import InvalidRequest
from stoker.gateway.api.client_body import check_num_values, fields
from stoker.gateway.objects.pages import ListPage, list_object, paged
from stoker.gateway.objects.response_table import StoredResponse

_ITEMS: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
# Fields that only the gateway acts upon. Workers are stateless.
_STATE_FIELDS = ("store", "background", "previous_response_id")
_CONTINUED = frozenset({"completed", "incomplete"})
_NONE = Raw(b"[]")
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
    given = bytes(body.get("input", Raw(b"[]")))
    if given.startswith(b"["):
        check_num_values(given, "input")  # the items are listed, so there must not be millions of them
        return given
    try:
        text = msgspec.json.decode(given, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest(
            "Invalid value for 'input': expected a string or an array of items.", param="input", code="invalid_value"
        ) from None
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    return msgspec.json.encode([item])


def stateless_body(body: dict[str, Raw], turns: Sequence[StoredResponse], items: bytes, *, streams: bool) -> bytes:
    """Return the request for a worker: with the whole conversation, and without the fields of stored responses."""
    table = {name: value for name, value in body.items() if name not in _STATE_FIELDS}
    if turns:
        lists = [one for turn in turns for one in (turn.input, bytes(fields(turn.response).get("output", _NONE)))]
        table["input"] = Raw(_joined([*lists, items]))
    if streams:
        table["stream"] = Raw(b"true")
    return msgspec.json.encode(table)


def _joined(lists: Sequence[bytes]) -> bytes:
    """Return one JSON array of the items of several. They are not decoded."""
    inner = [one[1:-1].strip() for one in lists if one.startswith(b"[")]
    return b"[%b]" % b",".join([one for one in inner if one])


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


class _ItemHead(msgspec.Struct):
    """What an item's id depends on."""

    id: Any = None
    type: Any = None


def listed_items(row: StoredResponse, page: ListPage) -> dict[str, Any]:
    """Return a page of the input items of a response for a client, each with an id. Only the items of the page are decoded."""
    items = [(i, item) for i, item in enumerate(_ITEMS.decode(row.input)) if bytes(memoryview(item)[:1]) == b"{"]
    some, has_more = paged(items, page, lambda one: _item_id(row, *one))
    return list_object([_shown(row, *one) for one in some], has_more=has_more)


def _item_id(row: StoredResponse, number: int, item: Raw) -> str:
    head = msgspec.json.decode(item, type=_ItemHead)
    if isinstance(head.id, str):
        return head.id
    digest = hashlib.sha256(f"{row.id}\n{number}".encode()).hexdigest()
    return _ID_PREFIXES.get(str(head.type or "message"), "item_") + digest[:32]


def _shown(row: StoredResponse, number: int, item: Raw) -> dict[str, Any]:
    given = msgspec.json.decode(item)
    kind = given.get("type") or "message"
    shown = {**given, "type": kind, "id": _item_id(row, number, item)}
    if kind == "message" and isinstance(shown.get("content"), str):
        part = "output_text" if shown.get("role") == "assistant" else "input_text"
        text = {"type": part, "text": shown["content"]}
        shown["content"] = [text | ({"annotations": []} if part == "output_text" else {})]
    if kind in ("message", "function_call", "function_call_output"):
        shown.setdefault("status", "completed")
    return shown
