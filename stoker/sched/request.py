"""What is asked of an engine and what it answers, in token ids. Plain dataclasses: `proto` carries them across processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from stoker.base.ids import RequestId
from stoker.kv.blocks.transfer import KvTicket

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "structural_tag"]
FinishReason = Literal["stop", "length", "handoff", "cancelled", "deadline", "error"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the output must match. `text` is the schema, expression, grammar or structural tag itself (empty for json_object)."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Randomness is a function of (seed, position) alone."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    num_logprobs: int | None = None  # None: no logprobs; 0: of the drawn token alone; k: and of the k most likely
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence tokens among them, unless the client ignores those
    min_tokens: int = 0  # no stop token is drawn before so many
    grammar: GrammarSpec | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to be continued. `token_ids` may hold more than the prompt: then the answer goes on after them (resume)."""

    request_id: RequestId
    token_ids: list[int]
    num_prompt: int  # token_ids[num_prompt:] were sampled before: penalties, grammar and positions count them as output
    sampling: SamplingParams
    max_new_tokens: int  # counted from num_prompt
    cache_salt: str = ""
    priority: int = 0  # lower runs first
    deadline_s: float | None = None  # on the machine's monotonic clock
    lease_id: str | None = None  # end after one token; its KV is kept under this name, for whoever continues elsewhere
    ticket: KvTicket | None = None  # where the KV of the leading tokens can be pulled


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the model's own distribution (before temperature, penalties and masks)."""

    token_id: int
    logprob: float
    top_ids: list[int]  # most likely first
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stop_token_id: int | None = None  # the token of stop_token_ids that ended it; it is the last of token_ids
    error_code: str | None = None
    error_message: str | None = None


@dataclass(slots=True)
class Usage:
    """`cached_tokens`: prompt tokens in whole blocks found in the cache, of any tier, when the sequence first ran.
    `pulled_tokens`: those that came from the worker that the ticket names; that worker has counted them."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    pulled_tokens: int = 0


@dataclass(slots=True)  # not frozen, though nobody changes it: one is made for every token, in a third of the time
class TokenChunk:
    """New tokens of one sequence. The last chunk has `finish`, always, also after an error."""

    request_id: RequestId
    token_ids: list[int]
    usage: Usage | None = None  # with the first chunk and with the last: between them only the completion grows
    logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None
    ticket: KvTicket | None = None  # with the last chunk, if the KV is kept


@dataclass(slots=True)
class TokenChunks:
    """What a step brought, for all its sequences, as columns: most chunks are a token and nothing else. What only a few of them
    have goes by their number."""

    request_ids: list[RequestId] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    usages: dict[int, Usage] = field(default_factory=dict)
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
        usage: Usage | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        finish: Finish | None = None,
        ticket: KvTicket | None = None,
    ) -> None:
        number = len(self.request_ids)
        self.request_ids.append(request_id)
        self.token_ids.append(token_ids)
        if usage is not None:
            self.usages[number] = usage
        if logprobs is not None:
            self.logprobs[number] = logprobs
        if finish is not None:
            self.finishes[number] = finish
        if ticket is not None:
            self.tickets[number] = ticket

    def extend(self, later: TokenChunks) -> None:
        first = len(self)
        self.request_ids += later.request_ids
        self.token_ids += later.token_ids
        self.usages |= {first + i: usage for i, usage in later.usages.items()}
        self.logprobs |= {first + i: logprobs for i, logprobs in later.logprobs.items()}
        self.finishes |= {first + i: finish for i, finish in later.finishes.items()}
        self.tickets |= {first + i: ticket for i, ticket in later.tickets.items()}
