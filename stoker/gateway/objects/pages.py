"""Lists in pages, as OpenAI's API has them: `limit`, `after` and `order`, and an object of the type `list`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qs

from stoker.base.errors import InvalidRequest
from stoker.gateway.objects.object_ids import is_object_id

_MAX_LIMIT = 100
_DEFAULT_LIMIT = 20
_NUMBER = re.compile(r"-?[0-9]{1,18}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListPage:
    """Which part of a list a client wants."""

    limit: int
    after: str | None
    is_ascending: bool


def page_of(query: bytes, *, default_order: str = "desc", max_limit: int = _MAX_LIMIT) -> ListPage:
    """Parse the query string of a list."""
    given = parse_qs(query.decode("ascii"))
    limit = given.get("limit", [str(min(_DEFAULT_LIMIT, max_limit))])[-1]
    order = given.get("order", [default_order])[-1]
    if (number := small_number(limit)) is None or not 1 <= number <= max_limit:
        raise InvalidRequest(
            f"Invalid value for 'limit': {limit[:40]!r}. Expected a number from 1 to {max_limit}.", param="limit"
        )
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"Invalid value for 'order': {order[:40]!r}. Expected 'asc' or 'desc'.", param="order")
    after = given.get("after", [None])[-1]
    if after is not None and not is_object_id(after):
        raise InvalidRequest(f"Invalid value for 'after': {after[:80]!r} is not an id.", param="after")
    return ListPage(number, after, order == "asc")


def small_number(text: str) -> int | None:
    """Return the integer that a query or form field holds, or None. `str.isdigit` accepts texts that `int` refuses, such as "²"."""
    return int(text) if _NUMBER.fullmatch(text) else None


def paged(items: Sequence[T], page: ListPage, id_of: Callable[[T], str]) -> tuple[Sequence[T], bool]:
    """Return one page of `items`, which are in ascending order, and True if more follow."""
    ordered = items if page.is_ascending else items[::-1]
    if page.after is not None:
        place = next((i for i, item in enumerate(ordered) if id_of(item) == page.after), None)
        if place is None:
            raise InvalidRequest(f"Invalid value for 'after': no item has the id {page.after[:80]!r}.", param="after")
        ordered = ordered[place + 1 :]
    return ordered[: page.limit], len(ordered) > page.limit


def list_object(items: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a list as OpenAI's document describes it: the ids are texts, also of an empty list."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else "",
        "last_id": items[-1]["id"] if items else "",
        "has_more": has_more,
    }
