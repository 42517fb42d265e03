"""The engine's settings as a frozen tree. "auto" (None) is resolved once, at start, against the model and the hardware."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KvSettings:
    block_tokens: int | None = None
    num_blocks: int | None = None  # None: what the memory holds
    memory_gib: float | None = None  # on a CPU: how much RAM the cache may take
    card_gib: float | None = None  # of a card that others use too: all that this engine may take, weights and all


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The tiers below the device. All off: KV ends with the engine's own memory. Workers of one machine that name the same
    `name` (or the same `disk_dir`) share what they keep."""

    name: str | None = None  # of the host tier's shared memory; None: this worker's own
    host_gib: float = 0.0
    disk_dir: str | None = None
    disk_gib: float = 16.0
    disk_key_file: str | None = None  # 32 bytes: the disk tier is encrypted with it
    mooncake_master: str | None = None  # host:port
    mooncake_host: str = "127.0.0.1"  # where other workers reach this one's segment
    mooncake_segment_gib: float = 0.0  # RAM that this worker gives to the cluster
    mooncake_protocol: str = "tcp"
    mooncake_ssd_dir: str | None = None


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    """How KV goes from worker to worker. `transports` in the order of preference: the first that both sides can use is used."""

    host: str = "127.0.0.1"  # where peers reach this worker's KV server
    port: int = 0
    transports: tuple[str, ...] = ("local", "cuda_ipc", "tcp")
    secret: str | None = None  # shared by all workers that may pull from each other
    lease_s: float = 30.0
    serves: bool = False  # whether this worker keeps blocks for others: prefill workers do


@dataclass(frozen=True, slots=True)
class SchedSettings:
    step_tokens: int | None = None
    max_rows: int | None = None
    mixed_tokens: int | None = None  # in a step in which answers go on


@dataclass(frozen=True, slots=True)
class EngineSettings:
    device: str | None = None  # cpu, cuda, cuda:1
    dtype: str | None = None  # float32, bfloat16, float16, float64
    max_model_tokens: int | None = None
    num_threads: int | None = None  # CPU threads of one operation
    steps_ahead: int | None = None  # plans launched before the oldest result is taken in
    kv: KvSettings = field(default_factory=KvSettings)
    sched: SchedSettings = field(default_factory=SchedSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    handoff: HandoffSettings = field(default_factory=HandoffSettings)

    def __post_init__(self) -> None:
        positive = {
            "max_model_tokens": self.max_model_tokens,
            "num_threads": self.num_threads,
            "kv.block_tokens": self.kv.block_tokens,
            "kv.num_blocks": self.kv.num_blocks,
            "kv.memory_gib": self.kv.memory_gib,
            "kv.card_gib": self.kv.card_gib,
            "sched.step_tokens": self.sched.step_tokens,
            "sched.max_rows": self.sched.max_rows,
            "sched.mixed_tokens": self.sched.mixed_tokens,
        }
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value}: it must be above zero")
        if self.steps_ahead is not None and self.steps_ahead < 0:
            raise ConfigError(f"steps_ahead={self.steps_ahead}: it must not be below zero")
        if self.dtype not in (None, "float32", "float64", "bfloat16", "float16"):
            raise ConfigError(f"dtype={self.dtype!r}: it must be float32, float64, bfloat16 or float16")
