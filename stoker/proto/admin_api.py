"""The answers of the gateway's admin API that `stoker` commands and the dashboard read.

Fields that a gateway of another version may not have need a default.
"""

from __future__ import annotations

import msgspec

ADMIN_STATUS_PATH = "/admin/status"
ADMIN_FLEET_PATH = "/admin/fleet"
ADMIN_MISSES_PATH = "/admin/misses"
ADMIN_SERIES_PATH = "/admin/series"
ADMIN_NOW_PATH = "/admin/now"
ADMIN_DRAIN_PATH = "/admin/drain"
ADMIN_UNDRAIN_PATH = "/admin/undrain"
ADMIN_ROLE_PATH = "/admin/role"
ADMIN_SCALE_PATH = "/admin/scale"
ADMIN_CANARIES_PATH = "/admin/canaries"
ADMIN_REQUESTS_PATH = "/admin/requests"
ADMIN_UPGRADE_PATH = "/admin/upgrade"
ADMIN_UPGRADE_HOLD_PATH = "/admin/upgrade/hold"
ADMIN_UPGRADE_RELEASE_PATH = "/admin/upgrade/release"


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway process."""

    version: str
    uptime_s: float = 0.0
    process: int = 0  # the number of the process that answers
    processes: int = 1
    draining: bool = False
    running_requests: int = 0
    waiting_requests: int = 0
    policy: str = ""
    store: str | None = None  # the file or URL of the store
    store_trouble: str | None = None  # why the store does not work, if it does not
    ledger_pending_rows: int = 0
    silent: list[int] = []  # the processes that do not answer; the numbers are without theirs
    changes: list[str] = []  # the paths of the admin API that change something, so that a client shows only what works


class ReportedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load that a worker last reported."""

    waiting_tokens: int = 0
    waiting_sequences: int = 0
    running_sequences: int = 0
    kv_used: float = 0.0  # share of the KV blocks that running sequences hold, 0 to 1
    num_blocks: int | None = None
    block_tokens: int | None = None
    prefill_tokens_per_s: float | None = None
    step_s: float | None = None


class ReservedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The work that the gateway has sent to a worker and that is not finished yet."""

    requests: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0
    output_tokens: int = 0


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the gateway sees it."""

    worker: str
    url: str
    role: str
    dialect: str = ""
    cluster: str = ""
    weight: float = 1.0
    labels: dict[str, str] = {}
    models: list[str] = []
    from_config: bool = True
    usable: bool = False
    breaker: str = ""
    draining: bool = False
    busy: bool = False
    share: float = 0.0  # slow start: fraction of its full speed, up to 1
    report: ReportedLoad | None = None
    report_age_s: float | None = None
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    reserved: ReservedLoad = ReservedLoad()

    @property
    def health(self) -> str:
        """Return `ready`, `unusable` or `draining`."""
        if self.draining:
            return "draining"
        return "ready" if self.usable else "unusable"


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    workers: list[WorkerStatus]
    silent: list[int] = []  # the processes of the gateway that do not answer


class StartWish(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that the autoscaler wants. A placement engine starts one for each number, once."""

    number: int
    role: str


class ScaleDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision of the autoscaler. In a dry run it was not carried out."""

    age_s: float
    action: str
    reason: str
    numbers: dict[str, float] = {}


class ScaleWishes(msgspec.Struct, frozen=True, kw_only=True):
    """What the autoscaler wants from a placement engine, and its latest decisions, the latest first."""

    mode: str  # off, dry_run or on
    board: str = ""  # another one after each restart of the gateway, whose wishes are then counted from 1 again
    starts: list[StartWish] = []
    stops: list[str] = []  # workers that are drained and may end
    counted: list[str] | None = None  # the workers that the latest decision knew; None: an older gateway does not say
    decisions: list[ScaleDecision] = []


class UpgradeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The upgrade of a fleet that was asked for, and the one that runs or ran last."""

    board: str = ""  # another one after each restart of the gateway, which then counts from 1 again
    number: int = 0  # counts the upgrades that were asked for at the gateway
    workers: list[str] = []  # of the last one that was asked for; empty: all
    followed: bool = False  # something carries out what is asked for, such as `stoker up`
    running: bool = False
    outcome: str = ""  # how the last one ended
    lines: list[str] = []  # what it has done, the latest last


class CanaryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A share of a name's requests that goes to another model, and how that model compares with the rest."""

    name: str
    model: str
    rest: str = ""  # the model of the other requests
    share: float = 0.0
    stopped: bool = False  # it was worse than the rest, and gets no more requests
    reason: str = ""
    numbers: dict[str, float] = {}


class CanaryList(msgspec.Struct, frozen=True, kw_only=True):
    canaries: list[CanaryStatus] = []


class RequestOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison of workers needs of a request that has ended."""

    time_s: float  # arrival as Unix time
    worker: str = ""
    prefill_worker: str = ""  # empty without a hand-off
    status: int = 0
    ttft_ms: float | None = None
    e2e_ms: float = 0.0
    completion_tokens: int = 0


class RequestOutcomes(msgspec.Struct, frozen=True, kw_only=True):
    requests: list[RequestOutcome] = []


class MissReason(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt tokens of one key that were computed for one reason. Costs are decimal numbers."""

    reason: str
    place: str = ""  # of `changed`: a message, a tool, the system prompt or the options
    requests: int = 0
    tokens: int = 0
    cost: str = "0"  # at the price of uncached input
    extra_cost: str = "0"  # what of it would have been saved if the tokens had been cached


class KeyMisses(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one key and model, and the reasons for which they were computed, the most tokens first."""

    key: str
    tenant: str
    model: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reasons: list[MissReason] = []


class MissList(msgspec.Struct, frozen=True, kw_only=True):
    since_s: float  # Unix time
    currency: str = "USD"
    keys: list[KeyMisses] = []


class SeriesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Points over time. `columns` has one list for each name, with null where nothing is known."""

    step_s: int
    times_s: list[float]  # the start of each point, as Unix time
    columns: dict[str, list[float | None]]
    silent: list[int] = []  # the processes of the gateway that do not answer


class NowAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The last minute in numbers, and one sentence about what limits the fleet."""

    time_s: float  # Unix time
    bottleneck: str
    values: dict[str, float | None]  # of the last minute; the names are those of the series
    point: dict[str, float | None]  # of the last second
    currency: str = "USD"
    has_prices: bool = False
    ttft_goal_ms: float = 0.0
    itl_goal_ms: float = 0.0
    process: int = 0  # the number of the gateway's process that answers
    silent: list[int] = []  # the processes of the gateway that do not answer


decode_series = msgspec.json.Decoder(SeriesAnswer).decode
decode_now = msgspec.json.Decoder(NowAnswer).decode
decode_gateway_status = msgspec.json.Decoder(GatewayStatus).decode
decode_worker_list = msgspec.json.Decoder(WorkerList).decode
decode_scale_wishes = msgspec.json.Decoder(ScaleWishes).decode
decode_canary_list = msgspec.json.Decoder(CanaryList).decode
decode_request_outcomes = msgspec.json.Decoder(RequestOutcomes).decode
decode_upgrade_status = msgspec.json.Decoder(UpgradeStatus).decode
decode_miss_list = msgspec.json.Decoder(MissList).decode
