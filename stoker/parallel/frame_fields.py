"""The fields of a frame to the ranks: integers, floats, and text or bytes, written and read in one order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stoker.base.errors import StokerError
from stoker.base.ids import BlockKey


class FrameError(StokerError):
    """A frame is damaged, or comes from another version."""

    code = "bad_plan_frame"


class FrameWriter:
    def __init__(self) -> None:
        self.ints: list[int] = []
        self.floats: list[float] = []
        self.text = bytearray()

    def put(self, *values: int) -> None:
        self.ints += values

    def put_list(self, values: Iterable[int]) -> None:
        values = list(values)
        self.ints.append(len(values))
        self.ints += values

    def put_text(self, text: str) -> None:
        self.put_bytes(text.encode())

    def put_bytes(self, data: bytes) -> None:
        self.ints.append(len(data))
        self.text += data

    def put_keys(self, keys: Sequence[BlockKey]) -> None:
        """Put keys of one length."""
        self.ints.append(len(keys[0]) if keys else 0)
        self.put_bytes(b"".join(keys))


class FrameReader:
    def __init__(self, ints: list[int], floats: list[float], text: bytes) -> None:
        self._ints, self._floats, self._text = iter(ints), iter(floats), text
        self._at = 0

    def one(self) -> int:
        return next(self._ints)

    def take(self, count: int) -> list[int]:
        if count < 0:
            raise FrameError(f"a list of {count} entries")
        return [next(self._ints) for _ in range(count)]

    def take_list(self) -> list[int]:
        return self.take(self.one())

    def floats(self, count: int) -> list[float]:
        return [next(self._floats) for _ in range(count)]

    def text(self) -> str:
        return self.data().decode()

    def data(self) -> bytes:
        first, self._at = self._at, self._at + self.one()
        if not first <= self._at <= len(self._text):
            raise FrameError(f"bytes {first} to {self._at} of {len(self._text)}")
        return self._text[first : self._at]

    def keys(self) -> list[BlockKey]:
        key_bytes, data = self.one(), self.data()
        if not data:
            return []
        if key_bytes <= 0 or len(data) % key_bytes:
            raise FrameError(f"keys of {key_bytes} bytes in {len(data)}")
        return [BlockKey(data[at : at + key_bytes]) for at in range(0, len(data), key_bytes)]
