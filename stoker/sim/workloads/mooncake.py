"""Mooncake's trace format: one request a line, with its arrival in ms, its lengths, and the ids of its 512-token blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError
from stoker.sim.workloads.trace_file import check_order, length_field, number_field, output_field, trace_rows
from stoker.sim.workloads.workload import SimSession, SimTurn

BLOCK_TOKENS = 512
_LAST_STEP_S = 3.0  # the time after the last batch
_FIRST_TAIL, _FIRST_OUTPUT, _MAX_ID = 1 << 30, 1 << 31, 1 << 32


@dataclass(frozen=True, slots=True)
class MooncakeTrace:
    """Requests that arrived in one batch are spread evenly over the time until the next batch."""

    path: Path
    max_requests: int | None = None
    speedup: float = 1.0

    def sessions(self) -> Iterator[SimSession]:
        last_s, number = 0.0, 0
        batch: list[tuple[str, dict[str, Any]]] = []
        for where, row in trace_rows(self.path):
            time_s = number_field(row, "timestamp", where) / 1000
            check_order(time_s, last_s, where, "timestamp")
            if batch and time_s > last_s:
                yield from self._batch(batch, last_s, time_s - last_s, number)
                number += len(batch)
                batch = []
            if self.max_requests is not None and number + len(batch) >= self.max_requests:
                break
            last_s = time_s
            batch.append((where, row))
        yield from self._batch(batch, last_s, _LAST_STEP_S, number)

    def _batch(
        self, batch: list[tuple[str, dict[str, Any]]], start_s: float, step_s: float, first: int
    ) -> Iterator[SimSession]:
        for at, (where, row) in enumerate(batch):
            turn = self._turn(where, row, first + at)
            yield SimSession((start_s + step_s * at / len(batch)) / self.speedup, iter((turn,)))

    def _turn(self, where: str, row: dict[str, Any], number: int) -> SimTurn:
        num_tokens = length_field(row, "input_length", where)
        output_tokens = output_field(row, "output_length", where)
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not all(isinstance(one, int) and one >= 0 for one in ids):
            raise ConfigError(f"{where}: hash_ids must be a list of block ids, whole numbers that are not negative")
        if len(ids) > -(-num_tokens // BLOCK_TOKENS):
            raise ConfigError(
                f"{where}: {len(ids)} hash_ids, but input_length={num_tokens} has fewer blocks of {BLOCK_TOKENS}"
            )
        segments = [(1 + one % (_FIRST_TAIL - 1), BLOCK_TOKENS) for one in ids[: num_tokens // BLOCK_TOKENS]]
        if tail := num_tokens - len(segments) * BLOCK_TOKENS:
            # A partly filled block of the same id is the same text.
            has_id = len(ids) == len(segments) + 1
            token = 1 + ids[-1] % (_FIRST_TAIL - 1) if has_id else _FIRST_TAIL + number % (_FIRST_OUTPUT - _FIRST_TAIL)
            segments.append((token, tail))
        return SimTurn(tuple(segments), output_tokens, _FIRST_OUTPUT + number % (_MAX_ID - _FIRST_OUTPUT))

    def describe(self) -> dict[str, object]:
        return {"workload": "mooncake", "file": self.path.name, "speedup": self.speedup, "requests": self.max_requests}
