"""Data about a worker from outside the gateway: its address and role (WorkerSpec), and its latest load (LoadReport)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stoker.base.errors import ConfigError
from stoker.base.ids import WorkerId

_MOST_COUNT = 1 << 40  # of sequences, tokens or blocks
_MOST_TOKENS_PER_S = 1e9
_LONGEST_STEP_S = 3600.0


class Role(StrEnum):
    """What a worker does: prefill, decode, or both."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker's address, role and capabilities, from the configuration or from its registration."""

    worker_id: WorkerId
    url: str
    role: Role = Role.UNIFIED
    dialect: str = "stoker"
    models: tuple[str, ...] = ()  # empty: use the names that its /v1/models returns
    cluster: str = "default"
    weight: float = 1.0  # share of the work, relative to a worker of weight 1
    labels: Mapping[str, str] = field(default_factory=dict)
    events_url: str | None = None
    replay_url: str | None = None
    bootstrap_port: int | None = None
    decodes_alone: bool = True  # whether a decode worker can also prefill; some engines cannot
    from_config: bool = True  # False: it registered itself, and is removed when its heartbeats stop

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ConfigError(f"worker {self.worker_id}: weight={self.weight} must be greater than zero")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The load that a worker reports about itself, by KV events or on its metrics page."""

    waiting_tokens: int = 0
    waiting_sequences: int = 0
    running_sequences: int = 0
    kv_used: float = 0.0  # fraction of the KV blocks held by running sequences, 0 to 1
    num_blocks: int | None = None
    block_tokens: int | None = None
    prefill_tokens_per_s: float | None = None
    step_s: float | None = None

    def plausible(self) -> LoadReport:
        """Return this report without the numbers that no worker can have, such as a negative speed or NaN.

        One worker with a fault must not get all requests, or make the costs of the others incomparable.
        """
        if (
            0 <= self.waiting_tokens <= _MOST_COUNT
            and 0 <= self.waiting_sequences <= _MOST_COUNT
            and 0 <= self.running_sequences <= _MOST_COUNT
            and 0 <= self.kv_used <= 1
            and 0 <= (self.num_blocks or 0) <= _MOST_COUNT
            and 0 <= (self.block_tokens or 0) <= _MOST_COUNT
            and 0 <= (self.prefill_tokens_per_s or 0) <= _MOST_TOKENS_PER_S
            and 0 <= (self.step_s or 0) <= _LONGEST_STEP_S
        ):
            return self  # as nearly always
        return LoadReport(
            _count(self.waiting_tokens),
            _count(self.waiting_sequences),
            _count(self.running_sequences),
            min(max(0.0, self.kv_used), 1.0),  # this order of arguments makes 0 of NaN
            self.num_blocks and _count(self.num_blocks),
            self.block_tokens and _count(self.block_tokens),
            _measured(self.prefill_tokens_per_s, _MOST_TOKENS_PER_S),
            _measured(self.step_s, _LONGEST_STEP_S),
        )


def _count(value: int) -> int:
    return min(max(value, 0), _MOST_COUNT)


def _measured(value: float | None, most: float) -> float | None:
    """Return the value, or None if it cannot have been measured."""
    return value if value is not None and math.isfinite(value) and 0 <= value <= most else None
