"""How layouts travel: workers of the release before read and write the fields of one full group."""

from __future__ import annotations

from typing import Any

import pytest
from kv.blocks.test_layout import TWO_GROUPS
from kv.peer_world import LAYOUT, rank

from stoker.kv.blocks.layout import KvGroup, KvLayout
from stoker.kv.peer.layout_wire import describe_layout, read_layout
from stoker.kv.peer.peer_wire import BadFrame

FIRST_RELEASE = {
    "num_layers": 3, "num_heads": 4, "head_dim": 8, "block_tokens": 16, "dtype": "float32", "dtype_bytes": 4,
    "first_head": 0, "all_heads": None,
}  # fmt: skip

WIDE = KvLayout((KvGroup(3, 1, 8, "latent", wide=2),), 16, "int8", 1, part=1, num_parts=2)
HALF = KvLayout((KvGroup(3, 1, 8, "latent"),), 16, "float32", 4, part=1, num_parts=2)
FULL = {"kind": "full", "num_layers": 3, "num_heads": 4, "width": 8}


@pytest.mark.parametrize(
    "layout", [LAYOUT, rank(LAYOUT, 1, 2), rank(LAYOUT, 3, 2, 3), TWO_GROUPS, rank(TWO_GROUPS, 3, 4), HALF, WIDE]
)
def test_a_layout_is_read_as_it_was_described(layout: KvLayout) -> None:
    found = read_layout(describe_layout(layout))
    assert (found.fingerprint, found.identity) == (layout.fingerprint, layout.identity)
    assert (found.first_head, found.end_head, found.block_bytes) == (
        layout.first_head, layout.end_head, layout.block_bytes,
    )  # fmt: skip


def test_one_group_has_the_fields_of_the_first_release() -> None:
    assert describe_layout(LAYOUT) == FIRST_RELEASE
    assert describe_layout(rank(LAYOUT, 1, 2)) == FIRST_RELEASE | {"num_heads": 2, "first_head": 2, "all_heads": 4}
    assert read_layout(FIRST_RELEASE).fingerprint == LAYOUT.fingerprint


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_heads": "4"}, "num_heads"),
        ({"head_dim": 1 << 40}, "head_dim"),
        ({"dtype": 4}, "dtype"),
        ({"first_head": 3, "all_heads": 4, "num_heads": 2}, "heads 3 to 5 of 4"),
        ({"groups": []}, "groups"),
        ({"groups": [{"kind": "state"}]}, "'state'"),
        ({"groups": [FULL | {"wide": 8}]}, "8 wide values of 8"),
        ({"groups": [FULL | {"wide": -1}]}, "wide"),
        ({"groups": [FULL | {"held": [1, 1]}]}, r"layers \[1, 1\] of 3"),
        ({"groups": [FULL | {"held": [0, 4]}]}, r"layers \[0, 4\] of 3"),
        ({"groups": [FULL | {"held": "all"}]}, "held layers are 'all'"),
        ({"context": 2}, "context is 2"),
        ({"context": [2, 2]}, "part 2 of 2"),
        ({"context": [0, 0]}, "part 0 of 0"),
        ({"context": [1, 3]}, "16 tokens cannot be split into 3"),
        (
            {
                "groups": [
                    {"kind": "full", "num_layers": 1, "num_heads": 4, "width": 8},
                    {"kind": "full", "num_layers": 1, "num_heads": 6, "width": 8},
                ]
            },
            r"\[4, 6\] heads",
        ),
    ],
)
def test_a_bad_layout_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(BadFrame, match=named):
        read_layout(FIRST_RELEASE | change)


def test_a_welcome_without_a_layout_is_refused() -> None:
    with pytest.raises(BadFrame, match="must be an object"):
        read_layout(None)
