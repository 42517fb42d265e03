"""ByteMutator: changes inputs at random, from a seed. Generic edits, pieces of the format, and splices of two inputs."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

_NUMBERS = (0, 1, 2, 7, 8, 127, 128, 255, 256, 65535, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)
_TEXT_NUMBERS = (b"0", b"-1", b"1e400", b"NaN", b"18446744073709551616", b"9" * 4400, b"0.5", b"null", b"[]", b"{}")
_FORMATS = ("<B", "<H", "<I", "<Q", ">H", ">I", ">Q", "<d")


class ByteMutator:
    """Mutates inputs. Two mutators with the same seed and the same calls return the same bytes."""

    def __init__(
        self, rng: random.Random, tokens: Sequence[bytes], max_bytes: int, mutated_bytes: int | None = None
    ) -> None:
        self._rng = rng
        self._mutated_bytes = mutated_bytes
        self._tokens = [*tokens, *_TEXT_NUMBERS]
        self._max_bytes = max_bytes
        self._edits: list[Callable[[bytes], bytes]] = [
            self._flip,
            self._replace,
            self._insert,
            self._delete,
            self._repeat,
            self._number,
            self._token,
            self._token,
            self._digits,
            self._cut,
            self._nest,
        ]

    def mutate(self, pool: Sequence[bytes]) -> bytes:
        """Return a mutation of one of the inputs in `pool`."""
        rng = self._rng
        data = rng.choice(pool)
        if rng.random() < 0.1:
            other = rng.choice(pool)
            data = data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]
        end = len(data) if self._mutated_bytes is None else self._mutated_bytes
        data, rest = data[:end], data[end:]
        for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
            data = rng.choice(self._edits)(data)
        return (data + rest)[: self._max_bytes]

    def _at(self, data: bytes) -> int:
        return self._rng.randint(0, len(data))

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return data
        at = self._rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << self._rng.randrange(8))]) + data[at + 1 :]

    def _replace(self, data: bytes) -> bytes:
        at = self._at(data)
        new = self._rng.randbytes(self._rng.choice((1, 1, 2, 4, 8)))
        return data[:at] + new + data[at + len(new) :]

    def _insert(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self._rng.randbytes(self._rng.choice((1, 1, 2, 4, 16))) + data[at:]

    def _delete(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + data[at + self._rng.choice((1, 1, 2, 4, 16, 64)) :]

    def _repeat(self, data: bytes) -> bytes:
        at = self._at(data)
        piece = data[at : at + self._rng.choice((1, 4, 16, 64))]
        return data[:at] + piece * self._rng.choice((2, 3, 16, 500)) + data[at:]

    def _number(self, data: bytes) -> bytes:
        at, form = self._at(data), self._rng.choice(_FORMATS)
        if form == "<d":
            new = struct.pack(form, self._rng.choice((float("nan"), float("inf"), -1.0, 1e308)))
        else:
            new = struct.pack(form, self._rng.choice(_NUMBERS) % (1 << (8 * struct.calcsize(form))))
        return data[:at] + new + data[at + len(new) :]

    def _token(self, data: bytes) -> bytes:
        at, new = self._at(data), self._rng.choice(self._tokens)
        return data[:at] + new + data[at + (len(new) if self._rng.random() < 0.5 else 0) :]

    def _digits(self, data: bytes) -> bytes:
        """Replace a decimal number in the input by another value."""
        places = [at for at in range(len(data)) if 48 <= data[at] <= 57][:4096]
        if not places:
            return self._token(data)
        start = end = self._rng.choice(places)
        while end < len(data) and 48 <= data[end] <= 57:
            end += 1
        return data[:start] + self._rng.choice(_TEXT_NUMBERS) + data[end:]

    def _cut(self, data: bytes) -> bytes:
        return data[: self._at(data)]

    def _nest(self, data: bytes) -> bytes:
        """Insert deeply nested brackets, which exhaust the stack of a recursive parser."""
        at, depth = self._at(data), self._rng.choice((10, 1000, 20_000))
        opening, closing = self._rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"\x91", b"")))
        return data[:at] + opening * depth + b"1" + closing * depth + data[at:]
