"""ObjectBuffers: where the objects of one call lie in memory. A header stands in the room before its block, where the buffer has some:
then an object is one run, and costs the client one transfer instead of two. All is kept until the call has ended."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove, string_at

import numpy as np

from stoker.kv.store.tiers.mooncake.mooncake_object import ObjectFormat
from stoker.kv.store.tiers.tier import HostBytes


class ObjectBuffers:
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
            self._headers = [self._own.ctypes.data + at * size for at in range(len(blocks))]
            self.places = [[header, block] for header, block in zip(self._headers, blocks, strict=True)]
            self.sizes = [[size, block_bytes]] * len(blocks)

    def header(self, at: int) -> bytes:
        return string_at(self._headers[at], self._header_bytes)

    def put_header(self, at: int, packed: bytes) -> None:
        memmove(self._headers[at], packed, len(packed))
