"""Sequence: what the scheduler knows of one request, and its tokens as a chain of blocks. The scheduler alone changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stoker.base.ids import BlockId, BlockKey, Row
from stoker.kv.blocks.keys import next_key, salt_hash
from stoker.kv.blocks.transfer import BlockName
from stoker.sched.request import GenerateRequest, Usage


class State(Enum):
    WAITING = "waiting"
    LOADING = "loading"  # has its row and blocks; some of them are being filled from elsewhere
    RUNNING = "running"
    DONE = "done"  # its blocks may be kept for whoever continues it elsewhere: see leases.py


@dataclass(slots=True, eq=False)
class Sequence:
    """It knows so many tokens and has computed so many; each step hands out tokens so that the second catches up."""

    request: GenerateRequest
    arrival: int  # order of arrival, which breaks ties
    root: BlockKey
    block_tokens: int
    most_tokens: int  # that it may come to know
    token_ids: list[int]
    keys: list[BlockKey]  # of the leading full blocks of token_ids, as far as needed yet
    num_stored: int = 0  # leading blocks that tiers have and that are worth loading
    state: State = State.WAITING
    row: Row | None = None
    blocks: list[BlockId] = field(default_factory=list)
    num_named: int = 0  # leading blocks that have been offered to the pool by key
    num_computed: int = 0  # tokens computed, or planned in a step that is under way
    num_drawing: int = 0  # tokens that steps under way will draw; not yet in token_ids
    run: int = 0  # changes with each row that it gets or gives back: results of a step from before name no blocks
    cached_tokens: int | None = None  # set when it first runs
    pulled_tokens: int = 0

    @property
    def num_to_compute(self) -> int:
        """Zero once the tokens to come are all that may come: with a lease, one."""
        num_known = len(self.token_ids) + self.num_drawing
        if num_known >= self.most_tokens or (self.num_drawing and self.request.lease_id is not None):
            return 0
        return num_known - self.num_computed

    @property
    def precedence(self) -> tuple[int, int]:
        """Smaller runs first."""
        return (self.request.priority, self.arrival)

    @property
    def running_row(self) -> Row:
        """It has one from its admission until it is done or preempted."""
        assert self.row is not None, f"{self.request.request_id} has no row"
        return self.row

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.request.num_prompt,
            cached_tokens=self.cached_tokens or 0,
            completion_tokens=len(self.token_ids) - self.request.num_prompt,
            pulled_tokens=self.pulled_tokens,
        )

    # ---- its tokens as a chain of blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    @property
    def num_reusable(self) -> int:
        """Leading blocks that may come from elsewhere. The last known token is always computed anew: its logits are what we
        sample from."""
        return (len(self.token_ids) - 1) // self.block_tokens

    def tokens_of(self, i: int) -> list[int]:
        return self.token_ids[i * self.block_tokens : (i + 1) * self.block_tokens]

    def parent_of(self, i: int) -> BlockKey:
        return self.keys[i - 1] if i else self.root

    def extend_keys(self) -> None:
        """Keys for the blocks that filled up since: all but the prompt's first ones come one at a time."""
        for i in range(len(self.keys), len(self.token_ids) // self.block_tokens):
            self.keys.append(next_key(self.parent_of(i), self.tokens_of(i)))

    def key_up_to(self, num_tokens: int) -> BlockKey:
        """The key of the last block of so many tokens, which need not fill it."""
        i = (num_tokens - 1) // self.block_tokens
        return next_key(self.parent_of(i), self.token_ids[i * self.block_tokens : num_tokens])

    def block_name(self, i: int) -> BlockName:
        salt = None if i else salt_hash(self.request.cache_salt) or ""
        return BlockName(self.keys[i], self.parent_of(i), tuple(self.tokens_of(i)), salt)
