"""The settings of the autoscaler, in the gateway's table `[autoscale]`."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.errors import ConfigError
from stoker.base.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class AutoscaleSettings:
    """When workers change their role, start or stop."""

    mode: str = setting(
        "off",
        "What the autoscaler does with its decisions: nothing, log them, or carry them out. Try dry_run first.",
        choices=("off", "dry_run", "on"),
    )
    ttft_s: float = setting(2.0, "Goal for the time to the first token, at the 90th percentile.", unit="s", gt=0)
    itl_s: float = setting(0.1, "Goal for the time between two tokens, at the 90th percentile.", unit="s", gt=0)
    interval_s: float = setting(5.0, "Time between two decisions.", unit="s", ge=0.05, le=3600)
    confirm: int = setting(3, "How many decisions in a row must agree before one is carried out.", ge=1, le=1000)
    hold_s: float = setting(30.0, "Pause after a change, before the next one.", unit="s", ge=0)
    reverse_s: float = setting(
        300.0, "Pause after a change, before the opposite one. It keeps a fleet from oscillating.", unit="s", ge=0
    )
    warm_s: float = setting(
        30.0,
        "Measurements of a worker in its first seconds do not count: it compiles and fills its cache.",
        unit="s",
        ge=0,
    )
    high: float = setting(1.0, "A pool above this load, as a multiple of the goals, needs another worker.", gt=0)
    low: float = setting(0.5, "A pool that would stay below this load without one worker can give it away.", gt=0)
    min_prefill: int = setting(1, "Fewest prefill workers of a fleet that has any.", ge=0)
    min_decode: int = setting(1, "Fewest workers that decode.", ge=1)
    min_workers: int = setting(1, "Fewest workers in all.", ge=1)
    max_workers: int = setting(
        0, "Most workers in all, with those that start or stop. 0: only roles change.", ge=0, default_text="0"
    )
    start_s: float = setting(
        600.0, "A worker that was asked for and has not joined after this time will not come.", unit="s", gt=0
    )

    def __post_init__(self) -> None:
        check_settings(self, "autoscale")
        if self.low >= self.high:
            raise ConfigError(f"autoscale.low={self.low} must be below autoscale.high={self.high}")
        for name in ("min_workers", "min_prefill", "min_decode"):
            if self.max_workers and self.max_workers < (least := getattr(self, name)):
                raise ConfigError(
                    f"autoscale.max_workers={self.max_workers} is below autoscale.{name}={least}; raise it, or set it to 0"
                )
