"""How a KV server describes its layout to a client, as a JSON object.

A layout with one full group has the fields of the first version, so that workers of different releases understand each
other. Other layouts list their groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stoker.kv.blocks.layout import KINDS, LOCAL_KINDS, KvGroup, KvLayout
from stoker.kv.peer.peer_wire import BadFrame

_MAX_SIZE = 1 << 32  # of any number in a layout


def describe_layout(layout: KvLayout) -> dict[str, Any]:
    """Return the JSON object."""
    (group, *others) = layout.groups
    if not others and group.kind == "full" and group.held is None and layout.num_parts == 1:
        return {
            "num_layers": group.num_layers,
            "num_heads": layout.num_heads,
            "head_dim": group.width,
            "block_tokens": layout.block_tokens,
            "dtype": layout.dtype,
            "dtype_bytes": layout.dtype_bytes,
            "first_head": layout.first_head,
            "all_heads": None if layout.num_heads == layout.model_heads else layout.model_heads,
        }
    groups = [
        {"kind": group.kind, "num_layers": group.num_layers, "num_heads": group.num_heads, "width": group.width}
        | ({"extent": group.extent} if group.extent else {})
        | ({"wide": group.wide} if group.wide else {})
        | ({"held": [group.held.start, group.held.stop]} if group.held is not None else {})
        for group in layout.groups
    ]
    return {
        "groups": groups,
        "block_tokens": layout.block_tokens,
        "dtype": layout.dtype,
        "dtype_bytes": layout.dtype_bytes,
        "first_head": layout.first_head,
        "num_heads": layout.num_heads,
    } | ({"context": [layout.part, layout.num_parts]} if layout.num_parts > 1 else {})


def read_layout(fields: Any) -> KvLayout:
    """Return the layout that a peer describes. Raises BadFrame."""
    if not isinstance(fields, dict):
        raise BadFrame(f"a layout must be an object, found {fields!r}")
    num_heads, first_head = _size(fields, "num_heads"), _size(fields, "first_head", least=0, default=0)
    if "groups" in fields:
        groups = _groups(fields["groups"])
    else:
        all_heads = _size(fields, "all_heads", default=num_heads)
        groups = (KvGroup(_size(fields, "num_layers"), all_heads, _size(fields, "head_dim")),)
    dtype = fields.get("dtype")
    if not isinstance(dtype, str):
        raise BadFrame(f"a layout whose dtype is {dtype!r}")
    try:
        layout = KvLayout(
            groups, _size(fields, "block_tokens"), dtype, _size(fields, "dtype_bytes"), first_head, num_heads
        )
        part, num_parts = _context(fields)
        layout = replace(layout, part=part, num_parts=num_parts)
    except ValueError as error:
        raise BadFrame(f"a layout of {error}") from error
    if layout.end_head > layout.model_heads:
        raise BadFrame(f"a layout with heads {first_head} to {layout.end_head} of {layout.model_heads}")
    return layout


def _groups(entries: Any) -> tuple[KvGroup, ...]:
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise BadFrame(f"a layout whose groups are {entries!r}")
    for entry in entries:
        if entry.get("kind") not in KINDS:
            raise BadFrame(f"a layout with a group of the kind {entry.get('kind')!r}; known are: {', '.join(KINDS)}")
    return tuple(
        KvGroup(
            _size(entry, "num_layers"),
            _size(entry, "num_heads"),
            _size(entry, "width"),
            entry["kind"],
            _size(entry, "extent") if entry["kind"] in LOCAL_KINDS else 0,
            _held(entry),
            _wide(entry),
        )
        for entry in entries
    )


def _context(fields: dict[str, Any]) -> tuple[int, int]:
    """Return which part of the tokens of each block a rank holds, and how many parts there are."""
    found = fields.get("context")
    if found is None:
        return 0, 1
    if not isinstance(found, list) or len(found) != 2 or not all(type(number) is int for number in found):
        raise BadFrame(f"a layout whose context is {found!r}")
    if not 0 <= found[0] < found[1] <= _MAX_SIZE:
        raise BadFrame(f"a layout with part {found[0]} of {found[1]} of the context")
    return found[0], found[1]


def _held(entry: dict[str, Any]) -> range | None:
    """Return the layers of a group that a stage holds, None if it holds all."""
    held, num_layers = entry.get("held"), entry.get("num_layers")
    if held is None:
        return None
    if not isinstance(held, list) or len(held) != 2 or not all(type(number) is int for number in held):
        raise BadFrame(f"a layout with a group whose held layers are {held!r}")
    if type(num_layers) is not int or not 0 <= held[0] < held[1] <= num_layers:
        raise BadFrame(f"a layout with a group that holds the layers {held} of {num_layers}")
    return range(*held)


def _wide(entry: dict[str, Any]) -> int:
    """Return how many values of a token are wide."""
    wide = _size(entry, "wide", least=0, default=0)
    if wide >= _size(entry, "width"):
        raise BadFrame(f"a layout with a group that has {wide} wide values of {entry['width']}")
    return wide


def _size(fields: dict[str, Any], name: str, least: int = 1, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if type(value) is not int or not least <= value <= _MAX_SIZE:
        raise BadFrame(f"a layout whose {name} is {value!r}")
    return value
