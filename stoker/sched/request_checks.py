"""Checks that a request can run at all, made when it is added to the scheduler."""

from __future__ import annotations

from stoker.base.errors import ContextTooLong, InvalidRequest
from stoker.sched.request import GenerateRequest


def check_request(
    request: GenerateRequest, max_tokens: int | None, kv_tokens: int | None, vocab_size: int | None
) -> None:
    """Raise InvalidRequest if this engine can never complete the request.

    `max_tokens` is the model's context, `kv_tokens` the capacity of the KV cache. None means unlimited.
    """
    num_prompt, max_new_tokens = request.num_prompt, request.max_new_tokens
    total_tokens = num_prompt + max_new_tokens
    if max_tokens is not None and total_tokens > max_tokens:
        raise ContextTooLong(
            f"{num_prompt} prompt tokens and up to {max_new_tokens} new tokens are {total_tokens} tokens, but the model's "
            f"context is {max_tokens}; shorten the prompt or lower max_tokens"
        )
    if kv_tokens is not None and total_tokens > kv_tokens:
        raise InvalidRequest(
            f"{num_prompt} prompt tokens and up to {max_new_tokens} new tokens need KV for {total_tokens} tokens, but the KV "
            f"cache holds {kv_tokens}; shorten the prompt or lower max_tokens",
            code="kv_too_small",
        )
    if not 0 < num_prompt <= len(request.token_ids) < total_tokens:
        raise InvalidRequest(
            f"nothing to generate: num_prompt is {num_prompt}, {len(request.token_ids)} token ids are given, and the "
            f"limit is {total_tokens} tokens"
        )
    if vocab_size is not None and (largest := max(request.token_ids)) >= vocab_size:
        # Some tokenizers have tokens that were added after the model was trained.
        raise InvalidRequest(
            f"token id {largest} is not in the model's vocabulary of {vocab_size} tokens", code="unknown_token"
        )
