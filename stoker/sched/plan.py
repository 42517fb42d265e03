"""The data that scheduler and runner exchange: a step's plan and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.base.ids import BlockId, Row
from stoker.kv.blocks.transfer import KvLoad
from stoker.sched.request import SamplingParams, TokenLogprobs

# Marker in StepPlan.token_ids: an earlier step samples this token. The device has it; the host may not know it yet.
ON_DEVICE = -1


# Not frozen, for speed: one is created per row and step, and creating a frozen one takes three times as long.
@dataclass(slots=True)
class Span:
    """`count` tokens of one row, starting at position `start`. If `samples`, the token after them is sampled. The last
    `num_drafts` of the tokens are drafts, which the step verifies."""

    row: Row
    start: int
    count: int
    samples: bool
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence that gets a row on the device.

    `token_ids` are all its known tokens; the first `num_prompt` are the prompt. Penalties and grammars start from
    there, also after a preemption or on another worker.
    """

    row: Row
    sampling: SamplingParams
    token_ids: list[int]
    num_prompt: int
    max_new_tokens: int  # after the prompt; a grammar completes its output within this limit


@dataclass(frozen=True, slots=True)
class BlockTableChange:
    """Write `blocks` into the row's block table, starting at entry `first`."""

    row: Row
    first: int
    blocks: list[BlockId]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one KV block on the device."""

    src: BlockId
    dst: BlockId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine.

    The runner executes it in this order: freed rows, new rows, block table changes, copies, clearing of fresh blocks,
    one forward pass over all spans. Loads start after that. They finish in their own time, independently of the step.
    """

    spans: list[Span]
    token_ids: list[int]  # the tokens of all spans, concatenated
    freed_rows: list[Row] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    block_table_changes: list[BlockTableChange] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    fresh_blocks: list[BlockId] = field(default_factory=list)  # to clear, so that no earlier owner's KV can be read
    loads: list[KvLoad] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens that a plan's spans sampled. Rare extras are in dicts and sets, keyed by the span's index in the plan."""

    token_ids: list[list[int]]  # per span; empty where the span did not sample
    step_s: float
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    grammar_done: set[int] = field(default_factory=set)  # spans whose output is complete
    errors: dict[int, str] = field(default_factory=dict)  # spans whose grammar cannot continue, with the reason
