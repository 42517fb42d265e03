"""BlockPool: who holds which block of the device's KV, which blocks are findable by key, and which goes next.

The only place where a block is taken or freed. It knows nothing of bytes or sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.free_blocks import FreeBlocks

# A parent with very many children (a system prompt before every chat) is searched only this far back.
_PARTIAL_SEARCH = 8


@dataclass(frozen=True, slots=True)
class _Name:
    key: BlockKey
    parent: BlockKey
    token_ids: tuple[int, ...]


class PoolObserver(Protocol):
    """Whoever wants to know which blocks can be found. Called in the middle of a step: it must be quick."""

    def named(self, key: BlockKey, parent: BlockKey, token_ids: Sequence[int], root_salt: str | None) -> None: ...

    def forgot(self, key: BlockKey) -> None: ...


class NoObserver:
    def named(self, key: BlockKey, parent: BlockKey, token_ids: Sequence[int], root_salt: str | None) -> None: ...

    def forgot(self, key: BlockKey) -> None: ...


class BlockPool:
    def __init__(
        self, num_blocks: int, observer: PoolObserver | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_blocks = num_blocks
        self._observer = observer or NoObserver()
        self._refs = [0] * num_blocks
        self._names: list[_Name | None] = [None] * num_blocks
        self._by_key: dict[BlockKey, BlockId] = {}
        self._children: dict[BlockKey, dict[BlockId, None]] = {}
        self._was_found = [False] * num_blocks
        self._free = FreeBlocks(map(BlockId, reversed(range(num_blocks))), clock)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now; the named ones among them are lost by it."""
        return len(self._free)

    @property
    def num_named(self) -> int:
        return len(self._by_key)

    def match(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """The blocks of the leading keys that are here."""
        found: list[BlockId] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def match_partial(self, parent: BlockKey, token_ids: Sequence[int]) -> tuple[BlockId, int] | None:
        """After `parent`: the block that begins with most of `token_ids`, and how many of them."""
        best: tuple[BlockId, int] | None = None
        children = self._children.get(parent, {})
        for _, block in zip(range(_PARTIAL_SEARCH), reversed(children), strict=False):
            name = self._names[block]
            assert name is not None
            count = 0
            for mine, wanted in zip(name.token_ids, token_ids, strict=False):
                if mine != wanted:
                    break
                count += 1
            if count > (best[1] if best else 0):
                best = (block, count)
        return best

    def num_free_after(self, hold: Iterable[BlockId]) -> int:
        """How many could be taken once `hold` are held."""
        return len(self._free) - sum(1 for block in hold if self._refs[block] == 0)

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """One more owner for each."""
        for block in blocks:
            if self._refs[block] == 0:
                self._free.remove(block)
            self._refs[block] += 1

    def hold_found(self, blocks: Sequence[BlockId]) -> None:
        """Likewise, for a request that goes on from them: they will be kept longer."""
        self.hold(blocks)
        for block in blocks:
            self._was_found[block] = True

    def take(self, count: int) -> list[BlockId]:
        """`count` blocks for one owner; whatever they held is forgotten. The caller has looked at num_free."""
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        taken = []
        for _ in range(count):
            block = self._free.pop()
            self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def name(
        self,
        block: BlockId,
        key: BlockKey,
        parent: BlockKey,
        token_ids: Sequence[int],
        root_salt: str | None = None,
    ) -> None:
        """A full, computed block becomes findable. A key that another block has stays with that one. `root_salt`: of a
        chain's first block, whose parent is its root."""
        assert self._refs[block] > 0
        if key in self._by_key or self._names[block] is not None:
            return
        self._by_key[key] = block
        self._names[block] = _Name(key, parent, tuple(token_ids))
        self._children.setdefault(parent, {})[block] = None
        self._observer.named(key, parent, token_ids, root_salt)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One owner less for each. The last block goes before the first: a prefix is of use without its end, not the reverse."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} released more often than held"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._names[block] is None:
                    self._free.add_nameless(block)
                else:
                    self._free.add(block, was_found=self._was_found[block])

    def check(self) -> None:
        """What must hold at any time; tests call it after each step."""
        for i, refs in enumerate(self._refs):
            block = BlockId(i)
            assert (refs == 0) == (block in self._free), f"block {block}: refs {refs}, free {block in self._free}"
            name = self._names[block]
            if name is not None:
                assert self._by_key[name.key] == block
                assert block in self._children[name.parent]
        assert len(self._by_key) == sum(name is not None for name in self._names)
        assert sum(len(blocks) for blocks in self._children.values()) == len(self._by_key)

    def _forget(self, block: BlockId) -> None:
        name = self._names[block]
        if name is None:
            return
        del self._by_key[name.key]
        siblings = self._children[name.parent]
        del siblings[block]
        if not siblings:
            del self._children[name.parent]
        self._names[block] = None
        self._was_found[block] = False
        self._observer.forgot(name.key)
