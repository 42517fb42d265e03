"""Logprobs of the prompt's own tokens, for `echo` with `logprobs` in `/v1/completions`.

The engine returns the logprobs of tokens that it samples. So each position of the prompt is sampled once, with a bias that makes
the prompt's own token the result: logprobs are those of the model's distribution before any bias. The first sequence computes
the whole prompt. The others find their full blocks in the prefix cache and compute only the rest of a block.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import replace

from stoker.base.ids import RequestId
from stoker.sched.request import GenerateRequest, SamplingParams, TokenChunk, TokenLogprobs
from stoker.worker.errors import error_of
from stoker.worker.generate import ChunkSource, run_together

_FORCES = 1e5  # far above the difference of any two logits
_AT_A_TIME = 16


async def prompt_logprobs(source: ChunkSource, model: GenerateRequest, num_logprobs: int) -> list[TokenLogprobs | None]:
    """Return one entry per token of the prompt of `model`, a request that will be run. The first token has none."""
    token_ids, unique = model.token_ids[: model.num_prompt], uuid.uuid4().hex
    found: list[TokenLogprobs | None] = [None] * len(token_ids)
    limit = asyncio.Semaphore(_AT_A_TIME)

    async def score(place: int) -> None:
        bias = {token_ids[place]: _FORCES}
        request = replace(
            model,
            request_id=RequestId(f"{unique}-{place}"),
            token_ids=token_ids[:place],
            num_prompt=place,
            sampling=SamplingParams(temperature=0.0, logit_bias=bias, num_logprobs=num_logprobs),
            max_new_tokens=1,
            lease_id=None,
            ticket=None,
        )
        async with limit:
            found[place] = await _first_logprobs(source, request)

    if len(token_ids) > 1:
        await score(len(token_ids) - 1)
        await run_together([score(place) for place in range(1, len(token_ids) - 1)])
    return found


async def _first_logprobs(source: ChunkSource, request: GenerateRequest) -> TokenLogprobs:
    entries: Sequence[TokenLogprobs] = ()

    def take(chunk: TokenChunk) -> bool:
        nonlocal entries
        if chunk.finish is not None and (error := error_of(chunk.finish)) is not None:
            raise error
        entries = chunk.logprobs or entries
        return chunk.finish is None

    async with source.open(request) as chunks:
        await chunks.relay(take)
    return entries[0]
