"""A copy of the set of blocks in the engine and its tiers, kept from events, for snapshots to late subscribers."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from stoker.base.ids import BlockKey
from stoker.proto.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from stoker.proto.messages import BlocksForgotten, BlocksNamed, KvEvents

_CHAIN_BLOCKS = 256  # per event of a snapshot


@dataclass(frozen=True, slots=True)
class _MirroredBlock:
    parent: BlockKey | None
    token_ids: array[int]
    salt: str | None


_Held = dict[str, dict[BlockKey, _MirroredBlock]]  # by medium; a block in several media is one object


class KvMirror:
    """The blocks of each medium, updated by the engine's events."""

    def __init__(self) -> None:
        self._held: _Held = {}

    def __len__(self) -> int:
        """Count a block once for each medium that it is in."""
        return sum(map(len, self._held.values()))

    def apply(self, events: KvEvents) -> list[KvEvent]:
        """Apply the events and return them in the public format."""
        return [self._apply(event) for event in events.events]

    def clear(self) -> list[KvEvent]:
        self._held.clear()
        return [AllBlocksCleared()]

    def snapshot(self) -> Iterator[KvEvent]:
        """Return all blocks as they are now. The iterator may be read later, on another thread."""
        return _snapshot_events({medium: dict(held) for medium, held in self._held.items()})

    def _apply(self, event: BlocksNamed | BlocksForgotten) -> KvEvent:
        held = self._held.setdefault(event.medium, {})
        if isinstance(event, BlocksForgotten):
            for key in event.keys:
                held.pop(key, None)
            return BlockRemoved(block_hashes=list(event.keys), medium=event.medium)
        size = len(event.token_ids) // len(event.keys)
        parent = event.parent
        for i, key in enumerate(event.keys):
            block = self._known(key)
            if block is None:
                tokens = array("I", event.token_ids[i * size : (i + 1) * size])
                block = _MirroredBlock(parent, tokens, event.salt if i == 0 else None)
            held[key] = block
            parent = key
        return _stored(event.keys, event.parent, event.token_ids, event.salt, event.medium)

    def _known(self, key: BlockKey) -> _MirroredBlock | None:
        for held in self._held.values():
            block = held.get(key)
            if block is not None:
                return block
        return None


def _snapshot_events(held: _Held) -> Iterator[KvEvent]:
    """Yield events for all blocks, parents before their children, in every medium.

    A block whose parent is gone is left out: no prefix can reach it.
    """
    yield AllBlocksCleared()
    blocks = {key: block for of_medium in held.values() for key, block in of_medium.items()}
    children: dict[BlockKey | None, list[BlockKey]] = {}
    for key, block in blocks.items():
        children.setdefault(block.parent, []).append(key)

    def media_of(key: BlockKey) -> list[str]:
        return [medium for medium, of_medium in held.items() if key in of_medium]

    starts = children.get(None, [])[::-1]
    while starts:
        chain = [starts.pop()]
        media = media_of(chain[0])
        following = children.get(chain[0], [])
        while following and len(chain) < _CHAIN_BLOCKS and media_of(following[0]) == media:
            starts += following[:0:-1]
            chain.append(following[0])
            following = children.get(chain[-1], [])
        starts += reversed(following)
        first = blocks[chain[0]]
        token_ids = [token for key in chain for token in blocks[key].token_ids]
        for medium in media:
            yield _stored(chain, first.parent, token_ids, first.salt, medium)


def _stored(
    keys: list[BlockKey], parent: BlockKey | None, token_ids: list[int], salt: str | None, medium: str
) -> BlockStored:
    return BlockStored(
        block_hashes=list(keys),
        parent_block_hash=parent,
        token_ids=token_ids,
        block_size=len(token_ids) // len(keys),
        medium=medium,
        extra_keys=None if salt is None else [[salt], *([None] * (len(keys) - 1))],
    )
