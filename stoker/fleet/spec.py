"""What is known of a worker from outside: where it is and what it is for (WorkerSpec), and what it last said of its
load (LoadReport)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stoker.base.errors import ConfigError
from stoker.base.ids import WorkerId


class Role(StrEnum):
    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    worker_id: WorkerId
    url: str
    role: Role = Role.UNIFIED
    dialect: str = "stoker"
    models: tuple[str, ...] = ()  # empty: whatever its /v1/models says
    cluster: str = "default"
    weight: float = 1.0  # how much work it takes against a worker of weight 1
    labels: Mapping[str, str] = field(default_factory=dict)
    events_url: str | None = None
    replay_url: str | None = None
    bootstrap_port: int | None = None
    decodes_alone: bool = True  # a decode worker that can compute prompts itself; some kinds cannot
    from_config: bool = True  # else it registered itself, and is forgotten when its heartbeats end

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ConfigError(f"worker {self.worker_id}: weight={self.weight}: it must be above zero")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's own word about itself: a load report, or what its metrics page says."""

    waiting_tokens: int = 0
    waiting_sequences: int = 0
    running_sequences: int = 0
    kv_used: float = 0.0  # share of the KV blocks that running sequences hold, 0..1
    num_blocks: int | None = None
    block_tokens: int | None = None
    prefill_tokens_per_s: float | None = None
    step_s: float | None = None
