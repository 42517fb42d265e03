"""Requests to an engine and the tokens it returns. Plain dataclasses; `proto` encodes them for other processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from stoker.base.ids import RequestId
from stoker.kv.blocks.transfer import KvTicket

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "structural_tag"]
FinishReason = Literal["stop", "length", "handoff", "cancelled", "deadline", "error"]


@dataclass(frozen=True, slots=True)
class TextGrammar:
    """The grammar of a text that a client defined: Lark, or a regular expression as in Rust."""

    syntax: Literal["lark", "regex"]
    definition: str


@dataclass(frozen=True, slots=True)
class InputGrammar:
    """The grammar of the input of a custom tool call, which is a part of the output.

    A quote ends the content of a JSON string, in which characters are escaped. Any other end follows the text as it is.
    """

    begin: str  # the text that begins the call
    opening: str  # the text right before the input
    end: str  # the text right after it
    grammar: TextGrammar


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the output must match. `text` is the schema, regex, grammar or structural tag; it is empty for json_object."""

    kind: GrammarKind
    text: str = ""
    allows_text: bool = False  # the output may be free text, which may be cut anywhere by the token limit
    inputs: tuple[InputGrammar, ...] = ()  # of texts that `text` leaves free; only in a structural tag


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is sampled. Randomness is a function of (seed, position) alone."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    num_logprobs: int | None = None  # None: no logprobs; 0: the sampled token only; k: also the k most likely tokens
    stop_token_ids: tuple[int, ...] = ()  # includes the end-of-sequence tokens, unless the client sets ignore_eos
    min_tokens: int = 0  # no stop token is sampled before this many output tokens
    grammar: GrammarSpec | None = None


# Not frozen, for speed, like the parts of a step's plan (sched/plan.py). It is never changed.
@dataclass(slots=True)
class GenerateRequest:
    """One sequence to continue. `token_ids` may hold output after the prompt: generation then resumes after it."""

    request_id: RequestId
    token_ids: list[int]
    num_prompt: int  # token_ids[num_prompt:] were sampled earlier; penalties and grammar treat them as output
    sampling: SamplingParams
    max_new_tokens: int  # counted from num_prompt
    cache_salt: str = ""
    priority: int = 0  # lower runs first
    tenant: str = ""  # tenants share prefill by weight
    tenant_weight: float = 1.0
    deadline_s: float | None = None  # on the machine's monotonic clock
    lease_id: str | None = None  # if set: end after one token, and hold the KV under this id for another worker
    ticket: KvTicket | None = None  # the worker from which the KV of the leading tokens can be pulled
    prediction: tuple[int, ...] = ()  # the output that the client expects; a guess, which never changes an answer
    is_flex: bool = False  # it uses only what other requests leave idle; its steps may be interrupted


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the raw logits (before penalties, masks and temperature)."""

    token_id: int
    logprob: float
    top_ids: list[int]  # most likely first
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended."""

    reason: FinishReason
    stop_token_id: int | None = None  # the stop token that ended it; also the last of the token_ids
    error_code: str | None = None
    error_message: str | None = None


@dataclass(slots=True)
class TokenUsage:
    """The token counts of one sequence.

    `cached_tokens` are prompt tokens in full blocks that were in the GPU pool or in a tier when the sequence first ran.
    `pulled_tokens` came from the worker that the ticket names, which already counted them. `draft_tokens` were verified;
    the accepted ones are among the completion tokens.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    pulled_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


# Not frozen, for speed: one is created per token, and creating a frozen one takes three times as long.
@dataclass(slots=True)
class TokenChunk:
    """New tokens of one sequence. The last chunk always has `finish`, also after an error."""

    request_id: RequestId
    token_ids: list[int]
    # On the first and the last chunk; in between only completion_tokens and the counts of drafts change. With a
    # prediction, on every chunk, because a stop string may end the answer after any of them.
    usage: TokenUsage | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None
    ticket: KvTicket | None = None  # on the last chunk, if a lease holds the KV


@dataclass(slots=True)
class TokenChunks:
    """The chunks of one step, stored as columns, because most chunks are one token and nothing else.

    The rare fields are in dicts, keyed by the chunk's index.
    """

    request_ids: list[RequestId] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    usages: dict[int, TokenUsage] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    finishes: dict[int, Finish] = field(default_factory=dict)
    tickets: dict[int, KvTicket] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[TokenChunk]:
        for i, (request_id, token_ids) in enumerate(zip(self.request_ids, self.token_ids, strict=True)):
            sparse = (self.usages.get(i), self.logprobs.get(i), self.finishes.get(i), self.tickets.get(i))
            yield TokenChunk(request_id, token_ids, *sparse)

    def add(
        self,
        request_id: RequestId,
        token_ids: list[int],
        usage: TokenUsage | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        finish: Finish | None = None,
        ticket: KvTicket | None = None,
    ) -> None:
        index = len(self.request_ids)
        self.request_ids.append(request_id)
        self.token_ids.append(token_ids)
        if usage is not None:
            self.usages[index] = usage
        if logprobs is not None:
            self.logprobs[index] = logprobs
        if finish is not None:
            self.finishes[index] = finish
        if ticket is not None:
            self.tickets[index] = ticket

    def extend(self, later: TokenChunks) -> None:
        """Append the chunks of `later`."""
        first = len(self)
        self.request_ids += later.request_ids
        self.token_ids += later.token_ids
        self.usages |= {first + i: usage for i, usage in later.usages.items()}
        self.logprobs |= {first + i: logprobs for i, logprobs in later.logprobs.items()}
        self.finishes |= {first + i: finish for i, finish in later.finishes.items()}
        self.tickets |= {first + i: ticket for i, ticket in later.tickets.items()}
