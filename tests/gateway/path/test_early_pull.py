"""Early-pull hints: decode gets one before prefill has ended, where that helps, and no request depends on it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_stoker import FakeStoker
from mocks import MockWorker
from waiting import LONG_S, until
from world import World

from stoker.base.ids import WorkerId
from stoker.fleet.spec import Role
from stoker.gateway.http import HttpRequest
from stoker.gateway.path.handoff_hints import HandoffHints
from stoker.proto.messages import WorkerInfo

BODY: dict[str, Any] = {"model": "m", "messages": [], "stream": True, "seed": 42, "max_tokens": 8}


def info(name: str, **more: Any) -> WorkerInfo:
    facts: dict[str, Any] = {"models": ["m"], "fingerprint": "f", "block_tokens": 16, "num_blocks": 1, "tokenizer": "t"}
    role = "prefill" if name == "p" else "decode"
    addresses = {"max_model_tokens": 9, "events": None, "replay": None}
    return WorkerInfo(worker_id=WorkerId(name), role=role, **facts | addresses | more)  # type: ignore[arg-type]


@dataclass
class Hinted:
    """A decode worker that records its hints separately."""

    fake: FakeStoker = field(default_factory=FakeStoker)
    hints: list[Any] = field(default_factory=list)
    hangs: bool = False

    async def __call__(self, worker: MockWorker, request: HttpRequest) -> None:
        if request.path != b"/stoker/prefetch":
            await self.fake(worker, request)
            return
        self.hints.append(json.loads(request.body))
        if self.hangs:
            await asyncio.sleep(2 * LONG_S)
        request.respond(202, [], b"")


KEEPS = {"engine_id": "e1", "kv_address": "[::1]:7000"}


@pytest.mark.parametrize("hangs", [False, True])
def test_decode_gets_a_hint_where_the_blocks_will_be(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.gateway.path.handoff_hints._ANSWER_S", 2 * LONG_S)

    async def main() -> None:
        infos = {"p": info("p", **KEEPS), "d": info("d")}
        async with World(prompt_tokens=5000, hints=HandoffHints(infos.get)) as world:
            decode = Hinted(hangs=hangs)

            async def prefill(worker: MockWorker, request: HttpRequest) -> None:
                await until(lambda: bool(decode.hints))
                await FakeStoker()(worker, request)

            p = await world.add("p", prefill, role=Role.PREFILL, dialect="stoker")
            await world.add("d", decode, role=Role.DECODE, dialect="stoker")
            got = await world.ask(BODY)
            assert got.body.endswith(b"data: [DONE]\n\n")
            transfer = p.jsons[0]["kv_transfer_params"]
            assert transfer["do_remote_decode"] is True
            assert [hint["kv_transfer_params"] | {"lease_s": 0} for hint in decode.hints] == [
                {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "transfer_mode": "stoker",
                    "remote_engine_id": "e1",
                    "remote_host": "::1",
                    "remote_port": 7000,
                    "remote_request_id": f"{transfer['transfer_id']}-0",
                    "remote_num_tokens": 0,
                    "remote_block_ids": [],
                    "lease_s": 0,
                }
            ]
            await world.settled()
            await until(lambda: not [one for one in asyncio.all_tasks() if one.get_name() == "early-pull"])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt_tokens", "prefill", "decode"),
    [
        (300, KEEPS, {}),
        (5000, KEEPS | {"stores": {"CPU": "ram", "DISK": "d1"}}, {"stores": {"CPU": "ram"}}),
        (5000, {}, {}),
    ],
    ids=["too short", "in the same memory", "prefill keeps nothing"],
)
def test_no_hint_that_would_be_of_no_use(prompt_tokens: int, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    async def main() -> None:
        infos = {"p": info("p", **prefill), "d": info("d", **decode)}
        async with World(prompt_tokens=prompt_tokens, hints=HandoffHints(infos.get)) as world:
            p = await world.add("p", FakeStoker(), role=Role.PREFILL, dialect="stoker")
            hinted = Hinted()
            await world.add("d", hinted, role=Role.DECODE, dialect="stoker")
            assert (await world.ask(BODY)).status == 200
            assert len(p.bodies) == 1
            assert hinted.hints == []

    asyncio.run(main())
