"""tmp"""

from __future__ import annotations

from dataclasses import dataclass

PANEL_PAIRS = 2048


@dataclass(frozen=True, slots=True)
class PairTile:
    """The tile of one program: pairs, outputs and inputs at a time."""

    rows: int
    outs: int
    ins: int
    num_warps: int
    num_stages: int

    @property
    def panel(self) -> int:
        """How many tiles of one expert's pairs run next to each other on the same weights."""
        return max(1, PANEL_PAIRS // self.rows)
