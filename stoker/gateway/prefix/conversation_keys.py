"""Computes the prefix keys of a request's conversation, with which the router queries the prefix index.

There are two kinds of makers:

- `TextPrefixKeys` hashes the raw JSON of the conversation in blocks of 1 KiB. It needs no parsing, and text that a client
  resends unchanged gets the same keys.
- `TokenPrefixKeys` (`token_prefix_keys.py`) uses the model's tokenizer, so its blocks are those that the workers report.

`PrefixKeyMakers` holds the maker for each model. Request bodies are not validated here; the worker does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import msgspec
from msgspec import UNSET
from xxhash import xxh3_64_intdigest

from stoker.base.errors import InvalidRequest
from stoker.base.volatile_lines import VOLATILE_LINES
from stoker.fleet.prefix_index import Key
from stoker.gateway.api.client_body import EndpointKind, RequestEnvelope
from stoker.gateway.prefix.fair_threads import FairThreads
from stoker.gateway.prefix.prefix_keys import chain_keys
from stoker.gateway.prefix.stable_json import StableJson
from stoker.kv.blocks.keys import salt_hash

TEXT_BLOCK_BYTES = 1024
_BYTES_PER_TOKEN = 4  # estimate for text
_ROOTS = {EndpointKind.CHAT: 1, EndpointKind.COMPLETIONS: 2, EndpointKind.RESPONSES: 3, EndpointKind.MESSAGES: 4}
_INLINE_BYTES = 8 << 10  # tokenizing this much takes a few milliseconds
_INLINE_TEXT_BYTES = 1 << 20


class ConversationKeys(msgspec.Struct, frozen=True):
    """The prefix keys of a conversation's full blocks. `num_tokens` counts the whole prompt, exact or estimated."""

    keys: Sequence[Key]
    block_tokens: int
    num_tokens: int


class PrefixKeyMaker(Protocol):
    """Computes prefix keys of requests for one model."""

    block_tokens: int

    def keys(self, envelope: RequestEnvelope, salt: str | None) -> ConversationKeys:
        """Return the keys of a request. `salt` is the `cache_salt` that the worker gets.

        Raises InvalidRequest if the body cannot be read.
        """


class TextPrefixKeys:
    """Prefix keys over the bytes of the conversation, for models without a known tokenizer. Never raises."""

    block_tokens = TEXT_BLOCK_BYTES // _BYTES_PER_TOKEN

    def __init__(self, volatile_lines: Sequence[str] = VOLATILE_LINES) -> None:
        self._stable = StableJson(volatile_lines)

    def keys(self, envelope: RequestEnvelope, salt: str | None = None) -> ConversationKeys:
        root, num_bytes = _ROOTS[envelope.kind], 0
        digest = salt_hash(salt) if salt else None
        if digest is not None:
            root = xxh3_64_intdigest(digest.encode(), root)
        # Chat templates print these before the conversation, so another tool list changes the prefix from the first block.
        for field in (envelope.tools, envelope.instructions, envelope.system):
            if field is not UNSET:
                view = self._stable.of(memoryview(field))
                root = xxh3_64_intdigest(view, root)
                num_bytes += len(view)
        keys: list[int] = []
        for field in (envelope.prompt_token_ids, envelope.messages, envelope.prompt, envelope.input):
            if field is not UNSET:
                view = self._stable.of(memoryview(field))
                num_bytes += len(view)
                if len(view) >= TEXT_BLOCK_BYTES:
                    keys = chain_keys(view, root, TEXT_BLOCK_BYTES)
                break
        return ConversationKeys(keys, self.block_tokens, max(1, num_bytes // _BYTES_PER_TOKEN))


class PrefixKeyMakers:
    """The maker for each model: text blocks until the model's tokenizer is known."""

    def __init__(
        self,
        inline_bytes: int = _INLINE_BYTES,
        threads: FairThreads | None = None,
        volatile_lines: Sequence[str] = VOLATILE_LINES,
    ) -> None:
        self._inline_bytes = inline_bytes
        self._text = TextPrefixKeys(volatile_lines)
        self._exact: dict[str, PrefixKeyMaker] = {}
        self._threads = threads or FairThreads()

    def set_exact(self, model: str, maker: PrefixKeyMaker) -> None:
        self._exact[model] = maker

    def exact(self, model: str) -> PrefixKeyMaker | None:
        return self._exact.get(model)

    def block_tokens(self, model: str) -> int:
        """Return how many tokens one prefix key of this model covers."""
        return self._exact.get(model, self._text).block_tokens

    def keys_now(self, model: str, envelope: RequestEnvelope, salt: str | None) -> ConversationKeys | None:
        """Return the keys, or None if computing them takes too long for the event loop; `keys` then uses a thread."""
        maker = self._exact.get(model)
        if len(envelope.raw) > (_INLINE_TEXT_BYTES if maker is None else self._inline_bytes):
            return None
        return self._keys(maker, envelope, salt)

    async def keys(self, model: str, envelope: RequestEnvelope, salt: str | None, tenant: str = "") -> ConversationKeys:
        """Return the keys, computed on a thread if that takes long. Tenants take turns on the threads.

        While too many requests of the tenant wait for a thread, a long body gets text keys, which need no tokenizer.
        """
        found = self.keys_now(model, envelope, salt)
        if found is not None:
            return found
        if not self._threads.has_room(tenant):
            return self._text.keys(envelope, salt)
        work = partial(self._keys, self._exact.get(model), envelope, salt)
        return await self._threads.run(tenant, len(envelope.raw), work)

    def _keys(self, maker: PrefixKeyMaker | None, envelope: RequestEnvelope, salt: str | None) -> ConversationKeys:
        if maker is not None:
            try:
                return maker.keys(envelope, salt)
            except InvalidRequest:
                pass  # the worker will report the error
        return self._text.keys(envelope, salt)

    def close(self) -> None:
        self._threads.close()
