"""The file format of a block: a head of whole pages that describes the block, then the block.

A file is written under a temporary name and renamed, so that a file under its final name is always complete. A read
checks everything: a file is never trusted because of its name.

    head    magic, version, flags, crc, key, block_bytes, two nonces | parent, checksum, salt, token ids, zeros
    block   its bytes, then (encrypted) a tag, then zeros up to a page

With a cipher, the part of the head after the bar and the block are encrypted separately, and the part before the bar is
their associated data.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Sequence
from contextlib import suppress
from errno import EINVAL
from mmap import mmap

import numpy as np

from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import BlockName
from stoker.kv.device.checksum import checksum
from stoker.kv.store.tiers.disk.disk_encryption import NONCE_BYTES, TAG_BYTES, Cipher, DecryptionFailed
from stoker.kv.store.tiers.tier import HostBytes

VERSION = 2
PAGE = 4096
_MAGIC = b"stokerkv"
_PUBLIC = struct.Struct("<8sHHI16sQ12s12s")  # magic, version, flags, crc, key, block_bytes, nonces of head and block
_FACTS = struct.Struct("<16sQIB64s")  # parent, checksum, number of tokens, bytes of the salt, salt
_CRC_AT = 12
_ENCRYPTED = 1
_NO_SALT = 255
_NO_NONCE = bytes(NONCE_BYTES)


class CorruptBlock(Exception):
    """The file does not hold the block that its name says. The message says how that was found."""


class BlockFiles:
    """Reads and writes block files. Thread-safe. `direct`: bypass the kernel's page cache where the file system
    supports that."""

    def __init__(self, block_bytes: int, block_tokens: int, cipher: Cipher | None, *, direct: bool) -> None:
        self._block_bytes = block_bytes
        self._cipher = cipher
        tag_bytes = TAG_BYTES if cipher else 0
        self._head_bytes = _pages(_PUBLIC.size + _FACTS.size + 4 * block_tokens + tag_bytes)
        self._body_bytes = _pages(block_bytes + tag_bytes)
        self.file_bytes = self._head_bytes + self._body_bytes
        self.direct = direct
        self._own = threading.local()

    def write(self, path: str, name: BlockName, data: HostBytes, data_checksum: int, use_ns: int) -> None:
        """Write a block to `path`, which must not exist. After an OSError the file is not a valid block."""
        head, body = self._scratch()
        self._fill_head(head, name, data_checksum)
        if self._cipher:
            public = head[: _PUBLIC.size].tobytes()
            nonce = public[-NONCE_BYTES:]
            self._cipher.seal_into(nonce, data, public, body[: self._block_bytes + TAG_BYTES])
        elif self._block_bytes == self._body_bytes and (not self.direct or _is_aligned(data)):
            body = data
        else:
            np.copyto(body[: self._block_bytes], data)
        fd = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            _write_all(fd, [head, body])
            os.utime(fd, ns=(use_ns, use_ns))
        finally:
            os.close(fd)

    def read(self, path: str, key: BlockKey, into: HostBytes, use_ns: int | None) -> None:
        """Read a block into a buffer. Raises CorruptBlock or OSError; FileNotFoundError is a miss. With `use_ns`,
        record this use in the file's modification time."""
        head, body = self._scratch()
        is_plain = self._cipher is None
        in_place = is_plain and (not self.direct or (_is_aligned(into) and self._block_bytes == self._body_bytes))
        target = into if in_place else body[: self._body_bytes]
        fd = self._open(path, os.O_RDONLY)
        try:
            num_read = _read_all(fd, [head, target])
            if use_ns is not None:
                with suppress(OSError):  # for example, the file system has become read-only
                    os.utime(fd, ns=(use_ns, use_ns))
        finally:
            os.close(fd)
        if num_read < self._head_bytes + target.nbytes:
            raise CorruptBlock(f"{num_read} bytes long, must be {self.file_bytes}")
        public = self._check_public(head, key)
        if self._cipher:
            try:
                self._cipher.open_into(public[-NONCE_BYTES:], body[: self._block_bytes + TAG_BYTES], public, into)
            except DecryptionFailed:
                raise CorruptBlock("wrong encryption key, or the bytes have changed") from None
            return
        if not in_place:
            np.copyto(into, body[: self._block_bytes])
        _, expected, _, _, _ = _FACTS.unpack_from(head.data, _PUBLIC.size)
        if checksum(into) != expected:
            raise CorruptBlock("wrong checksum")

    def read_name(self, path: str, key: BlockKey) -> BlockName:
        """Read only the description of a block."""
        with open(path, "rb", buffering=0) as file:
            head = np.frombuffer(file.read(self._head_bytes), dtype=np.uint8)
        if len(head) < self._head_bytes:
            raise CorruptBlock(f"{len(head)} bytes long, must be {self.file_bytes}")
        public = self._check_public(head, key)
        facts = head[_PUBLIC.size :].tobytes()
        if self._cipher:
            nonce = public[-2 * NONCE_BYTES : -NONCE_BYTES]
            try:
                facts = self._cipher.open(nonce, facts, public)
            except DecryptionFailed:
                raise CorruptBlock("wrong encryption key, or the bytes have changed") from None
        parent, _, num_tokens, salt_bytes, salt = _FACTS.unpack_from(facts)
        try:
            tokens = struct.unpack_from(f"<{num_tokens}I", facts, _FACTS.size)
            text = None if salt_bytes == _NO_SALT else salt[:salt_bytes].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise CorruptBlock(f"{num_tokens} tokens and a salt of {salt_bytes} bytes: {error}") from None
        return BlockName(key, BlockKey(parent), tokens, text)

    def can_hold(self, name: BlockName) -> bool:
        """Return True if the description fits into the head."""
        room = self._head_bytes - _PUBLIC.size - _FACTS.size - (TAG_BYTES if self._cipher else 0)
        return 4 * len(name.token_ids) <= room and len((name.salt or "").encode()) <= 64 and len(name.parent) == 16

    def _fill_head(self, head: HostBytes, name: BlockName, data_checksum: int) -> None:
        salt = (name.salt or "").encode()
        facts = _FACTS.pack(
            name.parent,
            0 if self._cipher else data_checksum,
            len(name.token_ids),
            _NO_SALT if name.salt is None else len(salt),
            salt,
        ) + struct.pack(f"<{len(name.token_ids)}I", *name.token_ids)
        size = self._head_bytes - _PUBLIC.size
        if self._cipher:
            nonces = os.urandom(NONCE_BYTES), os.urandom(NONCE_BYTES)
            public = _PUBLIC.pack(_MAGIC, VERSION, _ENCRYPTED, 0, name.key, self._block_bytes, *nonces)
            facts = self._cipher.seal(nonces[0], facts.ljust(size - TAG_BYTES, b"\0"), public)
        else:
            public = _PUBLIC.pack(_MAGIC, VERSION, 0, 0, name.key, self._block_bytes, _NO_NONCE, _NO_NONCE)
        head[:] = np.frombuffer(public + facts.ljust(size, b"\0"), dtype=np.uint8)
        if not self._cipher:
            head[_CRC_AT : _CRC_AT + 4] = np.frombuffer(struct.pack("<I", zlib.crc32(head.data)), dtype=np.uint8)

    def _check_public(self, head: HostBytes, key: BlockKey) -> bytes:
        """Check the unencrypted part of the head, and return it."""
        public = head[: _PUBLIC.size].tobytes()
        magic, version, flags, crc, found_key, block_bytes, _, _ = _PUBLIC.unpack(public)
        if (magic, version, flags) != (_MAGIC, VERSION, _ENCRYPTED if self._cipher else 0):
            raise CorruptBlock(f"magic {magic!r}, version {version}, flags {flags}")
        if found_key != key:
            raise CorruptBlock(f"it holds block {found_key.hex()}")
        if block_bytes != self._block_bytes:
            raise CorruptBlock(f"block of {block_bytes} bytes instead of {self._block_bytes}")
        if not self._cipher:
            plain = head.tobytes()
            if zlib.crc32(plain[:_CRC_AT] + bytes(4) + plain[_CRC_AT + 4 :]) != crc:
                raise CorruptBlock("wrong crc of the head")
        return public

    def _open(self, path: str, flags: int) -> int:
        flags |= os.O_CLOEXEC
        if self.direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != EINVAL:
                    raise
                self.direct = False
                if flags & os.O_CREAT:  # some file systems create the file before they refuse direct I/O
                    with suppress(FileNotFoundError):
                        os.unlink(path)
        return os.open(path, flags, 0o600)

    def _scratch(self) -> tuple[HostBytes, HostBytes]:
        """Return this thread's page-aligned buffers for a head and a block."""
        buffer: HostBytes | None = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = self._own.buffer = np.frombuffer(mmap(-1, self.file_bytes), dtype=np.uint8)
        return buffer[: self._head_bytes], buffer[self._head_bytes :]


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def _is_aligned(data: HostBytes) -> bool:
    return data.ctypes.data % PAGE == 0


def _write_all(fd: int, parts: Sequence[HostBytes]) -> None:
    done, total = 0, sum(part.nbytes for part in parts)
    while done < total:
        done += os.pwritev(fd, _after(parts, done), done)


def _read_all(fd: int, parts: Sequence[HostBytes]) -> int:
    """Read until the buffers are full or the file ends. Returns the number of bytes."""
    done, total = 0, sum(part.nbytes for part in parts)
    while done < total:
        num_read = os.preadv(fd, _after(parts, done), done)
        done += num_read
        if num_read == 0 or num_read % PAGE:  # the end of the file; direct I/O cannot continue in the middle of a page
            break
    return done


def _after(parts: Sequence[HostBytes], skip: int) -> list[memoryview]:
    """Return views of the buffers after the first `skip` bytes."""
    left = []
    for part in parts:
        if skip < part.nbytes:
            left.append(part[skip:].data)
        skip = max(0, skip - part.nbytes)
    return left
