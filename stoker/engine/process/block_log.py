"""BlockLog: collects the KV events of one engine between two reports: blocks that were cached, and blocks that were lost."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.base.ids import BlockKey
from stoker.kv.blocks.keys import salt_hash
from stoker.kv.blocks.transfer import BlockName
from stoker.proto.messages import BlocksForgotten, BlocksNamed

_DEVICE = "GPU"  # the engine's own memory; also on a CPU


class BlockLog:
    """A PoolObserver that also records changes of the tiers. Consecutive blocks of one chain become one event."""

    def __init__(self) -> None:
        self._events: list[BlocksNamed | BlocksForgotten] = []

    def take(self) -> list[BlocksNamed | BlocksForgotten]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def named(self, key: BlockKey, parent: BlockKey, token_ids: Sequence[int], root_salt: str | None) -> None:
        salt = None if root_salt is None else salt_hash(root_salt) or ""
        self._named(BlockName(key, parent, tuple(token_ids), salt), _DEVICE)

    def forgot(self, key: BlockKey) -> None:
        self._forgot(key, _DEVICE)

    def tier_changed(self, medium: str, stored: Sequence[BlockName], removed: Sequence[BlockKey]) -> None:
        for name in stored:
            self._named(name, medium)
        for key in removed:
            self._forgot(key, medium)

    def _named(self, name: BlockName, medium: str) -> None:
        last = self._events[-1] if self._events else None
        follows = isinstance(last, BlocksNamed) and last.keys[-1] == name.parent and last.medium == medium
        if name.salt is None and follows and isinstance(last, BlocksNamed):
            last.keys.append(name.key)
            last.token_ids.extend(name.token_ids)
            return
        parent = name.parent if name.salt is None else None
        self._events.append(
            BlocksNamed(
                keys=[name.key], parent=parent, token_ids=list(name.token_ids), salt=name.salt or None, medium=medium
            )
        )

    def _forgot(self, key: BlockKey, medium: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksForgotten) and last.medium == medium:
            last.keys.append(key)
        else:
            self._events.append(BlocksForgotten(keys=[key], medium=medium))
