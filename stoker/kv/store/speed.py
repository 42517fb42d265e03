"""How fast bytes come from somewhere: what a load is worth against computing."""

from __future__ import annotations

_KEPT = 0.9  # of what was known, at each new reading


class Speed:
    """A mean that forgets: bytes and seconds, of which the older count less. `guess` holds until something was measured."""

    def __init__(self, guess_bytes_per_s: float) -> None:
        self._guess = guess_bytes_per_s
        self._bytes = 0.0
        self._seconds = 0.0

    @property
    def measured(self) -> float | None:
        return self._bytes / self._seconds if self._seconds else None

    @property
    def bytes_per_s(self) -> float:
        return self.measured or self._guess

    def saw(self, num_bytes: int, seconds: float) -> None:
        if num_bytes > 0:
            self._bytes = _KEPT * self._bytes + num_bytes
            self._seconds = _KEPT * self._seconds + max(seconds, 1e-6)

    def is_now(self, num_bytes: int, seconds: float) -> None:
        """Measured by itself: whatever was before counts no more."""
        self._bytes, self._seconds = float(num_bytes), max(seconds, 1e-6)

    def forget(self) -> None:
        """The guess holds again."""
        self._bytes = self._seconds = 0.0

    def failed(self, seconds: float) -> None:
        """Time went by and nothing came: it counts against the next estimate."""
        self._seconds += seconds
        self._bytes = self._bytes or 1.0

    def seconds(self, num_bytes: int) -> float:
        return num_bytes / self.bytes_per_s
