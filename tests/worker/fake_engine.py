"""An engine service that follows a script, and a tiny byte-level tokenizer for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import tokenizers
from tokenizers import models, pre_tokenizers

from stoker.base.errors import EngineDied, Overloaded
from stoker.kv.blocks.transfer import KvTicket
from stoker.proto.messages import EngineInfo, EngineStats, Prefetch
from stoker.sched.request import Finish, GenerateRequest, TokenChunk, TokenLogprobs, TokenUsage
from stoker.text.template import ChatTemplate
from stoker.text.tokenizer import Tokenizer
from stoker.worker.context import ModelText

SPECIALS = ("<|im_start|>", "<|im_end|>")
MAX_MODEL_TOKENS = 2048
BLOCK_TOKENS = 16
ENGINE_ID = "e-fake"
KV_ADDRESS = "10.0.0.7:7001"


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, so that a script can contain characters of several tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIALS))
    return Tokenizer(raw, eos_token_ids=[raw.token_to_id("<|im_end|>")], eos_token="<|im_end|>")


def byte_text(template: str | None = None) -> ModelText:
    tokenizer = byte_tokenizer()
    return ModelText.of(tokenizer, ChatTemplate({"default": template} if template else {}, tokenizer))


@dataclass
class Script:
    """How the engine answers. `text` may be a function of the request."""

    text: str | Callable[[GenerateRequest], str] = "Hello, world"
    chunk_tokens: int = 1
    delay_s: float = 0.0
    ends: Finish | None = None  # None: a stop token after the text, or "length" at max_new_tokens
    dies_after: int | None = None  # number of chunks
    endless: bool = False
    cached_tokens: int = 0
    pulled_tokens: int = 0
    draft_tokens: int = 0  # per chunk
    accepted_draft_tokens: int = 0
    overloaded: bool = False
    let_go: threading.Event | None = None  # chunks after the first one wait for it
    holds_first: bool = False  # the first one too


@dataclass
class FakeChunks:
    chunks: AsyncIterator[TokenChunk]

    async def relay(self, take: Callable[[TokenChunk], bool]) -> None:
        async for chunk in self.chunks:
            if not take(chunk):
                return


@dataclass
class FakeService:
    tokenizer: Tokenizer
    script: Script = field(default_factory=Script)
    ready: bool = True
    num_restarts: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    running: int = 0
    cancelled: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    sent_chunks: int = 0
    stopped: bool = False
    prefetched: list[Prefetch] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)  # requests that end with a hand-off, and their leases

    def __post_init__(self) -> None:
        self.info = EngineInfo(
            model_fingerprint="fedcba9876543210",
            device="cpu",
            dtype="float32",
            vocab_size=self.tokenizer.vocab_size,
            max_model_tokens=MAX_MODEL_TOKENS,
            block_tokens=BLOCK_TOKENS,
            num_blocks=64,
            max_rows=32,
            load_s=0.1,
        )
        self.stats: EngineStats | None = EngineStats(
            waiting_sequences=1,
            waiting_tokens=2,
            running_sequences=3,
            free_blocks=4,
            cached_blocks=5,
            num_blocks=64,
            steps=7,
            step_s=0.5,
            prompt_tokens=8,
            computed_tokens=9,
            partial_tokens=3,
            cached_tokens=10,
            generated_tokens=11,
            preemptions=12,
        )

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self.stopped = True

    def release(self, lease_id: str) -> None:
        self.released.append(lease_id)

    def prefetch(self, hint: Prefetch) -> None:
        self.prefetched.append(hint)

    def hand_off(self, request_id: str, lease_id: str) -> None:
        self.moved[request_id] = lease_id

    @asynccontextmanager
    async def open(self, request: GenerateRequest) -> AsyncIterator[FakeChunks]:
        if self.script.overloaded or not self.ready:
            raise Overloaded("The queue is full: 8 requests wait.", retry_after_s=2.5)
        self.requests.append(request)
        self.running += 1
        ended: list[bool] = []
        chunks = self._chunks(request, self.script, ended)
        try:
            yield FakeChunks(chunks)
        finally:
            await chunks.aclose()
            self.running -= 1
            (self.finished if ended else self.cancelled).append(request.request_id)

    async def _chunks(
        self, request: GenerateRequest, script: Script, ended: list[bool]
    ) -> AsyncGenerator[TokenChunk, None]:
        ids, finish = self._answer(request, script)
        already = len(request.token_ids) - request.num_prompt
        ticket = None
        if request.lease_id is not None:
            # Like the engine: one token, and the KV is kept if more follow, or if only one was requested.
            if len(ids) > already + 1:
                ids, finish = ids[: already + 1], Finish("handoff")
            if finish.reason == "handoff" or request.max_new_tokens == already + 1:
                ticket = KvTicket(ENGINE_ID, KV_ADDRESS, request.lease_id, len(request.token_ids), 30.0)
        cuts = [ids[i : i + script.chunk_tokens] for i in range(already, len(ids), script.chunk_tokens)] or [[]]
        done = already
        number = 0
        while True:
            for cut in cuts:
                await asyncio.sleep(script.delay_s)
                if (number or script.holds_first) and script.let_go is not None:
                    await asyncio.to_thread(script.let_go.wait, 120)
                if script.dies_after is not None and number >= script.dies_after:
                    raise EngineDied("The engine process ended (exit code -9).")
                if (lease_id := self.moved.get(request.request_id)) is not None:
                    ended.append(True)
                    held = KvTicket(ENGINE_ID, KV_ADDRESS, lease_id, request.num_prompt + done, 30.0) if done else None
                    usage = TokenUsage(request.num_prompt, script.cached_tokens, done) if done else None
                    yield TokenChunk(request.request_id, [], usage, None, Finish("handoff"), held)
                    return
                number += 1
                done += len(cut)
                drafts = (number * script.draft_tokens, number * script.accepted_draft_tokens)
                usage = TokenUsage(request.num_prompt, script.cached_tokens, done, script.pulled_tokens, *drafts)
                last = cut is cuts[-1] and not script.endless
                if last:
                    ended.append(True)
                self.sent_chunks += 1
                yield TokenChunk(
                    request_id=request.request_id,
                    token_ids=cut,
                    usage=usage if number == 1 or last or request.prediction else None,
                    logprobs=[_logprobs(id_, request.sampling.num_logprobs) for id_ in cut]
                    if request.sampling.num_logprobs is not None
                    else None,
                    finish=finish if last else None,
                    ticket=ticket if last else None,
                )
            if not script.endless:
                return

    def _answer(self, request: GenerateRequest, script: Script) -> tuple[list[int], Finish]:
        text = script.text if isinstance(script.text, str) else script.text(request)
        ids = self.tokenizer.encode(text)
        if script.ends is not None:
            return ids, script.ends
        if len(ids) >= request.max_new_tokens:
            return ids[: request.max_new_tokens], Finish("length")
        eos = self.tokenizer.eos_token_ids[0]
        if eos in request.sampling.stop_token_ids:
            return [*ids, eos], Finish("stop", stop_token_id=eos)
        return ids, Finish("length")


def _logprobs(token_id: int, count: int) -> TokenLogprobs:
    others = [token_id, *(id_ for id_ in range(count + 1) if id_ != token_id)][:count]
    logprob = -0.25 - token_id / 7
    return TokenLogprobs(token_id, logprob, others, [logprob - i for i in range(len(others))])
