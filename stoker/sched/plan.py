"""All that scheduler and runner say to each other: a step's plan, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.base.ids import BlockId, Row
from stoker.kv.blocks.transfer import KvLoad
from stoker.sched.request import SamplingParams, TokenLogprobs

# In StepPlan.token_ids: this token was sampled by an earlier step and is known on the device, maybe not yet here.
ON_DEVICE = -1


@dataclass(slots=True)
class Span:
    """`count` tokens of a row, from position `start` on. If `samples`, the token after them is drawn. (Nobody changes it: but one
    is made for every row and step, and a frozen one takes three times as long.)"""

    row: Row
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence gets a place on the device. `token_ids` is all that it knows, `num_prompt` of them its prompt: penalties
    and grammars start from there, also after a preemption or on another worker."""

    row: Row
    sampling: SamplingParams
    token_ids: list[int]
    num_prompt: int
    max_new_tokens: int  # after the prompt: a grammar ends in time


@dataclass(frozen=True, slots=True)
class BlockTableChange:
    """From entry `first` on, the row's block table holds `blocks`."""

    row: Row
    first: int
    blocks: list[BlockId]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    src: BlockId
    dst: BlockId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Carried out in this order: freed rows, new rows, table changes, copies, fresh blocks, one forward over all spans. Loads
    begin when all before them is done; they are ready when they are ready, not with the step."""

    spans: list[Span]
    token_ids: list[int]  # of all spans, one after the other
    freed_rows: list[Row] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    block_table_changes: list[BlockTableChange] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    fresh_blocks: list[BlockId] = field(default_factory=list)  # to be cleared: nothing of an earlier owner may be read
    loads: list[KvLoad] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the plan's spans drew, in their order; and of the few of which there is more to say, by their number, what that is."""

    token_ids: list[list[int]]  # none where a span did not sample
    step_s: float
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    grammar_done: set[int] = field(default_factory=set)  # the output is complete, nothing may follow
    errors: dict[int, str] = field(default_factory=dict)  # why the row's grammar cannot go on
