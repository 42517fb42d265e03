"""vLLM with its Mooncake connector: both legs run concurrently, tied by a transfer id from the gateway; prefill pushes.

Decode must know the prefill engine's id. It is queried from the prefill worker's bootstrap server once, and again after a
failure, because a restarted engine has a new id.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from typing import Annotated, ClassVar

import msgspec

from stoker.gateway.http import ClientLimits, ConnectionPool, Origin, header_block
from stoker.gateway.path.call import Call
from stoker.gateway.path.dialects.accepted_fields import VLLM_FIELDS
from stoker.gateway.path.dialects.dialect import DIALECTS
from stoker.gateway.path.dialects.foreign import (
    deliver,
    is_one_sequence,
    reply_for,
    run_alone,
    send_decode,
    together,
    usage_wanted,
)
from stoker.gateway.path.dialects.vllm import prefill_body
from stoker.gateway.path.errors import LegFailed
from stoker.gateway.path.legs import Legs
from stoker.gateway.path.rewrite import ForeignAnswer, read_usage
from stoker.gateway.watch.load_probe import LoadProbe, NoLoadProbe
from stoker.routing.query import Leg

BOOTSTRAP_PORT = 8998

_Rank = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")]  # it is sent in a header


class _MooncakeEngine(msgspec.Struct):
    engine_id: str


@DIALECTS.register("vllm_mooncake")
class VllmMooncake:
    """The dialect of vLLM servers with the Mooncake connector."""

    resumes: ClassVar[bool] = False
    decodes_alone: ClassVar[bool] = True
    speaks_messages: ClassVar[bool] = False
    load_probe: ClassVar[type[LoadProbe]] = NoLoadProbe

    async def run(self, call: Call, legs: Legs) -> None:
        prefill = legs.prefill
        if prefill is None or not is_one_sequence(call):
            legs.end_prefill()
            await run_alone(call, legs, VLLM_FIELDS)
            return
        upstream = legs.upstream(prefill)
        if not upstream.engines:
            upstream.engines = await self._query_engines(legs, prefill)
        rank = random.choice(sorted(upstream.engines))
        transfer_id = f"xfer-{secrets.token_hex(16)}"
        sends = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        pulls = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": str(self._bootstrap(legs, prefill)),
            "remote_engine_id": upstream.engines[rank],
        }
        wanted = usage_wanted(call, legs)
        reply = reply_for(call, legs, wanted, is_pair=True)

        async def decode(prefilling: asyncio.Task[None]) -> None:
            put = {"kv_transfer_params": msgspec.json.encode(pulls)}
            answer, hidden = await send_decode(call, legs, VLLM_FIELDS, put, legs.send, wanted)
            reply.hide_usage, reply.hide_running = hidden
            await deliver(call, legs, answer, reply, prefilling)

        try:
            await together(self._prefill(call, legs, prefill, msgspec.json.encode(sends), rank, reply), decode)
        except LegFailed:
            upstream.engines = {}
            raise

    async def _prefill(
        self, call: Call, legs: Legs, prefill: Leg, params: bytes, rank: str, reply: ForeignAnswer
    ) -> None:
        headers = header_block([(b"x-data-parallel-rank", rank.encode())])
        answer = await legs.send(prefill, prefill_body(call, legs, params), headers)
        usage = legs.parsed(prefill, answer, read_usage, await legs.read(prefill, answer))
        legs.end_prefill(handed_off=True)
        reply.prefill_cached_tokens = None if usage is None else usage.cached_tokens

    async def _query_engines(self, legs: Legs, prefill: Leg) -> dict[str, str]:
        pool = ConnectionPool(self._bootstrap(legs, prefill), ClientLimits())
        try:
            data = await legs.get(prefill, pool, b"/query")
        finally:
            pool.close()
        try:
            engines = msgspec.json.decode(
                data, type=Annotated[dict[_Rank, _MooncakeEngine], msgspec.Meta(min_length=1)]
            )
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            legs.fail(prefill, "invalid", f"worker {prefill.worker.worker_id}: /query: {error}")
        return {rank: engine.engine_id for rank, engine in engines.items()}

    def _bootstrap(self, legs: Legs, prefill: Leg) -> Origin:
        port = prefill.worker.spec.bootstrap_port or BOOTSTRAP_PORT
        return Origin("http", legs.upstream(prefill).origin.host, port)
