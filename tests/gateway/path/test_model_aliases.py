"""Clients may use other names for served models."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mocks import answers
from world import World

from stoker.base.errors import ConfigError
from stoker.gateway.config import load
from stoker.gateway.path.model_aliases import ModelAliases, canary_place
from stoker.gateway.path.tokenize import TokenizeEndpoint

ANSWER = {"id": "c", "object": "chat.completion", "choices": []}
ALIASES = ModelAliases({"gpt-4o": "m", "claude-*": "m", "claude-opus*": "gone", "m": "other"})


@pytest.mark.parametrize(
    ("name", "model"),
    [("gpt-4o", "m"), ("claude-haiku-9", "m"), ("claude-opus-9", "gone"), ("m", "m"), ("gpt-4o-mini", "gpt-4o-mini")],
)
def test_a_name_is_resolved(name: str, model: str) -> None:
    assert ALIASES.resolve(name, {"m"}) == model


def with_aliases(world: World) -> None:
    parts = world.gateway._parts
    tokenize = TokenizeEndpoint(
        world.fleet, world.upstreams, parts.keys, world.admission, world.proxy._services.settings, parts.clock, ALIASES
    )
    world.change(aliases=ALIASES, tokenize=tokenize)


def test_the_worker_gets_the_models_own_name() -> None:
    async def main() -> None:
        async with World() as world:
            with_aliases(world)
            worker = await world.add("w", answers(ANSWER), dialect="vllm")
            body: dict[str, Any] = {"model": "gpt-4o", "messages": [{"role": "user", "content": "a"}], "x": {"y": 1}}
            assert (await world.ask(body)).status == 200
            assert worker.jsons[0]["model"] == "m"
            assert (await world.settled()).model == "m"
            assert (await world.ask({"model": "claude-haiku", "prompt": "a"}, "/tokenize")).status == 200
            assert worker.jsons[1] == {"model": "m", "prompt": "a"}
            assert (await world.ask(body | {"model": "claude-opus-1"})).status == 404
            listed = (await world.get("/v1/models")).json["data"]
            assert [(card["id"], card.get("root")) for card in listed] == [("m", None), ("gpt-4o", "m")]
            assert (await world.get("/v1/models/claude-haiku")).json["root"] == "m"
            assert (await world.get("/v1/models/nope")).status == 404

    asyncio.run(main())


def test_a_share_of_the_sessions_goes_to_a_canary() -> None:
    aliases = ModelAliases({"chat": "v1"}, {"chat": ("v2", 0.1), "v1": ("v2", 0.1)})
    sessions = [f"session {i}" for i in range(2000)]
    for name in ("chat", "v1"):
        got = [aliases.resolve(name, ("v1", "v2"), canary_place(session)) for session in sessions]
        assert 0.07 < got.count("v2") / len(got) < 0.13
        assert got == [aliases.resolve(name, ("v1", "v2"), canary_place(session)) for session in sessions]
        assert {aliases.resolve(name, ("v1",), canary_place(session)) for session in sessions} == {"v1"}
    assert {aliases.resolve("chat", ("v1", "v2"), canary_place(None)) for _ in range(500)} == {"v1", "v2"}
    assert aliases.resolve("v2", ("v1", "v2"), 0.0) == "v2"


@pytest.mark.parametrize(
    "wrong",
    [
        ({"name": "a*", "model": "m", "share": 0.5},),
        ({"name": "a", "model": "m", "share": 0.0},),
        ({"name": "a", "model": "m", "share": 0.5}, {"name": "a", "model": "n", "share": 0.2}),
    ],
)
def test_wrong_shares_are_refused(wrong: tuple[dict[str, object], ...]) -> None:
    with pytest.raises(ConfigError, match="alias"):
        load(None, {"alias": list(wrong)})
