"""The context that all endpoints share: engine, tokenizer and template, settings, metrics. The app builds it once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from aiohttp import web

import stoker
from stoker.base.errors import InvalidRequest, NotFound
from stoker.base.ids import RequestId
from stoker.base.log import EventLog
from stoker.proto.messages import EngineInfo, EngineStats, Prefetch
from stoker.proto.openai.unknown_fields import UnknownFields
from stoker.text.folder import text_digest, text_files
from stoker.text.parsers.contract import REASONING_PARSERS, TOOL_PARSERS, ReasoningParser, ToolParser
from stoker.text.template import ChatTemplate
from stoker.text.tokenizer import Tokenizer
from stoker.worker.config import HttpConfig
from stoker.worker.errors import BodyTooSlow
from stoker.worker.generate import Choice, ChunkSource
from stoker.worker.identity import Identity
from stoker.worker.metrics import WorkerMetrics
from stoker.worker.open_work import OpenWork
from stoker.worker.sampling import ModelLimits
from stoker.worker.state import ServerState

T = TypeVar("T")


class Service(ChunkSource, Protocol):
    """The part of `EngineService` that the HTTP server uses."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def ready(self) -> bool: ...

    @property
    def stats(self) -> EngineStats | None: ...

    @property
    def num_restarts(self) -> int: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def prefetch(self, hint: Prefetch) -> None: ...

    def hand_off(self, request_id: RequestId, lease_id: str) -> None:
        """End a request with a hand-off, and keep its KV under this lease. Does nothing if it has ended."""


class Movable(Protocol):
    """The requests that can move to other workers (`moves.py`)."""

    def open(self, name: str | None, choices: Sequence[Choice]) -> AbstractContextManager[None]: ...

    def move(self, names: Sequence[str], service: Service) -> int: ...


@dataclass(frozen=True, slots=True)
class ModelText:
    """Everything about the text of a model: tokenizer, template, and the formats of its tool calls and reasoning."""

    tokenizer: Tokenizer
    template: ChatTemplate
    tool_parser: type[ToolParser]
    reasoning_parser: type[ReasoningParser] | None
    longest_token: int  # bytes
    folder: Path | None = None  # the folder it was loaded from
    digest: str = ""  # of the files in the folder

    @classmethod
    def from_folder(cls, path: Path, tool_format: str | None = None, reasoning_format: str | None = None) -> ModelText:
        """Load from a model folder.

        Formats default to those of the template. A reasoning format of "none" leaves the reasoning in the content.
        """
        tokenizer = Tokenizer.from_folder(path)
        text = cls.of(tokenizer, ChatTemplate.from_folder(path, tokenizer), tool_format, reasoning_format)
        return replace(text, folder=path, digest=text_digest(text_files(path)))

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
    ) -> ModelText:
        reasoning = reasoning_format or template.reasoning_format
        return cls(
            tokenizer=tokenizer,
            template=template,
            tool_parser=TOOL_PARSERS.get(tool_format or template.tool_format, "--tool-format"),
            reasoning_parser=None
            if reasoning in (None, "none")
            else REASONING_PARSERS.get(reasoning, "--reasoning-format"),
            longest_token=max(map(len, tokenizer.vocabulary.table)),
        )


@dataclass(slots=True)
class WorkerContext:
    """Everything that a request handler needs besides the request.

    `text`, `config` and `identity` change when the worker is given another model. A request that still runs after the drain
    may see that.
    """

    service: Service
    text: ModelText
    config: HttpConfig
    identity: Identity
    state: ServerState
    metrics: WorkerMetrics
    log: EventLog
    unknown_fields: UnknownFields
    text_threads: ThreadPoolExecutor
    movable: Movable
    report_now: Callable[[], None] = lambda: None  # publishes a load report at once
    open_work: OpenWork = field(default_factory=OpenWork)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def limits(self) -> ModelLimits:
        info = self.service.info
        return ModelLimits(info.vocab_size, info.max_model_tokens, tuple(self.text.tokenizer.eos_token_ids))

    @property
    def fingerprint(self) -> str:
        return f"fp_{self.service.info.model_fingerprint[:12]}_{stoker.__version__}"

    def served_model(self, requested: str | None) -> str:
        """Return the model name for the answer. A request without a model means the served one."""
        if requested is not None and requested not in self.config.served_names:
            served = ", ".join(self.config.served_names)
            message = f"The model '{requested}' does not exist. This worker serves: {served}."
            raise NotFound(message, param="model", code="model_not_found")
        return self.config.served_names[0]

    async def off_loop(self, num_chars: int, work: Callable[[], T]) -> T:
        """Run `work` on `num_chars` of text: at once if it is short, else in a thread, so that other streams do not wait."""
        if num_chars <= self.config.inline_chars:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.text_threads, work)


CONTEXT = web.AppKey("context", WorkerContext)


async def read_body(request: web.Request, config: HttpConfig) -> bytes:
    """Read the whole body. aiohttp limits its size with a 413, and `body_read_s` limits the time."""
    if (request.content_length or 0) > config.max_body_bytes:
        raise web.HTTPRequestEntityTooLarge(config.max_body_bytes, request.content_length or 0)
    if request.content_type.startswith("multipart/"):
        raise web.HTTPUnsupportedMediaType(text="The request body must be JSON.")
    try:
        async with asyncio.timeout(config.body_read_s):
            return await request.read()
    except TimeoutError:
        raise BodyTooSlow(f"The request body did not arrive within {config.body_read_s:g} s.") from None
    except web.RequestPayloadError as broken:
        raise InvalidRequest(f"The request body could not be read: {broken}") from None
