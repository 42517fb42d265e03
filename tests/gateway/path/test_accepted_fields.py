"""Foreign engines get only fields of the client's own request, whatever the client sends."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest
from mocks import answers
from world import World

from stoker.gateway.key_settings import KeySettings

ANSWER = {"id": "c", "object": "chat.completion", "choices": []}
HEADERS = [(b"authorization", b"Bearer secret-key")]
KEPT = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "temperature": 0.5,
    "top_k": 3,
    "tools": [],
    "response_format": {"type": "text"},
    "stop_token_ids": [1],
}
DROPPED: dict[str, Any] = {
    "extra_key": "another tenant",
    "rid": "req_1",
    "request_id": "req_1",
    "lora_path": "/adapters/other",
    "custom_logit_processor": "{}",
    "custom_params": {},
    "logits_processors": ["os.system"],
    "session_id": "theirs",
    "session_params": {"id": "theirs"},
    "return_hidden_states": True,
    "return_routed_experts": True,
    "chat_template": "{{ 1 }}",
    "mm_processor_kwargs": {},
    "media_io_kwargs": {},
    "prompt_embeds": "AAAA",
    "vllm_xargs": {"kv_transfer_params": "x"},
    "ngram_corpus_id": "theirs",
    "best_of": 64,
    "use_beam_search": True,
    "previous_response_id": "resp_1",
    "store": True,
    "extra_body": {"extra_key": "x"},
    "invented": [1],
}


def ask(body: Any, dialect: str) -> tuple[bytes, dict[str, int]]:
    """Return what a worker gets for a client's body, and which fields were counted."""

    async def main() -> tuple[bytes, dict[str, int]]:
        key = KeySettings("k", hashlib.sha256(b"secret-key").hexdigest(), tenant="t")
        async with World(keys=[key]) as world:
            worker = await world.add("w", answers(ANSWER), dialect=dialect)
            got = await world.ask(body, headers=HEADERS)
            assert got.status == 200, got.body
            return worker.bodies[0], dict(world.metrics.dropped_fields)

    return asyncio.run(main())


@pytest.mark.parametrize("dialect", ["vllm", "vllm_mooncake", "sglang", "openai"])
def test_only_accepted_fields_reach_a_foreign_engine(dialect: str) -> None:
    body, counted = ask(KEPT | DROPPED, dialect)
    got = json.loads(body)
    salt = got.pop("cache_salt", None)
    assert salt == (None if dialect == "openai" else "tenant:t")
    assert got == KEPT
    assert counted["extra_key"] == counted["lora_path"] == 1
    assert counted["other"] == 2  # a client's inventions share a label


def test_fields_of_openai_that_were_dropped_are_named_in_a_header() -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("w", answers(ANSWER), dialect="vllm")
            got = await world.ask(KEPT | {"store": True, "background": False, "conversation": "c", "rid": "x"})
            assert got.headers["x-ignored-fields"] == "store, conversation"
            assert "x-ignored-fields" not in (await world.ask(KEPT | {"store": False, "rid": "x"})).headers

    asyncio.run(main())


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "salt", ['"cache_salt":"theirs"', '"cache\\u005fsalt":"theirs"', '"cache_salt":null,"cache_salt":"theirs"'], ids=str
)
def test_a_client_cannot_choose_another_tenants_salt(dialect: str, salt: str) -> None:
    body, _ = ask(b'{"model":"m","messages":[],%b}' % salt.encode(), dialect)
    given = [value for name, value in json.loads(body, object_pairs_hook=list) if name == "cache_salt"]
    assert given == ["tenant:t:theirs"]


def test_a_dropped_field_cannot_be_hidden_by_escapes() -> None:
    body, _ = ask(b'{"model":"m","messages":[],"extra\\u005fkey":"theirs"}', "sglang")
    assert set(json.loads(body)) == {"model", "messages", "cache_salt"}


def test_arguments_of_the_template_renderer_are_removed() -> None:
    kwargs = {
        "enable_thinking": False,
        "chat_template": "{{ 1 }}",
        "tokenize": False,
        "deep": {"a": 1},
        "long": "x" * 300,
    }
    body, _ = ask({"model": "m", "messages": [], "chat_template_kwargs": kwargs}, "vllm")
    assert json.loads(body)["chat_template_kwargs"] == {"enable_thinking": False}
    body, _ = ask({"model": "m", "messages": [], "chat_template_kwargs": {"enable_thinking": True}}, "sglang")
    assert json.loads(body)["chat_template_kwargs"] == {"enable_thinking": True}
    body, _ = ask({"model": "m", "messages": [], "chat_template_kwargs": [1]}, "vllm")
    assert json.loads(body)["chat_template_kwargs"] == {}
