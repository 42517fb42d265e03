"""Names for the ids that travel through the system, so that a row is never taken for a block."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
BlockKey = NewType("BlockKey", bytes)  # chained hash of a block's tokens and all before it
BlockId = NewType("BlockId", int)  # a block's place in the device pool
Row = NewType("Row", int)  # a sequence's place on the device
