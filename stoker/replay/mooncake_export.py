"""Writes the requests of a recording as a trace in Mooncake's format, which `stoker sim` and `stoker bench serve` read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b

from stoker.fleet.prefix_index import Key
from stoker.replay.replayer import RecordedRequest

BLOCK_TOKENS = 512  # of Mooncake's traces


def mooncake_lines(requests: Iterable[RecordedRequest]) -> Iterator[str]:
    """Yield one JSON line for each answered request. Times begin with the first one.

    Two requests have equal block ids as far as their prompts are equal. A retry is not a request of its own.
    """
    first_s: float | None = None
    ids: dict[bytes, int] = {}
    for request in requests:
        if request.output_tokens is None or request.is_retry:
            continue
        first_s = request.at_s if first_s is None else first_s
        query = request.query
        row = {
            "timestamp": round((request.at_s - first_s) * 1000),
            "input_length": query.num_tokens,
            "output_length": max(1, request.output_tokens),
            "hash_ids": list(_block_ids(query.keys, query.block_tokens, query.num_tokens, ids)),
        }
        yield json.dumps(row, separators=(",", ":"))


def _block_ids(keys: Iterable[Key], block_tokens: int, num_tokens: int, ids: dict[bytes, int]) -> Iterator[int]:
    """Yield an id for each block of 512 tokens. The id of a block follows from all full keys up to its end."""
    known = list(keys)
    for start in range(0, num_tokens, BLOCK_TOKENS):
        end = min(start + BLOCK_TOKENS, num_tokens)
        covered = min(end // block_tokens, len(known))
        hashed = blake2b(repr((known[covered - 1] if covered else None, end)).encode(), digest_size=16).digest()
        yield ids.setdefault(hashed, len(ids))
