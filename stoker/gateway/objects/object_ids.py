"""The ids of stored objects."""

from __future__ import annotations

import re

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def is_object_id(text: str) -> bool:
    """Return True if an object can have this id. Databases refuse some texts, such as one with a NUL."""
    return _ID.fullmatch(text) is not None
