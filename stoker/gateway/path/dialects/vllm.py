"""vLLM with its NIXL connector: prefill first, then decode, which pulls the blocks.

The prefill worker gets the request with a limit of one token and keeps its blocks under a lease. Its response names them in
`kv_transfer_params`, which goes to the decode worker unchanged. The token is not used: decode samples it again.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Raw

from stoker.gateway.api.client_body import EndpointKind, fields
from stoker.gateway.path.call import Call
from stoker.gateway.path.dialects.accepted_fields import VLLM_FIELDS, accepted_body
from stoker.gateway.path.dialects.dialect import DIALECTS
from stoker.gateway.path.dialects.foreign import (
    ENGINE_FIELDS,
    deliver,
    is_one_sequence,
    reply_for,
    run_alone,
    send_decode,
    usage_wanted,
)
from stoker.gateway.path.legs import Legs
from stoker.gateway.path.rewrite import read_usage
from stoker.gateway.watch.load_probe import LoadProbe, VllmLoadProbe
from stoker.routing.query import Leg

_KEEP_BLOCKS = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
# Prefill is limited to one token, so a larger `min_tokens` would be refused; `stream_options` requires a stream.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens")
_ONE_TOKEN = {
    EndpointKind.CHAT: {"stream": b"false", "max_tokens": b"1", "max_completion_tokens": b"1"},
    EndpointKind.COMPLETIONS: {"stream": b"false", "max_tokens": b"1"},
    EndpointKind.RESPONSES: {"stream": b"false", "max_output_tokens": b"1"},
}


@DIALECTS.register("vllm", "vllm_nixl")
class Vllm:
    """The dialect of vLLM servers, alone or in NIXL pairs."""

    resumes: ClassVar[bool] = False
    decodes_alone: ClassVar[bool] = True
    speaks_messages: ClassVar[bool] = False
    load_probe: ClassVar[type[LoadProbe]] = VllmLoadProbe

    async def run(self, call: Call, legs: Legs) -> None:
        if legs.prefill is None or not is_one_sequence(call):
            legs.end_prefill()
            await run_alone(call, legs, VLLM_FIELDS)
            return
        ticket, cached_tokens = await self._prefill(call, legs, legs.prefill)
        legs.end_prefill(handed_off=ticket is not None)
        put = {} if ticket is None else {"kv_transfer_params": ticket}
        wanted = usage_wanted(call, legs)
        answer, wanted = await send_decode(call, legs, VLLM_FIELDS, put, legs.send_shielded, wanted)
        reply = reply_for(call, legs, wanted, is_pair=ticket is not None)
        reply.prefill_cached_tokens = cached_tokens
        await deliver(call, legs, answer, reply)

    async def _prefill(self, call: Call, legs: Legs, prefill: Leg) -> tuple[bytes | None, int | None]:
        """Run the prefill leg. Return the hand-off parameters (None if prefill kept no blocks) and its cached tokens."""
        answer = await legs.send(prefill, prefill_body(call, legs, _KEEP_BLOCKS))
        data = await legs.read(prefill, answer)
        ticket = legs.parsed(prefill, answer, fields, data).get("kv_transfer_params", Raw(b"null"))
        usage = read_usage(data)
        return None if bytes(ticket) == b"null" else bytes(ticket), None if usage is None else usage.cached_tokens


def prefill_body(call: Call, legs: Legs, params: bytes) -> bytes:
    """Return the client's request limited to one token, without streaming."""
    put = {**_ONE_TOKEN[call.envelope.kind], "kv_transfer_params": params}
    return accepted_body(call, VLLM_FIELDS, legs, put, _NOT_FOR_PREFILL, ENGINE_FIELDS)
