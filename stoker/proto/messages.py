"""Every message between processes, in one file. Engine-side dataclasses travel inside them as they are."""

from __future__ import annotations

import msgspec

from stoker.base.config import EngineSettings
from stoker.base.ids import RequestId
from stoker.sched.request import GenerateRequest, TokenChunk


class EngineArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is started with."""

    folder: str
    settings: EngineSettings
    log_level: str = "info"


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

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_tokens


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


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End now; what runs is dropped."""


class Chunks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What one step brought, for all its sequences."""

    chunks: list[TokenChunk]


ToEngine = Add | Cancel | Shutdown
FromEngine = EngineInfo | EngineStats | LoadProgress | StartFailed | Chunks
