"""A body that is nested deeply is answered or refused. At no depth is it an error of the gateway."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from mocks import answers, usage
from world import World

ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
    "usage": usage(1, 0, 1),
}
BODIES = {
    "/v1/chat/completions": b'{"model":"m","messages":[{"role":"user","content":"x"}],%b}',
    "/v1/completions": b'{"model":"m","prompt":"x",%b}',
    "/v1/responses": b'{"model":"m","input":"x","store":false,%b}',
    "/v1/messages": b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"x"}],%b}',
    "/v1/embeddings": b'{"model":"m","input":"x",%b}',
}
FIELDS = [b'"chat_template_kwargs":{"a":%b}', b'"tools":[{"type":"x","name":"f","input_schema":%b}]', b'"query":%b']
DEPTHS = [100, 400, 700, *range(sys.getrecursionlimit() - 110, sys.getrecursionlimit() + 10, 8), 50_000]


@pytest.mark.parametrize("dialect", ["stoker", "openai", "vllm"])
@pytest.mark.parametrize("path", BODIES)
def test_no_depth_is_a_server_error(dialect: str, path: str) -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("w", answers(ANSWER), dialect=dialect)
            found: dict[Any, int] = {}
            for field in FIELDS:
                for depth in DEPTHS:
                    for nested in (b'{"a":' * depth + b"1" + b"}" * depth, b"[" * depth + b"]" * depth):
                        got = await world.ask(BODIES[path] % (field % nested), path)
                        found[field, depth, nested[:1]] = got.status
            wrong = {case: status for case, status in found.items() if status not in (200, 400, 404)}
            assert not wrong

    asyncio.run(main())
