"""The settings of admission: how many requests run, how long the others wait, and what uses idle capacity."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """How many requests the workers get at a time, and how long the others may wait in the gateway's queue."""

    requests_per_worker: int = setting(512, "Maximum requests in flight to a worker of weight 1.", ge=1)
    waiting_per_worker: int = setting(
        4, "Maximum sequences that may wait inside a worker, if it reports its queue.", ge=0
    )
    prefill_s: float = setting(
        10.0,
        "Maximum uncached prefill in flight to a worker whose prefill rate is known, in seconds of its work.",
        unit="s",
        gt=0,
    )
    prefill_tokens: int = setting(
        4096, "Uncached prompt tokens that may always be in flight to a worker, at any rate.", unit="tokens", ge=1
    )
    queue_requests: int = setting(4096, "Maximum requests in the queue.", ge=0)
    queue_s: float = setting(
        30.0, "Maximum wait in a burst. A request with a longer predicted wait is refused at once.", unit="s", gt=0
    )
    standing_s: float = setting(
        2.0,
        "Maximum wait under overload, which is when the queue has not been empty for queue_s.",
        unit="s",
        gt=0,
    )
    priority_age_s: float = setting(
        5.0,
        "A request's priority improves by one step each time it has waited this long. This prevents starvation.",
        unit="s",
        gt=0,
    )

    def __post_init__(self) -> None:
        check_settings(self, "admission")


@dataclass(frozen=True, slots=True)
class FlexSettings:
    """Flex requests and the lines of batches, which use only idle capacity."""

    concurrency: int = setting(8, "Maximum flex requests that run at a time, for each worker.", ge=1)
    idle_requests: int = setting(
        0,
        "A model is idle for flex requests while it has at most this many interactive requests for each worker. More of them"
        " than 0 make batches faster and interactive requests slower.",
        ge=0,
    )
    quiet_s: float = setting(
        0.5, "How long a model must have been idle before flex requests begin to run.", unit="s", ge=0
    )
    wait_s: float = setting(30.0, "Maximum wait of a flex request for idle capacity.", unit="s", gt=0)
    max_waiting: int = setting(4096, "Maximum flex requests of a model that wait.", ge=1)

    def __post_init__(self) -> None:
        check_settings(self, "flex")
