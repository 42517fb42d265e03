"""BlockPool: which sequences hold which blocks of device memory, which blocks can be found by key, and which block is
reused next.

Blocks are taken and freed only here. The pool knows nothing of bytes or sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.free_blocks import FreeBlocks
from stoker.kv.blocks.reach import EVERYTHING, KvReach

# At most this many children of a parent are compared. A system prompt that precedes every chat has thousands of
# children.
_PARTIAL_SEARCH = 8


class _Name(NamedTuple):
    key: BlockKey
    parent: BlockKey
    token_ids: tuple[int, ...]


class PoolObserver(Protocol):
    """Receives an event for each block that can, or can no longer, be found by key. It is called during a step, so it
    must be quick."""

    def named(self, key: BlockKey, parent: BlockKey, token_ids: Sequence[int], root_salt: str | None) -> None:
        """A block can now be found by its key."""

    def forgot(self, key: BlockKey) -> None:
        """The block with this key was reused."""


class NoObserver:
    def named(self, key: BlockKey, parent: BlockKey, token_ids: Sequence[int], root_salt: str | None) -> None: ...

    def forgot(self, key: BlockKey) -> None: ...


class BlockPool:
    """The reference counts, keys and reuse order of the blocks of one KV set.

    The pool has no clock. `now_s` is the time of the current step, and the scheduler sets it. `reach` says which blocks
    a sequence needs.
    """

    def __init__(self, num_blocks: int, observer: PoolObserver | None = None, reach: KvReach = EVERYTHING) -> None:
        self.num_blocks = num_blocks
        self.reach = reach
        self.now_s = 0.0
        self._observer = observer or NoObserver()
        self._refs = [0] * num_blocks
        self._names: list[_Name | None] = [None] * num_blocks
        self._by_key: dict[BlockKey, BlockId] = {}
        self._children: dict[BlockKey, dict[BlockId, None]] = {}
        self._was_matched = bytearray(num_blocks)  # 1: the prefix of a later request has matched the block
        self._free = FreeBlocks(num_blocks)

    @property
    def num_free(self) -> int:
        """How many blocks can be taken now. Taking a named block evicts it."""
        return len(self._free)

    @property
    def num_named(self) -> int:
        """How many blocks can be found by key."""
        return len(self._by_key)

    def holds(self, key: BlockKey) -> bool:
        """Return True if a block can be found by this key."""
        return key in self._by_key

    def find(self, key: BlockKey) -> BlockId | None:
        """Return the block that has this key."""
        return self._by_key.get(key)

    def match(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """Return the blocks of the leading keys that are in the pool."""
        found: list[BlockId] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def match_partial(self, parent: BlockKey, token_ids: Sequence[int]) -> tuple[BlockKey, int] | None:
        """Among the blocks that follow `parent`, find the one that shares the longest prefix with `token_ids`. Return its
        key and the length of that prefix."""
        best: tuple[BlockKey, int] | None = None
        children = self._children.get(parent, {})
        for _, block in zip(range(_PARTIAL_SEARCH), reversed(children), strict=False):
            name = self._names[block]
            assert name is not None
            count = 0
            for cached, requested in zip(name.token_ids, token_ids, strict=False):
                if cached != requested:
                    break
                count += 1
            if count > (best[1] if best else 0):
                best = (name.key, count)
        return best

    def children(self, parent: BlockKey) -> Iterator[tuple[BlockKey, tuple[int, ...]]]:
        """Yield the keys and the tokens of the blocks that follow `parent`, newest first."""
        for block in reversed(self._children.get(parent, {})):
            name = self._names[block]
            assert name is not None
            yield name.key, name.token_ids

    def num_free_after(self, hold: Iterable[BlockId]) -> int:
        """Return how many blocks could still be taken if `hold` were held."""
        refs = self._refs
        return len(self._free) - [refs[block] for block in hold].count(0)

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Add one reference to each block."""
        refs, free = self._refs, self._free
        for block in blocks:
            count = refs[block]
            if count == 0:
                free.remove(block)
            refs[block] = count + 1

    def hold_matched(self, blocks: Sequence[BlockId]) -> None:
        """Add one reference to each block for a request whose prefix they match. Such blocks are kept longer."""
        self.hold(blocks)
        was_matched = self._was_matched
        for block in blocks:
            was_matched[block] = 1

    def take(self, count: int) -> list[BlockId]:
        """Take `count` blocks with one reference each, and evict what they held. The caller has checked num_free."""
        assert count <= len(self._free), f"{count} blocks requested, {len(self._free)} free"
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
        """Make a full, computed block findable by its key. If another block already has the key, nothing changes.
        `root_salt` is given for the first block of a chain, whose parent is the root key."""
        assert self._refs[block] > 0
        if key in self._by_key or self._names[block] is not None:
            return
        self._by_key[key] = block
        self._names[block] = _Name(key, parent, tuple(token_ids))
        self._children.setdefault(parent, {})[block] = None
        self._observer.named(key, parent, token_ids, root_salt)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference of each block. The last block is freed first: a prefix is useful without its end, but not
        the reverse."""
        refs, names, was_matched, free = self._refs, self._names, self._was_matched, self._free
        used_once: list[BlockId] = []
        matched: list[BlockId] = []
        for block in reversed(blocks):
            left = refs[block] - 1
            assert left >= 0, f"block {block} released more often than held"
            refs[block] = left
            if not left:
                if was_matched[block]:
                    matched.append(block)
                elif names[block] is not None:
                    used_once.append(block)
                else:
                    free.add_unnamed(block)
        if used_once:
            free.add_named(used_once, self.now_s, was_matched=False)
        if matched:
            free.add_named(matched, self.now_s, was_matched=True)

    def release_passed(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference of blocks that a running sequence no longer needs. They are reused before the others,
        except those that a later request has matched."""
        matched: list[BlockId] = []
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._names[block] is None:
                    self._free.add_unnamed(block)
                elif self._was_matched[block]:
                    matched.append(block)
                else:
                    self._free.add_passed(block)
        self._free.add_named(matched, self.now_s, was_matched=True)

    def check(self) -> None:
        """Assert the invariants of the pool. Tests call it after each step."""
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
        self._was_matched[block] = 0
        self._observer.forgot(name.key)
