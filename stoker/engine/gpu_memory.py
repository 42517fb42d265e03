"""What a card's memory is for, line by line: planned from shapes alone, and measured against the plan when all is in place.

Nothing is run to find out what a step takes. KV gets what the other lines leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker.engine.gpu_steps import most_captured
from stoker.engine.sampler import DRAWN_TOGETHER

_MIB = 1 << 20
# Beside what is planned by name: for the gaps between allocations, and for what libraries load late.
_RESERVE_BYTES = 512 * _MIB
# Kernels as they are loaded, cuBLAS's workspaces (32 MiB for each of two streams), what the driver keeps of captured steps.
_LIBRARY_BYTES = 256 * _MIB
# Drawing by the reference takes so many bytes for each row of those it takes together, and each token of the vocabulary.
_DRAWING_BYTES = 48
# A row with penalties keeps a count and a mark for each token of the vocabulary. Seldom do all rows have them: half the reserve is
# for this, too, and only what is beyond it is planned.
_PENALTY_BYTES = 5
# By so much plan and use may differ before it is worth a warning.
TOLERANCE_BYTES = 256 * _MIB


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """What a card holds beside weights and KV."""

    arena_bytes: int  # of the largest step that is launched kernel by kernel, of drawing its tokens, and of penalties
    graph_bytes: int  # of captured steps and libraries
    reserve_bytes: int = _RESERVE_BYTES

    @classmethod
    def plan(
        cls,
        step_tokens: int,
        mixed_tokens: int,
        max_rows: int,
        vocab_size: int,
        dtype_bytes: int,
        bytes_per_token: int,
    ) -> WorkingMemory:
        logits_bytes = max_rows * vocab_size * dtype_bytes
        drawing_bytes = min(max_rows, DRAWN_TOGETHER) * vocab_size * _DRAWING_BYTES
        penalty_bytes = max(0, max_rows * vocab_size * _PENALTY_BYTES - _RESERVE_BYTES // 2)
        return cls(
            arena_bytes=max(step_tokens * bytes_per_token, drawing_bytes) + logits_bytes + penalty_bytes,
            graph_bytes=_LIBRARY_BYTES + max(max_rows, most_captured(mixed_tokens)) * bytes_per_token + logits_bytes,
        )

    @property
    def total_bytes(self) -> int:
        return self.arena_bytes + self.graph_bytes + self.reserve_bytes


@dataclass(frozen=True, slots=True)
class MemoryLine:
    name: str
    planned_bytes: int
    used_bytes: int


class MemoryTable:
    """Planned beside used: what became less free since the line before. Without lines for RAM."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.lines: list[MemoryLine] = []
        self._free_bytes = 0
        if device.type == "cuda":
            self._free_bytes, total_bytes = torch.cuda.mem_get_info(device)
            used_bytes = total_bytes - self._free_bytes
            self.lines.append(MemoryLine("context and others", used_bytes, used_bytes))

    def note(self, name: str, planned_bytes: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            self._add(name, planned_bytes)

    def take_arena(self, num_bytes: int) -> None:
        """As one piece that is left to torch's allocator to cut up: steps then ask the driver for nothing."""
        if self._device.type == "cuda":
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._add("arena", num_bytes)

    def end(self, reserve_bytes: int) -> None:
        if self._device.type == "cuda":
            self.lines.append(MemoryLine("reserve", reserve_bytes, self._free_bytes))

    def _add(self, name: str, planned_bytes: int) -> None:
        free_bytes, _total = torch.cuda.mem_get_info(self._device)
        self.lines.append(MemoryLine(name, planned_bytes, self._free_bytes - free_bytes))
        self._free_bytes = free_bytes
