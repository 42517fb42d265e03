"""ObjectBuffers: the memory addresses of the objects of one call.

A header is placed in the headroom before its block, if the buffer has enough. Then an object is one contiguous range,
and costs one transfer instead of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove, string_at

import numpy as np

from stoker.kv.store.tiers.mooncake.mooncake_object import ObjectFormat
from stoker.kv.store.tiers.tier import HostBytes


class ObjectBuffers:
    """Keeps all memory of a call alive until the call has ended."""

    def __init__(self, format: ObjectFormat, buffers: Sequence[HostBytes], headroom_bytes: int) -> None:
        size, block_bytes = format.header_bytes, format.block_bytes
        self.buffers = buffers
        self._header_bytes = size
        blocks = [buffer.ctypes.data for buffer in buffers]
        if headroom_bytes >= size:
            self._headers = [block - size for block in blocks]
            self.places = [[header] for header in self._headers]
            self.sizes = [[size + block_bytes]] * len(blocks)
        else:
            self._own = np.zeros((len(blocks), size), np.uint8)
            self._headers = [self._own.ctypes.data + i * size for i in range(len(blocks))]
            self.places = [[header, block] for header, block in zip(self._headers, blocks, strict=True)]
            self.sizes = [[size, block_bytes]] * len(blocks)

    def header(self, i: int) -> bytes:
        return string_at(self._headers[i], self._header_bytes)

    def put_header(self, i: int, packed: bytes) -> None:
        memmove(self._headers[i], packed, len(packed))
