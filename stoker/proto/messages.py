"""Messages between the server process and the engine process, and between workers and gateways.

Some fields are dataclasses of the scheduler and the settings. msgspec encodes them directly.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from stoker.base.config import EngineSettings
from stoker.base.ids import BlockKey, RequestId, WorkerId
from stoker.kv.blocks.transfer import KvTicket
from stoker.proto.work import WorkChange
from stoker.sched.request import GenerateRequest, TokenChunks


class EngineArguments(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message to an engine process: its model and its settings."""

    folder: str
    settings: EngineSettings
    log_level: str = "info"
    kv_events: bool = False  # send a `KvEvents` message whenever blocks change
    kernel_cache_dir: str | None = None  # compiled kernels and measured choices are stored here for the next start
    tuning_dir: str | None = None  # has the tiles that `stoker tune` found on this GPU
    timeline_origin_s: float | None = None  # time.time() at the start of the worker; None: log no timeline


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of an engine that is ready: its model and its capacity."""

    model_fingerprint: str
    device: str
    dtype: str
    vocab_size: int
    max_model_tokens: int  # context length: prompt and answer together
    block_tokens: int
    num_blocks: int
    max_rows: int
    load_s: float
    engine_id: str = ""  # unique per engine process; tickets contain it
    kv_address: str | None = None  # where other workers pull KV; None: it keeps no KV for others
    stores: dict[str, str] = {}  # store name by medium; engines with the same name share its blocks
    keeps_spare: bool = False  # a spare engine process is kept beside this one

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_tokens


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of the KV store as one worker sees it. Counters start with the engine."""

    name: str
    medium: str
    blocks: int
    used_bytes: int
    capacity_bytes: int
    hits: int  # blocks read with a correct checksum
    misses: int  # blocks requested that were missing or corrupt
    read_bytes: int
    written_bytes: int
    read_s: float
    write_s: float
    declined: int  # blocks offered but not stored
    evicted: int
    corrupt: int
    errors: int
    bytes_per_s: float | None  # recent read speed; None until it is measured
    crossover_tokens: int | None  # number of tokens from which loading is faster than computing; None: never


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """The device's blocks of one KV set that keeps only what its layers still see."""

    name: str  # its reach, such as "window128"
    num_blocks: int
    free_blocks: int
    cached_blocks: int


class DraftReport(msgspec.Struct, frozen=True, kw_only=True):
    """The drafts of one source. Counters start with the engine."""

    source: str  # the name of a drafter
    spans: int  # rows of steps that verified its drafts
    drafted_at: list[int]  # verified drafts at positions 1, 2, ...
    accepted_at: list[int]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent a few times per second while the engine works. Counters start with the engine."""

    waiting_sequences: int
    waiting_tokens: int
    running_sequences: int
    free_blocks: int
    cached_blocks: int
    num_blocks: int
    steps: int
    step_s: float
    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    partial_tokens: int  # reused from blocks whose last tokens differ
    generated_tokens: int
    preemptions: int
    prefill_tokens_per_s: float | None = None  # recent; None until a prompt was measured
    decode_step_s: float | None = None  # recent time of a decode-only step
    mixed_step_tokens: int = 0  # token limit of the last step with both prefill and decode
    step_fixed_s: float = 0.0  # the fitted time of a step: fixed part, per token, and per row beyond its token
    step_token_s: float = 0.0
    step_row_s: float = 0.0
    loading_sequences: int = 0
    held_leases: int = 0
    loaded_tokens: int = 0  # from tiers
    pulled_tokens: int = 0  # from other workers
    failed_loads: int = 0  # loads that returned fewer tokens than requested
    local_pools: list[PoolReport] = []
    tiers: list[TierReport] = []
    drafts: list[DraftReport] = []
    draft_step_s: float = 0.0  # time of decode-only steps with drafts, and the estimate without drafts for their tokens
    undrafted_s: float = 0.0


class BlocksNamed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Consecutive blocks of one chain that are now in the cache.

    `parent` is None for the first block of a chain. In that case `salt` is a hash of the cache salt, if there is one.
    """

    keys: list[BlockKey]
    parent: BlockKey | None
    token_ids: list[int]
    salt: str | None = None
    medium: str = "GPU"  # "GPU" is the memory of the engine, on a CPU too; a tier has its own name


class BlocksForgotten(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that are no longer in the cache."""

    keys: list[BlockKey]
    medium: str = "GPU"


class KvEvents(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The changes of one step, in order."""

    events: list[BlocksNamed | BlocksForgotten]


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent twice per second by a thread of its own, from the moment the engine is ready."""

    round: int  # counts the rounds of the engine's loop
    busy: bool  # False: the loop waits for messages


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A spare engine process has imported torch and made its GPU context, and waits for `EngineArguments`."""


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Progress while the engine starts."""

    stage: str
    done: int
    total: int


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine cannot start, and a retry would not help."""

    code: str
    message: str


class Add(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request: GenerateRequest


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request_id: RequestId


class Prefetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Hint: load the KV of these tokens from the tiers, or from the worker of the ticket while it still computes them."""

    token_ids: list[int]
    cache_salt: str = ""
    ticket: KvTicket | None = None


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End this lease: no other worker will pull its KV."""

    lease_id: str


class HandOff(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End this request as soon as its launched steps are done, and keep its KV under this lease for another worker."""

    request_id: RequestId
    lease_id: str


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End now and drop what runs."""

    is_final: bool = False  # the worker stops; otherwise it may start another engine


class Chunks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    chunks: TokenChunks


ToEngine = EngineArguments | Add | Cancel | Prefetch | Release | HandOff | Shutdown
FromEngine = Prepared | EngineInfo | EngineStats | Beat | LoadProgress | StartFailed | Chunks | KvEvents


# ---- between a worker and its gateways

WorkerRole = Literal["unified", "prefill", "decode"]
# A gateway divides by some of these numbers, so a description with others is refused.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a worker, published a few times per second.

    `number` counts the reports. A smaller number than before means that the worker has restarted.
    """

    worker_id: WorkerId
    number: int
    role: WorkerRole
    role_assigned: bool = (
        False  # it was given this role while it ran, so that the gateway's configuration does not count
    )
    ready: bool  # the engine accepts requests
    draining: bool
    moving: bool = False  # with `draining`: gateways shall continue its requests on other workers
    waiting_sequences: int
    waiting_tokens: int
    running_sequences: int
    free_blocks: int
    num_blocks: int
    block_tokens: int
    prefill_tokens_per_s: float | None
    step_s: float | None  # time of a decode-only step
    changes: list[WorkChange] = []  # what happened to requests since the last report; such a report is sent at once
    open_work: list[WorkChange] | None = None  # all open requests, once per second


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a worker for gateways. `events` and `replay` are ZMQ addresses."""

    worker_id: WorkerId
    role: WorkerRole
    models: list[str]
    fingerprint: str
    block_tokens: PositiveCount
    num_blocks: Count
    max_model_tokens: PositiveCount
    events: str | None
    replay: str | None
    tokenizer: str  # digest of the contents of `TokenizerFiles`
    engine_id: str | None = None  # unique per engine process; tickets contain it
    kv_address: str | None = None  # where other workers pull the KV that it keeps for them
    stores: dict[str, str] = {}  # store name by medium of KV events; workers with the same name share its blocks
    volatile_lines: list[str] = []  # how lines begin that it leaves out of system prompts
    secret_id: str | None = None  # the public name of the secret with which it encrypts its events


class WorkerRegistration(WorkerInfo, frozen=True, kw_only=True):
    """The heartbeat of a worker. A gateway removes a worker whose heartbeats end."""

    url: str
    moving: bool = False  # when it signs off: gateways shall continue its requests on other workers


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The text files of a model folder that its tokenizer and chat template are loaded from, by name."""

    files: dict[str, str]
