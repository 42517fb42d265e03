"""Stoker workers: another worker can continue a broken stream, and a hand-off is a planned continuation.

Every request carries a seed, so that a second worker samples the same tokens as the first. In a stream, the worker reports
the tokens it sent in comment lines, which `resume.py` keeps. A prefill worker streams the first token and ends with a ticket
for its blocks. The decode worker gets the ticket and resumes after that token; it may start to pull blocks earlier
(`handoff_hints.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import ClassVar, NoReturn

from stoker.gateway.api.client_body import EndpointKind
from stoker.gateway.http import WorkerResponse, header_block
from stoker.gateway.path.call import Call
from stoker.gateway.path.dialects.dialect import DIALECTS
from stoker.gateway.path.errors import LegFailed, LegMoved
from stoker.gateway.path.handoff_hints import new_transfer_id
from stoker.gateway.path.legs import Legs, is_event_stream
from stoker.gateway.path.moves import MovableLeg
from stoker.gateway.path.resume import StokerStream
from stoker.gateway.path.rewrite import json_object, read_whole_usage, set_cached_tokens
from stoker.gateway.watch.load_probe import LoadProbe, NoLoadProbe
from stoker.proto.handoff import PARAM, encode_keep_params, has_kv_of
from stoker.proto.internal_http import NOTES_HEADER, NOTES_WANTED
from stoker.proto.resume_notes import BadNotes
from stoker.proto.sse import DONE
from stoker.routing.query import Leg

_REPORT_TOKENS = header_block([(NOTES_HEADER.encode(), NOTES_WANTED.encode())])
_SEVERAL_EVENTS = frozenset({EndpointKind.RESPONSES, EndpointKind.MESSAGES})  # for one token
_OUR_FIELDS = frozenset({"cache_salt", "priority", "tenant_share"})


@DIALECTS.register("stoker")
class Stoker:
    """The dialect of Stoker workers. They publish their load themselves, so there is nothing to scrape."""

    resumes: ClassVar[bool] = True
    decodes_alone: ClassVar[bool] = True
    speaks_messages: ClassVar[bool] = True
    load_probe: ClassVar[type[LoadProbe]] = NoLoadProbe

    async def run(self, call: Call, legs: Legs) -> None:
        if not (call.request.started or call.continues):
            call.memory.clear()  # tokens that the client never received are not part of the answer
        call.continues = False
        try:
            if legs.prefill is not None and await self._prefill(call, legs, legs.prefill):
                return
            if call.streams:
                await self._stream(call, legs)
            else:
                await self._whole(call, legs)
        finally:
            if call.streams or call.usage is None:
                call.usage = call.memory.usage

    async def _prefill(self, call: Call, legs: Legs, prefill: Leg) -> bool:
        """Run the prefill leg: the prompt and the first token. Return True if that token completed a streamed answer."""
        transfer_id = new_transfer_id()
        put = {PARAM: encode_keep_params(transfer_id)}
        if not call.streams:
            put["stream"] = b"true"
        legs.expect_lease(transfer_id)
        num_tokens = call.memory.num_tokens
        with legs.movable(prefill) as leg:
            headers = _REPORT_TOKENS + legs.work_header(prefill) + leg.header
            answer = await legs.send(prefill, self._body(call, put), headers)
            await self._relay(call, legs, prefill, answer, shown=call.streams)
            if leg.asked and call.memory.num_tokens == num_tokens:  # the prompt has not been computed
                self._hand_on(call, legs, prefill, leg)
        has_ticket = call.memory.notes.ticket is not None
        if has_ticket:
            try:
                call.memory.check(call.envelope.num_choices)
            except BadNotes as error:
                legs.fail(prefill, "invalid", f"worker {prefill.worker.worker_id}: {error.message}")
        legs.end_prefill(handed_off=has_ticket)
        if has_ticket or not call.streams:
            return False
        legs.finish()
        return True

    async def _stream(self, call: Call, legs: Legs) -> None:
        with legs.movable(legs.decode) as leg:
            answer = await self._send_decode(call, legs, leg)
            if not is_event_stream(answer):
                data = await legs.read(legs.decode, answer)
                legs.respond(answer, legs.parsed(legs.decode, answer, json_object, data))
                return
            await self._relay(call, legs, legs.decode, answer)
            if call.memory.notes.ticket is not None:
                self._hand_on(call, legs, legs.decode, leg)
        legs.finish()

    async def _whole(self, call: Call, legs: Legs) -> None:
        """Run an unstreamed request. The answer is buffered, so that any other worker can be tried until it is complete."""
        with legs.movable(legs.decode) as leg:
            answer = await self._send_decode(call, legs, leg)
            if is_event_stream(answer):  # instead of the answer, its tokens so far
                await self._relay(call, legs, legs.decode, answer, shown=False)
                self._hand_on(call, legs, legs.decode, leg)
            data = await legs.read(legs.decode, answer)

        def parse(data: bytes) -> bytes:
            usage = call.usage = read_whole_usage(data)
            cached_tokens = call.memory.cached_tokens
            if usage is None:
                return data
            if cached_tokens is not None:  # another worker did the prefill
                usage.cached_tokens = cached_tokens
                data = set_cached_tokens(data, cached_tokens)
            call.running.update(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
            return data

        legs.respond(answer, legs.parsed(legs.decode, answer, parse, data))

    async def _send_decode(self, call: Call, legs: Legs, leg: MovableLeg) -> WorkerResponse:
        ticket = call.memory.take_ticket()
        put = {} if ticket is None else {PARAM: ticket}
        headers = legs.work_header(legs.decode) + leg.header
        if call.streams:
            headers += _REPORT_TOKENS
        return await legs.send(legs.decode, self._body(call, put), headers)

    def _hand_on(self, call: Call, legs: Legs, leg: Leg, movable: MovableLeg) -> NoReturn:
        """Continue the request on another worker: this one drains, and was asked to hand it off."""
        worker_id, memory = leg.worker.worker_id, call.memory
        if not movable.asked:
            legs.fail(leg, "invalid", f"worker {worker_id}: it handed off a request that was not to move")
        has_kv = memory.notes.ticket is not None and has_kv_of(memory.notes.ticket)
        if not has_kv:
            memory.take_ticket()
        try:
            if memory.notes:
                memory.check(call.envelope.num_choices)
        except BadNotes as error:
            legs.fail(leg, "invalid", f"worker {worker_id}: {error.message}")
        call.continues = True
        raise LegMoved(worker_id, has_kv)

    def _body(self, call: Call, put: Mapping[str, bytes]) -> bytes:
        envelope = call.envelope
        changes = dict(put)
        if not isinstance(envelope.seed, int):
            changes["seed"] = b"%d" % call.seed
        if call.memory.notes:
            changes["resume"] = call.memory.resume_field(envelope.num_choices)
        return call.body(changes, may_add=_OUR_FIELDS)

    async def _relay(self, call: Call, legs: Legs, leg: Leg, answer: WorkerResponse, *, shown: bool = True) -> None:
        """Relay a stream to its end or to a ticket. Raises LegFailed if neither arrives."""
        stream = StokerStream(
            call.memory,
            call.running if shown else None,
            counts_events=call.envelope.kind in _SEVERAL_EVENTS,
            max_event_bytes=legs.max_event_bytes,
            max_notes_bytes=legs.max_notes_bytes,
        )
        try:
            await legs.relay(leg, answer, stream.push if shown else stream.push_unseen)
        except asyncio.CancelledError:
            call.ended = shown and stream.is_complete
            raise
        except LegFailed:
            if not stream.is_complete and not stream.lacks_only_done:
                raise
        else:
            if not (stream.is_complete or stream.lacks_only_done or call.memory.notes.ticket is not None):
                why = stream.failure or "its stream ended without a final event"
                legs.fail(leg, "lost", f"worker {leg.worker.worker_id}: {why}")
            legs.done(leg, answer)
        if stream.lacks_only_done:
            call.request.write(DONE)
