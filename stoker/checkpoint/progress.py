"""How slow work on files tells its caller how far it is. What a progress bar looks like is the CLI's business."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def __call__(self, stage: str, done: int, total: int) -> None:
        """`stage` is a sentence for people; it is finished when `done` equals `total`. Units may differ by stage."""


def silent(stage: str, done: int, total: int) -> None:
    """For callers that have nobody to tell."""
