"""Translates one worker's KV events from its own block hashes to the gateway's prefix keys. Pure.

An engine's hash only identifies a block within that engine. Its prefix keys are computed from its tokens (`prefix_keys.py`).
Engine blocks may be smaller or larger than the blocks of the prefix keys: a prefix key belongs to the engine block that
completes it. In a store shared by several workers, a block may be stored by one worker and removed by another, so the
translators of these workers share one table for it (`StoreBlocks`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest

from stoker.base.ids import WorkerId
from stoker.fleet.prefix_index import PrefixIndex
from stoker.gateway.prefix.prefix_keys import chain_keys, root_key
from stoker.kv.blocks.keys import salt_hash
from stoker.proto.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent

_GPU = "GPU"
_NOTHING_LEFT = b""
_TOKEN_BYTES = 4
_BATCH_SHARE = 512  # a full store drops 1/512 of its entries at a time
# KV groups of layers that keep only a window of tokens. A missing block of such a group does not end a cached prefix.
_PARTIAL_KINDS = ("sliding", "window", "chunk", "mamba", "linear", "local")


class PrefixIndexWriter(Protocol):
    """Receives one worker's blocks as prefix keys. The methods are those of PrefixIndex without the worker id."""

    def stored(self, keys: Sequence[int], medium: str) -> None: ...

    def removed(self, keys: Sequence[int], medium: str) -> None: ...

    def cleared(self) -> None: ...


class WorkerIndex:
    """Writes one worker's blocks to the prefix indexes of all models that it serves."""

    def __init__(self, worker_id: WorkerId, indexes: Sequence[PrefixIndex]) -> None:
        self._worker_id = worker_id
        self._indexes = indexes

    def stored(self, keys: Sequence[int], medium: str) -> None:
        for index in self._indexes:
            index.stored(self._worker_id, keys, medium)

    def removed(self, keys: Sequence[int], medium: str) -> None:
        for index in self._indexes:
            index.removed(self._worker_id, keys, medium)

    def cleared(self) -> None:
        for index in self._indexes:
            index.cleared(self._worker_id)

    def share(self, stores: Mapping[str, str]) -> None:
        for index in self._indexes:
            index.share(self._worker_id, stores)


@dataclass(slots=True, eq=False)
class _EngineBlock:
    keys: list[int]  # the prefix keys that this block completes
    last_key: int
    left: bytes  # tokens after the last complete prefix key
    media: frozenset[str]


class StoreBlocks(dict[BlockHash, _EngineBlock]):
    """The blocks in a shared store, as reported by all its workers, oldest first.

    It is a class because a plain dict cannot be weakly referenced.
    """


_NOWHERE: frozenset[str] = frozenset()
_ON_GPU = frozenset({_GPU})
_NO_STORES: Mapping[str, StoreBlocks] = {}


class Rekeyer:
    """Applies one worker's KV events to the prefix index.

    `hashes_salts` is True if the engine sends a chain's salt as plain text, so that it must be hashed here; Stoker workers send
    it hashed. `stores` holds the shared stores by medium.
    """

    def __init__(
        self,
        index: PrefixIndexWriter,
        block_tokens: int,
        *,
        hashes_salts: bool,
        stores: Mapping[str, StoreBlocks] = _NO_STORES,
        max_blocks: int = 4_000_000,
    ) -> None:
        self._index = index
        self._stride = _TOKEN_BYTES * block_tokens
        self._hashes_salts = hashes_salts
        self._stores = stores
        self._max_blocks = max_blocks
        self._blocks: dict[BlockHash, _EngineBlock] = {}
        self._partial_groups: set[int] = set()

    def apply(self, events: Iterable[KvEvent]) -> bool:
        """Apply events as far as possible. Return False if blocks were stored after a parent that is unknown here."""
        whole = True
        for event in events:
            match event:
                case BlockStored():
                    whole = self._stored(event) and whole
                case BlockRemoved():
                    self._removed(event)
                case AllBlocksCleared():
                    self.clear()
        return whole and len(self._blocks) <= self._max_blocks

    def clear(self) -> None:
        self._blocks.clear()
        self._index.cleared()

    def _stored(self, event: BlockStored) -> bool:
        if event.lora_id is not None or event.lora_name is not None:
            return True  # blocks of a LoRA adapter are never looked up
        if event.kv_cache_spec_kind is not None and any(kind in event.kv_cache_spec_kind for kind in _PARTIAL_KINDS):
            if event.group_idx is not None:
                self._partial_groups.add(event.group_idx)
            return True
        medium = event.medium or _GPU
        if len(event.token_ids) < event.block_size * len(event.block_hashes):
            self._copied(event.block_hashes, medium)
            return True
        key, left = self._start(event)
        if key is None:
            return False
        store = self._stores.get(medium)
        stored: list[int] = []
        for block_hash, new in zip(event.block_hashes, self._chain(event, key, left), strict=False):
            if store is not None:
                stored += store.setdefault(block_hash, new).keys
                continue
            block = self._blocks.setdefault(block_hash, new)
            if not block.media:
                block.media = _ON_GPU if medium == _GPU else frozenset({medium})
            elif medium not in block.media:
                block.media |= {medium}
            stored += block.keys
        if store is not None and len(store) > self._max_blocks:
            # Drop a batch: reaching the front of a large dict is too slow to do for every event.
            for block_hash in list(islice(store, len(store) - self._max_blocks + self._max_blocks // _BATCH_SHARE)):
                del store[block_hash]
        if stored:
            self._index.stored(stored, medium)
        return True

    def _chain(self, event: BlockStored, key: int, left: bytes) -> Iterator[_EngineBlock]:
        """Yield new entries for the event's blocks."""
        packed = array("I", event.token_ids).tobytes()
        size = _TOKEN_BYTES * event.block_size
        if size == self._stride and not left and not (event.extra_keys and any(event.extra_keys)):
            for one in chain_keys(packed, key, size):  # the common case: both block sizes are equal
                yield _EngineBlock([one], one, _NOTHING_LEFT, _NOWHERE)
            return
        for i in range(len(event.block_hashes)):
            block = self._new(key, left + packed[size * i : size * (i + 1)], self._extra(event, i))
            key, left = block.last_key, block.left
            yield block

    def _start(self, event: BlockStored) -> tuple[int | None, bytes]:
        """Return the prefix key and the left-over tokens that this event's blocks continue."""
        if event.parent_block_hash is None:
            return root_key(self._salt(event)), _NOTHING_LEFT
        parent = self._known(event.parent_block_hash)
        return (None, _NOTHING_LEFT) if parent is None else (parent.last_key, parent.left)

    def _known(self, block_hash: BlockHash) -> _EngineBlock | None:
        block = self._blocks.get(block_hash)
        if block is None and self._stores:
            block = next((store[block_hash] for store in self._stores.values() if block_hash in store), None)
        return block

    def _salt(self, event: BlockStored) -> str | None:
        salt = event.cache_salt
        first = event.extra_keys[0] if event.extra_keys else None
        if salt is None and first and isinstance(first[0], str):
            salt = first[0]
        if salt is None or not self._hashes_salts:
            return salt or None
        return salt_hash(salt)

    def _extra(self, event: BlockStored, i: int) -> Any:
        """Return what is in this block's hash besides tokens and salt, for example an image. It changes the prefix key."""
        extra = event.extra_keys[i] if event.extra_keys and i < len(event.extra_keys) else None
        if extra and i == 0 and event.parent_block_hash is None and event.cache_salt is None:
            return extra[1:] if isinstance(extra[0], str) else extra
        return extra

    def _new(self, parent: int, tokens: bytes, extra: Any) -> _EngineBlock:
        if extra:
            parent = xxh3_64_intdigest(repr(extra).encode(), parent)
        keys = chain_keys(tokens, parent, self._stride)
        left = tokens[len(keys) * self._stride :]
        return _EngineBlock(keys, keys[-1] if keys else parent, left or _NOTHING_LEFT, _NOWHERE)

    def _copied(self, hashes: Sequence[BlockHash], medium: str) -> None:
        """Note blocks that were copied to another medium. Such events carry no tokens, so unknown blocks are ignored."""
        copied: list[int] = []
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is not None:
                block.media |= {medium}
                copied += block.keys
        if copied:
            self._index.stored(copied, medium)

    def _removed(self, event: BlockRemoved) -> None:
        if event.group_idx in self._partial_groups:
            return
        medium = event.medium or _GPU
        store = self._stores.get(medium)
        removed: list[int] = []
        for block_hash in event.block_hashes:
            if store is not None:
                shared = store.pop(block_hash, None)
                removed += shared.keys if shared is not None else ()
                continue
            block = self._blocks.get(block_hash)
            if block is None or medium not in block.media:
                continue
            removed += block.keys
            block.media -= {medium}
            if not block.media:
                del self._blocks[block_hash]
        if removed:
            self._index.removed(removed, medium)
