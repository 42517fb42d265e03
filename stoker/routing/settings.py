"""Settings of the router and of the cost policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from stoker.base.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class CostSettings:
    """Weights, assumed speeds and limits of the cost policy. `docs/routing.md` explains them."""

    REMOVED: ClassVar[tuple[str, ...]] = ("bound", "home_slack_s", "move_part", "over_bound_s")

    host_tokens_per_s: float = setting(
        400_000.0, "Rate at which a worker loads KV from its RAM, in tokens per second.", gt=0
    )
    disk_tokens_per_s: float = setting(
        60_000.0, "Rate at which a worker loads KV from its disk or from a shared store, in tokens per second.", gt=0
    )
    pull_tokens_per_s: float = setting(
        200_000.0, "Rate at which a decode worker pulls KV from a prefill worker, in tokens per second.", gt=0
    )
    kv_pressure_s: float = setting(
        0.15, "Cost of a full KV cache, multiplied by k / (1 - k), where k is the share in use.", unit="s", ge=0
    )
    crowd_tokens: float = setting(262_144.0, "Resident tokens that double the time of a decode step.", gt=0)
    stall_share: float = setting(
        0.1, "Share of a prompt's prefill time by which each decoding sequence on the worker is delayed.", ge=0
    )
    move_factor: float = setting(40.0, "Weight of a lost cache hit, relative to the same time spent waiting.", ge=0)
    returns_weight: float = setting(
        1.5, "Weight of the time that other requests wait, relative to this request's own wait.", ge=0
    )
    later_turns: float = setting(
        0.6, "Turns that a conversation is expected to have after this one; the minimum for a new conversation.", ge=0
    )
    most_later_turns: float = setting(20.0, "Maximum of the turns that a new conversation is expected to have.", ge=0)
    recent_weight: float = setting(
        3.0,
        "Cost of a worker with twice its fair share of the recently computed tokens, in prefill times of the prompt.",
        ge=0,
    )
    request_s: float = setting(
        0.001, "In an idle fleet: cost for each recent request above the worker's fair share.", unit="s", ge=0
    )
    idle_queue_s: float = setting(0.1, "A fleet with a shorter average queue counts as idle.", unit="s", ge=0)
    bound_requests: float = setting(
        8.0,
        "Recent requests that a worker of an idle fleet may have above its fair share before others relieve it.",
        ge=0,
    )
    balance_share: float = setting(
        0.004, "Share of all prompt tokens that may be recomputed to balance the workers.", ge=0
    )
    balance_part: float = setting(
        0.65, "Largest share of its prompt that a conversation or session may lose when it moves for balance.", ge=0
    )
    even_s: float = setting(
        1.0,
        "In an idle fleet: extra cost that a new session accepts for each session fewer on a worker.",
        unit="s",
        ge=0,
    )
    move_share: float = setting(
        4.5,
        "Share of the balance budget that moving one session may use, for each 100 % of excess requests on its worker.",
        ge=0,
    )
    balance_s: float = setting(
        0.5, "Longest time that one request may spend on computing lost tokens again for balance.", unit="s", ge=0
    )

    def __post_init__(self) -> None:
        check_settings(self, "routing.cost")


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of the router. Those of the cost policy are in `cost`."""

    policy: str = setting(
        "cost",
        "Routing policy: cost, least_tokens, round_robin, random or consistent_hash.",
        flag="--policy",
    )
    expected_output_tokens: int = setting(
        256, "Output tokens that a request is expected to have, unless the client allows fewer.", unit="tokens", ge=1
    )
    local_prefill_tokens: int = setting(
        256,
        "An uncached part of a prompt up to this length is never handed off to a prefill worker.",
        unit="tokens",
        ge=0,
    )
    local_prefill_share: float = setting(
        0.25, "Share of a longer prefill's time by which it delays the decoding sequences on a decode worker.", ge=0
    )
    cluster_spill_s: float = setting(
        5.0, "How much longer the queue of a session's home cluster may be than the shortest one.", unit="s", ge=0
    )
    num_explained: int = setting(256, "Routing decisions kept for /admin/routes.", ge=0)
    seed: int = setting(0, "Random seed of the policies that use randomness.")
    cost: CostSettings = field(default_factory=CostSettings)

    def __post_init__(self) -> None:
        check_settings(self, "routing")
