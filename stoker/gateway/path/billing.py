"""The usage that is billed: what workers report, bounded by what the gateway saw itself. Pure.

Bounds, which an honest worker never exceeds:

- prompt: the bytes of the request's body plus 4,096 tokens for the chat template. A token of text has at least one byte. If the
  body refers to something outside itself (an image, a file, an earlier response), the bound is 2**24.
- cached: the prompt.
- completion, at most: the client's limit times the number of choices, or what was sent if the worker ignores the limit. Without
  a limit, the bytes that the worker sent plus `meter.hidden_tokens` per choice, because reasoning may be generated and not sent.
- completion, at least: a quarter of the pieces of text that were sent. One token makes one piece, but some servers split text
  further.

Without a report, the gateway's own counts are billed: its estimate of the prompt, and one token per piece that was sent.
"""

from __future__ import annotations

import re

import msgspec

from stoker.gateway.api.client_body import EndpointKind, fields
from stoker.gateway.path.call import Call
from stoker.gateway.path.rewrite import UsageCounts
from stoker.gateway.records.usage_row import MAX_TOKENS

_CHAT, _RESPONSES = EndpointKind.CHAT, EndpointKind.RESPONSES  # faster than enum attribute access
_TEMPLATE_TOKENS = 4096
_PIECES_PER_TOKEN = 4
# A whole answer of more than _JSON_BYTES has at least one token per _BYTES_PER_TOKEN, if it is ordinary text.
_JSON_BYTES = 512
_BYTES_PER_TOKEN = 8
_MAX_BEST_OF = 128
_OUTSIDE = re.compile(
    rb'"(?:image_url|input_image|video_url|input_video|audio_url|input_audio|input_file|file|file_id|image_embeds'
    rb'|previous_response_id|conversation|multi_modal_data|mm_processor_kwargs)"'
)


def billed_usage(call: Call, hidden_tokens: int) -> tuple[UsageCounts | None, str | None]:
    """Return the usage to bill for a request that has ended, and why the worker's report cannot be true, if it cannot.

    The usage is None if nothing was reported and nothing sent.
    """
    running, reported = call.running, call.usage
    if reported is None:
        if not call.request.started:
            return None, None
        reported = UsageCounts(running.prompt_tokens, running.cached_tokens, running.completion_tokens)
    prompt, cached, completion = reported.prompt_tokens, reported.cached_tokens, reported.completion_tokens
    wrong: str | None = None
    if prompt <= 0:
        wrong = f"prompt_tokens is {prompt}" if prompt < 0 else None
        prompt = call.query.num_tokens if call.request.started else 0
    elif prompt > len(call.envelope.raw) and prompt > (most := _max_prompt_tokens(call)):
        wrong = f"prompt_tokens is {prompt}, but the request can have at most {most}"
        prompt = most
    if not 0 <= cached <= prompt:
        wrong = wrong or f"cached_tokens is {cached}, but prompt_tokens is {prompt}"
        cached = min(max(cached, 0), prompt)
    least = -(-call.sent_pieces // _PIECES_PER_TOKEN) if call.sent_pieces else 0
    if completion < least:
        wrong = wrong or f"completion_tokens is {completion}, but at least {least} were sent"
        completion = least
    elif completion > min(_limit(call) or call.sent_bytes, MAX_TOKENS):
        most = _max_completion_tokens(call, hidden_tokens)
        if completion > most:
            wrong = wrong or f"completion_tokens is {completion}, but at most {most} are possible"
            completion = most
    if wrong is None and prompt == reported.prompt_tokens:
        return reported, None
    return UsageCounts(prompt, cached, completion), wrong


def _max_prompt_tokens(call: Call) -> int:
    body = call.envelope.raw
    if _OUTSIDE.search(body):
        return MAX_TOKENS
    return min(max(len(body), call.query.num_tokens) + _TEMPLATE_TOKENS, MAX_TOKENS)


def _limit(call: Call) -> int:
    """Return the largest limit that the worker may have applied to one choice, or 0 if it may have applied none.

    A client may send several. It must not be billed by one that the worker does not know.
    """
    envelope = call.envelope
    kind = envelope.kind
    limit = envelope.max_output_tokens if kind is _RESPONSES else envelope.max_tokens
    most = limit if isinstance(limit, int) and limit > 0 else 0
    if kind is _CHAT:
        limit = envelope.max_completion_tokens
        if isinstance(limit, int) and limit > most:
            return limit
    return most


def _max_completion_tokens(call: Call, hidden_tokens: int) -> int:
    choices, limit = _num_choices(call), _limit(call)
    if not limit:
        return min(call.sent_bytes + hidden_tokens * choices, MAX_TOKENS)
    text_bytes = 0 if call.streams else max(0, call.sent_bytes - _JSON_BYTES)
    sent_tokens = max(call.sent_pieces, text_bytes // _BYTES_PER_TOKEN)
    return min(max(limit * choices, sent_tokens), MAX_TOKENS)


def _num_choices(call: Call) -> int:
    """Return how many choices were generated. `best_of` generates choices that are not sent."""
    envelope = call.envelope
    try:
        best_of = msgspec.json.decode(fields(envelope.raw).get("best_of", b"1"), type=int)
    except msgspec.MsgspecError:
        best_of = 1
    prompts = max(1, envelope.num_prompts)
    return prompts * max(1, envelope.n or 1, min(best_of, _MAX_BEST_OF))
