"""A mock Stoker worker with the resume protocol. Its next token is a function of seed, choice and position.

So a worker that resumes an answer must end in the same bytes as an undisturbed run, wherever the stream was cut.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from mocks import DONE, JSON, SSE, MockWorker, event

from stoker.gateway.http import HttpRequest


def token(seed: int, choice: int, position: int) -> int:
    return (seed * 31 + choice * 7919 + position * 104729) % 50_000


@dataclass
class FakeStoker:
    """The script for a MockWorker. `dies` lists after how many tokens of each request it cuts the connection; None: never."""

    created: int = 1000
    cached_tokens: int = 3
    dies: list[int | None] = field(default_factory=list)  # one entry per request, in order
    fails: list[int | None] = field(default_factory=list)  # the same, but with an error event: the engine died
    tears: int = 0  # bytes of the next event that are still sent when it dies
    pace_s: float = 0.0
    completion_details: dict[str, int] | None = None  # in the usage
    splits: int = 0  # write in pieces of this many bytes; 0: whole
    holds: asyncio.Event | None = None  # after its first token, an answer waits for this event, or until it is moved
    moved: set[str] = field(default_factory=set)  # names of requests to hand off
    refuses_moves: bool = False

    async def __call__(self, worker: MockWorker, request: HttpRequest) -> None:
        if request.path == b"/stoker/move":
            if not self.refuses_moves:
                self.moved.update(json.loads(request.body)["names"])
            request.respond(404 if self.refuses_moves else 202, JSON, b"{}")
            return
        if request.path == b"/stoker/duty":
            request.respond(403, JSON, b"{}")
            return
        body = json.loads(request.body)
        dies = self.dies.pop(0) if self.dies else None
        fails = self.fails.pop(0) if self.fails else None
        run = _Run(self, body, request)
        if body.get("stream"):
            await run.stream(dies, fails)
        elif dies is not None:
            request.abort()
        elif not await run.moves(1):
            request.respond(200, JSON, json.dumps(run.whole()).encode())
        else:
            request.start(200, SSE)
            lines = b":u 10 %d %d %d\n" % (self.cached_tokens, run.created, body["seed"])
            lines += b"".join(
                b":t %d %d\n" % (i, run.token(i, len(sent))) for i, sent in enumerate(run.sent) if len(sent) < 1
            )
            run.write(lines + run.handoff())
            request.finish()


@dataclass
class _Run:
    fake: FakeStoker
    body: dict[str, Any]
    request: HttpRequest

    def __post_init__(self) -> None:
        self.num_choices = self.body.get("n") or 1
        resume = self.body.get("resume")
        self.created = resume["created"] if resume else self.fake.created
        choices: list[Any] = resume["choices"] if resume else [{"token_ids": [], "finished": False}] * self.num_choices
        assert len(choices) == self.num_choices
        self.sent = [list(choice["token_ids"]) for choice in choices]
        self.finished = [choice["finished"] for choice in choices]
        for index, ids in enumerate(self.sent):
            assert ids == [self.token(index, i) for i in range(len(ids))], "resumed from tokens that were not sampled"
        self.tells = self.request.header(b"x-stoker-stream") == b"1"
        self.is_prefill = (self.body.get("kv_transfer_params") or {}).get("do_remote_decode", False)

    async def moves(self, num_made: int) -> bool:
        """Wait where the fake holds its answers. Return True if this request is handed off now."""
        name = (self.request.header(b"x-stoker-move") or b"").decode()
        while name not in self.fake.moved:
            if not num_made or self.fake.holds is None or self.fake.holds.is_set():
                return False
            await asyncio.sleep(0.005)
        return True

    def handoff(self) -> bytes:
        leases = [{"remote_request_id": f"l-{i}", "num_tokens": len(sent)} for i, sent in enumerate(self.sent)]
        return b":k %b\n\n" % json.dumps({"choices": leases}, separators=(",", ":")).encode()

    def token(self, choice: int, position: int) -> int:
        return token(self.body["seed"], choice, position)

    @property
    def max_tokens(self) -> int:
        return int(self.body.get("max_tokens") or 8)

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": 10,
            "completion_tokens": self.max_tokens * self.num_choices,
            "total_tokens": 10 + self.max_tokens * self.num_choices,
            "prompt_tokens_details": {"cached_tokens": self.fake.cached_tokens},
            **({"completion_tokens_details": details} if (details := self.fake.completion_details) else {}),
        }

    def text(self, choice: int, position: int) -> str:
        """Return a token's text. Every third token is empty: its text comes with the next one."""
        if position % 3 == 1 and position + 1 < self.max_tokens:
            return ""
        before = f"<{self.token(choice, position - 1)}>" if position % 3 == 2 else ""
        return f"{before}<{self.token(choice, position)}>"

    def head(self) -> dict[str, Any]:
        request_id = (self.request.header(b"x-request-id") or b"").decode()
        return {"id": f"chatcmpl-{request_id}", "created": self.created, "model": self.body.get("model")}

    def whole(self) -> dict[str, Any]:
        choices = [
            {"index": i, "text": "".join(self.text(i, p) for p in range(self.max_tokens))}
            for i in range(self.num_choices)
        ]
        return {**self.head(), "choices": choices, "usage": self.usage()}

    async def stream(self, dies: int | None, fails: int | None) -> None:
        self.request.start(200, SSE)
        num_made, told = 0, False
        last = 1 if self.is_prefill else self.max_tokens
        for position in range(last):
            for choice in range(self.num_choices):
                if self.finished[choice] or position < len(self.sent[choice]):
                    continue
                lines = (
                    b"" if told else b":u 10 %d %d %d\n" % (self.fake.cached_tokens, self.created, self.body["seed"])
                )
                told = True
                lines += b":t %d %d\n" % (choice, self.token(choice, position))
                shown = self.event(choice, position)
                if shown and position == self.max_tokens - 1:
                    lines += b":f %d\n" % choice
                data = lines + (shown or b"\n") if self.tells else shown
                if num_made == fails:
                    self.write(b":x 503 engine_died\n" + event({"error": {"message": "dead", "code": "engine_died"}}))
                    self.request.finish()
                    return
                if num_made == dies:
                    self.write(data[: self.fake.tears])
                    await asyncio.sleep(0.01)
                    self.request.abort()
                    return
                if not self.is_prefill and await self.moves(num_made):
                    self.write(self.handoff())
                    self.request.finish()
                    return
                num_made += 1
                self.write(data)
                await asyncio.sleep(self.fake.pace_s)
        if self.is_prefill and self.max_tokens > 1:
            self.write(b':k {"remote_host":"10.0.0.1","block keys":["a b"]}\n\n')
        else:
            ending = b":e\n" if self.tells else b""
            if (self.body.get("stream_options") or {}).get("include_usage"):
                ending += event({**self.head(), "choices": [], "usage": self.usage()})
            self.write(ending + DONE)
        self.request.finish()

    def event(self, choice: int, position: int) -> bytes:
        text = self.text(choice, position)
        if not text:
            return b""
        delta = {"content": text} | ({"role": "assistant"} if position == 0 else {})
        finish = "length" if position == self.max_tokens - 1 else None
        return event({**self.head(), "choices": [{"index": choice, "delta": delta, "finish_reason": finish}]})

    def write(self, data: bytes) -> None:
        size = self.fake.splits or len(data) or 1
        for start in range(0, len(data), size):
            self.request.write(data[start : start + size])
