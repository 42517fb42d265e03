"""vLLM with its NIXL connector: prefill first, then decode, which pulls.

The prefill worker gets the request for one token and keeps its blocks under a lease; its answer names them in
`kv_transfer_params`, and that object goes to the decode worker as it is. The token is not used: decode draws it again.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec import Raw

from stoker.gateway.api.client_body import Kind, fields
from stoker.gateway.path.call import Call
from stoker.gateway.path.dialects.dialect import DIALECTS
from stoker.gateway.path.dialects.foreign import (
    ENGINE_FIELDS,
    deliver,
    is_one_sequence,
    reply_for,
    run_alone,
    send_decode,
)
from stoker.gateway.path.legs import Legs
from stoker.gateway.path.rewrite import read_usage
from stoker.routing.query import Leg

_KEEP_BLOCKS = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
# `min_tokens` above the one token that we ask for would be refused; a usage chunk needs a stream.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens")
_ONE_TOKEN = {
    Kind.CHAT: {"stream": b"false", "max_tokens": b"1", "max_completion_tokens": b"1"},
    Kind.COMPLETIONS: {"stream": b"false", "max_tokens": b"1"},
    Kind.RESPONSES: {"stream": b"false", "max_output_tokens": b"1"},
}


@DIALECTS.register("vllm", "vllm_nixl")
class Vllm:
    resumes: ClassVar[bool] = False
    decodes_alone: ClassVar[bool] = True

    async def run(self, call: Call, legs: Legs) -> None:
        if legs.prefill is None or not is_one_sequence(call):
            legs.end_prefill()
            await run_alone(call, legs)
            return
        ticket, cached_tokens = await self._prefill(call, legs, legs.prefill)
        legs.end_prefill(handed_off=ticket is not None)
        put = {} if ticket is None else {"kv_transfer_params": ticket}
        answer, hides_usage = await send_decode(call, legs, put, legs.send_surely)
        reply = reply_for(call, hides_usage, is_pair=ticket is not None)
        reply.prefill_cached_tokens = cached_tokens
        await deliver(call, legs, answer, reply)

    async def _prefill(self, call: Call, legs: Legs, prefill: Leg) -> tuple[bytes | None, int | None]:
        """The hand-off's parameters, None where prefill kept nothing, and what prefill found in its cache."""
        answer = await legs.send(prefill, prefill_body(call, _KEEP_BLOCKS))
        data = await legs.read(prefill, answer)
        usage = read_usage(data)
        try:
            ticket = fields(data).get("kv_transfer_params", Raw(b"null"))
        except msgspec.DecodeError:
            ticket = Raw(b"null")
        return None if bytes(ticket) == b"null" else bytes(ticket), None if usage is None else usage.cached_tokens


def prefill_body(call: Call, params: bytes) -> bytes:
    """The client's request for one token, unstreamed."""
    put = {**_ONE_TOKEN[call.envelope.kind], "kv_transfer_params": params}
    return call.body(put, _NOT_FOR_PREFILL, ENGINE_FIELDS)
