"""The work of one request on a worker, as its gateway tells the worker and the worker tells all gateways.

A gateway names itself and its estimate of the work in a header of each request. The worker publishes when it accepts a request,
when its first token is there and when it ends, at once, in a report on its load topic. So every gateway knows the work that the
others have sent. Once per second a report lists all open requests, for gateways that missed one.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

# NAME;PREFILL;OUTPUT: the gateway's name, prompt tokens to compute, expected output tokens; and ;flex for a flex request
WORK_HEADER = "x-stoker-work"
_MAX_TOKENS = 1 << 24
_FORM = re.compile(r"([A-Za-z0-9:._-]{1,96});([0-9]{1,8});([0-9]{1,8})(;flex)?")


class WorkChange(msgspec.Struct, frozen=True, array_like=True):
    """What happened to a request. The counts are those of its beginning."""

    number: int  # counts the requests of this worker process
    stage: Literal["accept", "first", "end"]
    gateway: str  # empty: the request came from elsewhere
    prefill_tokens: int
    context_tokens: int
    output_tokens: int
    is_flex: bool = False  # it uses only idle capacity


def work_header(gateway: str, prefill_tokens: int, output_tokens: int, *, is_flex: bool = False) -> str:
    prefill, output = (min(max(count, 0), _MAX_TOKENS) for count in (prefill_tokens, output_tokens))
    return f"{gateway};{prefill};{output}{';flex' if is_flex else ''}"


def read_work_header(text: str | None) -> tuple[str, int, int, bool] | None:
    """Return the gateway's name, the counts and True for a flex request, or None if the header is missing or not valid."""
    found = None if text is None else _FORM.fullmatch(text)
    if found is None:
        return None
    return found[1], min(int(found[2]), _MAX_TOKENS), min(int(found[3]), _MAX_TOKENS), found[4] is not None
