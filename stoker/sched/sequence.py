"""Sequence: what the scheduler knows of one request. The Scheduler alone changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stoker.base.ids import BlockId, BlockKey, Row
from stoker.sched.request import GenerateRequest, Usage


class State(Enum):
    WAITING = "waiting"
    LOADING = "loading"  # has its row and blocks; some of them are being filled from elsewhere
    RUNNING = "running"
    HELD = "held"  # done, with its blocks kept for whoever continues it elsewhere
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """It knows so many tokens and has computed so many; each step hands out tokens so that the second catches up."""

    request: GenerateRequest
    arrival: int  # order of arrival, which breaks ties
    root: BlockKey
    token_ids: list[int]
    state: State = State.WAITING
    row: Row | None = None
    blocks: list[BlockId] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)  # of the leading full blocks of token_ids, as far as needed yet
    num_named: int = 0  # leading blocks that have been offered to the pool by key
    num_computed: int = 0  # tokens computed, or planned in a step that is under way
    num_drawing: int = 0  # tokens that steps under way will draw; not yet in token_ids
    run: int = 0  # counts admissions: results of a step from before a preemption name no blocks
    cached_tokens: int | None = None  # set when it first runs
    pulled_tokens: int = 0
    num_stored: int = 0  # leading blocks that tiers have and that are worth loading

    @property
    def num_known(self) -> int:
        return len(self.token_ids) + self.num_drawing

    @property
    def num_output(self) -> int:
        return self.num_known - self.request.num_prompt

    @property
    def num_to_compute(self) -> int:
        """Zero once the tokens to come are all that may come: with a lease, one."""
        if self.num_output >= self.request.max_new_tokens or (self.request.lease_id is not None and self.num_drawing):
            return 0
        return self.num_known - self.num_computed

    @property
    def precedence(self) -> tuple[int, int]:
        """Smaller runs first."""
        return (self.request.priority, self.arrival)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.request.num_prompt,
            cached_tokens=self.cached_tokens or 0,
            completion_tokens=len(self.token_ids) - self.request.num_prompt,
            pulled_tokens=self.pulled_tokens,
        )
