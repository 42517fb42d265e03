"""What the dialects of foreign engines share: the decode leg, its usage chunk, and two concurrent legs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from stoker.gateway.api.client_body import EndpointKind, fields
from stoker.gateway.http import WorkerResponse
from stoker.gateway.path.call import Call
from stoker.gateway.path.dialects.accepted_fields import accepted_body
from stoker.gateway.path.dialects.translated_answer import TranslatedAnswer
from stoker.gateway.path.errors import LegFailed, Refused
from stoker.gateway.path.legs import Legs, is_event_stream
from stoker.gateway.path.rewrite import ForeignAnswer
from stoker.proto.openai.fields import StreamOptions

ENGINE_FIELDS = frozenset({"cache_salt"})  # the fields set by the gateway that both vLLM and SGLang accept

_REFUSAL_S = 60.0
_ONE_PROMPT = re.compile(rb'"|\[\s*\d')  # a text, or a list of token ids
_AT_END = {"include_usage": True}
_RUNNING = {**_AT_END, "continuous_usage_stats": True}
_PREFILL_REPLY_S = 1.0  # how long to wait for prefill's response after decode ended; it normally came long before

_NO_END = "its stream ended without a final event"


async def run_alone(
    call: Call,
    legs: Legs,
    accepted: frozenset[str],
    may_add: Collection[str] = ENGINE_FIELDS,
    *,
    has_running_usage: bool = True,
) -> None:
    """Run the whole request on the decode worker. `has_running_usage`: it can report usage in every chunk."""
    wanted = usage_wanted(call, legs, has_running_usage)
    if wanted is NO_USAGE_WANTED:
        answer = await legs.send(legs.decode, accepted_body(call, accepted, legs, {}, (), may_add))
    else:
        answer, wanted = await send_decode(call, legs, accepted, {}, legs.send, wanted, may_add)
    await deliver(call, legs, answer, reply_for(call, legs, wanted))


class UsageWanted(NamedTuple):
    """The usage that the gateway asks a worker for and the client did not ask for, so that it is hidden."""

    at_end: bool = False
    running: bool = False  # in every chunk

    def __bool__(self) -> bool:
        return self.at_end or self.running


NO_USAGE_WANTED = UsageWanted()


def reply_for(call: Call, legs: Legs, wanted: UsageWanted, *, is_pair: bool = False) -> ForeignAnswer:
    kind = ForeignAnswer if call.shows_thinking is None else TranslatedAnswer
    answer = kind(
        call.running,
        kind=call.envelope.kind,
        prompt_tokens=call.query.num_tokens,
        hide_usage=wanted.at_end,
        hide_running=wanted.running,
        keep_token_ids=bool(call.envelope.return_token_ids),
        is_pair=is_pair,
        max_event_bytes=legs.max_event_bytes,
    )
    if isinstance(answer, TranslatedAnswer):
        answer.translate_for(call)
    return answer


async def send_decode(
    call: Call,
    legs: Legs,
    accepted: frozenset[str],
    put: Mapping[str, bytes],
    send: Callable[[Any, bytes], Awaitable[WorkerResponse]],
    wanted: UsageWanted,
    may_add: Collection[str] = ENGINE_FIELDS,
) -> tuple[WorkerResponse, UsageWanted]:
    """Send the decode leg. Return the response, and which usage must be hidden from the client.

    If the worker refuses `stream_options`, it gets the request again without the gateway's addition. If it then streams an
    answer to a client that sent no options of its own, the addition was the reason, and it is left out for a minute. A client
    cannot bring this about: any other reason would make the second request fail too. While usage is left out, the gateway
    bills what it counts itself.
    """
    if wanted:
        asking = {**put, **asking_for_usage(call, wanted)}
        try:
            return await send(legs.decode, accepted_body(call, accepted, legs, asking, (), may_add)), wanted
        except Refused as refused:
            if b"stream_options" not in refused.body:
                raise
    answer = await send(legs.decode, accepted_body(call, accepted, legs, put, (), may_add))
    if wanted and call.envelope.stream_options is UNSET and is_event_stream(answer):
        legs.upstream(legs.decode).refuses_usage_until_s = legs.now_s + _REFUSAL_S
    return answer, NO_USAGE_WANTED


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
        legs.respond(answer, legs.parsed(legs.decode, answer, reply.whole, data))
    finally:
        call.usage, call.sent_pieces = reply.usage, reply.num_pieces


async def _stream(call: Call, legs: Legs, answer: WorkerResponse, reply: ForeignAnswer) -> None:
    try:
        await legs.relay(legs.decode, answer, reply.push)
    except asyncio.CancelledError:
        call.ended = reply.ended
        raise
    except LegFailed:
        if not reply.ended:  # a connection that breaks after the last event leaves a complete answer
            raise
        rest = b""
    else:
        rest = reply.finish()
        if not reply.ended:
            legs.fail(legs.decode, "lost", f"worker {legs.decode.worker.worker_id}: {_NO_END}")
        legs.done(legs.decode, answer)
    if not call.request.started:
        legs.begin(answer)
    call.request.write(rest)
    legs.finish()


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


def usage_wanted(call: Call, legs: Legs, has_running_usage: bool = True) -> UsageWanted:
    """Return what the gateway must ask for. The Responses API always reports usage, and only at the end.

    vLLM's running usage counts one choice only, so it is used for answers with one choice.
    """
    envelope = call.envelope
    if not envelope.stream or envelope.kind is EndpointKind.RESPONSES:
        return NO_USAGE_WANTED
    if legs.upstream(legs.decode).refuses_usage_until_s > legs.now_s:
        return NO_USAGE_WANTED
    options = envelope.stream_options
    has_asked = isinstance(options, StreamOptions) and bool(options.continuous_usage_stats)
    running = has_running_usage and not (envelope.wants_usage and has_asked) and _has_one_choice(call)
    return UsageWanted(not envelope.wants_usage, running)


def asking_for_usage(call: Call, wanted: UsageWanted) -> dict[str, bytes]:
    """Return the body change that requests usage."""
    added = _RUNNING if wanted.running else _AT_END
    envelope = call.envelope
    if envelope.stream_options is UNSET or envelope.stream_options is None:
        return {"stream_options": msgspec.json.encode(added)}
    options = fields(fields(envelope.raw)["stream_options"])
    return {"stream_options": msgspec.json.encode({**options, **added})}


def _has_one_choice(call: Call) -> bool:
    """Like `is_one_sequence`, but without decoding a long list: a list of texts counts as several prompts."""
    envelope = call.envelope
    if (envelope.n or 1) != 1:
        return False
    if envelope.kind is not EndpointKind.COMPLETIONS or isinstance(envelope.prompt, UnsetType):
        return True
    return _ONE_PROMPT.match(memoryview(envelope.prompt)) is not None


def is_one_sequence(call: Call) -> bool:
    """Return True for one prompt and one choice. A hand-off transfers the blocks of a single sequence."""
    return call.envelope.num_choices == 1
