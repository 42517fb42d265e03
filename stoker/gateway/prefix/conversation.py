"""A request's conversation as block keys: what the prefix index is asked with.

Two makers. `TextKeys` hashes the raw JSON of the conversation in blocks of 1 KiB: no parsing, and what a client resends
unchanged has the same keys. `TokenKeys` (token_keys.py) knows the model's tokenizer and gives the very blocks that workers
report. `KeyMakers` holds the one that fits each model. What a body should look like is not judged here: that is the worker's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec
from msgspec import UNSET
from xxhash import xxh3_64_intdigest

from stoker.base.errors import InvalidRequest
from stoker.fleet.prefix_index import Key
from stoker.gateway.api.client_body import Envelope, Kind
from stoker.gateway.prefix.prefix_keys import chain_keys
from stoker.kv.blocks.keys import salt_hash

TEXT_BLOCK_BYTES = 1024
_BYTES_A_TOKEN = 4
_ROOTS = {Kind.CHAT: 1, Kind.COMPLETIONS: 2, Kind.RESPONSES: 3}
_TEXT_THREADS = 2
_INLINE_BYTES = 100_000
_MAX_WAITING = 16


class Keys(msgspec.Struct, frozen=True):
    """`keys` are those of full blocks; `num_tokens` is the whole prompt's, exact or estimated."""

    keys: Sequence[Key]
    block_tokens: int
    num_tokens: int


class KeyMaker(Protocol):
    block_tokens: int

    def keys(self, envelope: Envelope, salt: str | None) -> Keys:
        """`salt` is what the worker gets as `cache_salt`. Raises InvalidRequest for what it cannot read."""


class TextKeys:
    """For any worker: bytes stand for tokens. Never raises."""

    block_tokens = TEXT_BLOCK_BYTES // _BYTES_A_TOKEN

    def keys(self, envelope: Envelope, salt: str | None = None) -> Keys:
        root, num_bytes = _ROOTS[envelope.kind], 0
        digest = salt_hash(salt) if salt else None
        if digest is not None:
            root = xxh3_64_intdigest(digest.encode(), root)
        # What a template prints in front of the conversation: another tool list is another prefix from the first block on.
        for field in (envelope.tools, envelope.instructions):
            if field is not UNSET:
                view = memoryview(field)
                root = xxh3_64_intdigest(view, root)
                num_bytes += len(view)
        keys: list[int] = []
        for field in (envelope.prompt_token_ids, envelope.messages, envelope.prompt, envelope.input):
            if field is not UNSET:
                view = memoryview(field)
                num_bytes += len(view)
                if len(view) >= TEXT_BLOCK_BYTES:
                    keys = chain_keys(view, root, TEXT_BLOCK_BYTES)
                break
        return Keys(keys, self.block_tokens, max(1, num_bytes // _BYTES_A_TOKEN))


class KeyMakers:
    """The maker of each model: text until somebody brings the model's tokenizer."""

    def __init__(self, inline_bytes: int = _INLINE_BYTES, max_waiting: int = _MAX_WAITING) -> None:
        self._inline_bytes = inline_bytes
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._text = TextKeys()
        self._exact: dict[str, KeyMaker] = {}
        self._threads = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="conversation")

    def set_exact(self, model: str, maker: KeyMaker) -> None:
        self._exact[model] = maker

    def exact(self, model: str) -> KeyMaker | None:
        return self._exact.get(model)

    def block_tokens(self, model: str) -> int:
        """How many tokens a key of this model stands for."""
        return self._exact.get(model, self._text).block_tokens

    def keys_now(self, model: str, envelope: Envelope, salt: str | None) -> Keys | None:
        """None: that would take long; `keys` does it in a thread. With too many of those, a body is read as text."""
        maker = self._exact.get(model)
        if maker is not None:
            if len(envelope.raw) > self._inline_bytes:
                return None if self._num_waiting < self._max_waiting else self._text.keys(envelope, salt)
            try:
                return maker.keys(envelope, salt)
            except InvalidRequest:
                pass  # the worker says what is wrong with it
        return self._text.keys(envelope, salt)

    async def keys(self, model: str, envelope: Envelope, salt: str | None) -> Keys:
        found = self.keys_now(model, envelope, salt)
        if found is not None:
            return found
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._exact[model].keys, envelope, salt)
        except InvalidRequest:
            return self._text.keys(envelope, salt)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
