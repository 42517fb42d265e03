"""The parts of a prompt that were computed, each with its reason, and their form in headers and in the ledger. Pure.

| reason | why the tokens were computed |
|---|---|
| `first_turn` | no earlier request of this conversation is known |
| `new` | they were added since the previous turn |
| `changed` | a message, a tool or an option before them differs from the previous turn; the place names it |
| `answer_changed` | the previous answer came back as other tokens, for example without its reasoning, or not at all |
| `salted` | the same text was sent under another `cache_salt` |
| `evicted` | a worker had them and needed the space; the place is the time since then, if it is known |
| `restarted` | the worker that had them restarted or left the fleet |
| `not_stored` | they were sent before, but the worker never stored them |
| `pending` | another request with the same beginning was still computing them |
| `not_loaded` | they were in a slower tier of the KV store, and computing was faster than loading, or loading failed |
| `routed_for_load` | another worker had them, but the router chose this one because it was less loaded |
| `held_elsewhere` | only a worker that could not take the request had them |
| `partial_block` | they did not fill a block, and only full blocks are cached |
| `unknown` | the gateway cannot tell |
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

FIRST_TURN = "first_turn"
NEW = "new"
CHANGED = "changed"
ANSWER_CHANGED = "answer_changed"
SALTED = "salted"
EVICTED = "evicted"
RESTARTED = "restarted"
NOT_STORED = "not_stored"
PENDING = "pending"
NOT_LOADED = "not_loaded"
ROUTED_FOR_LOAD = "routed_for_load"
HELD_ELSEWHERE = "held_elsewhere"
PARTIAL_BLOCK = "partial_block"
UNKNOWN = "unknown"


class MissPart(msgspec.Struct, frozen=True, gc=False):
    """Tokens that were computed for one reason. `place` says more: where a prompt changed, how long ago it was evicted."""

    reason: str
    tokens: int
    place: str = ""


# An end in tokens, a reason and a place: from the previous cut to this end, what is not cached was computed for this reason.
# A plain tuple, because each request makes several.
Cut = tuple[float, str, str]


def split(cuts: Sequence[Cut], cached_tokens: int, prompt_tokens: int) -> tuple[MissPart, ...]:
    """Return the parts of the tokens from `cached_tokens` to `prompt_tokens`. Each reason occurs once, and all add up."""
    if len(cuts) == 1:  # most short prompts, and faster
        [(end, reason, place)] = cuts
        if cached_tokens < prompt_tokens <= end:
            return (MissPart(reason, prompt_tokens - cached_tokens, place),)
    at, tokens = cached_tokens, dict[tuple[str, str], int]()
    for end, reason, place in cuts:
        stop = int(min(end, prompt_tokens))
        if stop > at:
            tokens[reason, place] = tokens.get((reason, place), 0) + stop - at
            at = stop
    if at < prompt_tokens:
        tokens[UNKNOWN, ""] = tokens.get((UNKNOWN, ""), 0) + prompt_tokens - at
    return tuple([MissPart(reason, count, place) for (reason, place), count in tokens.items()])


def as_text(parts: Sequence[MissPart]) -> str:
    """Return for example `changed[message 3]=2048;new=512;partial_block=9`."""
    if len(parts) == 1 and not parts[0].place:  # most prompts, and faster
        return f"{parts[0].reason}={parts[0].tokens}"
    return ";".join(
        [
            f"{part.reason}[{part.place}]={part.tokens}" if part.place else f"{part.reason}={part.tokens}"
            for part in parts
        ]
    )


def age(seconds: float) -> str:
    """Return a time span in one unit, such as `12s`, `5m` or `3h`."""
    if seconds < 120:
        return f"{max(0, round(seconds))}s"
    return f"{round(seconds / 60)}m" if seconds < 7200 else f"{round(seconds / 3600)}h"
