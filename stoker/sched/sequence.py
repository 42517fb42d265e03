"""Sequence: the scheduler's state of one request, and its tokens as a chain of KV blocks. Only the scheduler changes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stoker.base.ids import BlockKey, Row
from stoker.kv.blocks.keys import next_key, salt_hash
from stoker.kv.blocks.transfer import BlockName
from stoker.sched.draft_tape import DraftTape
from stoker.sched.held_blocks import HeldBlocks
from stoker.sched.request import GenerateRequest, TokenUsage


class SequenceState(Enum):
    WAITING = "waiting"
    LOADING = "loading"  # has a row and blocks; some blocks are being loaded from a tier or another worker
    RUNNING = "running"
    DONE = "done"  # a lease may still hold its blocks for another worker (leases.py)


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence has known tokens and computed tokens. Each step computes tokens until the two counts are equal."""

    request: GenerateRequest
    arrival: int  # order of arrival; unique
    root: BlockKey
    block_tokens: int
    max_tokens: int  # limit of prompt and output together
    token_ids: list[int]
    keys: list[BlockKey]  # keys of the leading full blocks of token_ids; extended when needed
    num_stored: int = 0  # leading blocks that a tier holds and that are worth loading
    state: SequenceState = SequenceState.WAITING
    row: Row | None = None
    held: tuple[HeldBlocks, ...] = ()  # its blocks in each KV set; empty while it has none
    room: int = 0  # tokens for which it has blocks in all KV sets
    num_matched: int = 0  # leading blocks that the pool held when it was last asked; an estimate while waiting
    num_shared: int = 0  # leading blocks that another sequence had computed when this one started
    num_named: int = 0  # leading blocks that the pool has registered under their keys
    num_computed: int = 0  # tokens that are computed, or that a launched step computes, if all its drafts are accepted
    num_pending: int = 0  # launched spans that sample. Each adds one token, and one more per accepted draft
    num_drafting: int = 0  # drafts in launched steps
    tape: DraftTape | None = None  # guesses for the tokens that follow
    uploaded_tape: DraftTape | None = None  # the tape that the row has on the device
    row_epoch: int = 0  # changes with each row that the sequence gets or loses; detects a preemption since a launch
    cached_tokens: int | None = None  # set when the sequence first runs
    pulled_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    leaves_under: str | None = (
        None  # the lease under which another worker takes the sequence over; it is not planned again
    )
    blocks_passed: int = 0  # blocks that other tenants' sequences took while this one did not fit

    @property
    def num_to_compute(self) -> int:
        """How many known tokens are not computed yet. Zero if the pending tokens are the last ones.

        It does not depend on how many of the launched drafts are accepted: each adds a token and computes one. A
        sequence with a lease ends after one token, and one that moves to another worker ends with its launched steps.
        """
        num_known = len(self.token_ids) + self.num_pending
        if num_known >= self.max_tokens or self.leaves_under is not None:
            return 0
        if self.num_pending and self.request.lease_id is not None:
            return 0
        return num_known + self.num_drafting - self.num_computed

    @property
    def is_loading(self) -> bool:
        return self.state is SequenceState.LOADING

    @property
    def has_output(self) -> bool:
        """True if tokens after the prompt are known: sampled here, or by the worker that had the sequence before."""
        return len(self.token_ids) > self.request.num_prompt

    @property
    def precedence(self) -> tuple[int, int]:
        """The sort key of running sequences: one with a smaller key is preempted later.

        It never changes. So two sequences cannot preempt each other in turns. `PrefillOrder` orders prompts.
        """
        return (self.request.priority, self.arrival)

    @property
    def running_row(self) -> Row:
        """The row of a sequence that is admitted and neither done nor preempted."""
        assert self.row is not None, f"{self.request.request_id} has no row"
        return self.row

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage(
            prompt_tokens=self.request.num_prompt,
            cached_tokens=self.cached_tokens or 0,
            completion_tokens=len(self.token_ids) - self.request.num_prompt,
            pulled_tokens=self.pulled_tokens,
            draft_tokens=self.draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
        )

    # ---- tokens as a chain of blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    @property
    def num_reusable(self) -> int:
        """How many leading blocks may come from a cache.

        The last known token is always computed, because its logits are needed to sample the next one.
        """
        return (len(self.token_ids) - 1) // self.block_tokens

    def tokens_of(self, i: int) -> list[int]:
        return self.token_ids[i * self.block_tokens : (i + 1) * self.block_tokens]

    def parent_of(self, i: int) -> BlockKey:
        return self.keys[i - 1] if i else self.root

    def extend_keys(self) -> None:
        """Compute the keys of the blocks that became full since the last call."""
        keys, num_full = self.keys, len(self.token_ids) // self.block_tokens
        if len(keys) < num_full:
            for i in range(len(keys), num_full):
                keys.append(next_key(self.parent_of(i), self.tokens_of(i)))

    def key_up_to(self, num_tokens: int) -> BlockKey:
        """Return the key of the last block of the first `num_tokens` tokens. The block may be partly filled."""
        i = (num_tokens - 1) // self.block_tokens
        return next_key(self.parent_of(i), self.token_ids[i * self.block_tokens : num_tokens])

    def block_name(self, i: int) -> BlockName:
        salt = None if i else salt_hash(self.request.cache_salt) or ""
        return BlockName(self.keys[i], self.parent_of(i), tuple(self.tokens_of(i)), salt)
