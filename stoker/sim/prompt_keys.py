"""PromptKeys: the block keys of simulated prompts. What a prompt shares with an earlier one of its session is hashed once."""

from __future__ import annotations

from collections import OrderedDict

from stoker.base.ids import BlockKey
from stoker.kv.blocks.keys import block_keys
from stoker.sim.workloads.workload import Segments

_MAX_PROMPTS = 8192  # the least recently used are forgotten


class PromptKeys:
    """Remembers the keys of recent prompts by their segments.

    The next turn of a session most often adds two segments: the answer, and what the user says. A first turn most often has
    a system prompt and one more segment.
    """

    def __init__(self, root: BlockKey, block_tokens: int) -> None:
        self._root = root
        self._block_tokens = block_tokens
        self._known: OrderedDict[Segments, list[BlockKey]] = OrderedDict()

    def of(self, segments: Segments, token_ids: list[int]) -> list[BlockKey]:
        """Return the keys of the full blocks of a prompt. `token_ids` are the tokens of its segments."""
        head = self._known.get(segments[:-2])
        if head is None and len(segments) > 1:
            head = self._head(segments[:1], segments[0][1], token_ids)
        keys = self._extended(head or [], token_ids)
        self._remember(segments, keys)
        return keys

    def _head(self, segments: Segments, num_tokens: int, token_ids: list[int]) -> list[BlockKey]:
        """Return the keys of the first segment, which other sessions may have too."""
        keys = self._known.get(segments)
        if keys is None:
            keys = self._extended([], token_ids[:num_tokens])
        self._remember(segments, keys)
        return keys

    def _extended(self, head: list[BlockKey], token_ids: list[int]) -> list[BlockKey]:
        parent = head[-1] if head else self._root
        return head + block_keys(token_ids[len(head) * self._block_tokens :], parent, self._block_tokens)

    def _remember(self, segments: Segments, keys: list[BlockKey]) -> None:
        self._known[segments] = keys
        self._known.move_to_end(segments)
        if len(self._known) > _MAX_PROMPTS:
            self._known.popitem(last=False)
