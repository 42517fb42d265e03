"""The plan of a GPU's memory, line by line. It is computed from shapes, and compared with real usage after the start.

There is no profiling run to measure how much memory a step needs. The KV cache gets what the other lines leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stoker.engine.gpu_steps import max_captured_tokens
from stoker.engine.sampler import SAMPLE_BATCH_ROWS
from stoker.sched.draft_tape import max_heads

_MIB = 1 << 20
CONTEXT_BYTES = 640 * _MIB  # what the driver takes for a process before it allocates anything
# For fragmentation, and for memory that libraries allocate late.
_RESERVE_BYTES = 512 * _MIB
# Loaded kernels, cuBLAS workspaces (32 MiB for each of two streams), and what the driver keeps per captured graph.
_LIBRARY_BYTES = 256 * _MIB
# What the reference sampler allocates per row of a batch and per token of the vocabulary.
_SAMPLING_BYTES = 48
# A row with penalties keeps a count and a flag per token of the vocabulary. Rarely do all rows have penalties. Half of
# the reserve is meant for them, and only what exceeds it is planned.
_PENALTY_BYTES = 5
# A larger difference between plan and usage is worth a warning.
TOLERANCE_BYTES = 256 * _MIB


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """GPU memory besides weights and KV."""

    arena_bytes: int  # for the largest step that is not captured, for sampling its tokens, and for penalties
    graph_bytes: int  # for captured steps and libraries
    reserve_bytes: int = _RESERVE_BYTES
    spare_bytes: int = 0  # for the context of the spare engine process, which starts after this one

    @classmethod
    def plan(
        cls,
        step_tokens: int,
        captured_tokens: int,
        max_rows: int,
        vocab_size: int,
        dtype_bytes: int,
        bytes_per_token: int,
        keeps_spare: bool = False,
        partial_bytes: int = 0,
        draft_logits_bytes: int = 0,
        samples: bool = True,
        exchanged_bytes: Callable[[int], int] = lambda num_tokens: 0,
    ) -> WorkingMemory:
        """Compute the plan. `bytes_per_token` is the memory of a forward pass per token (Model.bytes_per_token).
        `partial_bytes` is what numerics=exact adds to a step: attention's partial results. `draft_logits_bytes` is what a
        draft model adds. `samples`: this rank computes logits. `exchanged_bytes` returns what a step of some tokens exchanges
        if ranks split the context."""
        num_logits = max_heads(max_rows) * vocab_size if samples else 0
        logits_bytes = num_logits * dtype_bytes + draft_logits_bytes
        sampling_bytes = min(num_logits, SAMPLE_BATCH_ROWS * vocab_size) * _SAMPLING_BYTES
        penalty_bytes = max(0, max_rows * vocab_size * _PENALTY_BYTES - _RESERVE_BYTES // 2)
        graph_tokens = max(max_rows, max_captured_tokens(captured_tokens))
        return cls(
            arena_bytes=max(step_tokens * bytes_per_token, sampling_bytes)
            + logits_bytes
            + penalty_bytes
            + partial_bytes
            + exchanged_bytes(step_tokens),
            graph_bytes=_LIBRARY_BYTES
            + graph_tokens * bytes_per_token
            + logits_bytes
            + partial_bytes
            + exchanged_bytes(graph_tokens),
            spare_bytes=CONTEXT_BYTES if keeps_spare else 0,
        )

    @property
    def total_bytes(self) -> int:
        return self.arena_bytes + self.graph_bytes + self.reserve_bytes + self.spare_bytes


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line of the memory plan."""

    name: str
    planned_bytes: int
    used_bytes: int


class MemoryTable:
    """Planned and used bytes, line by line. Used is the decrease of free memory since the line before. Empty on a CPU."""

    def __init__(self, device: torch.device, ranks_per_gpu: int = 1) -> None:
        """`ranks_per_gpu` ranks share the GPU. Then only the allocations of this process are counted."""
        self._device, self._sharers = device, ranks_per_gpu
        self.lines: list[MemoryLine] = []
        self._free_bytes = 0
        if device.type == "cuda":
            self._free_bytes, total_bytes = self._measure()
            used_bytes = total_bytes - self._free_bytes
            self.lines.append(MemoryLine("context and others", used_bytes, used_bytes))

    def add_line(self, name: str, planned_bytes: int) -> None:
        """Add a line for memory that was just allocated."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            self._add(name, planned_bytes)

    def take_arena(self, num_bytes: int) -> None:
        """Allocate the arena in one piece and leave it in torch's cache, so that steps never allocate from the driver."""
        if self._device.type == "cuda":
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._add("arena", num_bytes)

    def add_reserve(self, reserve_bytes: int) -> None:
        """Add the last line: the memory that stays free. The spare engine process takes its part later."""
        if self._device.type == "cuda":
            self.lines.append(MemoryLine("reserve", reserve_bytes, self._free_bytes))

    def _add(self, name: str, planned_bytes: int) -> None:
        free_bytes, _total = self._measure()
        self.lines.append(MemoryLine(name, planned_bytes, self._free_bytes - free_bytes))
        self._free_bytes = free_bytes

    def _measure(self) -> tuple[int, int]:
        """Return the free and the total bytes of this rank's part of the GPU."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        if self._sharers == 1:
            return free_bytes, total_bytes
        part = total_bytes // self._sharers
        return part - CONTEXT_BYTES - torch.cuda.memory_reserved(self._device), part
