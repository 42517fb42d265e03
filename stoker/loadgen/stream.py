"""Reads a streamed answer: events, their chunks, and when tokens arrived. No I/O: bytes and times are arguments."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


class SseParser:
    """Splits received bytes into `data:` payloads, wherever the packets end.

    It reads what OpenAI's API sends, one line per event. Parsing the full SSE standard costs several times as much per
    chunk, and the client shares the machine with the server.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


# Only the fields that are measured or shown: msgspec skips the rest of a chunk without building it.
class Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class StreamedChoice(msgspec.Struct, frozen=True):
    delta: Delta = Delta()
    text: str | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class ReportedUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class ReportedError(msgspec.Struct, frozen=True):
    message: str = ""
    type: str | None = None
    code: str | int | None = None

    def kind(self) -> str:
        return str(self.code or self.type or "unknown")


class Chunk(msgspec.Struct, frozen=True):
    choices: list[StreamedChoice] = []
    usage: ReportedUsage | None = None
    error: ReportedError | str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ReportedError | str | None = None


_chunks = msgspec.json.Decoder(Chunk)
_errors = msgspec.json.Decoder(ErrorResponse)


def error_body(body: bytes) -> ReportedError:
    """Return the error of a response whose status is not 200, even if it is not in OpenAI's shape."""
    try:
        error = _errors.decode(body).error
    except msgspec.DecodeError:
        error = None
    if isinstance(error, ReportedError):
        return error
    return ReportedError(message=error or body[:200].decode(errors="replace"))


@dataclass(slots=True, eq=False)
class Record:
    """One request as its client saw it. Times are on the client's clock."""

    started_s: float
    ended_s: float = 0.0
    first_s: float | None = None  # first token
    last_s: float | None = None  # last token
    # Between tokens, or between chunks if the server does not report the number of tokens in each chunk.
    gaps_s: list[float] = field(default_factory=list)
    num_chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not report it
    completion_tokens: int = 0
    has_usage: bool = False
    finish_reason: str | None = None
    error: str | None = None  # the kind of error
    error_message: str = ""
    text: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean seconds per token after the first one."""
        if self.first_s is None or self.last_s is None or self.completion_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.completion_tokens - 1)

    def fail(self, kind: str, message: str = "") -> None:
        self.error = kind
        self.error_message = message


_FAILED = ("abort", "error")  # finish reasons of vLLM and SGLang that OpenAI's API does not have


class AnswerReader:
    """Reads a stream's bytes into a Record."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._events = SseParser()
        self._texts: list[str] = []
        self._done = False

    def feed(self, data: bytes, now_s: float) -> list[Delta]:
        """Read received bytes; return the deltas in them, for display."""
        deltas: list[Delta] = []
        for payload in self._events.feed(data):
            if payload == b"[DONE]":
                self._done = True
                continue
            try:
                chunk = _chunks.decode(payload)
            except msgspec.DecodeError as wrong:
                self.record.fail("stream bad_chunk", str(wrong))
                continue
            self._take(chunk, now_s, deltas)
        return deltas

    def end(self, now_s: float) -> None:
        record = self.record
        record.ended_s = now_s
        record.text = "".join(self._texts)
        if record.error is None and record.finish_reason is None:
            if not self._done:
                record.fail("stream truncated", "the stream ended without a finish reason")
            elif not (record.num_chunks or record.completion_tokens):
                record.fail("stream empty", "the stream ended without a token and without a finish reason")
        if not record.has_usage:
            record.completion_tokens = record.num_chunks
        elif record.completion_tokens and record.first_s is None:
            # No token had text of its own (special tokens, or parts of a character): only the end was seen.
            record.first_s = record.last_s = now_s

    def _take(self, chunk: Chunk, now_s: float, deltas: list[Delta]) -> None:
        record = self.record
        before = record.completion_tokens
        if chunk.usage is not None:
            self._take_usage(chunk.usage)
        if chunk.error is not None:
            error = chunk.error if isinstance(chunk.error, ReportedError) else ReportedError(message=chunk.error)
            record.fail(f"stream {error.kind()}", error.message)
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason
                if choice.finish_reason in _FAILED:
                    record.fail(f"stream {choice.finish_reason}", "the server aborted the answer")
            delta = choice.delta if choice.text is None else Delta(content=choice.text)
            if delta.content or delta.reasoning_content or delta.tool_calls:
                self._take_token(now_s, record.completion_tokens - before)
                if delta.content:
                    self._texts.append(delta.content)
                deltas.append(delta)

    def _take_token(self, now_s: float, num_tokens: int) -> None:
        """Record the arrival of a chunk. `num_tokens` is 0 unless the server reports usage in every chunk."""
        record = self.record
        record.num_chunks += 1
        if record.last_s is None:
            record.first_s = now_s
        else:
            num_tokens = max(num_tokens, 1)
            record.gaps_s += [(now_s - record.last_s) / num_tokens] * num_tokens
        record.last_s = now_s

    def _take_usage(self, usage: ReportedUsage) -> None:
        record = self.record
        record.has_usage = True
        record.prompt_tokens = usage.prompt_tokens
        record.completion_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens
