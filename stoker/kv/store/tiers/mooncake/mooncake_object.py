"""The format of a block as a Mooncake object: a header of fixed size that describes the block, then its bytes.

With the header a reader can check that the object is complete and is the right block, and can announce the block.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from hashlib import sha256

from stoker.base.ids import BlockKey
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import BlockName
from stoker.kv.device.checksum import NAME as CHECKSUM

_MAGIC = b"STOKERK2"
# magic, key space, key, parent, block bytes, checksum, number of tokens, length of the salt (-1: no salt)
_FIXED = struct.Struct("<8s16s16s16sQQIi")
_CRC = struct.Struct("<I")  # checksum of everything before it; follows the salt
_SALT_BYTES = 128
_ALIGNED = 512


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """The decoded header."""

    name: BlockName
    checksum: int


class ObjectFormat:
    """The format of one key space: blocks of one fingerprint and one layout. The heads of a rank are part of the
    layout, so each rank has its own space."""

    def __init__(self, fingerprint: str, layout: KvLayout) -> None:
        self._space = sha256(f"{CHECKSUM}\0{fingerprint}\0{layout.fingerprint}".encode()).digest()[:16]
        self.block_bytes = layout.block_bytes
        room = _FIXED.size + 4 * layout.block_tokens + _SALT_BYTES + _CRC.size
        self.header_bytes = -(-room // _ALIGNED) * _ALIGNED
        self.object_bytes = self.header_bytes + self.block_bytes
        self.prefix = f"stoker/{self._space.hex()}/"

    def store_key(self, key: BlockKey) -> str:
        return self.prefix + key.hex()

    def pack(self, name: BlockName, checksum: int) -> bytes | None:
        """Return the header, or None if the block's description does not fit."""
        salt = None if name.salt is None else name.salt.encode()
        fixed = _FIXED.pack(
            _MAGIC,
            self._space,
            name.key,
            name.parent,
            self.block_bytes,
            checksum,
            len(name.token_ids),
            -1 if salt is None else len(salt),
        )
        body = fixed + struct.pack(f"<{len(name.token_ids)}I", *name.token_ids) + (salt or b"")
        packed = body + _CRC.pack(zlib.crc32(body))
        return packed if len(packed) <= self.header_bytes else None

    def unpack(self, raw: bytes, key: BlockKey) -> ObjectHeader | None:
        """Decode a header, or return None if it is not the header of this block."""
        if len(raw) < _FIXED.size:
            return None
        magic, space, found, parent, block_bytes, checksum, num_tokens, salt_bytes = _FIXED.unpack_from(raw)
        if (magic, space, found, block_bytes) != (_MAGIC, self._space, key, self.block_bytes):
            return None
        tokens_end = _FIXED.size + 4 * num_tokens
        end = tokens_end + max(0, salt_bytes)
        if end + _CRC.size > len(raw) or _CRC.unpack_from(raw, end)[0] != zlib.crc32(raw[:end]):
            return None
        token_ids = struct.unpack_from(f"<{num_tokens}I", raw, _FIXED.size)
        salt = None if salt_bytes < 0 else raw[tokens_end:end].decode()
        return ObjectHeader(BlockName(key, BlockKey(parent), token_ids, salt), checksum)
