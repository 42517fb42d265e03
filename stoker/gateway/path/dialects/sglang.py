"""SGLang: prefill and decode servers get the same body at the same time, with a bootstrap room chosen by the gateway."""

from __future__ import annotations

import asyncio
import secrets
from typing import ClassVar

import msgspec

from stoker.gateway.path.call import Call
from stoker.gateway.path.dialects.accepted_fields import SGLANG_FIELDS, accepted_body
from stoker.gateway.path.dialects.dialect import DIALECTS
from stoker.gateway.path.dialects.foreign import (
    ENGINE_FIELDS,
    asking_for_usage,
    deliver,
    reply_for,
    run_alone,
    together,
    usage_wanted,
)
from stoker.gateway.path.legs import Legs
from stoker.gateway.path.rewrite import ForeignAnswer, read_last_usage
from stoker.gateway.watch.load_probe import LoadProbe, SglangLoadProbe
from stoker.routing.query import Leg

BOOTSTRAP_PORT = 8998


@DIALECTS.register("sglang")
class SgLang:
    """The dialect of SGLang servers."""

    resumes: ClassVar[bool] = False
    decodes_alone: ClassVar[bool] = False
    speaks_messages: ClassVar[bool] = False
    load_probe: ClassVar[type[LoadProbe]] = SglangLoadProbe

    async def run(self, call: Call, legs: Legs) -> None:
        prefill = legs.prefill
        if prefill is None:
            await run_alone(call, legs, SGLANG_FIELDS)
            return
        wanted = usage_wanted(call, legs)
        put = self._bootstrap(legs, prefill) | (asking_for_usage(call, wanted) if wanted else {})
        body = accepted_body(call, SGLANG_FIELDS, legs, put, (), ENGINE_FIELDS)
        reply = reply_for(call, legs, wanted, is_pair=True)

        async def decode(prefilling: asyncio.Task[None]) -> None:
            answer = await legs.send(legs.decode, body)
            await deliver(call, legs, answer, reply, prefilling)

        await together(self._prefill(legs, prefill, body, reply), decode)

    async def _prefill(self, legs: Legs, prefill: Leg, body: bytes, reply: ForeignAnswer) -> None:
        answer = await legs.send(prefill, body)
        usage = legs.parsed(prefill, answer, read_last_usage, await legs.read(prefill, answer))
        legs.end_prefill(handed_off=True)
        reply.prefill_cached_tokens = None if usage is None else usage.cached_tokens

    def _bootstrap(self, legs: Legs, prefill: Leg) -> dict[str, bytes]:
        """Return the fields that connect the two servers. One room suffices: SGLang numbers further sequences from it."""
        return {
            "bootstrap_host": msgspec.json.encode(legs.upstream(prefill).origin.host),
            "bootstrap_port": b"%d" % (prefill.worker.spec.bootstrap_port or BOOTSTRAP_PORT),
            "bootstrap_room": b"%d" % secrets.randbits(63),
        }
