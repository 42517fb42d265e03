"""The order in which a tier lists the blocks that it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import BlockName


def parents_first(names: Sequence[BlockName]) -> Iterator[BlockName]:
    """Yield every block after its parent, if the parent is among them."""
    here = {name.key for name in names}
    children: dict[BlockKey, list[BlockName]] = {}
    for name in names:
        children.setdefault(name.parent, []).append(name)
    left = [name for name in names if name.parent not in here]
    while left:
        name = left.pop()
        yield name
        left.extend(children.get(name.key, ()))
