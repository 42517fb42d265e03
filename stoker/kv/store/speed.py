"""The measured speed of a source of bytes, which decides whether loading is faster than computing."""

from __future__ import annotations

_KEPT = 0.9  # weight of the earlier measurements at each new one


class Speed:
    """A decaying average of bytes per second. `guess_bytes_per_s` applies until the first measurement."""

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

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Add a measurement."""
        if num_bytes > 0:
            self._bytes = _KEPT * self._bytes + num_bytes
            self._seconds = _KEPT * self._seconds + max(seconds, 1e-6)

    def replace(self, num_bytes: int, seconds: float) -> None:
        """Replace all earlier measurements by a dedicated one."""
        self._bytes, self._seconds = float(num_bytes), max(seconds, 1e-6)

    def forget(self) -> None:
        """Drop all measurements, so that the guess applies again."""
        self._bytes = self._seconds = 0.0

    def failed(self, seconds: float) -> None:
        """Count time in which nothing arrived against the next estimate."""
        self._seconds += seconds
        self._bytes = self._bytes or 1.0

    def seconds(self, num_bytes: int) -> float:
        """Return the expected time to read `num_bytes`."""
        return num_bytes / self.bytes_per_s
