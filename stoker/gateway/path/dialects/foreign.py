"""What the dialects of foreign engines share: the decode leg, its usage chunk, and two concurrent legs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from stoker.gateway.api.client_body import EndpointKind, fields
from stoker.gateway.http import WorkerResponse
from stoker.gateway.path.call import Call
from stoker.gateway.path.dialects.accepted_fields import accepted_body
from stoker.gateway.path.errors import LegFailed, Refused
from stoker.gateway.path.legs import Legs, is_event_stream
from stoker.gateway.path.rewrite import ForeignAnswer

ENGINE_FIELDS = frozenset({"cache_salt"})  # the fields set by the gateway that both vLLM and SGLang accept

_PREFILL_REPLY_S = 1.0  # how long to wait for prefill's response after decode ended; it normally came long before


async def run_alone(call: Call, legs: Legs, accepted: frozenset[str], may_add: Collection[str] = ENGINE_FIELDS) -> None:
    """Run the whole request on the decode worker."""
    hides = hides_usage(call, legs)
    if hides:
        answer, hides = await send_decode(call, legs, accepted, {}, legs.send, may_add)
    else:
        answer = await legs.send(legs.decode, accepted_body(call, accepted, legs.dropped_fields, {}, (), may_add))
    await deliver(call, legs, answer, reply_for(call, hides))


def reply_for(call: Call, hides_usage: bool, *, is_pair: bool = False) -> ForeignAnswer:
    keeps = bool(call.envelope.return_token_ids)
    return ForeignAnswer(hide_usage=hides_usage, keep_token_ids=keeps, is_pair=is_pair)


async def send_decode(
    call: Call,
    legs: Legs,
    accepted: frozenset[str],
    put: Mapping[str, bytes],
    send: Callable[[Any, bytes], Awaitable[WorkerResponse]],
    may_add: Collection[str] = ENGINE_FIELDS,
) -> tuple[WorkerResponse, bool]:
    """Send the decode leg. Return the response, and whether its usage chunk must be hidden from the client.

    A worker that refuses `stream_options` gets the request again without it, and is never sent it again.
    """
    dropped = legs.dropped_fields
    if hides_usage(call, legs):
        try:
            asking = {**put, **asking_for_usage(call)}
            return await send(legs.decode, accepted_body(call, accepted, dropped, asking, (), may_add)), True
        except Refused as refused:
            if b"stream_options" not in refused.body:
                raise
            legs.upstream(legs.decode).refuses_usage = True
    return await send(legs.decode, accepted_body(call, accepted, dropped, put, (), may_add)), False


async def deliver(
    call: Call, legs: Legs, answer: WorkerResponse, reply: ForeignAnswer, prefilling: asyncio.Task[None] | None = None
) -> None:
    """Send the decode worker's answer to the client, streamed or whole. `prefilling` yields prefill's cached tokens."""
    try:
        if is_event_stream(answer):
            await _stream(call, legs, answer, reply)
            return
        data = await legs.read(legs.decode, answer)
        if prefilling is not None:
            await asyncio.wait([prefilling], timeout=_PREFILL_REPLY_S)
        legs.respond(answer, reply.whole(data))
    finally:
        call.usage = reply.usage


async def _stream(call: Call, legs: Legs, answer: WorkerResponse, reply: ForeignAnswer) -> None:
    try:
        await legs.relay(legs.decode, answer, reply.push)
    except asyncio.CancelledError:
        call.ended = reply.ended
        raise
    except LegFailed:
        if not reply.ended:  # a connection that breaks after the last event leaves a complete answer
            raise
    else:
        legs.done(legs.decode, answer)
    rest = reply.finish()
    if not call.request.started:
        legs.begin(answer)
    call.request.write(rest)
    call.request.finish()


async def together(prefill: Coroutine[Any, Any, None], decode: Callable[[asyncio.Task[None]], Awaitable[None]]) -> None:
    """Run both legs concurrently. If one fails, or the client disconnects, the other ends in the same event loop turn."""
    try:
        async with asyncio.TaskGroup() as group:
            prefilling = group.create_task(prefill)
            await decode(prefilling)
            await asyncio.wait([prefilling], timeout=_PREFILL_REPLY_S)
            prefilling.cancel()
    except BaseExceptionGroup as failed:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # cancelled from outside in the same turn, which TaskGroup hides
            raise asyncio.CancelledError from None
        raise failed.exceptions[0] from None


def hides_usage(call: Call, legs: Legs) -> bool:
    """Return True if the gateway must request the usage chunk of a stream and hide it, because the client did not ask."""
    envelope = call.envelope
    if not envelope.stream or envelope.kind is EndpointKind.RESPONSES or envelope.wants_usage:
        return False
    return not legs.upstream(legs.decode).refuses_usage


def asking_for_usage(call: Call) -> dict[str, bytes]:
    """Return the body change that requests a usage chunk."""
    envelope = call.envelope
    if envelope.stream_options is UNSET or envelope.stream_options is None:
        return {"stream_options": b'{"include_usage":true}'}
    options = fields(fields(envelope.raw)["stream_options"])
    options["include_usage"] = Raw(b"true")
    return {"stream_options": msgspec.json.encode(options)}


def is_one_sequence(call: Call) -> bool:
    """Return True for one prompt and one choice. A hand-off transfers the blocks of a single sequence."""
    return call.envelope.num_choices == 1
