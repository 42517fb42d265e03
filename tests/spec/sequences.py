"""Sequences and a block pool for tests of drafters."""

from __future__ import annotations

import json
from collections.abc import Sequence as Tokens

from stoker.base.ids import RequestId
from stoker.kv.blocks.keys import root_key
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.request import GenerateRequest, GrammarSpec, SamplingParams
from stoker.sched.sequence import Sequence
from stoker.spec.drafter import DrafterParts
from stoker.spec.stored_blocks import StoredBlocks

BLOCK_TOKENS = 4
VOCAB_SIZE = 1000


def new_sequence(
    prompt: Tokens[int],
    output: Tokens[int] = (),
    salt: str = "",
    block_tokens: int = BLOCK_TOKENS,
    prediction: Tokens[int] = (),
    forced: Tokens[int] = (),
) -> Sequence:
    """`forced` is what its grammar forces at the start. Without it, the sequence has no grammar."""
    grammar = GrammarSpec("regex", json.dumps(list(forced))) if forced else None
    request = GenerateRequest(
        RequestId("r"),
        list(prompt),
        len(prompt),
        SamplingParams(grammar=grammar),
        max_new_tokens=1 << 20,
        cache_salt=salt,
        prediction=tuple(prediction),
    )
    token_ids = [*prompt, *output]
    return Sequence(
        request, 0, root_key("model", salt), block_tokens, len(prompt) + request.max_new_tokens, token_ids, []
    )


def new_parts(num_blocks: int = 64, argument: str = "") -> DrafterParts:
    return DrafterParts(
        BlockPool(num_blocks), VOCAB_SIZE, argument, StoredBlocks(2 * num_blocks), lambda spec: json.loads(spec.text)
    )


def fill_pool(pool: BlockPool, seq: Sequence) -> None:
    """Put the full blocks of a sequence into the pool, as if it had run and ended."""
    seq.extend_keys()
    blocks = pool.take(len(seq.keys))
    for i, block in enumerate(blocks):
        pool.name(block, seq.keys[i], seq.parent_of(i), seq.tokens_of(i))
    pool.release(blocks)
