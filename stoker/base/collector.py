"""Python's garbage collector in a process that serves: it must not stop a step, or a hundred streams, over what never goes."""

from __future__ import annotations

import gc

_YOUNG = 50_000  # new objects before the young ones are looked through; by default 700, which is less than a step makes


def settle() -> None:
    """Once, when the process has started: what there is now stays, and is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 100)
