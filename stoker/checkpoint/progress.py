"""Progress callbacks for downloads and conversions. The CLI decides how progress is shown."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A function that is called again and again during slow work."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report that `stage` (text for the user) is at `done` of `total`. The unit depends on the stage."""


def silent(stage: str, done: int, total: int) -> None:
    """Ignore all progress."""
