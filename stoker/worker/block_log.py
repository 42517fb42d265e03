"""The engine's side of KV events: which blocks became findable, which were lost, since somebody last asked."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.base.ids import BlockKey
from stoker.proto.events import salt_hash
from stoker.proto.messages import BlocksForgotten, BlocksNamed


class BlockLog:
    """A PoolObserver. Blocks of one chain that are named one after the other make one event."""

    def __init__(self) -> None:
        self._events: list[BlocksNamed | BlocksForgotten] = []

    def take(self) -> list[BlocksNamed | BlocksForgotten]:
        events, self._events = self._events, []
        return events

    def named(self, key: BlockKey, parent: BlockKey, token_ids: Sequence[int], root_salt: str | None) -> None:
        last = self._events[-1] if self._events else None
        if root_salt is None and isinstance(last, BlocksNamed) and last.keys[-1] == parent:
            last.keys.append(key)
            last.token_ids.extend(token_ids)
            return
        is_first = root_salt is not None
        salt = salt_hash(root_salt) if root_salt else None
        self._events.append(
            BlocksNamed(keys=[key], parent=None if is_first else parent, token_ids=list(token_ids), salt=salt)
        )

    def forgot(self, key: BlockKey) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksForgotten):
            last.keys.append(key)
        else:
            self._events.append(BlocksForgotten(keys=[key]))
