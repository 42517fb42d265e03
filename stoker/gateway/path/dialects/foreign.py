"""What all dialects but our own have in common: the decode leg, its usage chunk, and two legs that run at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from stoker.gateway.api.client_body import Kind, fields
from stoker.gateway.http import Answer
from stoker.gateway.path.call import Call
from stoker.gateway.path.errors import LegFailed, Refused
from stoker.gateway.path.legs import Legs, is_event_stream
from stoker.gateway.path.rewrite import ForeignAnswer

ENGINE_FIELDS = frozenset({"cache_salt"})  # of the gateway's own fields, those that vLLM and SGLang both know

_LAST_WORD_S = 1.0  # a prefill worker has answered long before decode ends; one that has not is not waited for


async def run_alone(call: Call, legs: Legs, may_add: Collection[str] = ENGINE_FIELDS) -> None:
    """One worker does all."""
    hides = hides_usage(call, legs)
    if hides:
        answer, hides = await send_decode(call, legs, {}, legs.send, may_add)
    else:
        answer = await legs.send(legs.decode, call.body(may_add=may_add))
    await deliver(call, legs, answer, reply_for(call, hides))


def reply_for(call: Call, hides_usage: bool, *, is_pair: bool = False) -> ForeignAnswer:
    keeps = bool(call.envelope.return_token_ids)
    return ForeignAnswer(hide_usage=hides_usage, keep_token_ids=keeps, is_pair=is_pair)


async def send_decode(
    call: Call,
    legs: Legs,
    put: Mapping[str, bytes],
    send: Callable[[Any, bytes], Awaitable[Answer]],
    may_add: Collection[str] = ENGINE_FIELDS,
) -> tuple[Answer, bool]:
    """The answer, and whether its usage chunk is there for us alone. A worker that refuses to be asked for one is not
    asked again."""
    if hides_usage(call, legs):
        try:
            return await send(legs.decode, call.body({**put, **asking_for_usage(call)}, may_add=may_add)), True
        except Refused as refused:
            if b"stream_options" not in refused.body:
                raise
            legs.upstream(legs.decode).refuses_usage = True
    return await send(legs.decode, call.body(put, may_add=may_add)), False


async def deliver(
    call: Call, legs: Legs, answer: Answer, reply: ForeignAnswer, prefilling: asyncio.Task[None] | None = None
) -> None:
    """The decode worker's answer to the client: as it comes, or whole. `prefilling` knows what prefill found in cache."""
    try:
        if is_event_stream(answer):
            await _stream(call, legs, answer, reply)
            return
        data = await legs.read(legs.decode, answer)
        if prefilling is not None:
            await asyncio.wait([prefilling], timeout=_LAST_WORD_S)
        legs.respond(answer, reply.whole(data))
    finally:
        call.usage = reply.usage


async def _stream(call: Call, legs: Legs, answer: Answer, reply: ForeignAnswer) -> None:
    try:
        await legs.relay(legs.decode, answer, reply.push)
    except asyncio.CancelledError:
        call.ended = reply.ended
        raise
    except LegFailed:
        if not reply.ended:  # cut after its own last event, the answer is whole all the same
            raise
    else:
        legs.done(legs.decode, answer)
    rest = reply.finish()
    if not call.request.started:
        legs.begin(answer)
    call.request.write(rest)
    call.request.finish()


async def together(prefill: Coroutine[Any, Any, None], decode: Callable[[asyncio.Task[None]], Awaitable[None]]) -> None:
    """Both legs at once. Whichever fails, and a client that leaves, ends the other in the same turn of the loop."""
    try:
        async with asyncio.TaskGroup() as group:
            prefilling = group.create_task(prefill)
            await decode(prefilling)
            await asyncio.wait([prefilling], timeout=_LAST_WORD_S)
            prefilling.cancel()
    except BaseExceptionGroup as failed:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # also from outside, in the same turn: a group keeps that to itself
            raise asyncio.CancelledError from None
        raise failed.exceptions[0] from None


def hides_usage(call: Call, legs: Legs) -> bool:
    """Nobody would tell us the usage of a stream if we did not ask; a client that did not ask never sees the answer."""
    envelope = call.envelope
    if not envelope.stream or envelope.kind is Kind.RESPONSES or envelope.wants_usage:
        return False
    return not legs.upstream(legs.decode).refuses_usage


def asking_for_usage(call: Call) -> dict[str, bytes]:
    """The change of the body that asks for a usage chunk."""
    envelope = call.envelope
    if envelope.stream_options is UNSET or envelope.stream_options is None:
        return {"stream_options": b'{"include_usage":true}'}
    options = fields(fields(envelope.raw)["stream_options"])
    options["include_usage"] = Raw(b"true")
    return {"stream_options": msgspec.json.encode(options)}


def is_one_sequence(call: Call) -> bool:
    """One prompt, one choice. A hand-off moves one sequence's blocks, and its lease ends when one reader has them."""
    return call.envelope.num_choices == 1
