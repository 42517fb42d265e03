"""The blocks that the engine holds, as its events tell: enough to tell all of it again to whoever comes late."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from stoker.base.ids import BlockKey
from stoker.proto.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from stoker.proto.messages import BlocksForgotten, BlocksNamed, KvEvents

MEDIUM = "GPU"  # the engine's own memory, whatever it is made of
_CHAIN_BLOCKS = 256  # in one event of a snapshot


@dataclass(frozen=True, slots=True)
class _Block:
    parent: BlockKey | None
    token_ids: array[int]
    salt: str | None


class KvMirror:
    def __init__(self) -> None:
        self._blocks: dict[BlockKey, _Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, events: KvEvents) -> list[KvEvent]:
        """The same in the public form."""
        return [self._apply(event) for event in events.events]

    def clear(self) -> list[KvEvent]:
        self._blocks.clear()
        return [AllBlocksCleared()]

    def snapshot(self) -> Iterator[KvEvent]:
        """All blocks as they are now; may be read on another thread, later."""
        return _told(dict(self._blocks))

    def _apply(self, event: BlocksNamed | BlocksForgotten) -> KvEvent:
        if isinstance(event, BlocksForgotten):
            for key in event.keys:
                self._blocks.pop(key, None)
            return BlockRemoved(block_hashes=list(event.keys), medium=MEDIUM)
        size = len(event.token_ids) // len(event.keys)
        parent = event.parent
        for i, key in enumerate(event.keys):
            tokens = array("I", event.token_ids[i * size : (i + 1) * size])
            self._blocks[key] = _Block(parent, tokens, event.salt if i == 0 else None)
            parent = key
        return _stored(event.keys, event.parent, event.token_ids, event.salt)


def _told(blocks: dict[BlockKey, _Block]) -> Iterator[KvEvent]:
    """Parents come before their children. A block whose parent is gone is found by no prefix, and left out."""
    yield AllBlocksCleared()
    children: dict[BlockKey | None, list[BlockKey]] = {}
    for key, block in blocks.items():
        children.setdefault(block.parent, []).append(key)
    starts = children.get(None, [])[::-1]
    while starts:
        chain = [starts.pop()]
        following = children.get(chain[0], [])
        while following and len(chain) < _CHAIN_BLOCKS:
            starts += following[:0:-1]
            chain.append(following[0])
            following = children.get(chain[-1], [])
        starts += reversed(following)
        first = blocks[chain[0]]
        yield _stored(chain, first.parent, [token for key in chain for token in blocks[key].token_ids], first.salt)


def _stored(keys: list[BlockKey], parent: BlockKey | None, token_ids: list[int], salt: str | None) -> BlockStored:
    return BlockStored(
        block_hashes=list(keys),
        parent_block_hash=parent,
        token_ids=token_ids,
        block_size=len(token_ids) // len(keys),
        medium=MEDIUM,
        extra_keys=None if salt is None else [[salt], *([None] * (len(keys) - 1))],
    )
