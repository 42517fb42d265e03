"""Encryption of the disk tier's files with AES-256-GCM and a key of the operator.

Without the key, neither blocks nor prompts can be read or changed unnoticed. Visible without the key: that a block with
some key exists, and its length.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from stoker.base.errors import ConfigError
from stoker.base.extras import install_command
from stoker.base.log import EventLog
from stoker.kv.store.tiers.tier import HostBytes

log = EventLog("kv.disk")

NONCE_BYTES = 12
TAG_BYTES = 16
_KEY_BYTES = 32
_CHECK = b"stoker disk tier"


class DecryptionFailed(Exception):
    """The data was encrypted with another key, or has changed."""


class Cipher:
    """AES-256-GCM with one key. Needs the package cryptography."""

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError(
                f"store.disk_key_file needs the package cryptography: {install_command('encryption')}"
            ) from error
        self._invalid = InvalidTag
        self._aes = AESGCM(key)

    def seal(self, nonce: bytes, data: bytes, public: bytes) -> bytes:
        """Encrypt. The public bytes are authenticated, but not encrypted."""
        return self._aes.encrypt(nonce, data, public)

    def open(self, nonce: bytes, sealed: bytes, public: bytes) -> bytes:
        """Decrypt. Raises DecryptionFailed."""
        try:
            return self._aes.decrypt(nonce, sealed, public)
        except self._invalid:
            raise DecryptionFailed from None

    def seal_into(self, nonce: bytes, data: HostBytes, public: bytes, sealed: HostBytes) -> None:
        """Encrypt into a buffer that is TAG_BYTES longer than `data`."""
        self._aes.encrypt_into(nonce, data.data, public, sealed.data)

    def open_into(self, nonce: bytes, sealed: HostBytes, public: bytes, data: HostBytes) -> None:
        """Decrypt into a buffer. Raises DecryptionFailed."""
        try:
            self._aes.decrypt_into(nonce, sealed.data, public, data.data)
        except self._invalid:
            raise DecryptionFailed from None

    def proof(self) -> str:
        """Return a text from which `proves` can later decide whether it has the same key."""
        nonce = os.urandom(NONCE_BYTES)
        return (nonce + self.seal(nonce, _CHECK, b"")).hex()

    def proves(self, proof: str) -> bool:
        """Return True if the proof was made with this key."""
        raw = bytes.fromhex(proof)
        try:
            return self.open(raw[:NONCE_BYTES], raw[NONCE_BYTES:], b"") == _CHECK
        except DecryptionFailed:
            return False


def read_key(path: Path) -> bytes:
    """Read a key file: 32 bytes, or 64 hex digits."""
    try:
        raw = path.read_bytes()
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            log.warning("disk_key_readable_by_others", path=str(path))
    except OSError as error:
        raise ConfigError(f"store.disk_key_file={path}: {error.strerror}") from error
    if len(raw) == _KEY_BYTES:
        return raw
    try:
        key = bytes.fromhex(raw.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"store.disk_key_file={path} holds {len(raw)} bytes: write 32 bytes or 64 hex digits")
    return key
