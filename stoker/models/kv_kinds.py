"""The KV groups of models whose layers see different parts of the context. Registers nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.base.errors import ModelFilesError
from stoker.kv.blocks.layout import KvGroup


def read_kinds(
    layer_types: Any, kinds: Mapping[str, str], extents: Mapping[str, int], num_layers: int, num_heads: int, width: int
) -> tuple[tuple[KvGroup, ...], list[int]]:
    """Return the KV groups, and the group of each layer.

    `layer_types` is the field of config.json, `kinds` has the kind of KV for each of its values, and `extents` the
    tokens that a window or a chunk has. The group of layers that see all tokens comes first.
    """
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ModelFilesError(f"config.json: 'layer_types' must be a list of {num_layers}, found {layer_types!r}")
    for name in layer_types:
        if not isinstance(name, str) or name not in kinds:
            raise ModelFilesError(
                f"config.json: layer_types has {name!r}, which is not supported; supported are {', '.join(kinds)}"
            )
    found = [kinds[name] for name in layer_types]
    order = sorted(set(found), key=lambda kind: kind != "full")
    groups = tuple(KvGroup(found.count(kind), num_heads, width, kind, extents.get(kind, 0)) for kind in order)
    return groups, [order.index(kind) for kind in found]
