"""The data that scheduler and runner exchange: a step's plan and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.base.ids import BlockId, Row
from stoker.kv.blocks.transfer import KvLoad
from stoker.sched.request import SamplingParams, TokenLogprobs

# Marker in StepPlan.token_ids: an earlier step samples this token. The device has it; the host may not know it yet. The
# drafts that follow are ON_DEVICE - 1, ON_DEVICE - 2 and so on: the device takes them from the row's tape.
ON_DEVICE = -1


# Not frozen, for speed, like the other parts of a plan that every step has: creating a frozen one takes three times as long.
@dataclass(slots=True)
class Span:
    """`count` tokens of one row, starting at position `start`. If `samples`, the token after them is sampled.

    The last `num_drafts` of the tokens are drafts. Then the token after the last known one and after each draft is
    sampled, up to the first draft that differs from the token sampled in its place.

    While earlier steps with drafts are in flight, the host does not know how many tokens they add. Then the real start,
    which the device knows, is up to `slack` smaller than `start`.
    """

    row: Row
    start: int
    count: int
    samples: bool
    num_drafts: int = 0
    slack: int = 0
    in_prompt: bool = field(default=False, compare=False)  # the first of the tokens belongs to the prompt
    next_id: int = field(default=0, compare=False)  # the token after those of a span that does not sample


@dataclass(slots=True)
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

    @property
    def max_tokens(self) -> int:
        """The limit of prompt and output together."""
        return self.num_prompt + self.max_new_tokens


@dataclass(slots=True)
class BlockTableChange:
    """Write `blocks` into the row's block table of a KV set, starting at entry `first`.

    Entry i is the block of tokens i * block_tokens and following. Entries before those that a token sees may be
    anything.
    """

    row: Row
    first: int
    blocks: list[BlockId]
    kv_set: int = 0


@dataclass(frozen=True, slots=True)
class TapeUpload:
    """Replace the row's tape. `token_ids[i]` is a guess for position `start + i`; see DraftTape."""

    row: Row
    start: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block of a KV set on the device."""

    src: BlockId
    dst: BlockId
    kv_set: int = 0


@dataclass(slots=True)
class StepPlan:
    """One step of the engine.

    The runner executes it in this order: freed rows, new rows, block table changes, tapes, copies, clearing of fresh
    blocks, one forward pass over all spans. Loads start after that. They finish in their own time, independently of the
    step.
    """

    spans: list[Span]
    token_ids: list[int]  # the tokens of all spans, concatenated
    freed_rows: list[Row] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    block_table_changes: list[BlockTableChange] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    # blocks of each KV set to clear, so that no earlier owner's KV can be read; missing sets have none
    fresh_blocks: list[list[BlockId]] = field(default_factory=list)
    loads: list[KvLoad] = field(default_factory=list)
    tapes: list[TapeUpload] = field(default_factory=list)
    num_drafts: int = 0  # of all spans
    num_guesses: int = 0  # tokens that a draft model guesses for each row after it has sampled; drafts of the next step
    # All spans belong to flex sequences: a runner that can may stop the forward pass for an interactive request.
    is_interruptible: bool = False
    runs_alone: bool = False  # no step is launched behind it before it has ended

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class StepResult:
    """The tokens that a plan's spans sampled. Rare extras are in dicts and sets, keyed by the span's index in the plan."""

    token_ids: list[list[int]]  # per span: one and the accepted drafts; empty where the span did not sample
    step_s: float
    is_interrupted: bool = field(default=False, kw_only=True)  # nothing was sampled, and the KV of the step is lost
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    grammar_done: set[int] = field(default_factory=set)  # spans whose output is complete
    errors: dict[int, str] = field(default_factory=dict)  # spans whose grammar cannot continue, with the reason
    drafts: dict[int, list[int]] = field(default_factory=dict)  # tokens that the grammar forces after the span's tokens
