"""Every message between processes, in one file. Engine-side dataclasses travel inside them as they are."""

from __future__ import annotations

from typing import Literal

import msgspec

from stoker.base.config import EngineSettings
from stoker.base.ids import BlockKey, RequestId, WorkerId
from stoker.kv.blocks.transfer import KvTicket
from stoker.sched.request import GenerateRequest, TokenChunks


class EngineArguments(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first word to an engine process: what it is to be."""

    folder: str
    settings: EngineSettings
    log_level: str = "info"
    kv_events: bool = False  # whether anybody wants to know which blocks it holds
    kernel_cache_dir: str | None = None  # where compiled kernels are kept, for the next start
    timeline_origin_s: float | None = None  # the worker's start, time.time(); None: nobody wants to see the timeline


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine's first word once it is ready: what it can hold."""

    model_fingerprint: str
    device: str
    dtype: str
    vocab_size: int
    max_model_tokens: int  # prompt and answer together
    block_tokens: int
    num_blocks: int
    max_rows: int
    load_s: float
    engine_id: str = ""  # of this life of the engine: tickets carry it
    kv_address: str | None = None  # where peers pull KV; None: it keeps none for others
    stores: dict[str, str] = {}  # by medium: engines that name the same one read and write the same blocks there

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_tokens


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of the KV store, as one worker sees it; counters since the engine's start."""

    name: str
    medium: str
    blocks: int
    used_bytes: int
    capacity_bytes: int
    hits: int  # blocks read and right
    misses: int  # blocks asked for that were not there, or were wrong
    read_bytes: int
    written_bytes: int
    read_s: float
    write_s: float
    declined: int  # blocks offered and not taken
    evicted: int
    corrupt: int
    errors: int
    bytes_per_s: float | None  # of reading, lately; None until it was measured
    crossover_tokens: int | None  # from so many tokens on, loading beats computing; None: never


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A few times a second while it works: gauges as they are, counters since the engine's start."""

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
    partial_tokens: int
    generated_tokens: int
    preemptions: int
    prefill_tokens_per_s: float | None = None  # lately; None until there was a prompt to measure
    decode_step_s: float | None = None  # lately, of steps that had no prompt in them
    loading_sequences: int = 0
    held_leases: int = 0
    loaded_tokens: int = 0  # from tiers
    pulled_tokens: int = 0  # from other workers
    failed_loads: int = 0  # ended with less than was asked for
    tiers: list[TierReport] = []


class BlocksNamed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks of one chain, in order, that can now be found. `parent` is None for a chain's first; then `salt` is a hash of
    the salt that the chain is rooted in, if there is one."""

    keys: list[BlockKey]
    parent: BlockKey | None
    token_ids: list[int]
    salt: str | None = None
    medium: str = "GPU"  # the engine's own memory, whatever it is made of; else a tier's


class BlocksForgotten(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    keys: list[BlockKey]
    medium: str = "GPU"


class KvEvents(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a step changed, in order."""

    events: list[BlocksNamed | BlocksForgotten]


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """While the engine starts."""

    stage: str
    done: int
    total: int


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine cannot start, and starting it again would not help."""

    code: str
    message: str


class Add(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request: GenerateRequest


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request_id: RequestId


class Prefetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring the KV of these tokens nearer, from the tiers or from the ticket's worker while it still computes. A hint."""

    token_ids: list[int]
    cache_salt: str = ""
    ticket: KvTicket | None = None


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nobody will come for what is kept under this lease."""

    lease_id: str


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End now; what runs is dropped."""


class Chunks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    chunks: TokenChunks


ToEngine = EngineArguments | Add | Cancel | Prefetch | Release | Shutdown
FromEngine = EngineInfo | EngineStats | LoadProgress | StartFailed | Chunks | KvEvents


# ---- a worker and the gateways in front of it

WorkerRole = Literal["unified", "prefill", "decode"]


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A few times a second, to all who listen. `number` counts them: a smaller one is of a worker that began anew."""

    worker_id: WorkerId
    number: int
    role: WorkerRole
    ready: bool  # the engine takes requests
    draining: bool
    waiting_sequences: int
    waiting_tokens: int
    running_sequences: int
    free_blocks: int
    num_blocks: int
    block_tokens: int
    prefill_tokens_per_s: float | None
    step_s: float | None  # of a step that only decodes


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway must know of a worker before it sends it anything. `events` and `replay` are ZMQ addresses."""

    worker_id: WorkerId
    role: WorkerRole
    models: list[str]
    fingerprint: str
    block_tokens: int
    num_blocks: int
    max_model_tokens: int
    events: str | None
    replay: str | None
    tokenizer: str  # a digest of what TokenizerFiles holds
    engine_id: str | None = None  # of this life of its engine: tickets carry it
    kv_address: str | None = None  # where others pull the KV that it keeps for them
    stores: dict[str, str] = {}  # by medium of KV events: workers that name the same one hold the same blocks there


class WorkerRegistration(WorkerInfo, frozen=True, kw_only=True):
    """A worker's word to a gateway, again and again: a gateway that has not heard it for a while may forget the worker."""

    url: str


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The text files of a model's folder that its tokenizer and its chat template are read from, by name."""

    files: dict[str, str]
