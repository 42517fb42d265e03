"""Types for ids, so that the type checker finds an id that is used as another kind of id."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
BlockKey = NewType("BlockKey", bytes)  # chained hash of a block's tokens and of all tokens before it
BlockId = NewType("BlockId", int)  # index of a block in the device's KV pool
Row = NewType("Row", int)  # index of a sequence in the device's row table
